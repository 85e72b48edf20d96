// What the runtime asks of the browser, in the profile that stands in for Safari on an iPhone.

import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import { after, before, describe, test } from 'node:test';

import { PATIENCE } from '../harness.mjs';
import { BROWSERS, EXPERTS, REPLIES, ROOT, answersAsRecorded, loadPart, servePackage } from '../package.mjs';

const BOOKS = await readFile(`${ROOT}tests/browser/fixtures/keep-books.js`, 'utf8');

for (const { name, gpu, skip, open } of BROWSERS.filter((browser) => browser.name !== 'Chromium as Safari')) {
  describe(`what Safari must give, in ${name}`, { timeout: 4 * PATIENCE, skip }, () => {
    let server;

    before(async () => {
      server = await servePackage({ isolated: true });
      server.fault(/(engine|flash)-worker\.js$/, { body: (script) => `${BOOKS}\n${script}` });
    });
    after(() => server.close());

    for (const backend of gpu ? ['gpu', 'cpu'] : ['cpu']) {
      test(`${backend}: two submissions, default limits, files of its own, and nothing else`, async (context) => {
        await open(server, async (page) => {
          assert.equal(await page.call('isolated'), true);
          // With few slots there is much to upload, in several waves.
          const { memory, pool } = await loadPart(page, backend, 0.1, { profile: 'safari', f16: true });
          const entry = (kind) => memory.entries.find((entry) => entry.kind === kind).bytes;
          const slot = entry('pool') / pool.slots;
          assert.ok(pool.slots < EXPERTS / 4, `${pool.slots} slots`);
          await answersAsRecorded(page, REPLIES.slice(0, 1));

          const books = await page.call('books');
          const engine = books.find(({ worker }) => worker === 'outrider-engine');
          const { devices, submissions, mostOutstanding, mostQueued } = engine;
          assert.deepEqual(books.flatMap(({ missed }) => missed), [], 'nothing was looked for that Safari lacks');
          const handles = books.filter((book) => book !== engine).map((book) => book.handles);
          assert.equal(handles.length, 2, 'two workers read the files');
          assert.ok(!handles.flat().includes('read-only'), 'every handle is the only one of its file');
          if (backend === 'cpu') return assert.deepEqual(devices, []);

          context.diagnostic(`${submissions} submissions, ${mostOutstanding} outstanding, ${mostQueued} bytes queued`);
          assert.deepEqual(devices, [{ features: [], differing: [], workgroupMemory: 16 << 10, binding: 128 << 20 }]);
          assert.ok(submissions > 100);
          assert.ok(mostOutstanding <= 2, `${mostOutstanding} submissions were outstanding`);
          // Sixteen experts may wait to be taken up, and the one that is being written.
          assert.ok(mostQueued > 8 * slot && mostQueued <= 17 * slot, `${mostQueued} bytes waited, slots have ${slot}`);
          assert.ok(mostQueued <= entry('workspace'));
        });
      });
    }
  });
}
