// Turns the engine's counts of bytes into speed and time left.

import type { Progress } from './types.js';

/** Seconds over which the speed is averaged. */
const WINDOW = 4;

export function withSpeed(report: (progress: Progress) => void): (progress: Progress) => void {
  let phase: Progress['phase'] | undefined;
  let samples: { time: number; done: number }[] = [];
  return (progress) => {
    const time = performance.now() / 1000;
    if (progress.phase !== phase) {
      phase = progress.phase;
      samples = [];
    }
    samples.push({ time, done: progress.done });
    while (samples.length > 2 && samples[0]!.time < time - WINDOW) samples.shift();
    const first = samples[0]!;
    const bytesPerSecond = (progress.done - first.done) / (time - first.time);
    // A moment is too short to tell.
    if (time - first.time < 0.25 || !(bytesPerSecond > 0)) return report(progress);
    report({ ...progress, bytesPerSecond, secondsLeft: (progress.total - progress.done) / bytesPerSecond });
  };
}
