// Installing a pack into the browser's storage: what servers do wrong, what comes back on a second visit.

import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import { PATIENCE } from '../harness.mjs';
import { BROWSERS, MODEL, REPLIES, answersAsRecorded, load, servePackage } from '../package.mjs';

const CPU = { backend: 'cpu' };

for (const { name, skip, some, less, open } of BROWSERS) describe(`installing a model in ${name}`, { timeout: 4 * PATIENCE, skip }, () => {
  let server;

  before(async () => {
    server = await servePackage();
  });
  after(() => server.close());

  /** Calls `use` while requests that match `pattern` misbehave. */
  async function during(pattern, fault, use) {
    const end = server.fault(pattern, fault);
    try {
      return await use();
    } finally {
      end();
    }
  }

  /** Bytes of the model that the server has sent since the log was cleared. */
  const sent = () => server.log.filter((r) => r.path.startsWith(MODEL)).reduce((sum, r) => sum + r.bytes, 0);

  /** The model loads and answers, without anything that is there being fetched again. */
  async function heals(page, atMost) {
    server.log.length = 0;
    const { error } = await load(page, CPU);
    assert.ifError(error && new Error(error.message));
    if (atMost !== undefined) assert.ok(sent() <= atMost, `${sent()} bytes were sent again`);
    await answersAsRecorded(page, REPLIES.slice(0, 1));
  }

  test('a second visit needs no model files on the server', async () => {
    await open(server, async (page) => {
      const first = await load(page, CPU);
      assert.ifError(first.error);
      assert.ok(first.progress.some((p) => p.phase === 'download' && p.done === p.total && p.total > 19e6));
      await during(MODEL, { status: 404 }, async () => {
        await page.reload();
        const second = await load(page, CPU);
        assert.ifError(second.error && new Error(second.error.message));
        assert.ok(!second.progress.some((p) => p.phase === 'download'));
        await answersAsRecorded(page, REPLIES.slice(0, 2));
      });
    });
  });

  for (const [name, pattern, fault, code, says] of some([
    ['no such model', MODEL, { status: 404 }, 'http', /404/],
    ['a server that fails', MODEL, { status: 500 }, 'http', /500/],
    ['a shard that is missing', 'experts-00000.bin', { status: 404 }, 'http', /404.*experts/],
    ['a shard that is cut short', 'experts-00000.bin', { truncate: 5_000_000 }, 'truncated', /experts-00000\.bin/],
    ['a byte that is wrong every time', 'core-00000.bin', { flip: 4096 }, 'corrupt', /core-00000\.bin/],
    ['a tokenizer that is not the manifest’s', 'tokenizer.json', { flip: 100 }, 'corrupt', /tokenizer\.json/],
  ])) {
    test(`${name}: a typed error, and the next attempt succeeds`, async () => {
      await open(server, async (page) => {
        const { error } = await during(pattern, fault, () => load(page, CPU));
        assert.equal(error?.code, code, error?.message);
        assert.ok(error.typed);
        assert.match(error.message, says);
        await heals(page);
      });
    });
  }

  for (const [name, change, code, says] of some([
    ['a manifest from a newer version', (m) => ({ ...m, version: 99 }), 'version', /99/],
    ['an architecture nobody knows', (m) => ({ ...m, architecture: 'mystery', config: { ...m.config, model_type: 'mystery' } }), 'unknown_architecture', /mystery/],
    ['a pack without a tokenizer', (m) => ({ ...m, files: m.files.filter((f) => f.file !== 'tokenizer.json') }), 'missing_file', /tokenizer\.json/],
    ['an extent outside its shard', (m) => ({ ...m, extents: m.extents.map((e, i) => (i === 3 ? { ...e, offset: 2 ** 52 } : e)) }), 'format', /./],
    ['sizes that overflow', (m) => ({ ...m, extents: m.extents.map((e, i) => (i === 3 ? { ...e, bytes: 2 ** 53 } : e)) }), 'format', /./],
    ['a file outside the directory', (m) => ({ ...m, files: [{ ...m.files[0], file: '../secret' }] }), 'format', /secret/],
    ['a manifest that is no manifest', () => ({ hello: 'there' }), 'format', /./],
  ])) {
    test(`${name}: refused before anything else is downloaded`, less, async () => {
      await open(server, async (page) => {
        const body = (bytes) => JSON.stringify(change(JSON.parse(bytes)));
        const { error } = await during('manifest.json', { body }, () => {
          server.log.length = 0;
          return load(page, CPU);
        });
        assert.equal(error?.code, code, error?.message);
        assert.match(error.message, says);
        assert.ok(!server.log.some((r) => r.path.endsWith('.bin')), 'a shard was asked for');
        await heals(page);
      });
    });
  }

  test('a byte that was wrong once is fetched again', less, async () => {
    await open(server, async (page) => {
      const { error } = await during('experts-00000.bin', { flip: 123_456, times: 1 }, () => load(page, CPU));
      assert.ifError(error && new Error(error.message));
      await answersAsRecorded(page, REPLIES.slice(0, 1));
    });
  });

  test('a connection that breaks goes on where it broke', async () => {
    await open(server, async (page) => {
      server.log.length = 0;
      const { error } = await during('experts-00000.bin', { cutAfter: 12_000_000, times: 1, rate: 25e6 }, () => load(page, CPU));
      assert.ifError(error && new Error(error.message));
      // What the browser had received but not handed on is lost with the connection.
      assert.ok(sent() < 19.9e6 + 8e6, `${sent()} bytes were sent`);
      await answersAsRecorded(page, REPLIES.slice(0, 1));
    });
  });

  test('a server that knows no ranges is enough', less, async () => {
    await open(server, async (page) => {
      const { error } = await during(MODEL, { ignoreRange: true }, () => load(page, CPU));
      assert.ifError(error && new Error(error.message));
      await answersAsRecorded(page, REPLIES.slice(0, 1));
    });
  });

  test('aborted while downloading: what has arrived is not fetched again', async () => {
    await open(server, async (page) => {
      const { error } = await during(MODEL, { rate: 10e6 }, () =>
        load(page, { ...CPU, abortAt: 'download', abortAfter: 12e6 }),
      );
      assert.equal(error?.code, 'aborted', error?.message);
      // The server notices a little later that nobody listens any more.
      await sleep(500);
      await heals(page, 12e6);
    });
  });

  for (const phase of ['load', 'warmup']) {
    test(`aborted in ${phase}: a typed error, and nothing is fetched again`, less, async () => {
      await open(server, async (page) => {
        const { error } = await load(page, { ...CPU, abortAt: phase });
        assert.equal(error?.code, 'aborted', error?.message);
        await heals(page, 0);
      });
    });
  }

  test('a byte that went wrong in storage is found when it is read, and repaired', async () => {
    await open(server, async (page) => {
      assert.ifError((await load(page, CPU)).error);
      await page.call('damage', 'core-00000.bin', 5000);
      await heals(page, 2.5e6);
      assert.ok(sent() > 0, 'the wrong extent was fetched again');
    });
  });
});
