// What happened when in one token's last pass: a row for each layer and one for the logits, time from left to right. In the
// upper part of a row what the host did there, in the lower the reads of that layer's experts.

import type { PassTimes, Span, TokenTimes } from 'outrider';
import { byId, element } from './dom.js';
import { count, time } from './format.js';

/** Units of the drawing: its width, a row's height, and where in it reads begin. */
const WIDTH = 1000;
const ROW = 10;
const READS = 6;
/** What is narrower would not be seen. */
const LEAST = 1.5;

const KINDS = {
  computing: 'Computing',
  gpu: 'Waiting for the GPU',
  uploads: 'Into the pool',
  flash: 'Waiting for flash',
  demand: 'Reads on demand',
  ahead: 'Reads ahead',
};

type Kind = keyof typeof KINDS;

interface Bar {
  kind: Kind;
  /** None for the logits. */
  layer: number | undefined;
  begin: number;
  end: number;
}

/** `later` tokens have come since. */
export function showLayers(token: TokenTimes | undefined, later: number, gpu: boolean): void {
  const chart = byId('layers');
  const note = byId('layers-note');
  const pass = token?.pass;
  const name = later === 0 ? 'The latest token' : `The token ${later} before the latest`;
  byId('token').ariaValueText = name;
  chart.hidden = !pass;
  if (!pass) {
    note.textContent = token ? `${name} is too long ago: what it did layer by layer is not kept.` : '';
    byId('layer-kinds').replaceChildren();
    return;
  }

  const bars = barsOf(pass, gpu);
  const layers = 1 + Math.max(0, ...bars.map(({ layer }) => layer ?? 0));
  const kinds = (Object.keys(KINDS) as Kind[]).filter((kind) => kind !== 'gpu' || gpu);
  const drawing = svg('svg', { viewBox: `0 0 ${WIDTH} ${(layers + 1) * ROW}`, preserveAspectRatio: 'none' });
  drawing.append(...kinds.map((kind) => svg('path', { class: `part-${kind}`, d: outline(kind, bars, pass, layers) })));
  chart.style.height = `${Math.min(Math.max(layers, 4), 20)}rem`;
  chart.dataset['layers'] = String(layers);
  chart.replaceChildren(drawing);

  byId('layer-kinds').replaceChildren(...kinds.map((kind) => legend(kind, bars, gpu)));
  const rows = `a row for each of ${layers} layers, the last for logits`;
  note.textContent = `${name}: a pass of ${time(pass.milliseconds)} from left to right, ${rows}.`;
  const told = [...byId('layer-kinds').children].map((row) => [...row.children].map((e) => e.textContent).join(' '));
  chart.ariaLabel = `${note.textContent} ${told.join(', ')}`;
}

function barsOf({ spans }: PassTimes, gpu: boolean): Bar[] {
  // What was cancelled was taken back before it began.
  const began = spans.filter((span) => span.what !== 'read' || span.outcome !== 'cancelled');
  return began.map((span) => {
    const { begin, end } = span;
    return { kind: kindOf(span, gpu), layer: layerOf(span), begin, end };
  });
}

function kindOf(span: Span, gpu: boolean): Kind {
  switch (span.what) {
    case 'read':
      return span.demand ? 'demand' : 'ahead';
    case 'stall':
      return span.of === 'bytes' ? 'flash' : 'gpu';
    case 'upload':
      return 'uploads';
    case 'logits':
      return gpu ? 'gpu' : 'computing';
    default:
      return 'computing';
  }
}

function layerOf(span: Span): number | undefined {
  if (span.what === 'logits') return undefined;
  if (span.what !== 'foresee') return span.layer;
  return span.origin === 'embedding' ? 0 : span.origin.layer;
}

const isRead = (kind: Kind): boolean => kind === 'demand' || kind === 'ahead';

/** All bars of a kind as one path. */
function outline(kind: Kind, bars: Bar[], pass: PassTimes, layers: number): string {
  const [top, bottom] = isRead(kind) ? [READS, ROW - 1] : [1, READS];
  const x = (ms: number) => (WIDTH * Math.min(Math.max(ms / pass.milliseconds, 0), 1)).toFixed(1);
  const least = (LEAST * pass.milliseconds) / WIDTH;
  const bar = ({ layer = layers, begin, end }: Bar) => {
    const y = ROW * layer;
    return `M${x(begin)} ${y + top}H${x(Math.max(end, begin + least))}V${y + bottom}H${x(begin)}Z`;
  };
  return bars.filter((b) => b.kind === kind).map(bar).join('');
}

function legend(kind: Kind, bars: Bar[], gpu: boolean): HTMLElement {
  const of = bars.filter((bar) => bar.kind === kind);
  const ms = of.reduce((sum, { begin, end }) => sum + end - begin, 0);
  const row = element('div');
  row.dataset['testid'] = `layers-${kind}`;
  row.dataset['milliseconds'] = String(ms);
  row.dataset['count'] = String(of.length);
  const name = kind === 'computing' && gpu ? 'Handing over to the GPU' : KINDS[kind];
  // Reads go on side by side, so that their times add up to nothing that was waited for.
  row.append(element('dt', `part-${kind}`, name), element('dd', '', isRead(kind) ? count(of.length) : time(ms)));
  return row;
}

function svg(name: string, attributes: Record<string, string>): SVGElement {
  const made = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
