// What each part of reading ahead gains on slow flash in headless Chromium, where a GPU is software: `cargo xtask bench
// les` puts it into its table. Prints one JSON object a line, with the fields of `outrider lookahead --json`.
//
//   node bench-les.mjs [--backend cpu]… [--rounds 3] [--slowness 2.5] [--slots 128]

import { readFile } from 'node:fs/promises';
import { parseArgs } from 'node:util';

import { closeBrowser } from './harness.mjs';
import { BROWSERS, EXPERTS, ROOT, load, servePackage } from './package.mjs';

const { values } = parseArgs({
  options: {
    backend: { type: 'string', multiple: true, default: ['cpu', 'gpu'] },
    rounds: { type: 'string', default: '3' },
    slowness: { type: 'string', default: '2.5' },
    slots: { type: 'string', default: '128' },
  },
});
const [rounds, slowness, slots] = [values.rounds, values.slowness, values.slots].map(Number);

/** Experts that a token of the bundled model reads, and as in `src/bin/outrider/lookahead`. */
const READS = 8 * 4;
const RUN = 24;
const WARM = 3;
const LATENCY = 0.25;
const SAMPLES = 2000;

const overlap = { guesses: 0 };
const pool = { ...overlap, readyFirst: false };
const CONFIGS = [
  ['on demand', slots, { ...pool, keep: false }],
  ['+ pool', slots, pool],
  ['+ overlap', slots, overlap],
  ['+ look-ahead untrained', slots, {}],
  ['+ look-ahead trained', slots, {}, false],
  ['everything resident', EXPERTS, overlap],
];

/** Counts what comes back from the GPU, which tells when it is asked. */
const COUNT = `
  if (self.GPUBuffer) {
    let readbacks = 0;
    const { mapAsync } = GPUBuffer.prototype;
    GPUBuffer.prototype.mapAsync = function (...args) {
      readbacks += 1;
      return mapAsync.apply(this, args);
    };
    new BroadcastChannel('readbacks').onmessage = ({ target, data }) => data === 'tell' && target.postMessage(readbacks);
  }
`;

const median = (numbers) => numbers.toSorted((a, b) => a - b)[Math.trunc(numbers.length / 2)];

/** The interval that holds 95 % of the medians of samples drawn from these (Efron's bootstrap), the same every time. */
function interval(numbers) {
  let state = 1;
  const draw = () => numbers[(state = (Math.imul(state, 1664525) + 1013904223) >>> 0) % numbers.length];
  const medians = Array.from({ length: SAMPLES }, () => median(numbers.map(draw))).sort((a, b) => a - b);
  return [medians[Math.trunc(SAMPLES * 0.025)], medians[Math.trunc(SAMPLES * 0.975)]];
}

async function must(outcome) {
  const { error, ...result } = await outcome;
  if (error) throw new Error(error.message);
  return result;
}

const readbacks = (page) =>
  page.evaluate(async () => {
    const channel = new BroadcastChannel('readbacks');
    const told = new Promise((resolve) => (channel.onmessage = ({ data }) => resolve(data)));
    channel.postMessage('tell');
    const count = await told;
    channel.close();
    return count;
  });

const lines = (await readFile(`${ROOT}tests/data/concierge/dialogues.jsonl`, 'utf8')).trim().split('\n');
const ids = lines.flatMap((line) => JSON.parse(line).ids);
/** Every run is a sequence of its own. */
const runs = Array.from({ length: Math.trunc(ids.length / RUN) }, (_, i) => ids.slice(RUN * i, RUN * (i + 1)));

async function decode(page, tokens) {
  return must(page.call('internal', { op: 'logits', tokens, widths: [1] }));
}

/** One page within the other, so that all of them are open at once and can take turns. */
async function open(backend, configs, pages) {
  if (configs.length === 0) return measure(backend, pages);
  const [[name, maxSlots, scheduling, untrained = true], ...rest] = configs;
  return BROWSERS[0].open(server, async (page) => {
    const { stats } = await must(load(page, { backend, internal: { maxSlots, scheduling, untrained } }));
    await open(backend, rest, [...pages, { page, name, slots: stats.pool.slots, times: [] }]);
  });
}

async function measure(backend, pages) {
  const warm = runs.slice(0, 2 * WARM);
  for (const { page } of pages) for (const tokens of warm) await decode(page, tokens);
  const resident = pages.at(-1).page;
  let compute = 0;
  for (const tokens of warm) compute += (await decode(resident, tokens)).seconds / RUN / warm.length;
  const { counters } = await decode(pages[0].page, runs[0]);
  const bytes = counters.demandBytes / counters.misses;
  const bandwidth = (bytes * READS) / (slowness * compute);
  const throttle = { bandwidth, latency: (LATENCY * bytes) / bandwidth, lanes: 2 };
  for (const one of pages) {
    await must(one.page.call('internal', { op: 'throttle', throttle }));
    one.before = await must(one.page.call('internal', { op: 'counters' }));
    one.readbacks = backend === 'gpu' ? await readbacks(one.page) : 0;
  }
  for (const [i, tokens] of runs.slice(warm.length, warm.length + 2 * rounds).entries()) {
    for (const one of i % 2 ? pages.toReversed() : pages) {
      const { seconds, counters } = await decode(one.page, tokens);
      one.times.push(seconds / RUN);
      one.after = counters;
    }
  }
  const paired = (a, b) => Array.from({ length: rounds }, (_, i) => (a[2 * i] + a[2 * i + 1]) / (b[2 * i] + b[2 * i + 1]));
  for (const { page, name, slots, times, before, after, readbacks: counted } of pages) {
    const more = (field) => after[field] - before[field];
    const tokens = more('tokens');
    const missed = more('misses') + more('late');
    const ratios = paired(pages[0].times, times);
    const row = {
      name,
      backend: `${backend} (chromium)`,
      pool: slots / EXPERTS,
      slots,
      ratio: slowness,
      speedup: median(ratios),
      ci: interval(ratios),
      hit: more('hits') / Math.max(more('hits') + missed, 1),
      demand_bytes: more('demandBytes') / tokens,
      speculative_bytes: more('guessBytes') / tokens,
      stall_bytes: (1000 * more('flash')) / tokens,
      stall_roundtrip: backend === 'gpu' ? (1000 * more('results')) / tokens : 0,
      readbacks: backend === 'gpu' ? ((await readbacks(page)) - counted) / tokens : 0,
      milliseconds: 1000 * median(times),
      resident: median(paired(pages.at(-1).times, times)),
    };
    console.log(JSON.stringify(row));
  }
}

const server = await servePackage();
server.fault('engine-worker.js', { body: (worker) => `${worker}\n${COUNT}` });
try {
  for (const backend of values.backend) await open(backend, CONFIGS, []);
} finally {
  await closeBrowser();
  await server.close();
}
