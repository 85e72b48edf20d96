// A pack's files on a web server. The methods are what `src/flash/opfs.rs` expects of a `Server` object.

import { type OutriderError, describe, fail } from './errors.js';
import { fileAddress } from './location.js';

/** Bytes handed on at once: large enough that messages cost nothing, small enough to be stopped soon. */
const PIECE = 1 << 20;
/** How long to wait for a piece to fill up: on a slow line progress is to be seen, too. */
const PIECE_MS = 250;
/** How long an answer, and then its content, may take that is not waited for. */
const PEEK_MS = 3000;
const PEEK_BODY_MS = 10_000;

export class Server {
  constructor(readonly address: string) {}

  /** Bytes `start .. end` of a file, or all of it. */
  async get(file: string, start?: number, end?: number): Promise<Body> {
    const control = new AbortController();
    const range: HeadersInit = start === undefined ? {} : { Range: `bytes=${start}-${end! - 1}` };
    // The bytes are stored once, in the file system; a copy in the HTTP cache would double them, and keep wrong ones.
    return this.#ask(file, { headers: range, cache: 'no-store' }, control, start, end);
  }

  /**
   * All of a file, or an error soon. The browser asks by the tag of what it has in its cache, so that an unchanged file
   * costs no more than the answer that it is; `anew` goes past the cache. Asking by headers of our own would need leave
   * from servers of another origin.
   */
  async peek(file: string, anew: boolean): Promise<Body> {
    const control = new AbortController();
    const stop = () => control.abort(new Error('the server takes too long'));
    let timer = setTimeout(stop, PEEK_MS);
    const body = await this.#ask(file, { cache: anew ? 'reload' : 'no-cache' }, control).finally(() => clearTimeout(timer));
    timer = setTimeout(stop, PEEK_BODY_MS);
    return body;
  }

  async #ask(file: string, init: RequestInit, control: AbortController, start?: number, end?: number): Promise<Body> {
    const url = fileAddress(this.address, file);
    let response: Response;
    try {
      response = await fetch(url, { ...init, signal: control.signal });
    } catch (error) {
      throw unreachable(url, error);
    }
    if (response.status === 416 && start !== undefined) {
      control.abort();
      const actual = Number(/\/(\d+)$/.exec(response.headers.get('Content-Range') ?? '')?.[1] ?? start);
      const message = `${file} is ${actual} bytes long on the server where more than ${start} were expected`;
      throw fail('truncated', message, { path: file, expected: end!, actual });
    }
    if (!response.ok) {
      control.abort();
      throw fail('http', `the server answered ${response.status} for ${url}`, { url, status: response.status });
    }
    // A server that knows no ranges sends the file from its start.
    const skip = start !== undefined && response.status !== 206 ? start : 0;
    const length = start === undefined ? Infinity : end! - start;
    return new Body(url, response, control, skip, length);
  }

  /** Waits before a request is repeated. */
  pause(attempt: number): Promise<void> {
    return new Promise((resolve) => setTimeout(resolve, 250 * 2 ** attempt));
  }
}

export class Body {
  /** What the server calls this version of the file. Servers of another origin have to allow that it is read. */
  readonly tag: string | undefined;
  readonly #url: string;
  readonly #reader: ReadableStreamDefaultReader<Uint8Array> | undefined;
  readonly #control: AbortController;
  #skip: number;
  #left: number;
  #rest: Uint8Array | undefined;
  #error: OutriderError | undefined;

  constructor(url: string, response: Response, control: AbortController, skip: number, length: number) {
    this.#url = url;
    this.tag = response.headers.get('ETag') ?? response.headers.get('Last-Modified') ?? undefined;
    this.#reader = response.body?.getReader();
    this.#control = control;
    this.#skip = skip;
    this.#left = length;
  }

  /** The next bytes, in a buffer of their own; undefined at the end. What arrived before a failure is not lost. */
  async next(): Promise<Uint8Array | undefined> {
    const piece = new Uint8Array(Math.min(PIECE, this.#left));
    const deadline = performance.now() + PIECE_MS;
    let filled = 0;
    while (filled < piece.length && (filled === 0 || performance.now() < deadline)) {
      const received = this.#rest ?? (await this.#receive());
      if (!received) break;
      const take = received.subarray(0, piece.length - filled);
      this.#rest = take.length < received.length ? received.subarray(take.length) : undefined;
      piece.set(take, filled);
      filled += take.length;
    }
    this.#left -= filled;
    if (this.#left === 0) this.cancel();
    if (filled === 0 && this.#error) throw this.#error;
    if (filled === 0) return undefined;
    return filled === piece.length ? piece : piece.slice(0, filled);
  }

  cancel(): void {
    this.#control.abort();
  }

  /** What comes next from the network after the bytes to skip; undefined at the end or after a failure. */
  async #receive(): Promise<Uint8Array | undefined> {
    if (this.#error) return undefined;
    try {
      for (;;) {
        const { value, done } = (await this.#reader?.read()) ?? { done: true };
        if (done || !value) return undefined;
        if (value.length > this.#skip) {
          const kept = value.subarray(this.#skip);
          this.#skip = 0;
          return kept;
        }
        this.#skip -= value.length;
      }
    } catch (error) {
      this.#error = unreachable(this.#url, error);
      return undefined;
    }
  }
}

function unreachable(url: string, error: unknown): OutriderError {
  const reason = describe(error);
  const message = `could not reach ${url}: ${reason}; check the connection and that the server allows cross-origin reads`;
  return fail('network', message, { url, reason }, error);
}
