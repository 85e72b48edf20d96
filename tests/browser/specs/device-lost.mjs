// A GPU that goes away in the middle of a reply: the model is loaded again from storage and the reply goes on.

import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';

import { PATIENCE } from '../harness.mjs';
import { BROWSERS, MODEL, REPLIES, answersAsRecorded, greedy, load, servePackage } from '../package.mjs';

/** Destroys the device at the nth submission after a reply was asked for; `then` runs with it. */
const losing = (nth, then = '') => (script) => `
  let chats = 0, calls = 0, lost = false;
  const devices = [];
  const { requestDevice } = GPUAdapter.prototype;
  const { submit } = GPUQueue.prototype;
  addEventListener('message', ({ data }) => { if (data.op === 'chat') chats += 1; });
  GPUAdapter.prototype.requestDevice = async function (...args) {
    const device = await requestDevice.apply(this, args);
    devices.push(device);
    return device;
  };
  GPUQueue.prototype.submit = function (...args) {
    if (chats > 0 && !lost && (calls += 1) === ${nth}) {
      lost = true;
      devices.at(-1).destroy();
      ${then}
    }
    return submit.apply(this, args);
  };
  ${script}`;

const GONE = 'GPU.prototype.requestAdapter = async () => null;';

for (const { name, gpu, skip, some, less, open } of BROWSERS)
  describe(`a lost GPU in ${name}`, { timeout: 4 * PATIENCE, skip: skip || (!gpu && 'it has no WebGPU') }, () => {
    let server;

    before(async () => {
      server = await servePackage();
    });
    after(() => server.close());

    /** A reply in the middle of which the GPU is lost. */
    async function reply(page, options, nth, then) {
      const end = server.fault('engine-worker.js', { body: losing(nth, then) });
      const { error } = await load(page, options);
      end();
      assert.ifError(error && new Error(error.message));
      server.log.length = 0;
      return page.call('stream', greedy(REPLIES[3].prompt));
    }

    const text = ({ chunks }) => chunks.map((chunk) => chunk.choices[0]?.delta.content ?? '').join('');

    for (const [when, nth] of some([
      ['in the middle of the reply', 90],
      ['while the prompt is read', 3],
    ])) {
      test(`${when}: the same tokens, from storage`, async () => {
        await open(server, async (page) => {
          const result = await reply(page, { backend: 'gpu' }, nth);
          assert.ifError(result.error && new Error(result.error.message));
          assert.equal(text(result), REPLIES[3].text);
          assert.deepEqual(result.chunks.flatMap((chunk) => chunk.choices[0]?.token_ids ?? []), REPLIES[3].token_ids);
          assert.ok(!server.log.some((r) => r.path.startsWith(MODEL)), 'nothing was downloaded');
          const { notices, tokens } = await page.call('stats');
          assert.match(notices.join(' '), /GPU was lost/);
          // The other engine counts anew, which makes no token cost less than nothing.
          assert.equal(tokens.length, REPLIES[3].token_ids.length);
          for (const token of tokens) {
            assert.ok(Object.values(token).every((n) => n >= 0 && n < 2 ** 32), JSON.stringify(token));
            assert.ok(token.flash + token.results <= token.milliseconds + 0.5, JSON.stringify(token));
          }
          await answersAsRecorded(page, REPLIES.slice(0, 1));
        });
      });
    }

    test('and does not come back: the CPU goes on, where it may', async () => {
      await open(server, async (page) => {
        const result = await reply(page, { backend: 'auto' }, 60, GONE);
        assert.ifError(result.error && new Error(result.error.message));
        assert.equal(text(result), REPLIES[3].text);
        const { backend, notices } = await page.call('stats');
        assert.equal(backend.kind, 'cpu');
        assert.match(notices.join(' '), /CPU/);
      });
    });

    test('and does not come back where the GPU was asked for: a typed error', less, async () => {
      await open(server, async (page) => {
        const result = await reply(page, { backend: 'gpu' }, 60, GONE);
        assert.equal(result.error?.code, 'device_lost', JSON.stringify(result.error));
        assert.ok(result.error.typed);
        const again = await page.call('chat', greedy(REPLIES[3].prompt));
        assert.equal(again.error?.code, 'device_lost');
      });
    });
  });
