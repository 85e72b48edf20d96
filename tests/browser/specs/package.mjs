// The npm package in every browser: the right tokens from experts on flash, streams, stops, and what a page may ask wrongly.

import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';

import { PATIENCE } from '../harness.mjs';
import { BROWSERS, EXPERTS, REPLIES, answersAsRecorded, chat, greedy, load, loadPart, servePackage } from '../package.mjs';

const quick = process.argv.includes('--quick');

/** Software rendering is slow: the GPU answers some of the prompts, the CPU all of them. */
const SOME = REPLIES.slice(0, quick ? 1 : 5);

for (const { name, gpu, skip, some, less, open } of BROWSERS) describe(`the package in ${name}`, { timeout: 8 * PATIENCE, skip }, () => {
  let plain;
  let isolated;

  before(async () => {
    plain = await servePackage();
    isolated = await servePackage({ isolated: true });
  });
  after(async () => {
    await plain.close();
    await isolated.close();
  });

  /** The ledger covers the wasm memory, which holds everything with the CPU, and what is not on the GPU otherwise. */
  function withinMemory({ backend, memory }) {
    const bytes = (kind) => memory.entries.find((entry) => entry.kind === kind).bytes;
    const covered = backend.kind === 'cpu' ? memory.total : bytes('host') + bytes('staging');
    assert.ok(memory.wasm <= covered, `${memory.wasm} bytes of wasm memory where ${covered} were counted`);
    assert.ok(memory.total <= memory.budget);
  }

  for (const [backend, replies] of [
    ['cpu', some(REPLIES)],
    ...(gpu ? [['gpu', some(SOME)]] : []),
  ]) {
    test(`${backend}: the native CPU's tokens, with every expert resident and with a quarter`, async (context) => {
      await open(plain, async (page) => {
        const whole = await load(page, { backend });
        assert.ifError(whole.error);
        context.diagnostic(`runs on ${JSON.stringify(whole.stats.backend)}`);
        assert.equal(whole.stats.backend.kind, backend);
        assert.equal(whole.stats.pool.slots, EXPERTS);
        await answersAsRecorded(page, replies);
        withinMemory(await page.call('stats'));

        const { memory, pool } = await loadPart(page, backend, 1 / 4);
        assert.equal(pool.slots, EXPERTS / 4);
        assert.ok(memory.total <= memory.budget);
        assert.equal(memory.total, memory.entries.reduce((sum, entry) => sum + entry.bytes, 0));
        await answersAsRecorded(page, replies);
        const after = await page.call('stats');
        withinMemory(after);
        assert.ok(after.pool.hits > 0 && after.pool.misses > 0 && after.pool.bytesRead > 0);
      });
    });
  }

  test('what each token cost adds up to the whole, and only so many tokens are remembered', less, async () => {
    await open(plain, async (page) => {
      const { pool: before } = await loadPart(page, 'cpu', 1 / 4);
      await answersAsRecorded(page, REPLIES.slice(3, 4));
      const { tokens, pool } = await page.call('stats');
      assert.equal(tokens.length, REPLIES[3].token_ids.length);
      for (const name of ['hits', 'misses', 'bytesRead', 'bytesGuessed']) {
        assert.equal(tokens.reduce((sum, token) => sum + token[name], 0), pool[name] - before[name], name);
      }
      // The prompt is longer than what follows any other token.
      assert.ok(tokens.at(-1).misses > tokens[0].misses);

      const rambling = { messages: [{ role: 'user', content: 'x' }], temperature: 2, top_p: 1, top_k: 0, seed: 1, max_tokens: 140 };
      const { usage } = await page.call('chat', rambling);
      assert.equal(usage.completion_tokens, 140);
      assert.equal((await page.call('stats')).tokens.length, 128);
    });
  });

  for (const backend of gpu ? ['cpu', 'gpu'] : ['cpu']) {
    test(`${backend}: a pass's times by layer are told where they are asked for`, less, async () => {
      await open(plain, async (page) => {
        await loadPart(page, backend, 1 / 4);
        const { prompt } = REPLIES[3];
        await chat(page, greedy(prompt, { max_tokens: 2 }));
        assert.ok((await page.call('stats')).tokens.every((token) => token.pass === undefined));

        await loadPart(page, backend, 1 / 4, { timeline: true });
        await answersAsRecorded(page, REPLIES.slice(3, 4));
        const { tokens } = await page.call('stats');
        const kept = tokens.filter(({ pass }) => pass);
        assert.ok(kept.length > 1 && tokens.slice(0, kept.length).every(({ pass }) => pass), `${kept.length} passes`);
        assert.ok(kept.slice(1).reduce((sum, { pass }) => sum + pass.spans.length, 0) <= 2048);
        // The oldest may be the prompt's, of which only the last pass is told.
        for (const { pass, milliseconds, flash } of kept.slice(0, -1)) {
          assert.ok(pass.milliseconds <= milliseconds + 1, `${pass.milliseconds} of ${milliseconds} ms`);
          const of = (what) => pass.spans.filter((span) => span.what === what);
          const sum = (spans) => spans.reduce((total, { begin, end }) => total + end - begin, 0);
          assert.ok(pass.spans.every(({ begin, end }) => begin <= end && end <= pass.milliseconds + 0.1));
          // What the host does comes one after another, and fills no more than the pass.
          const host = pass.spans.filter(({ what, begin }) => what !== 'read' && begin >= 0);
          assert.ok(sum(host) <= pass.milliseconds + 1, `${sum(host)} of ${pass.milliseconds} ms`);
          const finished = new Set(of('finish').map(({ layer }) => layer));
          if (backend === 'cpu') assert.equal(finished.size, 8);
          assert.ok(Math.abs(sum(of('stall').filter((span) => span.of === 'bytes')) - flash) < 1, `${flash} ms`);
          assert.ok(of('read').every(({ layer, expert }) => layer < 8 && expert < 64));
        }
        assert.ok(kept.some(({ pass }) => pass.spans.some((span) => span.what === 'read' && span.demand)));
        assert.ok(kept.some(({ pass }) => pass.spans.some((span) => span.what === 'read' && !span.demand)));
      });
    });
  }

  test('the smallest budget works, and one byte less names it before anything is downloaded', less, async () => {
    await open(plain, async (page) => {
      plain.log.length = 0;
      const { error } = await load(page, { backend: 'cpu', memoryBudget: 1000 });
      assert.equal(error.code, 'budget');
      assert.ok(error.typed);
      const { smallest } = error.details;
      assert.ok(smallest > 1e6, error.message);
      assert.deepEqual(new Set(plain.log.filter((r) => r.path.startsWith('/models')).map((r) => r.path)), new Set(['/models/concierge/manifest.json']));
      const less = await load(page, { backend: 'cpu', memoryBudget: smallest - 1 });
      assert.equal(less.error?.code, 'budget');
      assert.equal(less.error.details.smallest, smallest);
      const enough = await load(page, { backend: 'cpu', memoryBudget: smallest });
      assert.ifError(enough.error);
      await answersAsRecorded(page, REPLIES.slice(0, 2));
    });
  });

  test('with and without cross-origin isolation', less, async () => {
    for (const [server, isolation] of [
      [plain, false],
      [isolated, true],
    ]) {
      await open(server, async (page) => {
        assert.equal(await page.call('isolated'), isolation);
        assert.ifError((await load(page, { backend: 'cpu' })).error);
        await answersAsRecorded(page, REPLIES.slice(0, 2));
      });
    }
  });

  test('a streamed reply is the whole reply in pieces', less, async () => {
    await open(plain, async (page) => {
      assert.ifError((await load(page, { backend: 'cpu' })).error);
      const { prompt, text, token_ids } = REPLIES[3];
      const request = greedy(prompt, { stream_options: { include_usage: true } });
      const { chunks, error } = await page.call('stream', request);
      assert.ifError(error);
      assert.equal(chunks[0].choices[0].delta.role, 'assistant');
      assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? '').join(''), text);
      assert.deepEqual(chunks.flatMap((chunk) => chunk.choices[0]?.token_ids ?? []), token_ids);
      assert.ok(chunks.filter((chunk) => chunk.choices[0]?.delta.content).length > 10, 'it came in pieces');
      const last = chunks.at(-1);
      assert.deepEqual(last.choices, []);
      assert.equal(last.usage.completion_tokens, token_ids.length);
      assert.equal(chunks.at(-2).choices[0].finish_reason, 'stop');
      for (const chunk of chunks) {
        assert.equal(chunk.object, 'chat.completion.chunk');
        assert.equal(chunk.id, chunks[0].id);
      }
    });
  });

  test('seeds, stop strings and lengths', less, async () => {
    await open(plain, async (page) => {
      assert.ifError((await load(page, { backend: 'cpu' })).error);
      const { prompt, text } = REPLIES[3];
      const cut = await chat(page, greedy(prompt, { stop: [' will'] }));
      assert.equal(cut.choices[0].message.content, text.slice(0, text.indexOf(' will')));
      assert.equal(cut.choices[0].finish_reason, 'stop');
      const short = await chat(page, greedy(prompt, { max_tokens: 3 }));
      assert.equal(short.choices[0].finish_reason, 'length');
      // What OpenAI's clients may count on.
      assert.deepEqual([short.choices[0].message.refusal, short.choices[0].logprobs], [null, null]);
      assert.equal(short.usage.completion_tokens, 3);
      const warm = greedy(prompt, { temperature: 1, seed: 7 });
      const [one, two, other] = [await chat(page, warm), await chat(page, warm), await chat(page, { ...warm, seed: 8 })];
      assert.deepEqual(one.choices[0].token_ids, two.choices[0].token_ids);
      assert.notDeepEqual(one.choices[0].token_ids, other.choices[0].token_ids);
    });
  });

  for (const backend of gpu ? ['cpu', 'gpu'] : ['cpu']) {
    test(`${backend}: a reply is stopped midway, and the next is right`, async () => {
      await open(plain, async (page) => {
        assert.ifError((await load(page, { backend })).error);
        const long = greedy('I need a hotel in London for two nights.', { max_tokens: 400, temperature: 1, seed: 1, stop: null });
        const stopped = await page.call('stream', long, 3);
        assert.equal(stopped.error?.code, 'aborted', JSON.stringify(stopped.chunks.length));
        const texts = stopped.chunks.filter((chunk) => chunk.choices[0]?.delta.content).length;
        assert.ok(texts >= 3 && !stopped.chunks.some((chunk) => chunk.choices[0]?.finish_reason));
        await answersAsRecorded(page, REPLIES.slice(0, 1));
      });
    });
  }

  test('requests that cannot be answered say why, and the engine goes on', less, async () => {
    await open(plain, async (page) => {
      assert.ifError((await load(page, { backend: 'cpu', context: 256 })).error);
      const hello = [{ role: 'user', content: 'hello' }];
      for (const [request, code, says] of [
        [{ messages: [] }, 'request', /messages.*empty/],
        [{ messages: hello, max_tokens: 0 }, 'request', /max_tokens/],
        [{ messages: hello, temperature: -1 }, 'request', /temperature/],
        [{ messages: hello, temperature: 'hot' }, 'request', /./],
        [{ messages: [{ role: 'user', content: [{ type: 'image_url', image_url: {} }] }] }, 'request', /image_url/],
        [{ messages: [{ role: 'user', content: 'room '.repeat(500) }] }, 'context', /256/],
      ]) {
        const { error } = await chat(page, request);
        assert.equal(error?.code, code, JSON.stringify(request).slice(0, 80));
        assert.match(error.message, says);
        assert.ok(error.typed);
      }
      await answersAsRecorded(page, REPLIES.slice(0, 1));
    });
  });

  test('a worker that is not where it was said to be is a typed error that says what to do', less, async () => {
    await open(plain, async (page) => {
      const { error } = await load(page, { backend: 'cpu', workerUrl: 'nowhere.js' });
      assert.equal(error?.code, 'worker');
      assert.ok(error.typed);
      assert.match(error.message, /workerUrl/);
      assert.ifError((await load(page, { backend: 'cpu', workerUrl: new URL('/pkg/engine-worker.js', plain.origin).href })).error);
      await answersAsRecorded(page, REPLIES.slice(0, 1));
    });
  });

  test('dispose ends replies in progress and everything after with a typed error', less, async () => {
    await open(plain, async (page) => {
      assert.ifError((await load(page, { backend: 'cpu' })).error);
      const long = greedy('I need a hotel in London for two nights.', { max_tokens: 400, temperature: 1, seed: 1 });
      const outcomes = await page.call('disposeMidway', long);
      assert.ok(['disposed', 'aborted'].includes(outcomes[0].error?.code), JSON.stringify(outcomes[0].error));
      assert.equal(outcomes[1].error?.code, 'disposed');
    });
  });

  test('f16 is used where the GPU has it, and the notices say where it is not; nonsense is refused', less, async (context) => {
    await open(plain, async (page) => {
      if (gpu) {
        const half = await load(page, { backend: 'gpu', f16: true });
        assert.ifError(half.error);
        const { backend, notices } = half.stats;
        context.diagnostic(`runs on ${JSON.stringify(backend)}`);
        const used = backend.detail.endsWith(', f16');
        if (name.endsWith('Safari')) assert.ok(!used);
        else assert.equal(used, !/f16/.test(notices.join()));
        await answersAsRecorded(page, REPLIES.slice(0, 1));
      }
      const cpu = await load(page, { backend: 'cpu', f16: true });
      if (!name.endsWith('Safari')) assert.match(cpu.stats.notices.join(), /f32.*CPU/);
      const { error } = await load(page, { f16: 'yes' });
      assert.equal(error.code, 'request');
    });
  });

  test('without WebGPU the CPU takes over and says so; asking for the GPU is an error', async () => {
    await open(plain, async (page) => {
      // Workers get their own navigator, so the engine's worker is served with the property taken away.
      const body = (script) => `Object.defineProperty(navigator, 'gpu', { value: undefined });\n${script}`;
      const end = plain.fault('engine-worker.js', { body });
      const automatic = await load(page, { backend: 'auto' });
      assert.ifError(automatic.error);
      assert.equal(automatic.stats.backend.kind, 'cpu');
      assert.match(automatic.stats.notices.join(), /CPU/);
      await answersAsRecorded(page, REPLIES.slice(0, 1));
      const { error } = await load(page, { backend: 'gpu' });
      assert.equal(error.code, 'no_gpu');
      end();
    });
  });
});
