// Owns the engine: the wasm module, the GPU device and the flash workers.

import { type OutriderError, aborted, fail } from './errors.js';
import { Files } from './flash-files.js';
import { HotList } from './hot-list.js';
import type { Ask } from './internal.js';
import type { LoadArgs } from './load-args.js';
import { MemoryRecord } from './memory-record.js';
import { mib } from './memory-steps.js';
import { type Context, serve } from './serve.js';
import { Server } from './server.js';
import type { ChatCompletionRequest, FlashStats, Progress, Stats } from './types.js';
import { Use } from './use.js';
import init, { WebEngine, type WebInstallation, install, onPanic } from './wasm/outrider.js';

let files: Files | undefined;
let engine: WebEngine | undefined;
/** What the user should know about how the model came here. */
let notices: string[] = [];
/** How the model's files are read. */
let flash: FlashStats | undefined;
/** What is learnt about memory, where the budget is to be found. */
let memory: MemoryRecord | undefined;
/** Which experts were used, for the next visit. */
let hot: HotList | undefined;
/** The reply being generated, and those to come. */
let running: number | undefined;
const queued = new Set<number>();
const stopped = new Set<number>();
let last: Promise<unknown> = Promise.resolve();

const fatal = serve({ load, chat, stats, internal, abort, settle, dispose });

// A trap (a panic, or memory that could not grow) ends a call without settling its promise.
self.addEventListener('error', (event) => {
  event.preventDefault();
  fatal(trap(event.error ?? event.message));
});
self.addEventListener('unhandledrejection', (event) => {
  event.preventDefault();
  fatal(trap(event.reason));
});

function trap(error: unknown): unknown {
  if (!(error instanceof WebAssembly.RuntimeError)) return error;
  return fail('panic', `the runtime stopped: ${error.message}; memory may have run out; reload the engine`, {}, error);
}

async function load(args: LoadArgs, { emit }: Context): Promise<void> {
  const progress = throttle(emit);
  progress('open', 0, 0);
  await init({ module_or_path: new URL('./wasm/outrider_bg.wasm', import.meta.url) });
  onPanic((message: string) => fatal(fail('panic', `the runtime failed: ${message}; reload the engine`)));
  const store = await Files.open(args.directory, args.exclusive, (error) => {
    if ((error as OutriderError).code !== 'disposed') fatal(error);
  });
  files = store;
  // What the model will need is judged by the backend it will run on.
  const backend = args.backend === 'auto' ? ((await hasAdapter()) ? 'gpu' : 'cpu') : args.backend;
  const options = { context: args.context, f16: args.f16, timeline: args.timeline };
  if (args.budget === 'auto') memory = await MemoryRecord.open(backend, args.attempt, args.left, args.watched);
  const inUse = new Use(`outrider-use-${args.directory}`);
  const bring = () =>
    exclusively(`outrider-install-${args.directory}`, async () => {
      const alone = await inUse.claim();
      try {
        // A model that turned out to be damaged is open for reading.
        await store.seal();
        const server = new Server(args.address);
        const judged = { ...options, backend, budget: args.budget === 'auto' ? memory!.limit : args.budget };
        return await install(store, server, JSON.stringify(judged), args.update, alone, progress);
      } finally {
        await store.seal();
        // Before another tab may install: it must not think that it is alone.
        await inUse.share();
      }
    });
  const start = async (installed: WebInstallation) => {
    notices = installed.notice === undefined ? [] : [installed.notice];
    flash = await store.probe(JSON.parse(installed.shards), installed.piece);
    const load = (budget: number | null) =>
      WebEngine.load(
        store,
        installed,
        JSON.stringify({ ...options, budget, backend: args.backend, internal: args.internal }),
        progress,
        pause,
      );
    return args.budget === 'auto' ? within(memory!, installed, load) : load(args.budget);
  };
  try {
    engine = await start(await bring());
  } catch (error) {
    if (!DAMAGED.includes((error as OutriderError).code)) throw await unfit(error);
    // The installation has been marked as one to check: what is wrong in it is fetched again.
    engine = await start(await bring()).catch(async (error: unknown) => Promise.reject(await unfit(error)));
  }
  if (!args.warm) return;
  hot = new HotList(args.directory);
  const kept = await hot.read();
  // A call like others, that gives way to the first of them.
  if (kept && engine?.remember(kept)) last = engine.warm();
}

/** After loading failed with an error, which is nothing to be remembered about memory. */
async function unfit(error: unknown): Promise<unknown> {
  const { code, details } = error as OutriderError;
  const limit = memory?.limit;
  await memory?.end();
  return code === 'budget' && limit ? tooMuch(limit, Number(details['smallest'])) : error;
}

/** Loads with a budget that has not been too much. */
async function within(
  memory: MemoryRecord,
  { smallest, whole }: { smallest: number; whole: number },
  load: (budget: number | null) => Promise<WebEngine>,
): Promise<WebEngine> {
  let last: unknown;
  for (;;) {
    const { budget } = await memory.begin({ smallest, whole });
    if (budget === undefined) throw last ?? tooMuch(memory.limit ?? 0, smallest);
    try {
      return await load(budget < whole ? budget : null);
    } catch (error) {
      // A GPU that has no more memory says so.
      last = error;
      const { code, message } = error as OutriderError;
      if (code !== 'gpu' || !/memory/i.test(message) || !(await memory.fail(budget))) throw error;
    }
  }
}

function tooMuch(limit: number, smallest: number): OutriderError {
  const message =
    `the model needs at least ${mib(smallest)} of memory, and this page was ended when it used ${mib(limit)}; ` +
    `close other tabs and set \`memoryBudget\` to a size to try all the same, or pick a smaller model`;
  return fail('budget', message, { budget: limit, smallest });
}

/** Errors that say that stored bytes are not what was installed. */
const DAMAGED = ['corrupt', 'truncated', 'not_found'];

async function hasAdapter(): Promise<boolean> {
  try {
    return Boolean(await navigator.gpu?.requestAdapter());
  } catch {
    return false;
  }
}

const { port1, port2 } = new MessageChannel();

/** Resolves when the messages that have come to this worker have been handled. Unlike a time-out, it is never throttled. */
function pause(): Promise<void> {
  return new Promise((resolve) => {
    port1.onmessage = () => resolve();
    port2.postMessage(null);
  });
}

/** One tab installs at a time; the others find the model in place. */
function exclusively<T>(name: string, act: () => Promise<T>): Promise<T> {
  if (!navigator.locks) return act();
  return navigator.locks.request(name, act) as Promise<T>;
}

function throttle(emit: (progress: Progress) => void): (phase: Progress['phase'], done: number, total: number) => void {
  let last = { phase: '', time: 0 };
  return (phase, done, total) => {
    const time = performance.now();
    if (phase === last.phase && time - last.time < 100 && done < total) return;
    last = { phase, time };
    emit({ phase, done, total });
  };
}

async function chat(request: ChatCompletionRequest, { id, emit }: Context): Promise<unknown> {
  engine?.hurry();
  queued.add(id);
  const turn = last.then(async () => {
    queued.delete(id);
    if (stopped.delete(id)) throw aborted();
    running = id;
    try {
      const reply = await ready().chat(JSON.stringify(request), (chunk: string) => emit(JSON.parse(chunk)));
      // The reply is what matters.
      await memory?.succeed().catch(() => {});
      return reply;
    } finally {
      running = undefined;
      hot?.keep(used);
    }
  });
  last = turn.catch(() => {});
  const reply = await turn;
  return request.stream ? null : JSON.parse(reply);
}

function used(): Uint8Array | undefined {
  return engine?.hot();
}

function abort(id: number): void {
  if (running === id) ready().abort();
  else if (queued.has(id)) stopped.add(id);
}

function stats(): Stats {
  const stats = JSON.parse(ready().stats()) as Omit<Stats, 'flash'>;
  return { ...stats, flash: flash!, notices: [...stats.notices, ...notices, ...(memory?.notices ?? [])] };
}

async function internal(ask: Ask): Promise<unknown> {
  const answer = async () => JSON.parse(await ready().internal(JSON.stringify(ask)));
  if (ask.op === 'throttle') return answer();
  const turn = last.then(answer);
  last = turn.catch(() => {});
  return turn;
}

/** Puts on record that what ends now was to end. */
async function settle(): Promise<void> {
  await memory?.end();
}

async function dispose(): Promise<void> {
  await settle();
  engine?.hurry();
  if (running !== undefined) engine?.abort();
  await last;
  await hot?.settle(used);
  engine?.free();
  engine = undefined;
  await files?.close();
}

function ready(): WebEngine {
  if (!engine) throw fail('disposed', 'the engine is not loaded');
  return engine;
}
