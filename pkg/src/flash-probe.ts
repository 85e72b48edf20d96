// Finds out at the start of a visit how a browser's storage is read fastest: through synchronous handles or as slices, by
// one worker or by two at a time. Browsers and devices differ too much for that to be known beforehand.

import type { Probe, Probed } from './flash-worker.js';
import type { Way } from './opfs-file.js';
import type { Remote } from './rpc.js';
import type { FlashStats } from './types.js';

/** Time for one measurement; there are four at most. */
const PROBE_MS = 60;

/** A second reader must be worth the memory of what it reads. */
const WORTH = 1.15;

/** A file to try on, and the size of what will be read from it. */
export interface Sample {
  file: string;
  bytes: number;
  piece: number;
}

/**
 * Reads `sample` each way by each number of workers. What cannot be done, or fails, counts 0.
 *
 * @throws why the first of them failed, where nothing can be read any way.
 */
export async function measureFlash(workers: readonly Pick<Remote, 'call'>[], sample: Sample): Promise<FlashStats> {
  const start = performance.now();
  const measured: FlashStats['measured'] = [];
  const failures: unknown[] = [];
  for (const way of ['sync', 'slice'] satisfies Way[]) {
    for (let lanes = 1; lanes <= workers.length; lanes += 1) {
      const bytesPerSecond = await together(workers.slice(0, lanes), { ...sample, way, milliseconds: PROBE_MS }, failures);
      measured.push({ way, lanes, bytesPerSecond });
      // Two can not do what one can not.
      if (bytesPerSecond === 0) break;
    }
  }
  let best = measured[0]!;
  for (const other of measured.slice(1)) {
    const worth = other.lanes > best.lanes ? WORTH : 1;
    if (other.bytesPerSecond > worth * best.bytesPerSecond) best = other;
  }
  if (best.bytesPerSecond === 0 && failures.length > 0) throw failures[0];
  return { ...best, measured, milliseconds: performance.now() - start };
}

/** Bytes a second of several workers at once; 0 if one of them can not read so beside the others. */
async function together(
  workers: readonly Pick<Remote, 'call'>[],
  probe: Omit<Probe, 'first'>,
  failures: unknown[],
): Promise<number> {
  const read = (worker: Pick<Remote, 'call'>, first: number) =>
    worker.call<Probed>('probe', { ...probe, first }).catch((error: unknown): Probed => {
      failures.push(error);
      return { bytes: 0, milliseconds: 0 };
    });
  const results = await Promise.all(workers.map(read));
  if (results.some(({ bytes }) => bytes === 0)) return 0;
  return results.reduce((sum, { bytes, milliseconds }) => sum + (1000 * bytes) / milliseconds, 0);
}
