// The npm package in a bare page, with a server of its own that can misbehave.

import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import { fileURLToPath } from 'node:url';

import { withPage } from './harness.mjs';
import { Remote, withRemoteBrowser } from './remote.mjs';
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

/**
 * Where the package is tested. `open(server, use)` calls `use(page)` with a fresh profile and `fixtures/bare.html`:
 * `page.call(name, ...args)` calls what that page defines, `page.reload()` loads it again. `visit(server, search,
 * watch, use)` does so with the server's own page, made to obey (`fixtures/driver.js`), where nothing else drives it.
 * `some(cases)` are those that this run tries there, and `less` are options of tests of what hardly depends on the browser,
 * which without `--full` only Chromium takes. `page.send(method, params)` is there in Chromium, for its DevTools
 * protocol, and `open`'s third argument may hold `prefs` for Firefox.
 */
export const BROWSERS = [
  { name: 'Chromium', gpu: true, skip: false, open: openChromium('') },
  { name: 'Chromium as Safari', gpu: true, skip: false, open: openChromium('?profile=safari') },
  remoteBrowser('Firefox', process.env.OUTRIDER_FIREFOX, true),
  remoteBrowser('WebKit', process.env.OUTRIDER_WEBKIT, false),
]
  .filter(({ name }) => name === 'Chromium' || !process.argv.includes('--quick'))
  .map((browser) => {
    const deep = browser.name === 'Chromium' || process.argv.includes('--full');
    return { ...browser, some: deep ? (all) => all : everyThird, less: { skip: !deep && 'here only with --full' } };
  });

/** Long tables of cases are gone through in one browser, and in all of them with `--full`. */
function everyThird(cases) {
  return cases.filter((_, i) => i % 3 === 0);
}

export function openChromium(search, executablePath) {
  const open = (server, use) => async (page) => {
    const ready = () => page.waitForFunction(() => 'outrider' in globalThis);
    await page.goto(`${server.origin}/bare.html${search}`);
    await ready();
    await use({
      evaluate: (script, argument) => page.evaluate(script, argument),
      call: (name, ...args) => page.evaluate(([name, args]) => globalThis[name](...args), [name, args]),
      async send(method, params) {
        return (await page.context().newCDPSession(page)).send(method, params);
      },
      async reload() {
        await page.reload();
        await ready();
      },
    });
  };
  return (server, use) => withPage(open(server, use), executablePath);
}

function remoteBrowser(name, executable, gpu) {
  const skip = executable ? false : `no ${name} was found`;
  const start = async (server, address, use, { prefs } = {}) => {
    const remote = new Remote();
    server.routes.set('/remote', (request, response) => remote.handle(request, response));
    const call = remote.call.bind(remote);
    const page = { call, reload: () => call('reload') };
    await withRemoteBrowser(name, executable, `${server.origin}${address}`, remote, () => use(page), prefs);
  };
  const open = (server, use, options) => start(server, '/bare.html?remote', use, options);
  const visit = (server, search, watch, use) => {
    const driven = (html) => `${html}`.replace('<head>', `<head><script src="/remote/driver.js" data-watch="${watch}"></script>`);
    const end = server.fault(/^\/(index\.html)?$/, { body: driven });
    return start(server, `/${search}`, use).finally(end);
  };
  return { name, gpu, skip, open, visit };
}

/** Loads a model into the page; what the package reported on the way. */
export function load(page, options = {}) {
  return page.call('load', { model: MODEL, ...options });
}

/** A whole reply, or `{ error: { code, message, details } }`. */
export function chat(page, request) {
  return page.call('chat', request);
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
export async function loadPart(page, backend, part, more = {}) {
  const slots = Math.round(EXPERTS * part);
  let loaded = await load(page, { backend, ...more });
  for (let tries = 0; tries < 16 && !loaded.error && loaded.stats.pool.slots !== slots; tries += 1) {
    const { memory, pool } = loaded.stats;
    const slot = memory.entries.find((entry) => entry.kind === 'pool').bytes / pool.slots;
    loaded = await load(page, { backend, ...more, memoryBudget: Math.ceil(memory.total - (pool.slots - slots) * slot) });
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

/**
 * Serves the package with `memoryBudget: 'auto'` beginning at 18 MiB, so that the bundled model has several steps, on a
 * device of which nothing is known. Returns what ends that.
 */
export function fewSteps(server) {
  const edited = (from, to) => (script) => {
    assert.ok(String(script).includes(from), `${from} is not in the script`);
    return String(script).replace(from, to);
  };
  return [
    server.fault('memory-steps.js', { body: edited('512 * 2 ** 20', '18 * 2 ** 20') }),
    server.fault('memory-record.js', { body: edited('navigator.deviceMemory', 'undefined') }),
  ];
}
