// Storage that is full, or that there is too little of: before the download, in the middle of it, and after.

import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';

import { PATIENCE } from '../harness.mjs';
import { BROWSERS, REPLIES, answersAsRecorded, fewSteps, load, servePackage } from '../package.mjs';

const CPU = { backend: 'cpu' };

/** Has the engine worker be told of this much room. */
const told = (quota, usage) => (script) => `
  StorageManager.prototype.estimate = async () => ({ quota: ${quota}, usage: ${usage} });
  ${script}`;

/** Where there is no way to make storage small: streams that take so many bytes in all. */
const narrow = (room) => (script) => `
  let room = ${room};
  const { write } = FileSystemWritableFileStream.prototype;
  FileSystemWritableFileStream.prototype.write = function (chunk) {
    room -= chunk.data.byteLength;
    return room < 0 ? Promise.reject(new DOMException('as asked', 'QuotaExceededError')) : write.call(this, chunk);
  };
  ${script}`;

/** Room for about half of the model. Firefox counts in KiB. */
const ROOM = 10_000_000;
const SMALL = { prefs: { 'dom.quotaManager.temporaryStorage.fixedLimit': Math.round(ROOM / 1024) } };

for (const { name, skip, less, open } of BROWSERS)
  describe(`storage in ${name}`, { timeout: 4 * PATIENCE, skip }, () => {
    let server;

    before(async () => {
      server = await servePackage();
    });
    after(() => server.close());

    const shards = () => server.log.filter((r) => r.path.endsWith('.bin'));
    const sent = () => shards().reduce((sum, r) => sum + r.bytes, 0);

    /** Loads, and it must be for want of room that it fails. */
    async function lacks(page) {
      const { error } = await load(page, CPU);
      assert.equal(error?.code, 'quota', error?.message ?? 'it loaded');
      assert.ok(error.typed);
      assert.match(error.message, /storage is full: \d+ more bytes are needed; free some space/);
      return error.details.needed;
    }

    async function loads(page, options = CPU) {
      const { error, progress } = await load(page, options);
      assert.ifError(error && new Error(error.message));
      await answersAsRecorded(page, REPLIES.slice(0, 1));
      return progress;
    }

    test('too little of it: refused before the first byte, with how much is missing; the browser was asked to keep it', async () => {
      await open(server, async (page) => {
        const end = server.fault('engine-worker.js', { body: told(5e6, 1e6) });
        server.log.length = 0;
        const needed = await lacks(page);
        end();
        assert.equal(shards().length, 0, 'a shard was asked for');
        assert.ok((await page.call('persistAsked')) > 0);
        const { total } = (await loads(page)).findLast((p) => p.phase === 'download');
        assert.equal(needed, total - 4e6);
      });
    });

    test('full in the middle of a download: a typed error, no lock outlives it, and what was stored is kept', async () => {
      const quota = (page, quotaSize) => page.send('Storage.overrideQuotaForOrigin', { origin: server.origin, quotaSize });
      // Firefox tells the truth about the room that there is.
      const ends = [server.fault('engine-worker.js', { body: told(1e10, 0) })];
      if (name === 'WebKit') ends.push(server.fault('flash-worker.js', { body: narrow(ROOM / 2) }));
      await open(
        server,
        async (page) => {
          if (page.send) await quota(page, ROOM);
          for (const _ of ['once', 'again']) {
            const needed = await lacks(page);
            assert.ok(needed > 1e6 && needed < 20e6, `${needed} more bytes are needed`);
          }
          for (const end of ends) end();
          if (name === 'Firefox') return;
          if (page.send) await quota(page);
          server.log.length = 0;
          await loads(page);
          assert.ok(sent() > 1e6 && sent() < 16e6, `${sent()} bytes were sent again`);
        },
        SMALL,
      );
    });

    if (name.startsWith('Chromium')) {
      test('full once the model is there: it goes on working', less, async () => {
        await open(server, async (page) => {
          await loads(page);
          await page.send('Storage.overrideQuotaForOrigin', { origin: server.origin, quotaSize: 1e6 });
          server.log.length = 0;
          await loads(page);
          const ends = fewSteps(server);
          await loads(page, { ...CPU, memoryBudget: 'auto' });
          for (const end of ends) end();
          const { notices } = await page.call('stats');
          assert.match(notices.join(' '), /could not be written down/);
          assert.equal(sent(), 0);
        });
      });
    }
  });
