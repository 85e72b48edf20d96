// What is known about memory, kept in the private file system over visits, and written there before a step is taken.

import { ROOT } from './location.js';
import * as steps from './memory-steps.js';
import type { Choice, Device, Knowledge } from './memory-steps.js';
import { openFile } from './opfs-file.js';

export class MemoryRecord {
  readonly #device: Device;
  readonly #id: string;
  /** Only who holds the lock tries, and writes. */
  readonly #alone: boolean;
  readonly #release: () => void;
  readonly #watched: boolean;
  #known: Knowledge;
  #notices: string[];
  #ended = false;

  private constructor(device: Device, id: string, watched: boolean, release: (() => void) | undefined, known: Knowledge, left: string[]) {
    this.#device = device;
    this.#id = id;
    this.#watched = watched;
    this.#alone = release !== undefined;
    this.#release = release ?? (() => {});
    // What another tab is trying has not ended.
    ({ known: this.#known, notices: this.#notices } = this.#alone ? steps.judge(known, left, Date.now()) : { known, notices: [] });
  }

  /**
   * `left` are the ids of engines whose pages were closed, and `watched` says whether that will be known of the engine
   * `id` as well.
   */
  static async open(backend: Device['backend'], id: string, left: string[], watched: boolean): Promise<MemoryRecord> {
    const device: Device = { backend, memory: (navigator as { deviceMemory?: number }).deviceMemory };
    const release = await hold(`outrider-memory-${backend}`);
    return new MemoryRecord(device, id, watched, release, await read(fileOf(device)), left);
  }

  get notices(): readonly string[] {
    return this.#notices;
  }

  /** The most that a model may need, or null. */
  get limit(): number | null {
    return steps.limit(this.#known) ?? null;
  }

  /** The budget to load a model with. It is on record when this returns. */
  async begin(model: { smallest: number; whole: number }): Promise<Choice> {
    let choice = steps.choose(this.#known, model, this.#device, this.#alone);
    if (choice.budget !== undefined && this.#alone && !steps.isHarmless(choice.budget)) {
      try {
        await this.#write({ ...this.#known, trying: { budget: choice.budget, id: this.#id, survived: false } });
      } catch {
        // Storage is full, perhaps. What cannot be put on record is not tried.
        const { trying: _, ...known } = this.#known;
        this.#known = known;
        choice = steps.choose(known, model, this.#device, false);
        choice.notices = choice.notices.map(() => 'what works of memory could not be written down, so no more is tried');
      }
    }
    this.#notices = [...this.#notices, ...choice.notices];
    return choice;
  }

  /** The budget turned out to be too much, and the page lives. Whether there is another one to try. */
  async fail(budget: number): Promise<boolean> {
    if (!this.#alone) return false;
    this.#notices = [`${steps.mib(budget)} of memory could not be had, so less is taken`];
    // What cannot be written down is known for now.
    await this.#write(steps.failed(this.#known, budget, Date.now())).catch(() => {});
    return true;
  }

  /** The model was loaded and has answered. */
  async succeed(): Promise<void> {
    const { trying } = this.#known;
    if (this.#ended || !trying || trying.survived) return;
    await this.#write(steps.survived(this.#known, trying.budget));
    // Where nobody will tell a page that was closed from one that was ended, nothing can be learnt from here on.
    if (!this.#watched) await this.end();
  }

  /** The engine ends as it was asked to, which is nothing to be remembered. */
  async end(): Promise<void> {
    if (this.#ended) return;
    this.#ended = true;
    if (this.#known.trying) await this.#write(steps.ended(this.#known)).catch(() => {});
    this.#release();
  }

  async #write(known: Knowledge): Promise<void> {
    this.#known = known;
    const file = await openFile(await directory(), fileOf(this.#device), { writable: true, exclusive: false });
    try {
      const bytes = new TextEncoder().encode(JSON.stringify(known));
      await file.resize(0);
      await file.write(0, bytes);
      await file.flush();
    } finally {
      await file.close();
    }
  }
}

/** Backends use memory differently, and each is known about by itself. */
function fileOf({ backend }: Device): string {
  return `memory-${backend}.json`;
}

async function directory(): Promise<FileSystemDirectoryHandle> {
  const root = await navigator.storage.getDirectory();
  return root.getDirectoryHandle(ROOT, { create: true });
}

/** What is on record. Half of it, or none, is nothing known. */
async function read(name: string): Promise<Knowledge> {
  try {
    const file = await openFile(await directory(), name, { writable: false, exclusive: false });
    try {
      const known = JSON.parse(new TextDecoder().decode(await file.read(0, await file.size()))) as Knowledge;
      return Number.isFinite(known.good) && Number.isFinite(known.doubts) ? known : steps.NOTHING;
    } finally {
      await file.close();
    }
  } catch {
    return steps.NOTHING;
  }
}

/** Takes a lock if it is free; what lets go of it, or undefined. */
function hold(name: string): Promise<(() => void) | undefined> {
  if (!navigator.locks) return Promise.resolve(undefined);
  return new Promise((held, refused) => {
    navigator.locks
      .request(name, { ifAvailable: true }, (lock) => {
        if (!lock) return held(undefined);
        return new Promise<void>((release) => held(release));
      })
      .catch(refused);
  });
}
