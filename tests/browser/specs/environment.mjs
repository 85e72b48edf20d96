// What the other specs take for granted about the browser. When one of these fails, so do the others, less clearly.

import assert from 'node:assert/strict';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import os from 'node:os';
import path from 'node:path';
import { after, before, describe, test } from 'node:test';

import { PATIENCE, withPage } from '../harness.mjs';
import { startServer } from '../server.mjs';

const WORKER = `
  const answers = {
    async storage() {
      const root = await navigator.storage.getDirectory();
      const file = await root.getFileHandle('probe', { create: true });
      const handle = await file.createSyncAccessHandle();
      handle.write(new Uint8Array([1, 2, 3, 4]), { at: 4096 });
      handle.flush();
      const out = new Uint8Array(2);
      const read = handle.read(out, { at: 4097 });
      const size = handle.getSize();
      handle.close();
      return { read, out: [...out], size };
    },
    async adapter() {
      const adapter = await navigator.gpu?.requestAdapter();
      if (!adapter) return undefined;
      const device = await adapter.requestDevice();
      const { vendor, architecture, description } = adapter.info;
      device.destroy();
      return { vendor, architecture, description, features: [...adapter.features].sort() };
    },
    isolated: () => ({ isolated: crossOriginIsolated, shared: typeof SharedArrayBuffer }),
  };
  onmessage = async ({ data }) => postMessage(await answers[data]());
`;

describe('Chromium', { timeout: 2 * PATIENCE }, () => {
  let dir;
  const servers = {};

  before(async () => {
    dir = await mkdtemp(path.join(os.tmpdir(), 'outrider-environment-'));
    await writeFile(path.join(dir, 'index.html'), '<!doctype html><title>probe</title>');
    await writeFile(path.join(dir, 'worker.js'), WORKER);
    servers.plain = await startServer({ mounts: { '/': dir } });
    servers.isolated = await startServer({ mounts: { '/': dir }, isolated: true });
  });
  after(async () => {
    for (const server of Object.values(servers)) await server.close();
    await rm(dir, { recursive: true });
  });

  /** What a dedicated module worker answers. */
  async function ask(server, question) {
    let answer;
    await withPage(async (page) => {
      await page.goto(server.origin);
      answer = await page.evaluate(
        (question) =>
          new Promise((done, failed) => {
            const worker = new Worker('worker.js', { type: 'module' });
            worker.onmessage = ({ data }) => done(data);
            worker.onerror = (event) => failed(new Error(event.message));
            worker.postMessage(question);
          }),
        question,
      );
    });
    return answer;
  }

  test('a worker reads and writes the private file system synchronously', async () => {
    assert.deepEqual(await ask(servers.plain, 'storage'), { read: 2, out: [2, 3], size: 4100 });
  });

  test('a worker gets a WebGPU device', async (context) => {
    const adapter = await ask(servers.plain, 'adapter');
    assert.ok(adapter, 'there is no adapter');
    context.diagnostic(`adapter: ${JSON.stringify(adapter)}`);
  });

  test('isolation follows the headers', async () => {
    assert.deepEqual(await ask(servers.plain, 'isolated'), { isolated: false, shared: 'undefined' });
    assert.deepEqual(await ask(servers.isolated, 'isolated'), { isolated: true, shared: 'function' });
  });
});
