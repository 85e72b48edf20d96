// The client: everything it does happens in a worker.

import { requireBrowser } from './browser.js';
import { parseBytes } from './bytes.js';
import { OutriderError, aborted, describe, fail } from './errors.js';
import { type Ask, INTERNAL, type Internals } from './internal.js';
import { packAddress, packDirectory } from './location.js';
import { departed, watch } from './presence.js';
import { withSpeed } from './progress.js';
import type { LoadArgs } from './load-args.js';
import { Remote } from './rpc.js';
import { ChatStream, type StreamPromise, iterable } from './stream.js';
import type {
  ChatCompletion,
  ChatCompletionChunk,
  ChatCompletionRequest,
  ChatCompletionRequestStreaming,
  ChatCompletionRequestWhole,
  EngineOptions,
  Progress,
  RequestOptions,
  Stats,
} from './types.js';

/** How long a worker may take to put things away before it is ended. */
const GRACE_MS = 2000;
/** How long a worker that is to end may take to write down that it was. */
const SETTLE_MS = 500;

export class ChatCompletions {
  readonly #remote: Remote;

  /** @internal */
  constructor(remote: Remote) {
    this.#remote = remote;
  }

  /** A whole reply, or with `stream: true` its chunks as they are generated. Requests are answered one after another. */
  create(request: ChatCompletionRequestStreaming, options?: RequestOptions): StreamPromise;
  create(request: ChatCompletionRequestWhole, options?: RequestOptions): Promise<ChatCompletion>;
  create(request: ChatCompletionRequest, options?: RequestOptions): StreamPromise | Promise<ChatCompletion>;
  create(request: ChatCompletionRequest, { signal }: RequestOptions = {}): StreamPromise | Promise<ChatCompletion> {
    let id: number | undefined;
    const stop = () => {
      if (id !== undefined) this.#remote.call('abort', id).catch(() => {});
    };
    const send = async <T>(onEvent?: (chunk: ChatCompletionChunk) => void): Promise<T> => {
      if (signal?.aborted) throw aborted(signal.reason);
      signal?.addEventListener('abort', stop, { once: true });
      try {
        return await this.#remote.call<T>('chat', request, {
          onId: (given) => (id = given),
          ...(onEvent && { onEvent }),
        });
      } catch (error) {
        if (signal?.aborted && error instanceof OutriderError && error.code === 'aborted') throw aborted(signal.reason);
        throw error;
      } finally {
        signal?.removeEventListener('abort', stop);
      }
    };
    if (!request.stream) return send<ChatCompletion>();

    const stream = new ChatStream(stop);
    const started = new Promise<ChatStream>((resolve, reject) => {
      send<null>((chunk) => {
        stream.push(chunk);
        resolve(stream);
      }).then(
        () => {
          stream.end();
          resolve(stream);
        },
        (error: unknown) => {
          stream.end(error);
          reject(error);
        },
      );
    });
    return iterable(stream, started);
  }
}

/** A loaded model. Made by {@link createEngine}. */
export class Engine {
  readonly #remote: Remote;
  readonly chat: { readonly completions: ChatCompletions };
  /** Resolves when the engine can no longer be used: after `dispose()`, or when it failed. Never rejects. */
  readonly closed: Promise<OutriderError>;

  /** @internal */
  constructor(remote: Remote) {
    this.#remote = remote;
    this.chat = { completions: new ChatCompletions(remote) };
    this.closed = remote.closed;
  }

  /** Memory against the budget, the pool, speed and notices, as of now. */
  stats(): Promise<Stats> {
    return this.#remote.call('stats', null);
  }

  /** @internal */
  [INTERNAL](ask: Ask): Promise<unknown> {
    return this.#remote.call('internal', ask);
  }

  /** Frees everything. Replies in progress end with a `disposed` error, as does whatever is called later. */
  async dispose(): Promise<void> {
    await close(this.#remote, fail('disposed', 'the engine was disposed of'));
  }
}

async function close(remote: Remote, error: OutriderError): Promise<void> {
  const putAway = remote.call('dispose', null).catch(() => {});
  await Promise.race([putAway, new Promise((resolve) => setTimeout(resolve, GRACE_MS))]);
  remote.close(error);
}

/**
 * Brings a model into the browser's storage, unless it is there, and loads it.
 *
 * @throws {OutriderError} with the codes `budget` (too small, names the smallest; nothing but the manifest has been
 * downloaded), `quota`, `http`, `network`, `corrupt`, `version`, `no_gpu`, `aborted`, `unsupported` and others.
 */
export async function createEngine(options: EngineOptions): Promise<Engine> {
  const { signal } = options;
  if (signal?.aborted) throw aborted(signal.reason);
  requireBrowser();
  const args = await loadArgs(options);
  // Best effort, and not waited for, since some browsers ask the user: unless storage is persistent, the browser may
  // clear it when the disk gets full.
  navigator.storage.persist?.().catch(() => {});
  const remote = new Remote(startWorker(options.workerUrl), 'engine worker');
  const stop = () => {
    // Ended at once: an interrupted download resumes, whatever the moment. What was tried is put on record first.
    const settled = args.budget === 'auto' ? remote.call('settle', null).catch(() => {}) : undefined;
    if (!settled) return remote.close(aborted(signal?.reason));
    void Promise.race([settled, new Promise((resolve) => setTimeout(resolve, SETTLE_MS))]).then(() =>
      remote.close(aborted(signal?.reason)),
    );
  };
  if (args.budget === 'auto') {
    args.left = departed();
    const unwatch = watch(args.attempt);
    args.watched = unwatch !== undefined;
    void remote.closed.then(unwatch);
  }
  signal?.addEventListener('abort', stop, { once: true });
  try {
    if (signal?.aborted) stop();
    const report = withSpeed((progress) => options.onProgress?.(progress));
    await remote.call('load', args, { onEvent: (progress: Progress) => report(progress) });
    return new Engine(remote);
  } catch (error) {
    remote.close(error instanceof OutriderError ? error : fail('worker', String(error), {}, error));
    throw error;
  } finally {
    signal?.removeEventListener('abort', stop);
  }
}

function startWorker(url: string | URL | undefined): Worker {
  try {
    if (url !== undefined) {
      const base = globalThis.document?.baseURI ?? location.href;
      return new Worker(new URL(url, base), { type: 'module', name: 'outrider-engine' });
    }
    // Bundlers look for these very words.
    return new Worker(new URL('./engine-worker.js', import.meta.url), { type: 'module', name: 'outrider-engine' });
  } catch (error) {
    const message = `the engine worker could not start: ${describe(error)}; see \`workerUrl\` in the README`;
    throw fail('worker', message, {}, error);
  }
}

async function loadArgs(options: EngineOptions): Promise<LoadArgs> {
  const { model, memoryBudget, backend = 'auto', context, profile, update = 'auto' } = options;
  const { f16 = false, warmStart = true, timeline = false } = options;
  if (!['auto', 'gpu', 'cpu'].includes(backend)) {
    throw fail('request', `the backend \`${backend}\` is not one of auto, gpu, cpu`);
  }
  if (context !== undefined && !(Number.isSafeInteger(context) && context > 0 && context < 2 ** 31)) {
    throw fail('request', `the context \`${context}\` is not a number of tokens`);
  }
  for (const [name, value] of Object.entries({ f16, warmStart, timeline })) {
    if (typeof value !== 'boolean') throw fail('request', `${name} is \`${value}\`, neither true nor false`);
  }
  if (profile !== undefined && profile !== 'safari') {
    throw fail('request', `the profile \`${profile}\` is not \`safari\``);
  }
  if (!['auto', 'never'].includes(update)) {
    throw fail('request', `update is \`${update}\`, neither \`auto\` nor \`never\``);
  }
  const address = addressOf(model);
  return {
    address,
    directory: await packDirectory(address),
    budget: memoryBudget === undefined ? null : memoryBudget === 'auto' ? 'auto' : parseBytes(memoryBudget),
    attempt: crypto.randomUUID(),
    watched: false,
    left: [],
    backend,
    context: context ?? null,
    f16: f16 && profile !== 'safari',
    timeline,
    update: update === 'auto',
    exclusive: profile === 'safari',
    warm: warmStart,
    internal: (options as { [INTERNAL]?: Internals })[INTERNAL] ?? null,
  };
}

export function addressOf(model: string | URL): string {
  try {
    return packAddress(model, globalThis.document?.baseURI);
  } catch (error) {
    throw fail('request', `\`${model}\` is not an address of a model`, {}, error);
  }
}
