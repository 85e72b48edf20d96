// What is published: the files that are meant and no others, which resolve in every way a project may ask for them.

import assert from 'node:assert/strict';
import { mkdtemp, readFile, readdir, rm, stat, writeFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import os from 'node:os';
import path from 'node:path';
import { after, before, describe, test } from 'node:test';
import { pathToFileURL } from 'node:url';

import { PACKAGE, install, pack, tsc } from './packed.mjs';

const MANIFEST = JSON.parse(await readFile(path.join(PACKAGE, 'package.json'), 'utf8'));

describe('the packed package', () => {
  let project;
  let packed;
  let installed;

  before(async () => {
    project = await mkdtemp(path.join(os.tmpdir(), 'outrider-pack-'));
    packed = await pack(project);
    installed = await install(project, packed);
    await writeFile(path.join(project, 'package.json'), '{ "private": true, "type": "module" }');
  });
  after(() => rm(project, { recursive: true }));

  test('has the files that are meant and no others', async (context) => {
    const sources = (await readdir(path.join(PACKAGE, 'src'))).map((file) => path.basename(file, '.ts'));
    const files = packed.files.map((file) => file.path).sort();
    const declared = files.filter((file) => file.endsWith('.d.ts'));
    const meant = [
      'LICENSE-APACHE',
      'LICENSE-MIT',
      'README.md',
      'package.json',
      'dist/wasm/outrider.js',
      'dist/wasm/outrider_bg.wasm',
      ...sources.map((name) => `dist/${name}.js`),
    ];
    assert.deepEqual(files, [...meant, ...declared].sort());
    // Types are those of the modules that the index exports from; the workers have none.
    for (const name of declared) assert.ok(sources.includes(path.basename(name, '.d.ts')), name);
    assert.ok(declared.includes('dist/index.d.ts') && !declared.includes('dist/engine-worker.d.ts'));
    const wasm = packed.files.find((file) => file.path.endsWith('.wasm'));
    const mib = (bytes) => `${(bytes / 2 ** 20).toFixed(2)} MiB`;
    context.diagnostic(`${mib(packed.size)} packed, ${mib(packed.unpackedSize)} unpacked, the wasm module ${mib(wasm.size)}`);
  });

  test('names no source map, which it has none of', async () => {
    for (const file of packed.files.filter(({ path }) => /\.(js|ts)$/.test(path))) {
      assert.doesNotMatch(await readFile(path.join(installed, file.path), 'utf8'), /sourceMappingURL/, file.path);
    }
  });

  test('depends on nothing and runs nothing when it is installed', () => {
    assert.equal(MANIFEST.dependencies, undefined);
    for (const script of ['preinstall', 'install', 'postinstall', 'prepare']) assert.equal(MANIFEST.scripts[script], undefined);
  });

  test('every export resolves to a file of the package', async () => {
    const from = createRequire(path.join(project, 'app.js'));
    for (const [name, target] of Object.entries(MANIFEST.exports)) {
      const file = from.resolve(path.posix.join('outrider', name));
      assert.equal(file, path.join(installed, target.default ?? target));
      assert.ok((await stat(file)).isFile());
    }
    assert.throws(() => from.resolve('outrider/dist/engine.js'), { code: 'ERR_PACKAGE_PATH_NOT_EXPORTED' });
  });

  test('knows its version', async () => {
    const { VERSION } = await import(pathToFileURL(path.join(installed, MANIFEST.exports['.'].default)));
    assert.equal(VERSION, MANIFEST.version);
  });

  for (const [module, resolution] of [
    ['ESNext', 'bundler'],
    ['NodeNext', 'nodenext'],
  ]) {
    test(`its types are whole when TypeScript resolves them as ${resolution}`, async () => {
      await writeFile(
        path.join(project, 'app.ts'),
        `import { type ChatCompletionChunk, type Stats, VERSION, createEngine } from 'outrider';
         const engine = await createEngine({ model: '/models/concierge/', memoryBudget: '64MiB' });
         const chunks: AsyncIterable<ChatCompletionChunk> = engine.chat.completions.create({ messages: [], stream: true });
         const { memory }: Stats = await engine.stats();
         export const all: [AsyncIterable<ChatCompletionChunk>, number, string] = [chunks, memory.total, VERSION];
         // @ts-expect-error A budget is no boolean.
         void createEngine({ model: '/models/concierge/', memoryBudget: true });`,
      );
      const options = ['--noEmit', '--strict', '--exactOptionalPropertyTypes', '--module', module, '--types', ''];
      const lib = ['--target', 'ES2022', '--lib', 'ES2022,DOM,DOM.Iterable,DOM.AsyncIterable', '--moduleResolution', resolution];
      await tsc([...options, ...lib, 'app.ts'], project).catch(({ stdout }) => assert.fail(stdout));
    });
  }
});
