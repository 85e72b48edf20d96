// Going back in a conversation on the demo page, by pointer and by keyboard.

import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';

import { ask, reach, send } from '../demo.mjs';
import { PATIENCE, withPage } from '../harness.mjs';
import { REPLIES, ROOT } from '../package.mjs';
import { startServer } from '../server.mjs';

describe('a conversation on the demo page', { timeout: 4 * PATIENCE }, () => {
  let server;

  before(async () => {
    server = await startServer({ mounts: { '/': `${ROOT}www/dist`, '/models': `${ROOT}models` } });
  });
  after(() => server.close());

  async function withDemo(use) {
    await withPage(async (page) => {
      await page.goto(`${server.origin}/?backend=cpu`);
      await reach(page, 'ready');
      const shown = async () => {
        const items = await page.getByTestId('log').locator('li').all();
        return Promise.all(items.map(async (item) => [await item.getAttribute('data-role'), await item.locator('.text').innerText()]));
      };
      await use(page, shown);
    });
  }

  test('a question is edited: it returns to the box, and what followed is gone', async () => {
    await withDemo(async (page, shown) => {
      await ask(page, 'Please find me a hotel in San Francisco.');
      await ask(page, 'For two nights.');
      const edit = page.getByRole('button', { name: 'Edit “Please find me a hotel in San Francisco.”' });
      await edit.focus();
      await page.keyboard.press('Enter');
      assert.deepEqual(await shown(), []);
      assert.equal(await page.getByTestId('input').inputValue(), 'Please find me a hotel in San Francisco.');
      assert.ok(await page.getByTestId('input').evaluate((input) => input === document.activeElement));
      // Nothing of what was dropped reaches the model.
      assert.equal(await ask(page, REPLIES[0].prompt), REPLIES[0].text);
      await ask(page, 'Something Italian, please.');
      await page.getByTestId('message-edit').nth(1).click();
      assert.deepEqual(await shown(), [['user', REPLIES[0].prompt], ['assistant', REPLIES[0].text]]);
    });
  });

  test('the last reply is asked for again', async () => {
    await withDemo(async (page, shown) => {
      await ask(page, REPLIES[0].prompt);
      await ask(page, 'Something Italian, please.');
      assert.equal(await page.getByTestId('message-retry').count(), 1, 'only the last can be');
      const before = await shown();
      await page.getByTestId('message-retry').focus();
      await page.keyboard.press('Space');
      await page.getByTestId('message-retry').waitFor();
      await reach(page, 'ready');
      const after = await shown();
      assert.deepEqual(after.slice(0, 3), before.slice(0, 3));
      assert.equal(after.length, 4);
      assert.ok(after[3][0] === 'assistant' && after[3][1].length > 0);
    });
  });

  test('a reply is stopped and asked for again, and a question edited while it is answered', async () => {
    await withDemo(async (page, shown) => {
      await send(page, REPLIES[3].prompt);
      await page.getByTestId('stop').click();
      await reach(page, 'ready');
      await page.getByTestId('message-retry').click();
      await reach(page, 'generating', 'ready');
      await page.getByTestId('message-edit').click();
      assert.deepEqual(await shown(), []);
      await reach(page, 'ready');
      assert.equal(await page.getByTestId('input').inputValue(), REPLIES[3].prompt);
      assert.equal(await ask(page, REPLIES[3].prompt), REPLIES[3].text);
    });
  });
});
