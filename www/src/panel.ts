// What the engine reports about itself.

import type { MemoryKind, Stats } from 'outrider';
import { byId, element } from './dom.js';
import { bytes, count, rate } from './format.js';
import { showTimeline } from './timeline.js';

const KINDS: Record<MemoryKind, string> = {
  core: 'Core weights',
  state: 'Conversation state',
  checkpoint: 'States to go back to',
  workspace: 'Activations',
  staging: 'Reads in flight',
  host: 'Tokenizer and tables',
  pool: 'Expert pool',
};

export function showStats(stats: Stats): void {
  const { memory, pool, backend, speed } = stats;
  byId('speed').textContent = rate(speed.decode);
  byId('prefill').textContent = speed.prefill > 0 ? `${rate(speed.prefill)} tokens/s reading the prompt` : '';
  showTimeline(stats);
  byId('memory-total').textContent = bytes(memory.total);
  byId('memory-budget').textContent = bytes(memory.budget);

  const parts = memory.entries.filter((entry) => entry.bytes > 0);
  byId('stack').replaceChildren(
    ...parts.map((entry) => {
      const part = element('span', `kind-${entry.kind}`);
      part.style.flexBasis = `${(100 * entry.bytes) / Math.max(memory.budget, memory.total)}%`;
      return part;
    }),
  );
  byId('stack').ariaLabel = `Memory by kind: ${parts.map((e) => `${KINDS[e.kind]} ${bytes(e.bytes)}`).join(', ')}`;
  byId('legend').replaceChildren(
    ...parts.map((entry) => {
      const row = element('div');
      row.dataset['testid'] = `memory-${entry.kind}`;
      row.dataset['bytes'] = String(entry.bytes);
      row.append(element('dt', `kind-${entry.kind}`, KINDS[entry.kind]), element('dd', '', bytes(entry.bytes)));
      return row;
    }),
  );

  byId('slots').textContent = `${count(pool.slots)} of ${count(pool.experts)}`;
  byId('hits').textContent = count(pool.hits);
  byId('misses').textContent = count(pool.misses);
  byId('read').textContent = bytes(pool.bytesRead);
  const pill = document.querySelector<HTMLElement>('.pill')!;
  pill.textContent = backend.kind === 'gpu' ? 'WebGPU' : 'CPU';
  byId('backend-detail').textContent = `${pill.textContent} (${backend.detail})`;
  pill.hidden = false;

  const notice = byId('notice');
  notice.textContent = stats.notices.join(' ');
  notice.hidden = stats.notices.length === 0;
}

/** On a narrow screen the panel lies over the conversation and is opened by a button. */
export function setUpPanel(): void {
  const toggle = byId<HTMLButtonElement>('panel-toggle');
  const panel = byId('panel');
  const set = (open: boolean) => {
    document.body.classList.toggle('panel', open);
    toggle.ariaExpanded = String(open);
    toggle.textContent = open ? 'Close' : 'Details';
  };
  toggle.addEventListener('click', () => set(toggle.ariaExpanded !== 'true'));
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && toggle.ariaExpanded === 'true') {
      set(false);
      toggle.focus();
    }
  });
  document.addEventListener('pointerdown', (event) => {
    const target = event.target as Node;
    if (!panel.contains(target) && !toggle.contains(target)) set(false);
  });
}
