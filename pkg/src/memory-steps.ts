// How much memory `memoryBudget: 'auto'` takes. No browser tells how much a page may have, and some end it without a word
// when it has too much. So loads begin low, each that went well lets the next take a step more, and what ended a page is
// not tried again. Pure: what is known goes in, what to do comes out.

/** The first step where the browser tells nothing: what pages have been given everywhere for years. */
export const FIRST = 512 * 2 ** 20;
/** A page that ends with no more than this part of the first step ended for another reason. */
const HARMLESS_PART = 1 / 4;
/** From one step to the next. */
const FACTOR = 1.5;
/** Where the browser tells how much memory the device has, the first step and the last are these parts of it. */
const FIRST_PART = 1 / 8;
const LAST_PART = 1 / 2;
/** WebAssembly has 4 GiB of addresses, and not all of them can be used up. */
const LAST_CPU = 3.5 * 2 ** 30;
/** Browsers and devices change: what failed so long ago may be tried again. */
const FORGET_MS = 30 * 24 * 3600 * 1000;

/** What is known of a device, for one backend. */
export interface Knowledge {
  /** The most that has gone well, in bytes. */
  good: number;
  /** The least that has ended a page, how many times, and when last. */
  bad?: { budget: number; times: number; at: number };
  /** What is being tried, by which engine, and whether it has gone well already. */
  trying?: { budget: number; id: string; survived: boolean };
  /** Pages in a row that ended with a budget that had gone well. Once may be chance. */
  doubts: number;
}

export const NOTHING: Knowledge = { good: 0, doubts: 0 };

/** What the browser tells. */
export interface Device {
  backend: 'cpu' | 'gpu';
  /** GiB, rounded by the browser. */
  memory: number | undefined;
}

export interface Choice {
  /** Bytes; undefined where nothing is left to be tried. */
  budget: number | undefined;
  notices: string[];
}

/**
 * What an engine that is on record as trying has shown. It has ended; `left` tells of those that ended with their page
 * closed, reloaded or out of sight, which says nothing about memory.
 */
export function judge(known: Knowledge, left: readonly string[], now: number): { known: Knowledge; notices: string[] } {
  const { trying, ...rest } = known;
  const fresh: Knowledge = { ...rest };
  if (fresh.bad && now - fresh.bad.at > FORGET_MS) delete fresh.bad;
  if (!trying) return { known: fresh, notices: [] };
  if (left.includes(trying.id)) return { known: ended({ ...fresh, trying }), notices: [] };
  if (trying.survived && fresh.doubts === 0) return { known: { ...fresh, doubts: 1 }, notices: [] };
  const notice = `the page ended when ${mib(trying.budget)} of memory were used, so it now takes less`;
  return { known: failed(fresh, trying.budget, now), notices: [notice] };
}

/** After a budget turned out to be too much. */
export function failed(known: Knowledge, budget: number, now: number): Knowledge {
  const times = known.bad?.budget === budget ? known.bad.times + 1 : 1;
  const least = Math.min(budget, known.bad?.budget ?? Infinity);
  const bad = least === budget ? { budget, times, at: now } : known.bad!;
  return { good: known.good < budget ? known.good : 0, bad, doubts: 0 };
}

/** After an engine ended as engines do. */
export function ended(known: Knowledge): Knowledge {
  const { trying, ...rest } = known;
  return { ...rest, doubts: trying?.survived ? 0 : rest.doubts };
}

/** After a budget went well. */
export function survived(known: Knowledge, budget: number): Knowledge {
  const trying = known.trying && { ...known.trying, survived: true };
  return { ...known, good: Math.max(known.good, budget), ...(trying && { trying }) };
}

/** The most that a model may be judged by before it is downloaded; undefined where everything may be tried. */
export function limit({ bad }: Knowledge): number | undefined {
  return bad && bad.times > 1 ? bad.budget - 1 : undefined;
}

/**
 * The budget for a model that works with `smallest` and is held whole by `whole`. One step more than what has gone well
 * if `may` be tried, else what has.
 */
export function choose(known: Knowledge, model: { smallest: number; whole: number }, device: Device, may: boolean): Choice {
  const { good, bad } = known;
  const all = steps(model, device);
  const allowed = all.filter((step) => !bad || step < bad.budget);
  // Less than every step is still to be had, and what ended a page once may have been chance.
  if (allowed.length === 0 && (!bad || model.smallest < bad.budget || bad.times < 2)) allowed.push(model.smallest);
  const held = allowed.filter((step) => step <= good).at(-1) ?? allowed[0];
  if (!may) {
    const notices = ['another tab is trying how much memory there is, so this one takes no more than has gone well'];
    return { budget: held, notices: held === undefined || held >= model.whole ? [] : notices };
  }
  const more = known.doubts > 0 ? undefined : allowed.find((step) => step > good);
  const budget = more ?? (known.doubts > 0 ? held : allowed.at(-1));
  const notices = [];
  if (budget !== undefined && budget < model.whole) {
    if (budget > good) notices.push(`trying ${mib(budget)} of memory${good ? `, after ${mib(good)} went well` : ''}`);
    else if (bad) notices.push(`staying at ${mib(budget)} of memory, since ${mib(bad.budget)} ended the page before`);
  }
  return { budget, notices };
}

/** What is tried for a model, from the first to the last. */
function steps({ smallest, whole }: { smallest: number; whole: number }, { backend, memory }: Device): number[] {
  const told = memory === undefined ? undefined : memory * 2 ** 30;
  const last = Math.max(smallest, Math.min(whole, (told ?? Infinity) * LAST_PART, backend === 'cpu' ? LAST_CPU : Infinity));
  const list: number[] = [];
  for (let step = Math.max(FIRST, (told ?? 0) * FIRST_PART); step < last; step *= FACTOR) {
    if (step >= smallest) list.push(Math.floor(step));
  }
  return [...list, Math.floor(last)];
}

/** Whether a budget is so small that nothing is to be learnt from it. */
export function isHarmless(budget: number): boolean {
  return budget <= FIRST * HARMLESS_PART;
}

export function mib(bytes: number): string {
  return `${Math.round(bytes / 2 ** 20)} MiB`;
}
