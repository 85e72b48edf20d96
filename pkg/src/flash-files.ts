// The engine's view of a pack's files: calls to the flash workers that own them. Its methods are what `src/flash/opfs.rs`
// expects of a `Files` object.

import { describe, fail } from './errors.js';
import { type Sample, measureFlash } from './flash-probe.js';
import { Remote } from './rpc.js';
import type { FlashStats } from './types.js';

/** Two readers at a time keep flash busy; more gain nothing. */
const LANES = 2;

/** From when a worker's locks are free to when its thread is. */
const LINGER_MS = 50;

export class Files {
  readonly #lanes: Remote[];
  readonly #owner = new Map<string, Remote>();
  /** Files that every worker reads, and how many reads each worker has before it. */
  readonly #shared = new Set<string>();
  readonly #waiting = new Map<Remote, number>();

  private constructor(lanes: Remote[]) {
    this.#lanes = lanes;
  }

  static async open(directory: string, exclusive: boolean, onDeath: (error: unknown) => void): Promise<Files> {
    const lanes = Array.from({ length: LANES }, () => {
      const worker = new Worker(new URL('./flash-worker.js', import.meta.url), { type: 'module', name: 'outrider-flash' });
      const lane = new Remote(worker, 'flash worker');
      void lane.closed.then(onDeath);
      return lane;
    });
    const files = new Files(lanes);
    try {
      // One after the other, for they would race to make the same directory.
      for (const lane of lanes) await lane.call('open', { directory, exclusive });
    } catch (error) {
      files.terminate();
      throw error;
    }
    return files;
  }

  /**
   * Finds the fastest way to read, and reads so from now on until {@link seal}. `shards` are the files with the experts;
   * `piece` is what is read of them at a time.
   */
  async probe(shards: readonly { file: string; bytes: number }[], piece: number): Promise<FlashStats> {
    const largest = shards.reduce((a, b) => (b.bytes > a.bytes ? b : a));
    await this.seal();
    const flash = await measureFlash(this.#lanes, { ...largest, piece } satisfies Sample);
    await Promise.all(this.#lanes.map((lane) => lane.call('prefer', flash.way)));
    if (flash.lanes > 1) for (const { file } of shards) this.#shared.add(file);
    return flash;
  }

  async read(file: string, offset: number, length: number): Promise<Uint8Array> {
    const lane = this.#shared.has(file) ? this.#idlest() : this.#lane(file);
    this.#waiting.set(lane, this.#reads(lane) + 1);
    try {
      return await lane.call<Uint8Array>('read', { file, offset, length });
    } finally {
      this.#waiting.set(lane, this.#reads(lane) - 1);
    }
  }

  size(file: string): Promise<number> {
    return this.#lane(file).call('size', file);
  }

  write(file: string, offset: number, bytes: Uint8Array): Promise<void> {
    // Moving is possible only for a buffer that holds these bytes and no others.
    const whole = bytes.byteLength === bytes.buffer.byteLength ? bytes : bytes.slice();
    return this.#lane(file).call('write', { file, offset, bytes: whole }, { transfer: [whole.buffer] });
  }

  resize(file: string, length: number): Promise<void> {
    return this.#lane(file).call('resize', { file, length });
  }

  flush(file: string): Promise<void> {
    return this.#lane(file).call('flush', file);
  }

  remove(file: string): Promise<void> {
    return this.#lane(file).call('remove', file);
  }

  list(): Promise<string[]> {
    return this.#lanes[0]!.call('list', null);
  }

  /** Bytes that may still be written, or undefined where the browser does not tell. */
  async free(): Promise<number | undefined> {
    try {
      const { quota, usage } = await navigator.storage.estimate();
      return quota === undefined || usage === undefined ? undefined : Math.max(0, quota - usage);
    } catch (error) {
      throw fail('storage', `the browser does not tell how much may be stored: ${describe(error)}`, {
        path: '/',
        reason: describe(error),
      });
    }
  }

  /** Closes every file, so that other tabs may read what was written, and any worker write it. */
  async seal(): Promise<void> {
    this.#shared.clear();
    await Promise.all(this.#lanes.map((lane) => lane.call('close', null)));
  }

  async close(): Promise<void> {
    await Promise.allSettled(this.#lanes.map((lane) => lane.call('close', null)));
    this.terminate();
    // Chromium keeps a worker, with all of its memory, that is ended while its own workers are still ending.
    await Promise.all(this.#lanes.map((lane) => lane.ended()));
    await new Promise((resolve) => setTimeout(resolve, LINGER_MS));
  }

  terminate(): void {
    for (const lane of this.#lanes) lane.close(fail('disposed', 'the files were closed'));
  }

  #reads(lane: Remote): number {
    return this.#waiting.get(lane) ?? 0;
  }

  #idlest(): Remote {
    return this.#lanes.reduce((a, b) => (this.#reads(b) < this.#reads(a) ? b : a));
  }

  /** Files go to the workers in turn, so that neighbouring shards are read side by side. */
  #lane(file: string): Remote {
    let lane = this.#owner.get(file);
    if (!lane) {
      lane = this.#lanes[this.#owner.size % this.#lanes.length]!;
      this.#owner.set(file, lane);
    }
    return lane;
  }
}
