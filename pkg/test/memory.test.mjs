// What is tried of memory, and what is learnt from it.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import * as steps from '../dist/memory-steps.js';

const MIB = 2 ** 20;
const GIB = 2 ** 30;
const DAY = 24 * 3600 * 1000;
const PHONE = { backend: 'gpu', memory: undefined };
const MODEL = { smallest: 300 * MIB, whole: 20 * GIB };

/** A visit that ends in one of the ways there are; what is known afterwards, and what was tried. */
function visit(known, end, { model = MODEL, device = PHONE, now = 0 } = {}) {
  const judged = steps.judge(known, [], now);
  const choice = steps.choose(judged.known, model, device, true);
  const notices = [...judged.notices, ...choice.notices];
  let after = { ...judged.known, trying: { budget: choice.budget, id: 'a', survived: false } };
  if (end !== 'killed at once' && end !== 'left at once') after = steps.survived(after, choice.budget);
  if (end === 'closed') after = steps.ended(after);
  if (end === 'left at once') after = steps.judge(after, ['a'], now).known;
  return { known: after, budget: choice.budget, notices };
}

function visits(ends, options) {
  let known = steps.NOTHING;
  const budgets = [];
  let notices = [];
  for (const end of ends) {
    const seen = visit(known, end, options);
    ({ known, notices } = seen);
    budgets.push(Math.round(seen.budget / MIB));
  }
  return { known, budgets, notices };
}

test('it begins low and takes a step more after each visit that went well', () => {
  const { budgets, notices } = visits(['closed', 'closed', 'closed']);
  assert.deepEqual(budgets, [512, 768, 1152]);
  assert.match(notices.join(), /trying 1152 MiB of memory, after 768 MiB went well/);
});

test('what ended the page is not tried again, and what went well is kept', () => {
  const { budgets, notices } = visits(['closed', 'closed', 'killed at once', 'closed', 'closed']);
  assert.deepEqual(budgets, [512, 768, 1152, 768, 768]);
  assert.match(notices.join(), /staying at 768 MiB of memory, since 1152 MiB ended the page/);
  const first = visits(['killed at once', 'closed', 'closed']);
  assert.deepEqual(first.budgets, [512, 300, 300]);
});

test('a page that was closed before it answered says nothing', () => {
  assert.deepEqual(visits(['left at once', 'left at once', 'closed', 'closed']).budgets, [512, 512, 512, 768]);
});

test('what had gone well is doubted after one end and given up after two in a row', () => {
  assert.deepEqual(visits(['closed', 'killed later', 'closed', 'killed later', 'closed']).budgets, [512, 768, 768, 1152, 1152]);
  assert.deepEqual(visits(['closed', 'killed later', 'killed later', 'closed']).budgets, [512, 768, 768, 512]);
});

test('what ended the page with the least that there is, twice, is given up before anything is downloaded', () => {
  const { known, budgets } = visits(['killed at once', 'killed at once', 'killed at once']);
  assert.deepEqual(budgets, [512, 300, 300]);
  const judged = steps.judge(known, [], 0).known;
  assert.equal(steps.choose(judged, MODEL, PHONE, true).budget, undefined);
  assert.equal(steps.limit(judged), MODEL.smallest - 1);
  assert.equal(steps.choose(judged, { smallest: 100 * MIB, whole: GIB }, PHONE, true).budget, 100 * MIB);
  const later = steps.judge(known, [], 31 * DAY).known;
  const forgotten = steps.judge({ ...later, trying: undefined }, [], 62 * DAY).known;
  assert.equal(steps.choose(forgotten, MODEL, PHONE, true).budget, 512 * MIB);
});

test('what the browser tells about the device is heeded', () => {
  const told = (memory, backend = 'gpu') => visits(Array(9).fill('closed'), { device: { backend, memory } }).budgets;
  assert.deepEqual(told(8), [1024, 1536, 2304, 3456, 4096, 4096, 4096, 4096, 4096]);
  assert.deepEqual(told(1), [512, 512, 512, 512, 512, 512, 512, 512, 512]);
  assert.equal(told(undefined, 'cpu').at(-1), 3584);
  assert.equal(told(64, 'cpu').at(-1), 3584);
});

test('a model that is smaller than the first step is held whole, and without a word', () => {
  const choice = steps.choose(steps.NOTHING, { smallest: 20 * MIB, whole: 40 * MIB }, PHONE, true);
  assert.deepEqual(choice, { budget: 40 * MIB, notices: [] });
  assert.ok(steps.isHarmless(40 * MIB));
  assert.ok(!steps.isHarmless(300 * MIB));
});

test('a tab beside the one that tries takes what has gone well', () => {
  const known = { good: 800 * MIB, doubts: 0, trying: { budget: 1152 * MIB, id: 'b', survived: false } };
  const choice = steps.choose(known, MODEL, PHONE, false);
  assert.equal(choice.budget, 768 * MIB);
  assert.match(choice.notices.join(), /another tab/);
});
