// Owns some of a pack's files in the Origin Private File System, and reads and writes them. Several of these make up the
// flash tier: where a file's handle is exclusive, that is the only way to read several files at a time.

import { fail } from './errors.js';
import { ROOT } from './location.js';
import { type PackFile, type Way, openFile, translate } from './opfs-file.js';
import { Moved, serve } from './serve.js';

interface Opened {
  file: Promise<PackFile>;
  writable: boolean;
}

export interface Probe {
  file: string;
  way: Way;
  /** Size of the file, and of the pieces to read. */
  bytes: number;
  piece: number;
  /** Where to begin, so that several workers read different pieces. */
  first: number;
  milliseconds: number;
}

export interface Probed {
  bytes: number;
  milliseconds: number;
}

const STRIDE = 37;

let directory: FileSystemDirectoryHandle | undefined;
let exclusive = false;
/** How files are read that are only read. */
let way: Way = 'sync';
const files = new Map<string, Opened>();

/** Files are opened for reading until they are written, so that several tabs may use a model where browsers allow it. */
function open(name: string, writable: boolean): Promise<PackFile> {
  const held = files.get(name);
  if (held && (held.writable || !writable)) return held.file;
  const file = putAway(held).then(() => {
    if (!directory) throw fail('worker', 'the flash worker has no directory');
    return openFile(directory, name, { writable, exclusive, way });
  });
  const opened = { file, writable };
  files.set(name, opened);
  // A failure is not remembered: the next attempt may find the file there, or free.
  file.catch(() => files.get(name) === opened && files.delete(name));
  return file;
}

async function putAway(opened: Opened | undefined): Promise<void> {
  const [result] = await Promise.allSettled([opened?.file]);
  if (result?.status === 'fulfilled') await result.value?.close();
}

serve({
  async open(args: { directory: string; exclusive: boolean }) {
    const name = args.directory;
    exclusive = args.exclusive;
    try {
      const root = await navigator.storage.getDirectory();
      const packs = await root.getDirectoryHandle(ROOT, { create: true });
      directory = await packs.getDirectoryHandle(name, { create: true });
    } catch (error) {
      throw translate(error, name);
    }
  },

  async read({ file, offset, length }: { file: string; offset: number; length: number }) {
    const bytes = await (await open(file, false)).read(offset, length);
    return new Moved(bytes, [bytes.buffer]);
  },

  /** How files are read that are opened from now on. */
  async prefer(preferred: Way) {
    way = preferred;
  },

  /**
   * Reads pieces of a file one way, here and there, until the time is up. Nothing is measured where the file can only be
   * read another way.
   */
  async probe({ file: name, way, bytes, piece, first, milliseconds }: Probe): Promise<Probed> {
    if (!directory) throw fail('worker', 'the flash worker has no directory');
    const file = await openFile(directory, name, { writable: false, exclusive, way, patience: 0 });
    try {
      if (file.way !== way) return { bytes: 0, milliseconds: 0 };
      const places = Math.max(1, Math.floor(bytes / piece));
      const length = Math.min(piece, bytes);
      const start = performance.now();
      let done = 0;
      for (let i = first; performance.now() - start < milliseconds; i += 1) {
        // Steps of an odd number of pieces, so that what the system reads ahead does not count.
        await file.read(((i * STRIDE) % places) * piece, length);
        done += length;
      }
      return { bytes: done, milliseconds: performance.now() - start };
    } finally {
      await file.close();
    }
  },

  async size(file: string) {
    return (await open(file, false)).size();
  },

  async write({ file, offset, bytes }: { file: string; offset: number; bytes: Uint8Array<ArrayBuffer> }) {
    await (await open(file, true)).write(offset, bytes);
  },

  async resize({ file, length }: { file: string; length: number }) {
    await (await open(file, true)).resize(length);
  },

  async flush(file: string) {
    await (await open(file, true)).flush();
  },

  async remove(file: string) {
    const held = files.get(file);
    files.delete(file);
    await putAway(held);
    try {
      await directory?.removeEntry(file);
    } catch (error) {
      if ((error as DOMException).name !== 'NotFoundError') throw translate(error, file);
    }
  },

  async list() {
    const names: string[] = [];
    for await (const name of directory!.keys()) names.push(name);
    return names;
  },

  /** Lets go of every file; what is used later is opened again. */
  async close() {
    const held = [...files.values()];
    files.clear();
    await Promise.all(held.map(putAway));
  },
});
