// A model whose pack changes behind its address: between visits, while it is fetched, and with the server or the network
// gone half-way. Earlier versions are made from the real one: some experts hold copies of another's weights.

import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import { after, before, describe, test } from 'node:test';

import { PATIENCE, withPage } from '../harness.mjs';
import { BROWSERS, MODEL, REPLIES, ROOT, answersAsRecorded, chat, greedy, load, servePackage } from '../package.mjs';

const CPU = { backend: 'cpu' };
const SHARD = 'experts-00000.bin';

const MANIFEST = JSON.parse(await readFile(`${ROOT}${MODEL.slice(1)}manifest.json`, 'utf8'));
const shard = MANIFEST.shards.findIndex(({ file }) => file === SHARD);
const experts = MANIFEST.extents.filter(([in_]) => in_ === shard).map(([, offset, bytes, hash]) => ({ offset, bytes, hash }));
/** Experts of the last version that are not in the one before, far enough apart that each is a request of its own. */
const fresh = experts.filter((extent, i) => i % 16 === 1 && extent.bytes === experts[0].bytes);
const FRESH_BYTES = fresh.reduce((sum, extent) => sum + extent.bytes, 0);

const olderManifest = (bytes) => {
  const manifest = JSON.parse(bytes);
  delete manifest.self_test; // its values are the last version's; a pack may be without
  for (const extent of manifest.extents) {
    if (extent[0] === shard && fresh.some(({ offset }) => offset === extent[1])) extent[3] = experts[0].hash;
  }
  return JSON.stringify(manifest);
};
const olderShard = (bytes) => {
  const { offset: first, bytes: length } = experts[0];
  for (const { offset } of fresh) bytes.copy(bytes, offset, first, first + length);
  return bytes;
};

// Firefox has Safari's handles.
const NATURES = BROWSERS.filter(({ name }) => name !== 'Chromium as Safari' || process.argv.includes('--full'));

for (const { name, skip, some, less, open } of NATURES) describe(`a model that changes in ${name}`, { timeout: 4 * PATIENCE, skip }, () => {
  let server;

  before(async () => {
    server = await servePackage();
  });
  after(() => server.close());

  /** Serves the version before; returns what ends that. */
  function older() {
    const ends = [server.fault('manifest.json', { body: olderManifest }), server.fault(SHARD, { body: olderShard })];
    return () => ends.forEach((end) => end());
  }

  const requests = () => server.log.filter((r) => r.path.startsWith(MODEL));
  const sent = (end = '') => requests().filter((r) => r.path.endsWith(end)).reduce((sum, r) => sum + r.bytes, 0);

  /** Loads, and says whether the reply is the last version's. */
  async function visit(page, options = {}) {
    server.log.length = 0;
    const { error, stats } = await load(page, { ...CPU, ...options });
    assert.ifError(error && new Error(error.message));
    const { prompt, token_ids } = REPLIES[0];
    const reply = await chat(page, greedy(prompt));
    assert.ifError(reply.error && new Error(reply.error.message));
    const last = JSON.stringify(reply.choices[0].token_ids) === JSON.stringify(token_ids);
    return { last, notices: stats.notices.filter((notice) => /server/.test(notice)) };
  }

  test('an unchanged model costs an answer without content; a changed one what has changed, unless that is not wanted', async () => {
    await open(server, async (page) => {
      const end = older();
      assert.equal((await visit(page)).last, false);
      assert.equal((await visit(page)).last, false);
      assert.equal(sent(), 0, 'the manifest was sent again');
      assert.deepEqual(requests().map((r) => [r.path.split('/').at(-1), r.status]), [['manifest.json', 304]]);
      end();

      assert.deepEqual(await visit(page, { update: 'never' }), { last: false, notices: [] });
      assert.equal(requests().length, 0);

      assert.deepEqual(await visit(page), { last: true, notices: [] });
      assert.equal(sent('core-00000.bin') + sent('tokenizer.json'), 0);
      assert.equal(sent(SHARD), FRESH_BYTES);
      await answersAsRecorded(page, REPLIES.slice(0, 3));
      const kept = await page.call('stored');
      assert.equal(kept.filter((file) => file.startsWith(SHARD)).length, 1, `left in storage: ${kept}`);

      const gone = server.fault(MODEL, { status: 404 });
      await page.reload();
      assert.equal((await visit(page)).last, true);
      gone();
    });
  });

  test('whatever goes wrong at an update, the model from before answers, and a later visit brings the new one', less, async () => {
    await open(server, async (page) => {
      const end = older();
      assert.equal((await visit(page)).last, false);
      end();
      for (const [what, told, ...faults] of some([
        ['a manifest that never comes', 0, ['manifest.json', { hang: true }]],
        ['a server that fails', 0, [MODEL, { status: 500 }]],
        ['a page in place of the manifest', 1, ['manifest.json', { body: () => '<!doctype html><title>Not here</title>' }]],
        ['a byte that is wrong every time', 1, [SHARD, { flip: fresh[3].offset + 5 }]],
        ['a connection that breaks for good', 1, [SHARD, { cutAfter: 10_000, times: 3 }], [SHARD, { status: 403 }]],
        ['a shard that is missing', 1, [SHARD, { status: 404 }]],
      ])) {
        const ends = faults.map(([pattern, fault]) => server.fault(pattern, fault));
        const { last, notices } = await visit(page);
        ends.forEach((end) => end());
        assert.equal(last, false, what);
        assert.equal(notices.length, told, `${what}: ${notices.join(' ')}`);
      }
      assert.deepEqual(await visit(page), { last: true, notices: [] });
    });
  });

  test('an update that the page did not live to see is gone on with, and until then the model from before answers', async () => {
    await open(server, async (page) => {
      const end = older();
      assert.equal((await visit(page)).last, false);
      end();
      const slow = server.fault(SHARD, { rate: 8e6 });
      const { error } = await load(page, { ...CPU, abortAt: 'download', abortAfter: 16e6 });
      assert.equal(error?.code, 'aborted', error?.message);
      slow();
      const gone = server.fault(MODEL, { status: 503 });
      assert.equal((await visit(page)).last, false);
      gone();
      assert.equal((await visit(page)).last, true);
    });
  });

  test('a model that changes while it is fetched is fetched as it is now', less, async () => {
    await open(server, async (page) => {
      server.log.length = 0;
      const ends = [
        server.fault('manifest.json', { body: olderManifest, times: 1 }),
        server.fault(SHARD, { body: olderShard, cutAfter: 9_000_000, times: 1 }),
      ];
      assert.ifError((await load(page, CPU)).error);
      ends.forEach((end) => end());
      assert.equal(requests().filter((r) => r.path.endsWith('manifest.json')).length, 2);
      await answersAsRecorded(page, REPLIES.slice(0, 2));
    });
  });
});

describe('a model that changes while another tab uses it', { timeout: 2 * PATIENCE }, () => {
  test('that tab goes on with what it has, and nothing is left behind in the end', async () => {
    const server = await servePackage();
    const visit = async (page) => {
      await page.goto(`${server.origin}/bare.html`);
      await page.waitForFunction(() => 'outrider' in globalThis);
      const call = (name, ...args) => page.evaluate(([name, args]) => globalThis[name](...args), [name, args]);
      // Few slots, so that replies have to read experts.
      const { error } = await load({ call }, { ...CPU, memoryBudget: '17MiB' });
      assert.ifError(error && new Error(error.message));
      return { call };
    };
    try {
      await withPage(async (page) => {
        const ends = [server.fault('manifest.json', { body: olderManifest }), server.fault(SHARD, { body: olderShard })];
        const first = await visit(page);
        ends.forEach((end) => end());
        const before = await chat(first, greedy(REPLIES[0].prompt));
        const second = await visit(await page.context().newPage());
        await answersAsRecorded(second, REPLIES.slice(0, 2));
        const again = await chat(first, greedy(REPLIES[0].prompt, { cache_prompt: false }));
        assert.deepEqual(again.choices?.[0].token_ids, before.choices[0].token_ids);
        assert.equal((await second.call('stored')).filter((file) => file.startsWith(SHARD)).length, 2);
        await first.call('dispose');
        await second.call('dispose');
        const third = await visit(page);
        await answersAsRecorded(third, REPLIES.slice(0, 1));
        assert.equal((await third.call('stored')).filter((file) => file.startsWith(SHARD)).length, 1);
      });
    } finally {
      await server.close();
    }
  });
});
