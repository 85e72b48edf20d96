// `memoryBudget: 'auto'`: what is tried from load to load, and what is learnt when a page or its browser is killed.

import assert from 'node:assert/strict';
import { mkdtemp, rm } from 'node:fs/promises';
import os from 'node:os';
import path from 'node:path';
import { after, before, describe, test } from 'node:test';

import { PATIENCE, withKillable, withPage } from '../harness.mjs';
import { BROWSERS, REPLIES, answersAsRecorded, fewSteps, load, servePackage } from '../package.mjs';

const MIB = 2 ** 20;
const AUTO = { backend: 'cpu', memoryBudget: 'auto' };

async function serve() {
  const server = await servePackage();
  fewSteps(server);
  return server;
}

/** Loads, with what was taken and what was said. */
async function take(page, options = {}) {
  const { error, stats } = await load(page, { ...AUTO, ...options });
  assert.ifError(error && new Error(error.message));
  const { memory, notices } = stats;
  assert.ok(memory.total <= memory.budget);
  return { step: Math.round(memory.budget / MIB), notices: notices.join(' ') };
}

const answers = (page) => answersAsRecorded(page, REPLIES.slice(0, 1));

for (const { name, skip, less, open } of BROWSERS)
  describe(`memory in ${name}`, { timeout: 4 * PATIENCE, skip }, () => {
    let server;

    before(async () => {
      server = await serve();
    });
    after(() => server.close());

    test('each load that answered lets the next take more, and a page that was closed costs nothing', async () => {
      await open(server, async (page) => {
        const first = await take(page);
        assert.equal(first.step, 18);
        assert.match(first.notices, /trying 18 MiB/);
        // It has not answered, so nothing is known of it.
        assert.equal((await take(page)).step, 18);
        await answers(page);
        const second = await take(page);
        assert.equal(second.step, 27);
        assert.match(second.notices, /trying 27 MiB of memory, after 18 MiB went well/);
        await page.reload();
        const again = await take(page);
        assert.equal(again.step, 27);
        assert.doesNotMatch(again.notices, /ended/);
        const { error } = await load(page, { ...AUTO, abortAt: 'load' });
        assert.equal(error?.code, 'aborted', error?.message);
        assert.equal((await take(page)).step, 27);
        await answers(page);
        const third = await take(page);
        assert.match(third.notices, /after 27 MiB went well/);
        await answers(page);
        const whole = await take(page);
        assert.ok(whole.step > third.step && !/memory/.test(whole.notices), JSON.stringify(whole));
        const { pool } = await page.call('stats');
        assert.equal(pool.slots, pool.experts);
        await answers(page);
      });
    });

    test('where the least has ended the page twice, the model is refused before it is downloaded', less, async () => {
      await open(server, async (page) => {
        await page.call('know', 'cpu', { good: 0, doubts: 0, bad: { budget: 9 * MIB, times: 2, at: Date.now() } });
        server.log.length = 0;
        const { error } = await load(page, AUTO);
        assert.equal(error?.code, 'budget', error?.message);
        assert.ok(error.typed && error.details.smallest > 9 * MIB && error.details.budget === 9 * MIB - 1, error.message);
        assert.match(error.message, /memoryBudget/);
        assert.ok(!server.log.some((r) => r.path.endsWith('.bin')), 'a shard was asked for');
      });
    });
  });

describe('memory, and what only Chromium lets a test do', { timeout: 4 * PATIENCE }, () => {
  let server;

  before(async () => {
    server = await serve();
  });
  after(() => server.close());

  const goto = async (page) => {
    await page.goto(`${server.origin}/bare.html`);
    await page.waitForFunction(() => 'outrider' in globalThis);
    return { call: (name, ...args) => page.evaluate(([name, args]) => globalThis[name](...args), [name, args]) };
  };

  /** Ends a page's process as a browser does that wants its memory back. */
  async function crash(page) {
    const crashed = new Promise((resolve) => page.once('crash', resolve));
    const session = await page.context().newCDPSession(page);
    // It is not answered.
    void session.send('Page.crash').catch(() => {});
    await crashed;
  }

  test('a tab that is killed in a step: the next start stays below, and says so', async () => {
    await withPage(async (page) => {
      const first = await goto(page);
      assert.equal((await take(first)).step, 18);
      await answers(first);
      assert.equal((await take(first)).step, 27);
      await crash(page);
      const next = await goto(await page.context().newPage());
      const below = await take(next);
      assert.equal(below.step, 18);
      assert.match(below.notices, /the page ended when 27 MiB of memory were used/);
      await answers(next);
      const later = await take(next);
      assert.equal(later.step, 18);
      assert.match(later.notices, /staying at 18 MiB of memory, since 27 MiB ended the page/);
    });
  });

  test('a step that had gone well is doubted after one kill and given up after two', async () => {
    await withPage(async (page) => {
      const context = page.context();
      await (await goto(page)).call('know', 'cpu', { good: 18 * MIB, doubts: 0 });
      let tab = page;
      for (const step of [27, 27]) {
        const bare = await goto(tab);
        assert.equal((await take(bare)).step, step);
        await answers(bare);
        await crash(tab);
        tab = await context.newPage();
      }
      assert.equal((await take(await goto(tab))).step, 18);
    });
  });

  test('a browser that is killed in the first step: the next start takes the least there is', async () => {
    const profile = await mkdtemp(path.join(os.tmpdir(), 'outrider-memory-'));
    try {
      const url = `${server.origin}/bare.html`;
      await withKillable(profile, url, async (page, kill) => {
        assert.equal((await take(page)).step, 18);
        kill();
      });
      await withKillable(profile, url, async (page) => {
        const { step, notices } = await take(page);
        assert.ok(step < 18, `${step} MiB`);
        assert.match(notices, /the page ended when 18 MiB of memory were used/);
        await answers(page);
      });
    } finally {
      await rm(profile, { recursive: true, force: true, maxRetries: 10, retryDelay: 100 });
    }
  });

  test('of two tabs one tries, and the other takes what has gone well', async () => {
    await withPage(async (page) => {
      const first = await goto(page);
      assert.equal((await take(first)).step, 18);
      await answers(first);
      assert.equal((await take(first)).step, 27);
      const second = await goto(await page.context().newPage());
      const beside = await take(second);
      assert.equal(beside.step, 18);
      assert.match(beside.notices, /another tab/);
      await answers(second);
      await second.call('dispose');
      // Nothing that the second did was taken for an end of the first.
      await answers(first);
      await first.call('dispose');
      assert.ok((await take(second)).step > 27);
    });
  });

  test('a GPU that has no more memory: less is taken at once', async () => {
    // Buffers of more than 20 MiB in all are too much.
    const scarce = (script) => `
      let total = 0;
      const { createBuffer, popErrorScope } = GPUDevice.prototype;
      GPUDevice.prototype.createBuffer = function (descriptor) {
        total += descriptor.size;
        return createBuffer.call(this, descriptor);
      };
      GPUDevice.prototype.popErrorScope = async function () {
        const error = await popErrorScope.call(this);
        if (total < 20 * 2 ** 20) return error;
        total = 0;
        return new GPUOutOfMemoryError('as asked');
      };
      ${script}`;
    const end = server.fault('engine-worker.js', { body: scarce });
    await withPage(async (page) => {
      const bare = await goto(page);
      await bare.call('know', 'gpu', { good: 18 * MIB, doubts: 0 });
      const { step, notices } = await take(bare, { backend: 'gpu' });
      assert.equal(step, 18, notices);
      assert.match(notices, /27 MiB of memory could not be had/);
      await answers(bare);
    });
    end();
  });
});
