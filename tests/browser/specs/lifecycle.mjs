// Engines that come, go and die: every promise settles with a typed error, and the next engine works.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { after, before, describe, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import { PATIENCE, withPage } from '../harness.mjs';
import { BROWSERS, MODEL, REPLIES, answersAsRecorded, chat, greedy, load, servePackage } from '../package.mjs';

const CPU = { backend: 'cpu' };
const LONG = greedy('I need a hotel in London for two nights.', { max_tokens: 400, temperature: 1, seed: 1 });

/** Lets a worker meet its end when it is called with `op` for the `nth` time. */
const doomed = (op, nth, end) => (script) => `
  let calls = 0;
  addEventListener('message', ({ data }) => {
    if (data.op === '${op}' && (calls += 1) === ${nth}) setTimeout(() => { ${end} }, 30);
  });
  ${script}`;

for (const { name, skip, some, less, open } of BROWSERS)
  describe(`engines in ${name}`, { timeout: 4 * PATIENCE, skip }, () => {
    let server;

    before(async () => {
      server = await servePackage();
    });
    after(() => server.close());

    for (const [what, file, op, nth, end] of some([
      ['an engine worker that the browser ends', 'engine-worker.js', 'chat', 1, 'self.close();'],
      ['an engine worker that throws', 'engine-worker.js', 'chat', 1, "throw new Error('as asked');"],
      ['a flash worker that the browser ends', 'flash-worker.js', 'read', 40, 'self.close();'],
    ])) {
      test(`${what}: the reply ends with a typed error, and a new engine works`, async () => {
        await open(server, async (page) => {
          const heal = server.fault(file, { body: doomed(op, nth, end) });
          // Few slots, so that replies have to read experts.
          const { error } = await load(page, { ...CPU, memoryBudget: '17MiB' });
          if (!error) {
            const reply = await page.call('stream', LONG);
            assert.equal(reply.error?.code, 'worker', JSON.stringify(reply.error));
            assert.ok(reply.error.typed);
            assert.equal((await chat(page, LONG)).error?.code, 'worker');
          } else {
            assert.equal(error.code, 'worker', error.message);
          }
          heal();
          assert.ifError((await load(page, CPU)).error);
          await answersAsRecorded(page, REPLIES.slice(0, 1));
        });
      });
    }

    test('a reply stopped before it began, and one stopped while the prompt is read', less, async () => {
      await open(server, async (page) => {
        assert.ifError((await load(page, CPU)).error);
        const early = await page.call('stopSoon', LONG, 0);
        assert.equal(early.error?.code, 'aborted', JSON.stringify(early));
        const prompt = 'a table for two, please, '.repeat(150);
        const during = await page.call('stopSoon', greedy(prompt), 20);
        assert.equal(during.error?.code, 'aborted', JSON.stringify(during));
        await answersAsRecorded(page, REPLIES.slice(0, 2));
      });
    });

    test('a file that the browser evicted is noticed and fetched again, and no other', async () => {
      await open(server, async (page) => {
        assert.ifError((await load(page, CPU)).error);
        await page.call('evict', 'core-00000.bin');
        server.log.length = 0;
        assert.ifError((await load(page, CPU)).error);
        const fetched = server.log.filter((r) => r.path.startsWith(MODEL)).map((r) => r.path.split('/').at(-1));
        assert.deepEqual(new Set(fetched), new Set(['manifest.json', 'core-00000.bin']));
        await answersAsRecorded(page, REPLIES.slice(0, 1));
      });
    });

    test('engine after engine', async () => {
      await open(server, async (page) => {
        const times = some([...Array(20).keys()]).length;
        assert.ok(!(await page.call('cycle', { model: MODEL, ...CPU }, times)));
        assert.ifError((await load(page, CPU)).error);
        await answersAsRecorded(page, REPLIES.slice(0, 1));
      });
    });
  });

describe('what only Chromium lets a test see', { timeout: 4 * PATIENCE }, () => {
  let server;

  before(async () => {
    server = await servePackage();
  });
  after(() => server.close());

  const goto = async (page) => {
    await page.goto(`${server.origin}/bare.html`);
    await page.waitForFunction(() => 'outrider' in globalThis);
    return { call: (name, ...args) => page.evaluate(([name, args]) => globalThis[name](...args), [name, args]) };
  };

  test('engines that are disposed of leave no memory behind', async (context) => {
    await withPage(async (page) => {
      const bare = await goto(page);
      const pid = await rendererOf(page);
      const resident = () => Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))[1]) / 1024;
      await bare.call('cycle', { model: MODEL, ...CPU }, 5);
      await sleep(1000);
      const before = resident();
      await bare.call('cycle', { model: MODEL, ...CPU }, 15);
      await sleep(1000);
      const after = resident();
      context.diagnostic(`${before.toFixed(0)} MiB after 5 engines, ${after.toFixed(0)} MiB after 20`);
      // One engine takes some 30 MiB: 15 that left something behind would show.
      assert.ok(after < before + 60, `${before} MiB grew to ${after} MiB`);
    });
  });

  test('two tabs that install at once download once, and both answer', async () => {
    await withPage(async (first) => {
      const second = await first.context().newPage();
      const pages = [await goto(first), await goto(second)];
      server.log.length = 0;
      const slow = server.fault(MODEL, { rate: 12e6 });
      const loaded = await Promise.all(pages.map((page) => load(page, CPU)));
      slow();
      for (const { error } of loaded) assert.ifError(error && new Error(error.message));
      const sent = server.log.filter((r) => r.path.endsWith('.bin')).reduce((sum, r) => sum + r.bytes, 0);
      assert.ok(sent < 20e6, `${sent} bytes were sent`);
      await Promise.all(pages.map((page) => answersAsRecorded(page, REPLIES.slice(0, 2))));
    });
  });

  test('a tab that is hidden goes on', async () => {
    await withPage(async (page) => {
      const bare = await goto(page);
      assert.ifError((await load(bare, CPU)).error);
      const reply = chat(bare, LONG);
      const other = await page.context().newPage();
      await other.bringToFront();
      assert.ok((await reply).choices[0].message.content.length > 0);
      await page.bringToFront();
      await answersAsRecorded(bare, REPLIES.slice(0, 1));
    });
  });

  /** The process in which the page's scripts and workers run. */
  async function rendererOf(page) {
    const session = await page.context().browser().newBrowserCDPSession();
    const { processInfo } = await session.send('SystemInfo.getProcessInfo');
    const renderers = processInfo.filter(({ type }) => type === 'renderer').map(({ id }) => id);
    // The newest is this page's: contexts of earlier tests are closed.
    return Math.max(...renderers);
  }
});
