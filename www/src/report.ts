// What someone who was not there needs to know, for `docs/iphone.md`: the machine, the engine, how loading and the last
// replies went, and what happened when. Nothing that was typed or answered is in it.

import { type Progress, type Stats, type Timings, type TokenTimes, VERSION } from 'outrider';
import { byId } from './dom.js';

const REPLIES = 5;
const EVENTS = 40;
const TOKENS = 32;
const SHOWN_MS = 4000;
/** Where a page notes that it lives. A note that is still there when the next one starts was left by a sudden end. */
const NOTE = 'outrider-alive';

interface Load {
  options: Record<string, unknown>;
  phases: { phase: Progress['phase']; seconds: number; bytes: number }[];
  outcome: string;
}

interface Reply {
  promptTokens?: number;
  promptPerSecond?: number;
  tokens?: number;
  tokensPerSecond?: number;
  firstTokenSeconds?: number;
  seconds: number;
  misses?: number;
  bytesRead?: number;
  outcome: string;
}

let stats: Stats | undefined;
let load: Load | undefined;
let adapter: unknown = 'not asked for yet';
let storage: unknown = 'not asked for yet';
const replies: Reply[] = [];
const events: string[] = [];

const now = (): number => performance.now() / 1000;
/** Three digits say what a time or a speed measured once can say. */
const round = (n: number): number => Number(n.toPrecision(3));

const rounded = ({ pass, ...token }: TokenTimes): TokenTimes => ({
  ...token,
  milliseconds: round(token.milliseconds),
  flash: round(token.flash),
  results: round(token.results),
});

function happened(what: string): void {
  events.push(`${now().toFixed(1)} s: ${what}`);
  if (events.length > EVENTS) events.shift();
  note();
}

/** Whether the page is being left in good order. It is told that it is hidden after that. */
let leaving = false;

/** Storage may be forbidden, which costs this note and nothing else. */
function note(): void {
  try {
    if (leaving) sessionStorage.removeItem(NOTE);
    else sessionStorage.setItem(NOTE, `${events.at(-1)}, ${document.visibilityState}`);
  } catch {}
}

export function keepStats(latest: Stats | undefined): void {
  stats = latest;
}

/** Times the phases of loading. */
export class LoadClock {
  readonly #load: Load;
  #first = { phase: '', time: 0, done: 0 };

  constructor(options: Record<string, unknown>) {
    this.#load = load = { options, phases: [], outcome: 'in progress' };
    happened(`loading ${JSON.stringify(options)}`);
  }

  progress({ phase, done }: Progress): void {
    const time = now();
    if (phase !== this.#first.phase) {
      this.#close(time);
      this.#first = { phase, time, done };
      this.#load.phases.push({ phase, seconds: 0, bytes: 0 });
    }
    this.#load.phases.at(-1)!.bytes = done - this.#first.done;
  }

  end(outcome: string): void {
    this.#close(now());
    this.#first.phase = '';
    this.#load.outcome = outcome;
    happened(outcome);
    void look();
  }

  #close(time: number): void {
    const last = this.#load.phases.at(-1);
    if (last && this.#first.phase) last.seconds = round(time - this.#first.time);
  }
}

/** Times a reply. */
export class ReplyClock {
  readonly #start = now();
  readonly #before = stats?.pool;
  #first: number | undefined;

  text(): void {
    this.#first ??= now();
  }

  end(outcome: string, timings: Timings | undefined, after: Stats | undefined): void {
    const pool = after?.pool;
    replies.push({
      ...(timings && {
        promptTokens: timings.prompt_n,
        promptPerSecond: round(timings.prompt_per_second),
        tokens: timings.predicted_n,
        tokensPerSecond: round(timings.predicted_per_second),
      }),
      ...(this.#first !== undefined && { firstTokenSeconds: round(this.#first - this.#start) }),
      seconds: round(now() - this.#start),
      ...(pool && this.#before && { misses: pool.misses - this.#before.misses, bytesRead: pool.bytesRead - this.#before.bytesRead }),
      outcome,
    });
    if (replies.length > REPLIES) replies.shift();
    happened(`reply: ${outcome}`);
  }
}

/** What can only be learnt by waiting is learnt beforehand: copying is allowed in the very moment of a click. */
async function look(): Promise<void> {
  try {
    const found = await navigator.gpu?.requestAdapter();
    const { vendor, architecture, device, description } = found?.info ?? {};
    const { maxBufferSize, maxStorageBufferBindingSize } = found?.limits ?? {};
    const features = found && [...found.features].sort();
    adapter = found ? { vendor, architecture, device, description, maxBufferSize, maxStorageBufferBindingSize, features } : null;
  } catch (error) {
    adapter = String(error);
  }
  try {
    const { usage, quota } = await navigator.storage.estimate();
    storage = { usage, quota, persisted: await navigator.storage.persisted() };
  } catch (error) {
    storage = String(error);
  }
}

export function report(): string {
  const { userAgent, language, hardwareConcurrency, maxTouchPoints } = navigator;
  const { deviceMemory } = navigator as { deviceMemory?: number };
  return JSON.stringify(
    {
      outrider: VERSION,
      time: new Date().toISOString(),
      openSeconds: round(now()),
      browser: {
        userAgent,
        language,
        screen: `${screen.width} × ${screen.height} at ${devicePixelRatio}`,
        cores: hardwareConcurrency,
        memoryGiB: deviceMemory,
        touchPoints: maxTouchPoints,
        online: navigator.onLine,
        isolated: crossOriginIsolated,
      },
      adapter,
      storage,
      load,
      engine: stats && { ...stats, tokens: stats.tokens.slice(0, TOKENS).map(rounded) },
      replies,
      events,
    },
    // What a browser does not tell is said to be unknown.
    (_, value: unknown) => (value === undefined ? null : value),
    2,
  );
}

export function setUpReport(): void {
  const told = byId('report-status');
  const text = byId<HTMLTextAreaElement>('report-text');
  let hiding: ReturnType<typeof setTimeout> | undefined;
  const tell = (message: string) => {
    told.textContent = message;
    clearTimeout(hiding);
    hiding = setTimeout(() => (told.textContent = ''), SHOWN_MS);
  };
  byId('report').addEventListener('click', async () => {
    const copied = report();
    text.hidden = true;
    try {
      await navigator.clipboard.writeText(copied);
      tell('Copied. Paste it into an issue or a message.');
    } catch {
      // No clipboard for this page: what is selected can still be copied by hand.
      text.value = copied;
      text.hidden = false;
      text.focus();
      text.setSelectionRange(0, copied.length);
      clearTimeout(hiding);
      told.textContent = 'The browser does not let the page copy. The report is selected below: copy it from there.';
    }
  });

  try {
    const left = sessionStorage.getItem(NOTE);
    if (left) happened(`the page before this one ended suddenly, after ${left}`);
  } catch {}
  document.addEventListener('visibilitychange', () => happened(document.visibilityState));
  addEventListener('pagehide', () => {
    leaving = true;
    note();
  });
  addEventListener('pageshow', ({ persisted }) => {
    leaving = false;
    if (persisted) happened('came back from the page cache');
  });
}
