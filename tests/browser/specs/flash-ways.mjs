// How files are read: what is found out when a model is loaded, and that it is acted upon.

import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';

import { PATIENCE } from '../harness.mjs';
import { BROWSERS, REPLIES, answersAsRecorded, load, servePackage } from '../package.mjs';

const FEW = { backend: 'cpu', memoryBudget: '17MiB' };

/** Makes reads of one way slow, and counts all of them; `readsOf` of the page asks the workers for their counts. */
const READS = `
  globalThis.reads = { sync: 0, slice: 0 };
  const until = (time) => { while (performance.now() < time); };
  const count = (prototype, method, way, delay) => {
    const original = prototype?.[method];
    if (!original) return;
    prototype[method] = function (...args) {
      globalThis.reads[way] += 1;
      until(performance.now() + delay);
      return original.apply(this, args);
    };
  };
  count(globalThis.FileSystemSyncAccessHandle?.prototype, 'read', 'sync', SYNC);
  count(File.prototype, 'slice', 'slice', SLICE);
  const channel = new BroadcastChannel('reads');
  channel.onmessage = ({ data }) => data === 'tell' && channel.postMessage(globalThis.reads);
`;

for (const { name, gpu, skip, open } of BROWSERS) {
  describe(`ways to read in ${name}`, { timeout: 4 * PATIENCE, skip }, () => {
    let server;

    before(async () => {
      server = await servePackage();
    });
    after(() => server.close());

    const slowed = (sync, slice) => {
      const script = READS.replace('SYNC', sync).replace('SLICE', slice);
      return server.fault('flash-worker.js', { body: (worker) => `${worker}\n${script}` });
    };
    const fastest = ({ measured }) => measured.reduce((a, b) => (b.bytesPerSecond > a.bytesPerSecond ? b : a));

    test('are measured in under a second, as is what a result of the backend takes', async (context) => {
      await open(server, async (page) => {
        for (const backend of gpu ? ['cpu', 'gpu'] : ['cpu']) {
          const { stats, error } = await load(page, { backend });
          assert.ifError(error && new Error(error.message));
          const { way, lanes, bytesPerSecond, measured, milliseconds } = stats.flash;
          const told = measured.map((m) => `${m.way}×${m.lanes} ${Math.round(m.bytesPerSecond / 1e6)}`).join(', ');
          context.diagnostic(`${told} MB/s, ${Math.round(milliseconds)} ms, readback ${stats.backend.readback} ms`);
          assert.deepEqual(new Set(measured.map((m) => m.way)), new Set(['sync', 'slice']));
          assert.ok(measured.some((m) => m.way === way && m.lanes === lanes && m.bytesPerSecond === bytesPerSecond));
          const best = fastest(stats.flash);
          assert.ok(best.bytesPerSecond <= 1.15 * bytesPerSecond, 'a way hardly faster may be passed over for fewer readers');
          // Where there are no handles at all, or one a file, that is found out too.
          if (name === 'WebKit') assert.equal(measured.find((m) => m.way === 'sync').bytesPerSecond, 0);
          if (name !== 'Chromium') assert.ok(!measured.some((m) => m.way === 'sync' && m.lanes > 1 && m.bytesPerSecond > 0));
          if (backend === 'cpu') assert.equal(stats.backend.readback, null);
          else assert.ok(stats.backend.readback > 0);
        }
      });
    });

    test('one that fails is not taken, and the model loads', { skip: name === 'WebKit' && 'it has no other' }, async () => {
      const broken = `File.prototype.slice = () => { throw new DOMException('as asked', 'NotReadableError'); };`;
      const end = server.fault('flash-worker.js', { body: (worker) => `${worker}\n${broken}` });
      await open(server, async (page) => {
        const { stats, error } = await load(page, FEW);
        assert.ifError(error && new Error(error.message));
        assert.equal(stats.flash.way, 'sync');
        assert.equal(stats.flash.measured.find((m) => m.way === 'slice').bytesPerSecond, 0);
        await answersAsRecorded(page, REPLIES.slice(0, 1));
      });
      end();
    });

    test('the faster one is taken, whichever it is, and the reply stays the same', async () => {
      await open(server, async (page) => {
        // Slow against what there is to read in the time of a measurement.
        const ways = name === 'WebKit' ? [['sync', 25, 0]] : [['slice', 0, 25], ['sync', 25, 0]];
        for (const [slow, sync, slice] of ways) {
          const end = slowed(sync, slice);
          const { stats, error } = await load(page, FEW);
          assert.ifError(error && new Error(error.message));
          const only = stats.flash.measured.find((m) => m.way === 'sync').bytesPerSecond === 0;
          if (!only) assert.notEqual(stats.flash.way, slow);
          const before = await page.call('readsOf');
          await answersAsRecorded(page, REPLIES.slice(0, 1));
          const after = await page.call('readsOf');
          const more = (way) => after[way] - before[way];
          assert.ok(more(stats.flash.way) > 20, 'experts are read so');
          assert.equal(more(stats.flash.way === 'sync' ? 'slice' : 'sync'), 0, 'and in no other way');
          end();
        }
      });
    });
  });
}
