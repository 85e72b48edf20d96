// Calls to a worker, which answers them by `serve`. Every call settles: with the worker's answer, or with an error when the worker fails,
// dies without a word, or is closed.

import { type ErrorData, OutriderError, fail } from './errors.js';

export interface Call {
  id: number;
  op: string;
  args: unknown;
}

export type Reply =
  | { id: number; kind: 'result'; value: unknown }
  | { id: number; kind: 'error'; error: ErrorData }
  | { id: number; kind: 'event'; value: unknown }
  | { kind: 'alive' }
  | { kind: 'fatal'; error: ErrorData };

interface Pending {
  resolve(value: unknown): void;
  reject(error: OutriderError): void;
  onEvent: ((value: never) => void) | undefined;
}

/** A worker that is told to end takes a moment. */
const ENDED_MS = 1000;

export class Remote {
  readonly #worker: Worker;
  readonly #name: string;
  readonly #pending = new Map<number, Pending>();
  readonly #watch = new AbortController();
  /** Name of the lock that the worker holds while it lives. */
  readonly #life: string;
  #next = 1;
  #error: OutriderError | undefined;
  /** Resolves once no further call can succeed. */
  readonly closed: Promise<OutriderError>;
  #resolveClosed!: (error: OutriderError) => void;

  constructor(worker: Worker, name: string) {
    this.#worker = worker;
    this.#name = name;
    this.closed = new Promise((resolve) => (this.#resolveClosed = resolve));
    this.#life = `outrider-worker-${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
    worker.onmessage = ({ data }: MessageEvent<Reply>) => this.#receive(data);
    worker.onmessageerror = () => this.close(fail('worker', `a message of the ${name} could not be read`));
    worker.onerror = (event) => {
      event.preventDefault();
      const unloaded = 'its script could not be loaded; check that it is served and allowed, see `workerUrl` in the README';
      const what = event.message || unloaded;
      this.close(fail('worker', `the ${name} failed: ${what}`));
    };
    worker.postMessage({ id: 0, op: 'life', args: this.#life } satisfies Call);
  }

  call<T>(
    op: string,
    args: unknown,
    options: { transfer?: Transferable[]; onEvent?: (value: never) => void; onId?: (id: number) => void } = {},
  ): Promise<T> {
    if (this.#error) return Promise.reject(this.#error);
    const id = this.#next++;
    options.onId?.(id);
    return new Promise<T>((resolve, reject) => {
      const pending: Pending = { resolve: resolve as (value: unknown) => void, reject, onEvent: options.onEvent };
      this.#pending.set(id, pending);
      try {
        this.#worker.postMessage({ id, op, args } satisfies Call, options.transfer ?? []);
      } catch (error) {
        this.#pending.delete(id);
        reject(fail('request', `the arguments cannot be sent to a worker: ${(error as Error).message}`, {}, error));
      }
    });
  }

  /** Ends the worker; calls in flight, and all later ones, fail with `error`. */
  close(error: OutriderError): void {
    if (this.#error) return;
    this.#error = error;
    this.#watch.abort();
    this.#worker.terminate();
    for (const pending of this.#pending.values()) pending.reject(error);
    this.#pending.clear();
    this.#resolveClosed(error);
  }

  #receive(reply: Reply): void {
    if (reply.kind === 'fatal') return this.close(new OutriderError(reply.error));
    if (reply.kind === 'alive') return this.#watchLife();
    const pending = this.#pending.get(reply.id);
    if (!pending) return;
    if (reply.kind === 'event') return pending.onEvent?.(reply.value as never);
    this.#pending.delete(reply.id);
    if (reply.kind === 'result') pending.resolve(reply.value);
    else pending.reject(new OutriderError(reply.error));
  }

  /** Resolves when a worker that was ended is gone, or soon enough. */
  async ended(): Promise<void> {
    const gone = navigator.locks?.request(this.#life, () => {});
    await Promise.race([gone, new Promise((resolve) => setTimeout(resolve, ENDED_MS))]);
  }

  /** A worker holds a lock while it lives; who is granted it knows that the worker is gone. There is no event for that. */
  #watchLife(): void {
    const died = () => this.close(fail('worker', `the ${this.#name} was ended by the browser; reload the engine`));
    navigator.locks.request(this.#life, { signal: this.#watch.signal }, died).catch(() => {
      // Closed first: nothing to watch for any more.
    });
  }
}
