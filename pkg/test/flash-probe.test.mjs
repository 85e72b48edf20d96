// What is found out about reading, with workers that are made up.

import assert from 'node:assert/strict';
import { describe, test } from 'node:test';

import { measureFlash } from '../dist/flash-probe.js';

const SAMPLE = { file: 'experts', bytes: 100, piece: 10 };

/** Workers that read so many bytes a second by each way, or fail with what is no number. */
const workers = (speeds) => [0, 1].map((worker) => ({
  async call(op, { way }) {
    const speed = [speeds[way]].flat()[worker] ?? speeds[way];
    if (typeof speed !== 'number') throw speed;
    return { bytes: speed, milliseconds: speed && 1000 };
  },
}));

describe('the probe of flash', () => {
  test('takes the fastest way', async () => {
    const { way, lanes, bytesPerSecond } = await measureFlash(workers({ sync: 10, slice: 30 }), SAMPLE);
    assert.deepEqual([way, lanes, bytesPerSecond], ['slice', 2, 60]);
  });

  test('counts a way that fails as one that does not work', async () => {
    const broken = new Error('as asked');
    for (const [speeds, way, lanes, measured] of [
      [{ sync: 10, slice: broken }, 'sync', 2, [10, 20, 0]],
      [{ sync: broken, slice: 10 }, 'slice', 2, [0, 10, 20]],
      [{ sync: [10, broken], slice: 0 }, 'sync', 1, [10, 0, 0]],
    ]) {
      const found = await measureFlash(workers(speeds), SAMPLE);
      assert.deepEqual([found.way, found.lanes], [way, lanes]);
      assert.deepEqual(found.measured.map((m) => m.bytesPerSecond), measured);
    }
  });

  test('says why where no way works', async () => {
    const [first, second] = [new Error('one'), new Error('two')];
    await assert.rejects(measureFlash(workers({ sync: first, slice: second }), SAMPLE), first);
  });
});
