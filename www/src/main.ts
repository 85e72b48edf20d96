// The demo: loads the bundled model and chats with it.
//
// `?backend=auto|gpu|cpu`, `?budget=64MiB` or `auto` and `?model=ADDRESS` choose how. For tests, elements are named by
// `data-testid`, and the body's `data-state` is `loading`, `ready`, `generating` or `failed`.

import {
  type ChatCompletionRequest,
  type Engine,
  OutriderError,
  type Timings,
  createEngine,
  removeModel,
} from 'outrider';
import { Conversation } from './conversation.js';
import { byId } from './dom.js';
import { rate } from './format.js';
import { hideProgress, showProgress } from './loading.js';
import { setUpPanel, showStats } from './panel.js';
import { LoadClock, ReplyClock, keepStats, setUpReport } from './report.js';
import { setUpTimeline } from './timeline.js';

type State = 'loading' | 'ready' | 'generating' | 'failed';
type Backend = 'auto' | 'gpu' | 'cpu';

const BUDGETS = ['', 'auto', '16MiB', '24MiB', '32MiB', '64MiB', '128MiB', '256MiB'];
const STATS_MS = 250;

const composer = byId<HTMLFormElement>('composer');
const input = byId<HTMLTextAreaElement>('input');
const send = byId<HTMLButtonElement>('send');
const stop = byId<HTMLButtonElement>('stop');
const failure = byId('failure');
const budgetChoice = byId<HTMLSelectElement>('budget-choice');
const backendChoice = byId<HTMLSelectElement>('backend-choice');

const address = new URL(location.href);
const model = new URL(address.searchParams.get('model') ?? 'models/concierge/', document.baseURI);
const conversation = new Conversation({ edit, retry });
let engine: Engine | undefined;
let loading: AbortController | undefined;
let reply: AbortController | undefined;
/** Whether a question was asked before the model was there. */
let waiting = false;

function setState(state: State): void {
  document.body.dataset['state'] = state;
  send.disabled = waiting;
  send.hidden = state === 'generating';
  stop.hidden = state !== 'generating';
  if (state !== 'failed') failure.hidden = true;
}

function fail(error: unknown): void {
  hideProgress();
  const text = error instanceof Error ? error.message : String(error);
  byId('failure-text').textContent = text.charAt(0).toUpperCase() + text.slice(1) + '.';
  failure.dataset['code'] = error instanceof OutriderError ? error.code : 'unknown';
  failure.hidden = false;
  setState('failed');
}

/** An error, for the report. */
function told(error: unknown): string {
  return error instanceof OutriderError ? `${error.code}: ${error.message}` : String(error);
}

async function load(): Promise<void> {
  const control = new AbortController();
  loading?.abort();
  loading = control;
  reply?.abort();
  const previous = engine;
  engine = undefined;
  keepStats(undefined);
  setState('loading');
  showProgress({ phase: 'open', done: 0, total: 0 });
  await previous?.dispose();
  if (control.signal.aborted) return;
  const budget = budgetChoice.value;
  const options = { model, backend: backendChoice.value as Backend, ...(budget && { memoryBudget: budget }) };
  const clock = new LoadClock(options);
  try {
    const made = await createEngine({
      ...options,
      timeline: true,
      signal: control.signal,
      onProgress: (progress) => {
        if (control.signal.aborted) return;
        clock.progress(progress);
        showProgress(progress);
      },
    });
    if (control.signal.aborted) return void made.dispose();
    engine = made;
    void made.closed.then((error) => {
      if (engine !== made) return;
      engine = undefined;
      clock.end(told(error));
      fail(error);
    });
    const stats = await made.stats();
    keepStats(stats);
    showStats(stats);
    clock.end('ready');
    hideProgress();
    setState('ready');
  } catch (error) {
    if (control.signal.aborted) return;
    clock.end(told(error));
    fail(error);
    return;
  }
  if (waiting) await answer();
}

/** Sends a question, at once or when the model is there. */
function ask(question: string): void {
  const text = question.trim();
  if (!text || reply || waiting) return;
  input.value = '';
  conversation.addUser(text);
  waiting = true;
  send.disabled = true;
  if (engine) void answer();
}

function edit(text: string): void {
  abandon();
  input.value = text;
  input.focus();
}

/** As the model's own settings say: what is likeliest would be the same reply. */
function retry(): void {
  input.focus();
  if (engine) void answer({});
  else waiting = send.disabled = true;
}

/** Gives up the reply in progress, and the question that waits for the model. */
function abandon(): void {
  reply?.abort();
  waiting = false;
  send.disabled = false;
}

async function answer(sampling: Pick<ChatCompletionRequest, 'temperature'> = { temperature: 0 }): Promise<void> {
  if (!engine) return;
  waiting = false;
  const current = engine;
  const control = new AbortController();
  reply = control;
  setState('generating');
  const shown = conversation.beginReply();
  const clock = new ReplyClock();
  const poll = setInterval(() => void refresh(current), STATS_MS);
  let foot = '';
  let outcome = '';
  let timings: Timings | undefined;
  try {
    const stream = current.chat.completions.create(
      { messages: conversation.messages, stream: true, max_tokens: 256, ...sampling },
      { signal: control.signal },
    );
    for await (const chunk of stream) {
      const choice = chunk.choices[0];
      if (choice?.delta.content) {
        clock.text();
        shown.add(choice.delta.content);
      }
      outcome = choice?.finish_reason ?? outcome;
      timings = chunk.timings ?? timings;
      if (choice?.finish_reason === 'length') foot = 'The reply reached its longest length.';
    }
  } catch (error) {
    outcome = told(error);
    if (control.signal.aborted) foot = 'Stopped.';
    else if (engine === current && error instanceof OutriderError && error.code === 'context') foot = `${error.message}.`;
    else if (engine === current) fail(error);
  } finally {
    clearInterval(poll);
    reply = undefined;
  }
  const stats = await refresh(current);
  clock.end(outcome, timings, stats);
  const speed = stats?.speed.decode ?? 0;
  shown.finish([foot, speed > 0 ? `${rate(speed)} tokens/s` : ''].filter(Boolean).join(' '));
  if (engine === current && document.body.dataset['state'] === 'generating') setState('ready');
}

async function refresh(of: Engine) {
  try {
    const stats = await of.stats();
    if (of === engine) {
      keepStats(stats);
      showStats(stats);
    }
    return stats;
  } catch {
    // The engine is gone, which is reported where it matters.
    return undefined;
  }
}

function choose(name: 'budget' | 'backend', value: string, absent: string): void {
  if (value === absent) address.searchParams.delete(name);
  else address.searchParams.set(name, value);
  history.replaceState(null, '', address);
  void load();
}

function setUpChoices(): void {
  const budget = address.searchParams.get('budget') ?? '';
  for (const value of BUDGETS.includes(budget) ? BUDGETS : [...BUDGETS, budget]) {
    const named = { '': 'Whole model', auto: 'As turns out to work' }[value];
    budgetChoice.add(new Option(named ?? value.replace(/(?<=\d)(?=[a-z])/i, ' '), value));
  }
  budgetChoice.value = budget;
  const backend = address.searchParams.get('backend') ?? 'auto';
  backendChoice.value = ['gpu', 'cpu'].includes(backend) ? backend : 'auto';
  budgetChoice.addEventListener('change', () => choose('budget', budgetChoice.value, ''));
  backendChoice.addEventListener('change', () => choose('backend', backendChoice.value, 'auto'));
}

composer.addEventListener('submit', (event) => {
  event.preventDefault();
  ask(input.value);
});
input.addEventListener('keydown', (event) => {
  // Enter sends, Shift+Enter breaks the line; while an input method composes, Enter belongs to it.
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    composer.requestSubmit();
  }
});
stop.addEventListener('click', () => {
  reply?.abort();
  input.focus();
});
byId('clear').addEventListener('click', () => {
  abandon();
  conversation.clear();
  input.focus();
});
byId('retry').addEventListener('click', () => void load());
byId('forget').addEventListener('click', async () => {
  const previous = engine;
  engine = undefined;
  loading?.abort();
  await previous?.dispose();
  try {
    await removeModel(model);
    fail(new Error('the model was deleted from this browser; try again to download it'));
  } catch (error) {
    fail(error);
  }
});
for (const suggestion of document.querySelectorAll<HTMLButtonElement>('.suggestions button')) {
  suggestion.addEventListener('click', () => ask(suggestion.textContent ?? ''));
}

setUpPanel();
setUpTimeline();
setUpReport();
setUpChoices();
await load();
// After the model, which is waited for. The page works without, where there is a network.
if (import.meta.env.PROD) navigator.serviceWorker?.register('./offline.js').catch(() => {});
