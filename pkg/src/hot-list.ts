// Which experts an earlier visit used, kept beside the model. What is written is a hint: the runtime knows half of it, or
// that of another model, from a whole one, and nothing fails for want of it.

import { ROOT } from './location.js';
import { openFile } from './opfs-file.js';

/** No file of a pack has a name that begins with a dot. */
const NAME = '.hot';

/** More is no list. */
const MOST_BYTES = 1 << 18;

/** Between two times that it is written. */
const RARELY_MS = 60_000;

export class HotList {
  readonly #directory: string;
  #written = -Infinity;
  #pending = false;
  #last: Promise<unknown> = Promise.resolve();

  constructor(directory: string) {
    this.#directory = directory;
  }

  /** What was kept, if anything. */
  async read(): Promise<Uint8Array | undefined> {
    try {
      const file = await openFile(await this.#open(), NAME, { writable: false, exclusive: false, way: 'slice', patience: 0 });
      try {
        const size = await file.size();
        return size > MOST_BYTES ? undefined : await file.read(0, size);
      } finally {
        await file.close();
      }
    } catch {
      return undefined;
    }
  }

  /** Keeps what `hot` tells, unless that was done a moment ago: then `settle` does. Nobody need wait for it. */
  keep(hot: () => Uint8Array | undefined): void {
    this.#pending = true;
    if (performance.now() - this.#written >= RARELY_MS) void this.settle(hot);
  }

  /** Keeps what has not been kept yet. */
  async settle(hot: () => Uint8Array | undefined): Promise<void> {
    if (this.#pending) {
      this.#pending = false;
      this.#written = performance.now();
      const bytes = hot();
      // Another tab may be writing as well, or storage be full.
      if (bytes) this.#last = this.#last.then(() => this.#write(Uint8Array.from(bytes))).catch(() => {});
    }
    await this.#last;
  }

  async #write(bytes: Uint8Array<ArrayBuffer>): Promise<void> {
    const file = await openFile(await this.#open(), NAME, { writable: true, exclusive: false, patience: 0 });
    try {
      await file.resize(bytes.length);
      await file.write(0, bytes);
      await file.flush();
    } finally {
      await file.close();
    }
  }

  /** The model's directory, which is there. One that is being deleted is not made again. */
  async #open(): Promise<FileSystemDirectoryHandle> {
    const root = await navigator.storage.getDirectory();
    return (await root.getDirectoryHandle(ROOT)).getDirectoryHandle(this.#directory);
  }
}
