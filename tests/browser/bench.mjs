// Speed of greedy replies by the package in headless Chromium, with every expert resident and with a part of them, in
// turns. Prints one JSON object a line, with the fields of `outrider bench --json`.
//
//   node bench.mjs --backend cpu|gpu [--ask PROMPT]… [--pool 1,0.25] [--rounds 2]

import { parseArgs } from 'node:util';

import { browser, closeBrowser } from './harness.mjs';
import { BROWSERS, chat, greedy, loadPart, servePackage } from './package.mjs';

const { values } = parseArgs({
  options: {
    backend: { type: 'string', default: 'cpu' },
    ask: { type: 'string', multiple: true, default: ['Can you find me a restaurant in San Jose?'] },
    pool: { type: 'string', default: '1,0.25' },
    rounds: { type: 'string', default: '2' },
  },
});
const parts = values.pool.split(',').map(Number);
const { backend } = values;

function median(numbers) {
  return numbers.toSorted((a, b) => a - b)[Math.trunc(numbers.length / 2)];
}

function must(result) {
  if (result.error) throw new Error(result.error.message);
  return result;
}

/** Answers every question; tokens per second. */
async function measure(page) {
  const sums = { prompt_n: 0, prompt_ms: 0, predicted_n: 0, predicted_ms: 0 };
  for (const question of values.ask) {
    const { timings } = must(await chat(page, greedy(question, { cache_prompt: false })));
    // The first token of a reply belongs to the prompt.
    timings.predicted_n -= 1;
    for (const name of Object.keys(sums)) sums[name] += timings[name];
  }
  return {
    prefill: (1000 * sums.prompt_n) / sums.prompt_ms,
    decode: (1000 * sums.predicted_n) / sums.predicted_ms,
    tokens: sums.prompt_n + sums.predicted_n,
  };
}

const server = await servePackage({ isolated: true });
try {
  const open = async (rest, pages) => {
    if (rest.length > 0) {
      // One page within the other, so that all of them are open at once.
      return BROWSERS[0].open(server, async (page) => {
        const stats = await loadPart(page, backend, rest[0]);
        await open(rest.slice(1), [...pages, { page, part: rest[0], stats, samples: [] }]);
      });
    }
    for (const { page } of pages) await measure(page);
    for (const one of pages) one.before = await one.page.call('stats');
    for (let round = 0; round < Number(values.rounds); round += 1) {
      for (const one of [...pages, ...pages.toReversed()]) one.samples.push(await measure(one.page));
    }
    const version = (await browser()).version();
    for (const { page, part, stats, before, samples } of pages) {
      const { pool } = await page.call('stats');
      const [hits, misses] = [pool.hits - before.pool.hits, pool.misses - before.pool.misses];
      const tokens = samples.reduce((sum, sample) => sum + sample.tokens, 0);
      const row = {
        backend: `Chromium ${version}, ${stats.backend.kind} (${stats.backend.detail})`,
        pool: part,
        slots: stats.pool.slots,
        prefill: median(samples.map((sample) => sample.prefill)),
        decode: median(samples.map((sample) => sample.decode)),
        ratio: median(samples.map((sample, i) => sample.decode / pages[0].samples[i].decode)),
        hit: hits / Math.max(hits + misses, 1),
        expert_bytes_per_token: (pool.bytesRead - before.pool.bytesRead) / tokens,
      };
      console.log(JSON.stringify(row));
    }
  };
  await open(parts, []);
} finally {
  await closeBrowser();
  await server.close();
}
