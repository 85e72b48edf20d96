// A visit that begins with the experts that the one before used.

import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';

import { PATIENCE } from '../harness.mjs';
import { BROWSERS, MODEL, REPLIES, answersAsRecorded, chat, greedy, load, servePackage } from '../package.mjs';

const FEW = { backend: 'cpu', internal: { maxSlots: 80 } };

for (const { name, skip, less, open } of BROWSERS)
  describe(`a second visit in ${name}`, { timeout: 4 * PATIENCE, skip }, () => {
    let server;

    before(async () => {
      server = await servePackage();
    });
    after(() => server.close());

    /** Loads, and waits for what is read when there is nothing to do; the pool then. */
    async function visit(page, options = {}) {
      const { error } = await load(page, { ...FEW, ...options });
      assert.ifError(error && new Error(error.message));
      await page.call('internal', { op: 'counters' });
      return (await page.call('stats')).pool;
    }

    /** A short reply, and the pool after it. */
    async function reply(page) {
      const { choices, error } = await chat(page, greedy(REPLIES[0].prompt, { max_tokens: 4 }));
      assert.ifError(error && new Error(error.message));
      assert.deepEqual(choices[0].token_ids, REPLIES[0].token_ids.slice(0, 4));
      return (await page.call('stats')).pool;
    }

    test('finds more in the pool at its beginning, and says the same', async (context) => {
      await open(server, async (page) => {
        assert.equal((await visit(page)).warmed, 0);
        const cold = await reply(page);
        await page.call('dispose');
        assert.ok((await page.call('stored')).includes('.hot'));

        const { warmed, bytesGuessed, hits, misses } = await visit(page);
        // The last read may find its place taken by the one before.
        const { maxSlots } = FEW.internal;
        assert.ok(warmed >= maxSlots && warmed < maxSlots + 4, `${warmed} were read`);
        assert.ok(bytesGuessed > 0 && hits === 0 && misses === 0);
        const warm = await reply(page);
        context.diagnostic(`hits ${cold.hits} → ${warm.hits}, misses ${cold.misses} → ${warm.misses}`);
        assert.ok(warm.hits > cold.hits && warm.misses < cold.misses && warm.warmedUsed > 10);
        await answersAsRecorded(page, REPLIES.slice(1, 3));

        // A request that comes at once waits for nothing.
        assert.ifError((await load(page, FEW)).error);
        await reply(page);
      });
    });

    test('begins from nothing where that is wanted, or what was kept is damaged; a deleted model leaves nothing', less, async () => {
      await open(server, async (page) => {
        await visit(page, { warmStart: false });
        await reply(page);
        await page.call('dispose');
        assert.ok(!(await page.call('stored')).includes('.hot'), 'nothing is kept');

        await visit(page);
        await reply(page);
        await page.call('damage', '.hot', 70);
        assert.equal((await visit(page)).warmed, 0);
        await reply(page);
        await page.call('dispose');
        assert.ok((await visit(page)).warmed > 0, 'it was written anew');
        assert.equal((await visit(page, { warmStart: false })).warmed, 0);
        assert.equal((await load(page, { ...FEW, warmStart: 1 })).error?.code, 'request');

        await page.call('removed', MODEL);
        assert.ok(!(await page.call('stored')).includes('.hot'));
      });
    });
  });
