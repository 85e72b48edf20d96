// Reading ahead in the browser: the same bits however reads are scheduled, and flash that fails or stops answering.

import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import { PATIENCE } from '../harness.mjs';
import { BROWSERS, EXPERTS, REPLIES, answersAsRecorded, chat, greedy, load, servePackage } from '../package.mjs';

const TOP_K = 4;
const TOKENS = Array.from({ length: 64 }, (_, i) => 2 + ((i * 97 + i * i * 31) % 320));
const FULL = process.argv.includes('--full');
const SCHEDULES = FULL ? { cpu: 16, gpu: 8 } : { cpu: 3, gpu: 2 };
const SEED = Number(process.env.OUTRIDER_SEED ?? Date.now() % 2 ** 32);

const { open } = BROWSERS[0];

/** Numbers from 0 to 1 that a seed gives (mulberry32). */
function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
}

function draw(next) {
  const between = (least, most) => least + Math.floor(next() * (most - least + 1));
  const coin = () => next() < 0.5;
  // A pool of which everything is lacking, most, or a little: less than the tokens use, which an earlier visit leaves in it.
  const maxSlots = [between(TOP_K, 40), between(40, 160), between(160, EXPERTS - 100)][between(0, 2)];
  const scheduling = {
    reads: between(1, 4),
    guesses: between(0, 4),
    lanes: between(1, 3),
    depth: between(0, 4),
    leastChance: next() * 0.6,
    readyFirst: coin(),
    keep: next() < 0.8,
    singly: coin(),
    runAhead: between(0, 10),
  };
  // Timers of browsers are milliseconds late, and the jitter lets reads end in another order than they began.
  const throttle = { lanes: between(1, 3), latency: next() * 5e-4, jitter: coin() ? next() * 3e-3 : 0, seed: between(0, 2 ** 31) };
  // Passes of one token now and then only: each stalls in every layer.
  const widths = Array.from({ length: between(1, 4) }, () => between(1, 32));
  return { maxSlots, scheduling, throttle, widths };
}

async function must(outcome) {
  const { error, ...result } = await outcome;
  assert.ifError(error && new Error(`${error.code}: ${error.message}`));
  return result;
}

const logits = (page, widths) => must(page.call('internal', { op: 'logits', tokens: TOKENS, widths }));
const throttle = (page, throttle) => must(page.call('internal', { op: 'throttle', throttle }));

describe('schedules in Chromium', { timeout: (FULL ? 20 : 6) * PATIENCE }, () => {
  let server;

  before(async () => {
    server = await servePackage();
  });
  after(() => server.close());

  for (const backend of ['cpu', 'gpu']) {
    test(`every logit of 64 tokens is the same on the ${backend} under random ones`, async (context) => {
      context.diagnostic(`OUTRIDER_SEED=${SEED}`);
      const next = random(SEED);
      await open(server, async (page) => {
        await must(load(page, { backend, internal: { scheduling: { guesses: 0, runAhead: 0 } } }));
        const plain = await logits(page, [TOKENS.length]);
        assert.equal(new Set(plain.hashes).size, TOKENS.length);
        assert.equal(plain.counters.guessReads, 0);
        // What is read because an earlier visit used it is part of the schedules: engines that are put away leave a list.
        await must(chat(page, greedy(REPLIES[0].prompt)));
        // One in which much is guessed, and called off, so that the comparison is about something.
        const eager = { reads: 4, guesses: 4, lanes: 1, depth: 3, leastChance: 0 };
        const jitter = backend === 'gpu' ? 2e-2 : 1e-3;
        const much = { maxSlots: 96, scheduling: eager, throttle: { lanes: 1, jitter }, widths: [1, 1, 1, 6] };
        let counted;
        for (const schedule of [much, ...Array.from({ length: SCHEDULES[backend] }, () => draw(next))]) {
          const told = JSON.stringify(schedule);
          const { widths, ...internal } = schedule;
          const { stats } = await must(load(page, { backend, internal }));
          assert.equal(stats.backend.kind, backend);
          assert.equal(stats.pool.slots, schedule.maxSlots);
          const { hashes, counters } = await logits(page, widths);
          assert.deepEqual(hashes, plain.hashes, told);
          assert.ok(counters.misses > 0, told);
          if (schedule === much) counted = counters;
        }
        assert.ok(counted.guessesUsed > 20 && counted.cancelled > 0, JSON.stringify(counted));
        assert.ok(counted.warmReads > 20, JSON.stringify(counted));
      });
    });
  }

  const FEW = { backend: 'cpu', internal: { maxSlots: 40 } };
  const [{ prompt }] = REPLIES;
  const turns = (...texts) => texts.map((content, i) => ({ role: i % 2 ? 'assistant' : 'user', content }));

  test('a read that fails once is tried again', async () => {
    await open(server, async (page) => {
      await must(load(page, FEW));
      await throttle(page, { failOneIn: 60, seed: 3 });
      await answersAsRecorded(page, REPLIES.slice(0, 2));
      const { failed } = await throttle(page, null);
      assert.ok(failed > 3, `${failed} failed`);
    });
  });

  test('one that fails twice is a typed error, and the conversation goes on', async () => {
    await open(server, async (page) => {
      const first = async () => {
        const { choices } = await must(chat(page, greedy(prompt)));
        return greedy('', { messages: turns(prompt, choices[0].message.content, 'For two, please.') });
      };
      await must(load(page, FEW));
      const expected = await must(chat(page, await first()));
      await must(load(page, FEW));
      const second = await first();
      for (const broken of [{ failOneIn: 1 }, { failOneIn: 3, seed: 7 }]) {
        await throttle(page, broken);
        const { error } = await chat(page, second);
        assert.equal(error?.code, 'storage', JSON.stringify(error));
        assert.ok(error.typed);
      }
      await throttle(page, null);
      const reply = await must(chat(page, second));
      assert.deepEqual(reply.choices, expected.choices);
      assert.ok(reply.usage.prompt_tokens_details.cached_tokens > 0, 'what came before was still known');
    });
  });

  test('flash that stops answering: a stop is heard, and nothing is held on to', async () => {
    await open(server, async (page) => {
      const stalled = async () => {
        await throttle(page, { hangOneIn: 1 });
        const { error } = await page.call('stopSoon', greedy(prompt), 300);
        assert.equal(error?.code, 'aborted', JSON.stringify(error));
      };
      await must(load(page, FEW));
      await stalled();
      await throttle(page, null);
      await answersAsRecorded(page, REPLIES.slice(0, 2));
      await stalled();
      await page.call('dispose');
      const held = () =>
        page.evaluate(async () => {
          const { held, pending } = await navigator.locks.query();
          return [...held, ...pending].map(({ name }) => name);
        });
      // Workers that were ended take a moment.
      for (let tries = 0; tries < 100 && (await held()).length > 0; tries += 1) await sleep(50);
      assert.deepEqual(await held(), []);
      await must(load(page, FEW));
      await answersAsRecorded(page, REPLIES.slice(0, 1));
    });
  });
});
