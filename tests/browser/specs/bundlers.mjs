// The package as it is published, in an app built with each bundler and with none, on the strictest host: without
// cross-origin isolation, and under a policy that allows the page's own files and compiling WebAssembly.

import assert from 'node:assert/strict';
import { cp, mkdir, mkdtemp, readFile, readdir, rm, stat, writeFile } from 'node:fs/promises';
import os from 'node:os';
import path from 'node:path';
import { after, before, describe, test } from 'node:test';

import * as esbuild from 'esbuild';
import * as vite from 'vite';
import webpack from 'webpack';

import { install, pack } from '../../../pkg/test/packed.mjs';
import { PATIENCE, withPage } from '../harness.mjs';
import { BROWSERS, REPLIES, ROOT } from '../package.mjs';
import { startServer } from '../server.mjs';

const POLICY = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; img-src data:";
const APP = `${ROOT}tests/browser/fixtures/app`;
const { prompt, text } = REPLIES[3];

const skip = process.argv.includes('--quick') && '--quick';

describe('an app with the package', { timeout: 4 * PATIENCE, skip }, () => {
  let project;
  let installed;
  let version;

  before(async () => {
    project = await mkdtemp(path.join(os.tmpdir(), 'outrider-app-'));
    installed = await install(project, await pack(project));
    version = JSON.parse(await readFile(path.join(installed, 'package.json'), 'utf8')).version;
    await cp(APP, project, { recursive: true });
  });
  after(() => rm(project, { recursive: true }));

  /** The app's page, which loads its script from `app.js`. */
  async function page(out, script = '<script type="module"') {
    const html = await readFile(path.join(APP, 'index.html'), 'utf8');
    await mkdir(out, { recursive: true });
    await writeFile(path.join(out, 'index.html'), html.replace('<script type="module"', script));
  }

  const BUILDS = {
    async vite(out) {
      await vite.build({ root: project, configFile: false, logLevel: 'warn', build: { outDir: out } });
    },

    async webpack(out) {
      const options = { context: project, mode: 'production', entry: './app.js', output: { path: out, filename: 'app.js' } };
      const stats = await new Promise((done, failed) => webpack(options, (error, stats) => (error ? failed(error) : done(stats))));
      assert.ok(!stats.hasErrors(), stats.toString('errors-only'));
      await page(out, '<script defer');
    },

    // As the README tells users of esbuild: the workers and the wasm module are entry points.
    async esbuild(out) {
      await esbuild.build({
        absWorkingDir: project,
        entryPoints: {
          app: './app.js',
          'engine-worker': 'outrider/engine-worker',
          'flash-worker': 'outrider/flash-worker',
          'wasm/outrider_bg': 'outrider/wasm',
        },
        outdir: out,
        bundle: true,
        minify: true,
        format: 'esm',
        loader: { '.wasm': 'copy' },
        logLevel: 'warning',
      });
      await page(out);
    },

    // A script in which nothing tells where it came from, and the package's files copied as they are.
    async 'esbuild, with a worker’s address'(out) {
      const stdin = { contents: `(async () => {${await readFile(path.join(APP, 'app.js'), 'utf8')}})()`, resolveDir: project };
      stdin.contents = stdin.contents.replace(/import (\{.*\}) from 'outrider';/, "const $1 = await import('outrider');");
      await esbuild.build({ stdin, outfile: path.join(out, 'app.js'), bundle: true, format: 'iife', logLevel: 'error' });
      await page(out, '<script defer');
      await cp(path.join(installed, 'dist'), path.join(out, 'outrider'), { recursive: true });
      return { worker: 'outrider/engine-worker.js' };
    },

    // No bundler: only the package's name gives way to its address.
    async 'no bundler'(out) {
      await page(out);
      const app = await readFile(path.join(APP, 'app.js'), 'utf8');
      await writeFile(path.join(out, 'app.js'), app.replace("'outrider'", "'./outrider/index.js'"));
      await cp(path.join(installed, 'dist'), path.join(out, 'outrider'), { recursive: true });
    },
  };

  /** The app at an address is to answer, without its policy refusing anything. */
  async function answers(address, query) {
    await withPage(async (page) => {
      const refused = [];
      page.context().on('console', (message) => {
        if (/Content Security Policy/i.test(message.text())) refused.push(message.text());
      });
      await page.goto(`${address}/?${new URLSearchParams({ prompt, ...query })}`);
      const reply = page.locator('#reply[data-done]');
      await reply.waitFor({ state: 'attached' });
      assert.equal(await reply.textContent(), text);
      assert.equal(await reply.getAttribute('data-done'), version);
      assert.equal(await page.evaluate(() => crossOriginIsolated), false);
      assert.deepEqual(refused, []);
    });
  }

  for (const { name, skip, visit } of BROWSERS.filter((browser) => browser.visit)) {
    test(`vite, in ${name}: answers as recorded`, { skip }, async () => {
      const out = path.join(project, 'out', name);
      await BUILDS.vite(out);
      const server = await startServer({ mounts: { '/': out, '/models': `${ROOT}models` }, csp: POLICY });
      try {
        await visit(server, `?${new URLSearchParams({ prompt })}`, [], async ({ call }) => {
          const done = await call('attribute', '#reply[data-done]', 'data-done');
          assert.deepEqual(await call('texts', '#reply'), [text]);
          assert.equal(done, version);
          assert.deepEqual(await call('problems'), []);
        });
      } finally {
        await server.close();
      }
    });
  }

  for (const [name, build] of Object.entries(BUILDS)) {
    test(`${name}: answers as recorded`, async (context) => {
      const out = path.join(project, 'out', name);
      const query = await build(out);
      const files = await readdir(out, { recursive: true });
      const modules = files.filter((file) => file.endsWith('.wasm'));
      assert.equal(modules.length, 1, `${modules} are the wasm modules`);
      const size = async (file) => (await stat(path.join(out, file))).size;
      const scripts = files.filter((file) => file.endsWith('.js'));
      const bytes = (await Promise.all(scripts.map(size))).reduce((sum, n) => sum + n, 0);
      context.diagnostic(`${scripts.length} scripts of ${Math.round(bytes / 1024)} KiB together`);
      const server = await startServer({ mounts: { '/': out, '/models': `${ROOT}models` }, csp: POLICY });
      try {
        await answers(server.origin, query);
      } finally {
        await server.close();
      }
    });
  }

  test('vite’s development server: answers as recorded', async () => {
    const models = await startServer({ mounts: { '/models': `${ROOT}models` } });
    const server = await vite.createServer({
      root: project,
      configFile: false,
      logLevel: 'warn',
      server: { host: 'localhost', port: 0, proxy: { '/models': models.origin } },
    });
    try {
      await server.listen();
      await answers(`http://localhost:${server.httpServer.address().port}`);
    } finally {
      await server.close();
      await models.close();
    }
  });
});
