// One file of a pack, through whichever interface of the browser is there and free.

import { type OutriderError, describe, fail } from './errors.js';

/** How a file is read: through a synchronous handle, or as slices of a `File`. */
export type Way = 'sync' | 'slice';

export interface PackFile {
  readonly way: Way;
  read(offset: number, length: number): Promise<Uint8Array<ArrayBuffer>>;
  size(): Promise<number>;
  write(offset: number, bytes: Uint8Array<ArrayBuffer>): Promise<void>;
  resize(length: number): Promise<void>;
  flush(): Promise<void>;
  close(): Promise<void>;
}

/** A page that is being reloaded lets go of its files a moment after the new one asks for them. */
const PATIENCE_MS = 1500;
const RETRY_MS = 50;

/**
 * Whether files have synchronous handles here. Tried on a file of its own, because WebKitGTK, which offers them and has
 * none, never lets go of a file that it was asked for one of.
 */
let synchronous: Promise<boolean> | undefined;

export interface OpenOptions {
  writable: boolean;
  /** Asks for a handle that leaves room for no other, the only kind that Safari and Firefox have. */
  exclusive: boolean;
  /** How it is to be read, where it is only read and can be so. */
  way?: Way;
  /** Milliseconds to wait for a handle that another tab has. */
  patience?: number;
}

async function hasSyncHandles(): Promise<boolean> {
  if (!('createSyncAccessHandle' in FileSystemFileHandle.prototype)) return false;
  try {
    const root = await navigator.storage.getDirectory();
    // It stays: where storage is full later none can be made.
    const entry = await root.getFileHandle('outrider-probe', { create: true });
    (await entry.createSyncAccessHandle()).close();
    return true;
  } catch (error) {
    // Another worker holds the handle that there is.
    if ((error as DOMException).name === 'NoModificationAllowedError') return true;
    // It says nothing about handles, so the next time it is asked again.
    if ((error as DOMException).name === 'QuotaExceededError') synchronous = undefined;
    return false;
  }
}

/**
 * Opens a file, for writing also one that does not exist, by a synchronous handle. Where there are none, or another tab
 * holds the only one there may be, files are read as slices, and written through a stream.
 */
export async function openFile(
  directory: FileSystemDirectoryHandle,
  name: string,
  { writable, exclusive, way = 'sync', patience = PATIENCE_MS }: OpenOptions,
): Promise<PackFile> {
  try {
    synchronous ??= hasSyncHandles();
    const entry = await directory.getFileHandle(name, { create: writable });
    if ((way === 'slice' && !writable) || !(await synchronous)) return new StreamedFile(entry, name, writable);
    const deadline = Date.now() + patience;
    for (;;) {
      try {
        // Browsers that know no modes ignore the option and give an exclusive handle.
        const mode = writable || exclusive ? 'readwrite' : 'read-only';
        const open = entry.createSyncAccessHandle as (options: { mode: string }) => Promise<FileSystemSyncAccessHandle>;
        return new SyncFile(await open.call(entry, { mode }), name);
      } catch (error) {
        if ((error as DOMException).name !== 'NoModificationAllowedError') throw error;
        if (Date.now() >= deadline) {
          if (!writable) return new StreamedFile(entry, name, false);
          throw error;
        }
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }
  } catch (error) {
    throw translate(error, name);
  }
}

/** An error of the file system, in the runtime's terms. */
export function translate(error: unknown, path: string, needed = 0): OutriderError {
  const name = (error as DOMException).name;
  if (name === 'OutriderError') return error as OutriderError;
  if (name === 'NotFoundError') return fail('not_found', `${path} is not in the browser's storage`, { path }, error);
  if (name === 'QuotaExceededError') return full(needed);
  const reason =
    name === 'NoModificationAllowedError'
      ? 'another tab is using the model; close it and try again'
      : name === 'SecurityError'
        ? 'the browser keeps no files for this page, as in some private windows; open it in a normal one'
        : `${name}: ${describe(error)}`;
  return fail('storage', `storage failed on ${path}: ${reason}`, { path, reason }, error);
}

function full(needed: number): OutriderError {
  const message = `storage is full: ${needed} more bytes are needed; free some space or pick a smaller model`;
  return fail('quota', message, { needed });
}

function unwritten(path: string, count: number): OutriderError {
  const reason = `the browser failed to write (${count | 0})`;
  return fail('storage', `storage failed on ${path}: ${reason}`, { path, reason });
}

function truncated(path: string, expected: number, actual: number): OutriderError {
  return fail('truncated', `${path} is ${actual} bytes long where ${expected} were expected`, { path, expected, actual });
}

/** Its `net::ERR_FILE_NO_SPACE`. */
const CHROMIUM_NO_SPACE = -8;

class SyncFile implements PackFile {
  readonly way = 'sync';

  constructor(
    readonly handle: FileSystemSyncAccessHandle,
    readonly name: string,
  ) {}

  async read(offset: number, length: number): Promise<Uint8Array<ArrayBuffer>> {
    const bytes = new Uint8Array(length);
    let done = 0;
    while (done < length) {
      const count = this.#guard(0, () => this.handle.read(bytes.subarray(done), { at: offset + done }));
      if (count === 0) throw truncated(this.name, offset + length, await this.size());
      done += count;
    }
    return bytes;
  }

  async size(): Promise<number> {
    return this.#guard(0, () => this.handle.getSize());
  }

  async write(offset: number, bytes: Uint8Array<ArrayBuffer>): Promise<void> {
    let done = 0;
    while (done < bytes.length) {
      const left = bytes.length - done;
      const count = this.#guard(left, () => this.handle.write(bytes.subarray(done), { at: offset + done }));
      // Firefox reports a full disk by writing nothing, Chromium by a negative number that it takes for an unsigned one.
      if (count === 0 || (count | 0) === CHROMIUM_NO_SPACE) throw full(left);
      if (count > left) throw unwritten(this.name, count);
      done += count;
    }
  }

  async resize(length: number): Promise<void> {
    this.#guard(length, () => this.handle.truncate(length));
  }

  async flush(): Promise<void> {
    this.#guard(0, () => this.handle.flush());
  }

  async close(): Promise<void> {
    this.handle.close();
  }

  #guard<T>(needed: number, act: () => T): T {
    try {
      return act();
    } catch (error) {
      throw translate(error, this.name, needed);
    }
  }
}

/**
 * A stream's bytes reach the file when the stream is closed, and until then a closed tab loses them; but the next stream
 * begins by copying the file. So streams are closed ever less often as a file grows.
 */
const SETTLE_BYTES = 4 << 20;

class StreamedFile implements PackFile {
  readonly way = 'slice';
  #end = 0;
  #unsettled = 0;
  #writer: FileSystemWritableFileStream | undefined;
  /** Operations run one after another, as on a synchronous handle. */
  #last: Promise<unknown> = Promise.resolve();

  constructor(
    readonly entry: FileSystemFileHandle,
    readonly name: string,
    readonly writable: boolean,
  ) {}

  read(offset: number, length: number): Promise<Uint8Array<ArrayBuffer>> {
    // What is only read needs no order.
    if (!this.writable) return this.#slice(offset, length).catch((error: unknown) => Promise.reject(translate(error, this.name)));
    return this.#next(0, async () => {
      await this.#settle();
      return this.#slice(offset, length);
    });
  }

  size(): Promise<number> {
    return this.#next(0, async () => {
      await this.#settle();
      return (await this.entry.getFile()).size;
    });
  }

  write(offset: number, bytes: Uint8Array<ArrayBuffer>): Promise<void> {
    return this.#next(bytes.length, async () => {
      const writer = await this.#writing();
      await writer.write({ type: 'write', position: offset, data: bytes });
      this.#end = Math.max(this.#end, offset + bytes.length);
      this.#unsettled += bytes.length;
      if (this.#unsettled >= Math.max(SETTLE_BYTES, this.#end / 2)) await this.#settle();
    });
  }

  resize(length: number): Promise<void> {
    return this.#next(length, async () => (await this.#writing()).truncate(length));
  }

  flush(): Promise<void> {
    return this.#next(0, () => this.#settle());
  }

  close(): Promise<void> {
    return this.flush();
  }

  async #slice(offset: number, length: number): Promise<Uint8Array<ArrayBuffer>> {
    const file = await this.entry.getFile();
    if (offset + length > file.size) throw truncated(this.name, offset + length, file.size);
    return new Uint8Array(await file.slice(offset, offset + length).arrayBuffer());
  }

  async #writing(): Promise<FileSystemWritableFileStream> {
    if (!this.writable) throw fail('storage', `${this.name} is open for reading only`, { path: this.name, reason: 'read-only' });
    return (this.#writer ??= await this.entry.createWritable({ keepExistingData: true }));
  }

  async #settle(): Promise<void> {
    const writer = this.#writer;
    this.#writer = undefined;
    this.#unsettled = 0;
    await writer?.close();
  }

  #next<T>(needed: number, act: () => Promise<T>): Promise<T> {
    const result = this.#last.then(act);
    this.#last = result.catch(() => {});
    return result.catch((error: unknown) => Promise.reject(translate(error, this.name, needed)));
  }
}
