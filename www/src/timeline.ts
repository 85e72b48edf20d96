// What each token of the reply waited for: a column a token, the latest at the right.

import type { Stats, TokenTimes } from 'outrider';
import { byId, element } from './dom.js';
import { time } from './format.js';
import { showLayers } from './layers.js';

/** What the panel has room for. */
const COLUMNS = 64;
/** From the bottom of a column up. */
const PARTS = { computing: 'Computing', gpu: 'Waiting for the GPU', flash: 'Waiting for flash' };

type Part = keyof typeof PARTS;

/** One token's milliseconds, or those of several. */
interface Times {
  all: number;
  parts: [Part, number][];
}

/** What is shown, and which of its tokens by layers: how many came after it. */
let current: Stats | undefined;
let later = 0;

export function setUpTimeline(): void {
  const slider = byId<HTMLInputElement>('token');
  slider.addEventListener('input', () => choose(Number(slider.max) - Number(slider.value)));
  byId('timeline').addEventListener('click', ({ target }) => {
    const columns = [...byId('timeline').children];
    const at = columns.findIndex((column) => column.contains(target as Node));
    if (at >= 0) choose(columns.length - 1 - at);
  });
}

function choose(at: number): void {
  later = at;
  showChosen();
}

function showChosen(): void {
  const { tokens, backend } = current!;
  const shown = Math.min(tokens.length, COLUMNS);
  const slider = byId<HTMLInputElement>('token');
  slider.max = String(shown);
  slider.value = String(shown - later);
  byId('token-row').hidden = shown === 0;
  [...byId('timeline').children].forEach((column, i) => column.classList.toggle('chosen', i === shown - 1 - later));
  showLayers(tokens[later], later, backend.kind === 'gpu');
}

export function showTimeline(stats: Stats): void {
  const { backend, tokens } = stats;
  // Once there is another token, it is the latest again.
  if (tokens[0]?.milliseconds !== current?.tokens[0]?.milliseconds) later = 0;
  current = stats;
  const times = tokens.map((token) => split(token, backend.kind === 'gpu'));
  const shown = times.slice(0, COLUMNS);
  // The reply's first token waits for the whole prompt, and beside it the others would not be seen.
  const prompt = shown.length === times.length ? shown.at(-1) : undefined;
  const compared = shown.length > 1 ? shown.filter((token) => token !== prompt) : shown;
  const highest = Math.max(...compared.map(({ all }) => all));

  const chart = byId('timeline');
  chart.replaceChildren(...shown.map((token) => column(token, highest)).reverse());
  const total = sum(times);
  byId('waits').replaceChildren(
    ...total.parts.map(([part, ms]) => {
      const row = element('div');
      row.dataset['testid'] = `waits-${part}`;
      row.dataset['milliseconds'] = String(ms);
      row.append(element('dt', `part-${part}`, PARTS[part]), element('dd', '', time(ms)));
      return row;
    }),
  );

  let note = 'A column for each token, once there are any.';
  if (prompt) {
    const others = shown.length > 1 ? `, ${shown.length - 1} more at most ${time(highest)} each` : '';
    note = `The first token, with the prompt, took ${time(prompt.all)}${others}.`;
  } else if (shown.length > 0) {
    note = `The latest ${shown.length} tokens took at most ${time(highest)} each. Times are of the last ${tokens.length}.`;
  }
  byId('waits-note').textContent = note;
  chart.ariaLabel = ['What each token waited for', told(total), note].filter(Boolean).join('. ');
  showChosen();
}

function split({ milliseconds, flash, results }: TokenTimes, gpu: boolean): Times {
  // With the CPU, results are computed while they are waited for.
  const waits: [Part, number][] = gpu ? [['gpu', results], ['flash', flash]] : [['flash', flash]];
  // Clocks are read one after another, and coarse ones may have ticked between.
  const computing = Math.max(0, waits.reduce((rest, [, ms]) => rest - ms, milliseconds));
  return { all: milliseconds, parts: [['computing', computing], ...waits] };
}

function sum(times: Times[]): Times {
  const parts = (times[0]?.parts ?? []).map(([part], i): [Part, number] => [
    part,
    times.reduce((ms, token) => ms + token.parts[i]![1], 0),
  ]);
  return { all: times.reduce((ms, token) => ms + token.all, 0), parts };
}

function column(token: Times, highest: number): HTMLElement {
  const made = element('span');
  made.dataset['milliseconds'] = String(token.all);
  made.style.height = `${Math.min(100, (100 * token.all) / highest)}%`;
  made.classList.toggle('cut', token.all > highest);
  made.title = `${time(token.all)}. ${told(token)}`;
  for (const [part, ms] of token.parts) {
    const piece = element('span', `part-${part}`);
    piece.dataset['milliseconds'] = String(ms);
    piece.style.height = `${(100 * ms) / token.all}%`;
    made.append(piece);
  }
  return made;
}

const told = ({ parts }: Times): string => parts.map(([part, ms]) => `${PARTS[part]} ${time(ms)}`).join(', ');
