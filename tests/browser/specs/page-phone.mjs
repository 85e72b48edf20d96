// The demo page on a phone, in the dark, by keyboard, by names that a screen reader says, and on the home screen.

import assert from 'node:assert/strict';
import { mkdir } from 'node:fs/promises';
import { after, before, describe, test } from 'node:test';

import { ask, reach, replyText } from '../demo.mjs';
import { PATIENCE, withPage } from '../harness.mjs';
import { REPLIES, ROOT } from '../package.mjs';
import { startServer } from '../server.mjs';

const PHONE = { width: 390, height: 844 };

describe('the demo page on a phone', { timeout: 4 * PATIENCE }, () => {
  let server;

  before(async () => {
    server = await startServer({ mounts: { '/': `${ROOT}www/dist`, '/models': `${ROOT}models` } });
  });
  after(() => server.close());

  const open = async (page, query = 'backend=cpu&budget=24MiB') => {
    await page.setViewportSize(PHONE);
    await page.goto(`${server.origin}/?${query}`);
    await reach(page, 'ready');
  };

  const picture = async (page, name) => {
    await mkdir(`${ROOT}tests/browser/out`, { recursive: true });
    await page.screenshot({ path: `${ROOT}tests/browser/out/${name}.png` });
  };

  test('everything fits 390 pixels, light and dark, with the panel open and closed', async () => {
    await withPage(async (page) => {
      await open(page);
      await ask(page, REPLIES[3].prompt);
      for (const colorScheme of ['light', 'dark']) {
        await page.emulateMedia({ colorScheme });
        for (const panel of [false, true]) {
          const toggle = page.getByTestId('panel-toggle');
          if (((await toggle.getAttribute('aria-expanded')) === 'true') !== panel) await toggle.click();
          const wide = await page.evaluate(() => {
            const limit = document.documentElement.clientWidth;
            const visible = (e) => e.checkVisibility() && e.getBoundingClientRect().width > 0;
            const over = (e) => visible(e) && e.getBoundingClientRect().right > limit + 1 && !e.closest('.skip');
            return [...document.querySelectorAll('body *')].filter(over).map((e) => e.outerHTML.slice(0, 80));
          });
          assert.deepEqual(wide, []);
          assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), PHONE.width);
          await picture(page, `phone-${colorScheme}${panel ? '-panel' : ''}`);
        }
      }
    });
  });

  test('what is tapped is large enough', async () => {
    await withPage(async (page) => {
      await open(page);
      await ask(page, REPLIES[0].prompt);
      for (const id of ['input', 'send', 'panel-toggle', 'clear']) {
        const box = await page.getByTestId(id).boundingBox();
        assert.ok(box.height >= 40, `${id} is ${box.height} pixels high`);
      }
    });
  });

  test('text is readable in both schemes', async () => {
    await withPage(async (page) => {
      await open(page);
      await ask(page, REPLIES[0].prompt);
      for (const colorScheme of ['light', 'dark']) {
        await page.emulateMedia({ colorScheme });
        for (const id of ['message-user', 'message-assistant', 'send', 'panel-toggle']) {
          const ratio = await page.getByTestId(id).first().evaluate(contrast);
          assert.ok(ratio >= 4.5, `${id} has a contrast of ${ratio.toFixed(2)} in the ${colorScheme} scheme`);
        }
      }
    });
  });

  test('by keyboard alone', async () => {
    await withPage(async (page) => {
      await open(page);
      await page.keyboard.press('Tab');
      assert.match(await page.evaluate(() => document.activeElement.textContent), /Skip/);
      await page.keyboard.press('Enter');
      await page.keyboard.type(REPLIES[0].prompt);
      await page.keyboard.press('Enter');
      await page.getByTestId('message-assistant').first().waitFor();
      await reach(page, 'ready');
      assert.equal(await replyText(page, 0), REPLIES[0].text);

      await page.getByTestId('panel-toggle').focus();
      await page.keyboard.press('Enter');
      assert.ok(await page.getByTestId('speed').isVisible());
      await page.keyboard.press('Escape');
      assert.equal(await page.getByTestId('panel-toggle').getAttribute('aria-expanded'), 'false');
      assert.equal(await page.evaluate(() => document.activeElement.dataset.testid), 'panel-toggle');
    });
  });

  test('everything that can be operated has a name, and replies are announced', async () => {
    await withPage(async (page) => {
      await open(page);
      await ask(page, REPLIES[0].prompt);
      await page.getByTestId('panel-toggle').click();
      const session = await page.context().newCDPSession(page);
      const { nodes } = await session.send('Accessibility.getFullAXTree');
      const operable = nodes.filter((node) => ['button', 'textbox', 'combobox', 'link'].includes(node.role?.value) && !node.ignored);
      assert.ok(operable.length >= 6, `${operable.length} controls`);
      const nameless = operable.filter((node) => !node.name?.value).map((node) => node.role.value);
      assert.deepEqual(nameless, []);
      const log = page.getByRole('log', { name: 'Conversation' });
      assert.equal(await log.getAttribute('aria-live'), 'polite');
      assert.match(await log.innerText(), new RegExp(REPLIES[0].text.replace(/[?.]/g, '\\$&')));
    });
  });

  test('it can be put on the home screen', async () => {
    await withPage(async (page) => {
      await open(page);
      const session = await page.context().newCDPSession(page);
      const { data, errors } = await session.send('Page.getAppManifest');
      assert.deepEqual(errors, []);
      const manifest = JSON.parse(data);
      assert.equal(manifest.display, 'standalone');
      for (const { src, sizes, type } of manifest.icons) {
        const size = await page.evaluate(async (src) => {
          const image = new Image();
          image.src = src;
          await image.decode();
          return `${image.naturalWidth}x${image.naturalHeight}`;
        }, new URL(src, `${server.origin}/`).href);
        if (type === 'image/png') assert.equal(size, sizes);
      }
      assert.equal(await page.locator('link[rel=apple-touch-icon]').getAttribute('href'), './icon-192.png');
    });
  });
});

/** Contrast of an element's text against what is painted behind it, as WCAG 2 defines it. Runs in the page. */
function contrast(element) {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const luminance = (color) => {
    const [r, g, b] = [...rgba(color)].map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const text = element.querySelector('.text') ?? element;
  let behind = text;
  while (behind.parentElement && rgba(getComputedStyle(behind).backgroundColor)[3] < 255) behind = behind.parentElement;
  const [a, b] = [luminance(getComputedStyle(text).color), luminance(getComputedStyle(behind).backgroundColor)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}
