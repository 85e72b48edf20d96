// The npm package in a bare page, with a server of its own that can misbehave.

import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import { fileURLToPath } from 'node:url';

import { withPage } from './harness.mjs';
import { startServer } from './server.mjs';

export const ROOT = fileURLToPath(new URL('../../', import.meta.url));

/** What the native CPU backend answers: {prompt, token_ids, text}. */
export const REPLIES = JSON.parse(await readFile(`${ROOT}tests/data/concierge/replies.json`, 'utf8'));

export const MODEL = '/models/concierge/';

/** Experts of the bundled model: layers × experts a layer. */
export const EXPERTS = 8 * 64;

export function servePackage(options = {}) {
  const mounts = { '/': `${ROOT}tests/browser/fixtures`, '/pkg': `${ROOT}pkg/dist`, '/models': `${ROOT}models` };
  return startServer({ mounts, ...options });
}

/** A page on that server which has the package as `outrider`, and helpers for `evaluate`. */
export function withPackage(server, use) {
  return withPage(async (page) => {
    await page.goto(`${server.origin}/bare.html`);
    await page.waitForFunction(() => 'outrider' in globalThis);
    await use(page);
  });
}

/** Loads a model into the page; what the package reported on the way. */
export async function load(page, options = {}) {
  return page.evaluate((options) => globalThis.load(options), { model: MODEL, ...options });
}

/** A whole reply, or `{ error: { code, message, details } }`. */
export async function chat(page, request) {
  return page.evaluate((request) => globalThis.chat(request), request);
}

/** A request as `tests/replies.rs` makes it. */
export function greedy(prompt, more = {}) {
  const messages = [{ role: 'user', content: prompt }];
  return { messages, temperature: 0, max_tokens: 32, return_token_ids: true, ...more };
}

/**
 * Loads with the budget that holds this part of the experts, found in steps, because a smaller budget may also make
 * other buffers smaller.
 */
export async function loadPart(page, backend, part) {
  const slots = Math.round(EXPERTS * part);
  let loaded = await load(page, { backend });
  for (let tries = 0; tries < 4 && !loaded.error && loaded.stats.pool.slots !== slots; tries += 1) {
    const { memory, pool } = loaded.stats;
    const slot = memory.entries.find((entry) => entry.kind === 'pool').bytes / pool.slots;
    loaded = await load(page, { backend, memoryBudget: Math.ceil(memory.total - (pool.slots - slots) * slot) });
  }
  if (loaded.error) throw new Error(loaded.error.message);
  return loaded.stats;
}

export async function answersAsRecorded(page, replies = REPLIES) {
  for (const { prompt, token_ids, text } of replies) {
    const reply = await chat(page, greedy(prompt));
    assert.ifError(reply.error && new Error(reply.error.message));
    assert.deepEqual(reply.choices[0].token_ids, token_ids, prompt);
    assert.equal(reply.choices[0].message.content, text);
  }
}
