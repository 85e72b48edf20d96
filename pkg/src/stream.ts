// A reply that arrives in chunks, as an async iterable that can also be awaited.

import { aborted } from './errors.js';
import type { ChatCompletionChunk } from './types.js';

/** The chunks of one reply; can be iterated once. Leaving the loop early stops the reply. */
export class ChatStream implements AsyncIterable<ChatCompletionChunk> {
  readonly #queue: ChatCompletionChunk[] = [];
  readonly #stop: () => void;
  #ended = false;
  #error: unknown;
  #wake: (() => void) | undefined;
  #taken = false;

  constructor(stop: () => void) {
    this.#stop = stop;
  }

  /** Stops the reply; the iteration ends with an `aborted` error. */
  abort(): void {
    this.#stop();
  }

  async *[Symbol.asyncIterator](): AsyncIterator<ChatCompletionChunk> {
    if (this.#taken) throw aborted(new Error('a reply can be iterated once'));
    this.#taken = true;
    try {
      for (;;) {
        const chunk = this.#queue.shift();
        if (chunk) yield chunk;
        else if (this.#ended && this.#error !== undefined) throw this.#error;
        else if (this.#ended) return;
        else await new Promise<void>((resolve) => (this.#wake = resolve));
      }
    } finally {
      if (!this.#ended) this.#stop();
    }
  }

  /** @internal */
  push(chunk: ChatCompletionChunk): void {
    this.#queue.push(chunk);
    this.#wake?.();
  }

  /** @internal */
  end(error?: unknown): void {
    this.#ended = true;
    this.#error = error;
    this.#wake?.();
  }
}

/** What `create` returns when streaming: both `for await (… of create(…))` and `for await (… of await create(…))` work. */
export type StreamPromise = Promise<ChatStream> & AsyncIterable<ChatCompletionChunk>;

export function iterable(stream: ChatStream, started: Promise<ChatStream>): StreamPromise {
  // Whoever iterates learns of a failure there; nobody need await the promise as well.
  started.catch(() => {});
  return Object.assign(started, { [Symbol.asyncIterator]: () => stream[Symbol.asyncIterator]() });
}
