// The README's table of errors names every code there is, and says what to do about each.

import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import { test } from 'node:test';

const read = (path) => readFile(new URL(`../${path}`, import.meta.url), 'utf8');

/** Codes of the runtime that only its command line meets. */
const NATIVE = ['bad_pack', 'encode', 'io'];

test('the README, the types and the runtime know the same error codes', async () => {
  const readme = (await read('README.md')).split('\n## Errors\n')[1].split('\n## ')[0];
  const rows = readme.split('\n').filter((line) => line.startsWith('| `') && !line.startsWith('| `code`')).map((line) => line.split('|').slice(1, -1));
  const listed = rows.flatMap(([codes]) => [...codes.matchAll(/`(\w+)`/g)].map(([, code]) => code));
  assert.deepEqual(listed, [...new Set(listed)], 'a code has two rows');
  for (const row of rows) assert.ok(row.length === 3 && row.every((cell) => cell.trim() !== ''), row.join('|'));

  const types = (await read('src/errors.ts')).split('export type ErrorCode =')[1].split(';')[0];
  const typed = [...types.matchAll(/'(\w+)'/g)].map(([, code]) => code);
  const runtime = [...(await read('../src/error.rs')).matchAll(/Error::\w+[^=\n]*=> "(\w+)"/g)].map(([, code]) => code);
  assert.ok(runtime.length > 20);
  assert.deepEqual(listed.toSorted(), typed.toSorted(), 'README.md and src/errors.ts');
  const missing = runtime.filter((code) => !typed.includes(code) && !NATIVE.includes(code));
  assert.deepEqual(missing, [], 'codes of src/error.rs that the package does not name');
  const own = typed.filter((code) => !runtime.includes(code));
  assert.deepEqual(own.toSorted(), ['disposed', 'panic', 'unsupported', 'worker']);
});
