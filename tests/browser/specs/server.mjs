// The test server itself: what a static host does, and the faults that the other specs rely on.

import assert from 'node:assert/strict';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { request } from 'node:http';
import os from 'node:os';
import path from 'node:path';
import { after, before, describe, test } from 'node:test';

import { startServer } from '../server.mjs';

describe('test server', () => {
  const bytes = Buffer.from(Array.from({ length: 1000 }, (_, i) => (i * 7) & 255));
  let dir;
  let server;
  let url;

  before(async () => {
    dir = await mkdtemp(path.join(os.tmpdir(), 'outrider-server-'));
    await writeFile(path.join(dir, 'data.bin'), bytes);
    await writeFile(path.join(dir, 'index.html'), '<!doctype html>');
    server = await startServer({ mounts: { '/': dir, '/models': dir }, isolated: true, csp: "default-src 'self'" });
    url = `${server.origin}/models/data.bin`;
  });
  after(async () => {
    await server.close();
    await rm(dir, { recursive: true });
  });

  async function get(headers = {}) {
    const response = await fetch(url, { headers });
    return { status: response.status, headers: response.headers, body: Buffer.from(await response.arrayBuffer()) };
  }

  async function withFault(fault, use) {
    const end = server.fault('data.bin', fault);
    try {
      await use();
    } finally {
      end();
    }
  }

  test('whole files, types and isolation headers', async () => {
    const whole = await get();
    assert.equal(whole.status, 200);
    assert.deepEqual(whole.body, bytes);
    assert.equal(whole.headers.get('cross-origin-opener-policy'), 'same-origin');
    assert.equal(whole.headers.get('cross-origin-embedder-policy'), 'require-corp');
    assert.equal(whole.headers.get('content-security-policy'), "default-src 'self'");
    const index = await fetch(`${server.origin}/`);
    assert.match(index.headers.get('content-type'), /^text\/html/);
    assert.equal((await fetch(`${server.origin}/none.js`)).status, 404);
    assert.equal((await fetch(url, { method: 'DELETE' })).status, 405);
  });

  test('ranges', async () => {
    for (const [range, start, end] of [['0-0', 0, 1], ['10-19', 10, 20], ['990-', 990, 1000], ['-5', 995, 1000], ['990-5000', 990, 1000]]) {
      const part = await get({ Range: `bytes=${range}` });
      assert.equal(part.status, 206, range);
      assert.equal(part.headers.get('content-range'), `bytes ${start}-${end - 1}/1000`);
      assert.deepEqual(part.body, bytes.subarray(start, end));
    }
    const beyond = await get({ Range: 'bytes=1000-' });
    assert.equal(beyond.status, 416);
    assert.equal(beyond.headers.get('content-range'), 'bytes */1000');
    assert.equal((await get({ Range: 'bytes=0-1,5-6' })).status, 200, 'several ranges get the whole file');
  });

  test('entity tags', async () => {
    const etag = (await get()).headers.get('etag');
    assert.equal((await get({ 'If-None-Match': etag })).status, 304);
    assert.equal((await get({ Range: 'bytes=0-9', 'If-Range': etag })).status, 206);
    assert.equal((await get({ Range: 'bytes=0-9', 'If-Range': '"older"' })).status, 200);
  });

  test('nothing outside the mounts is served', async () => {
    for (const target of ['/../etc/passwd', '/models/..%2f..%2fetc/passwd', '/models/%2e%2e/x', '/%00', '/%zz', '/a\\..\\b']) {
      const status = await new Promise((done, failed) => {
        // Not fetch, which would tidy the path before it is sent.
        const { hostname, port } = new URL(server.origin);
        request({ hostname, port, path: target }, (response) => done(response.resume().statusCode)).on('error', failed).end();
      });
      assert.equal(status, 404, target);
    }
  });

  test('faults', async () => {
    await withFault({ status: 500, times: 1 }, async () => {
      assert.equal((await get()).status, 500);
      assert.equal((await get()).status, 200, 'it applied once');
    });
    await withFault({ flip: 12 }, async () => {
      const { body } = await get({ Range: 'bytes=10-19' });
      assert.equal(body[2], bytes[12] ^ 1);
      body[2] ^= 1;
      assert.deepEqual(body, bytes.subarray(10, 20));
    });
    await withFault({ ignoreRange: true }, async () => {
      const { status, body } = await get({ Range: 'bytes=10-19' });
      assert.equal(status, 200);
      assert.deepEqual(body, bytes);
    });
    await withFault({ truncate: 100 }, async () => assert.deepEqual((await get()).body, bytes.subarray(0, 100)));
    await withFault({ body: () => 'other' }, async () => assert.equal(String((await get()).body), 'other'));
    await withFault({ delay: 100 }, async () => {
      const start = performance.now();
      await get();
      assert.ok(performance.now() - start > 90);
    });
    assert.equal((await get()).status, 200, 'faults end');
  });

  test('a cut connection delivers exactly what it should', async () => {
    await withFault({ cutAfter: 300 }, async () => {
      const response = await fetch(url);
      assert.equal(response.headers.get('content-length'), '1000');
      let received = 0;
      await assert.rejects(async () => {
        for await (const chunk of response.body) received += chunk.length;
      });
      assert.equal(received, 300);
    });
  });

  test('the log holds every request', async () => {
    server.log.length = 0;
    await get({ Range: 'bytes=0-9' });
    assert.deepEqual(server.log, [
      { method: 'GET', path: '/models/data.bin', range: 'bytes=0-9', status: 206, bytes: 10 },
    ]);
  });
});
