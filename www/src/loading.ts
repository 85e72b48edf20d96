// What is shown while the model is brought in.

import type { Progress } from 'outrider';
import { byId } from './dom.js';
import { bytes, duration } from './format.js';

const PHASES: Record<Progress['phase'], string> = {
  open: 'Looking for the model',
  verify: 'Verifying what is here already',
  download: 'Downloading the model',
  load: 'Loading the model into memory',
  warmup: 'Warming up',
};

const card = byId('loading');
const phase = byId('phase');
const bar = byId<HTMLProgressElement>('bar');
const figures = byId('figures');

export function showProgress(progress: Progress): void {
  card.hidden = false;
  card.dataset['phase'] = progress.phase;
  // Only changes are announced, so the text is set when it differs.
  if (phase.textContent !== PHASES[progress.phase]) phase.textContent = PHASES[progress.phase];
  if (progress.total > 0) {
    bar.max = progress.total;
    bar.value = progress.done;
  } else {
    bar.removeAttribute('value');
  }
  const parts: string[] = [];
  if (progress.total > 0) parts.push(`${bytes(progress.done)} of ${bytes(progress.total)}`);
  if (progress.bytesPerSecond !== undefined) parts.push(`${bytes(progress.bytesPerSecond)}/s`);
  if (progress.secondsLeft !== undefined && progress.done < progress.total) {
    parts.push(`${duration(progress.secondsLeft)} left`);
  }
  figures.textContent = parts.join(' · ');
}

export function hideProgress(): void {
  card.hidden = true;
}
