// In Node, as where a server renders a page: importing the package does nothing, and using it fails with a typed error.

import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { test } from 'node:test';
import { promisify } from 'node:util';

import { PACKAGE } from './packed.mjs';

const run = promisify(execFile);

/** What a browser has and Node may not, or has by the same name. */
const BROWSER =
  'Worker caches crypto document fetch importScripts indexedDB isSecureContext localStorage location navigator postMessage self sessionStorage window';

/** Runs a module in a Node of its own; what it prints, as JSON. */
async function inNode(script) {
  const { stdout, stderr } = await run(process.execPath, ['--input-type=module', '--eval', script], { cwd: PACKAGE });
  assert.equal(stderr, '');
  return JSON.parse(stdout);
}

test('importing it touches nothing of a browser’s', async () => {
  const touched = await inNode(`
    const touched = [];
    for (const name of '${BROWSER}'.split(' ')) {
      Object.defineProperty(globalThis, name, { configurable: true, get: () => void touched.push(name) });
    }
    const names = Object.keys(await import('outrider')).sort();
    process.stdout.write(JSON.stringify({ touched, names }));
  `);
  assert.deepEqual(touched, {
    touched: [],
    names: ['ChatStream', 'Engine', 'OutriderError', 'VERSION', 'createEngine', 'removeModel'],
  });
});

test('an engine, and deleting a model, are refused with the code `unsupported`', async () => {
  const errors = await inNode(`
    import { OutriderError, createEngine, removeModel } from 'outrider';
    const errors = [];
    const model = 'https://example.org/models/concierge/';
    for (const act of [() => createEngine({ model }), () => createEngine({ model: 'models/concierge' }), () => removeModel(model)]) {
      await act().catch((error) => errors.push([error instanceof OutriderError, error.name, error.code, error.message]));
    }
    process.stdout.write(JSON.stringify(errors));
  `);
  assert.equal(errors.length, 3);
  for (const [typed, name, code, message] of errors) {
    assert.deepEqual([typed, name, code], [true, 'OutriderError', 'unsupported']);
    assert.match(message, /browser/);
  }
});
