// The self-test that a model brings along: a GPU that computes something else gives way to the CPU before the first token.

import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';

import { ask, reach } from '../demo.mjs';
import { PATIENCE, withPage } from '../harness.mjs';
import { BROWSERS, REPLIES, ROOT, answersAsRecorded, load, servePackage } from '../package.mjs';
import { startServer } from '../server.mjs';

/** Changes every shader whose source matches before the browser sees it. */
const shaders = (pattern, change) => (script) => `
  const { createShaderModule } = GPUDevice.prototype;
  GPUDevice.prototype.createShaderModule = function ({ code, ...rest }) {
    if (${pattern}.test(code)) code = (${change})(code);
    return createShaderModule.call(this, { ...rest, code });
  };
  ${script}`;

const WRONG = shaders(/inverseSqrt/, (code) => code.replaceAll('inverseSqrt(', 'sqrt('));
const BROKEN = shaders(/./, (code) => `${code}\nfn broken( {`);
const WRONG_IN_F16 = shaders(/enable f16/, (code) => code.replaceAll('inverseSqrt(', 'sqrt(').replaceAll('f32(', '0.9 * f32('));

/** The manifest with another logit. */
const altered = (bytes) => {
  const manifest = JSON.parse(bytes);
  manifest.self_test.rows[1].top[0][1] += 0.5;
  return JSON.stringify(manifest);
};

const full = process.argv.includes('--full');

/** What the profile for Safari leaves out is not about this. */
for (const { name, gpu, skip, open } of BROWSERS.filter(({ name }) => !name.endsWith('Safari'))) describe(`the self-test in ${name}`, { timeout: 4 * PATIENCE, skip }, () => {
  let server;

  before(async () => {
    server = await servePackage();
  });
  after(() => server.close());

  test('a model that does not compute what it says is a typed error', async () => {
    const end = server.fault('concierge/manifest.json', { body: altered });
    await open(server, async (page) => {
      for (const [backend, failing] of gpu ? [['cpu', 'cpu'], ['gpu', 'gpu'], ['auto', 'cpu']] : [['cpu', 'cpu'], ['auto', 'cpu']]) {
        const { error } = await load(page, { backend });
        assert.equal(error?.code, 'self_test', JSON.stringify(error));
        assert.ok(error.typed);
        assert.equal(error.details.backend, failing);
        assert.match(error.message, /pack the model again/);
      }
    });
    end();
  });

  for (const [what, body, says] of [
    ['computes wrongly', WRONG, /running on the CPU: the self-test failed on the GPU: token \d+ has the logit/],
    ['takes no shader', BROKEN, /running on the CPU: the GPU failed/],
  ]) {
    test(`a GPU that ${what} gives way to the CPU, which says so`, { skip: !gpu && 'it has no WebGPU' }, async () => {
      const end = server.fault('engine-worker.js', { body });
      await open(server, async (page) => {
        const { error, stats } = await load(page, { backend: 'auto' });
        assert.ifError(error && new Error(error.message));
        assert.equal(stats.backend.kind, 'cpu');
        assert.match(stats.notices.join(), says);
        assert.deepEqual([stats.pool.hits, stats.pool.misses, stats.pool.bytesRead], [0, 0, 0]);
        await answersAsRecorded(page, REPLIES.slice(0, 2));
        const asked = await load(page, { backend: 'gpu' });
        assert.equal(asked.error?.code, body === WRONG ? 'self_test' : 'gpu');
      });
      end();
    });
  }

  test('f16 that computes wrongly gives way to f32', { skip: !gpu ? 'it has no WebGPU' : !full && 'it takes long: with --full' }, async (context) => {
    await open(server, async (page) => {
      const sound = await load(page, { backend: 'gpu', f16: true });
      assert.ifError(sound.error && new Error(sound.error.message));
      if (!sound.stats.backend.detail.endsWith(', f16')) return context.skip('it has no f16');
      const end = server.fault('engine-worker.js', { body: WRONG_IN_F16 });
      const { error, stats } = await load(page, { backend: 'gpu', f16: true });
      end();
      assert.ifError(error && new Error(error.message));
      assert.ok(!stats.backend.detail.endsWith(', f16'));
      assert.match(stats.notices.join(), /computing in f32: the self-test failed/);
      await answersAsRecorded(page, REPLIES.slice(0, 1));
    });
  });
});

describe('the self-test on the demo page', { timeout: 2 * PATIENCE }, () => {
  test('a GPU that computes wrongly: the page answers rightly and says that it uses the CPU', async () => {
    const server = await startServer({ mounts: { '/': `${ROOT}www/dist`, '/models': `${ROOT}models` } });
    server.fault(/engine-worker.*\.js$/, { body: WRONG });
    try {
      await withPage(async (page) => {
        await page.goto(server.origin);
        await reach(page, 'ready');
        const notice = page.getByTestId('notice');
        assert.ok(await notice.isVisible());
        assert.match(await notice.innerText(), /running on the CPU: the self-test failed on the GPU/);
        assert.equal(await ask(page, REPLIES[0].prompt), REPLIES[0].text);
      });
    } finally {
      await server.close();
    }
  });
});
