// The demo page, as `cargo xtask demo` serves it, used the way people use it.

import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { mkdir, readFile } from 'node:fs/promises';
import { after, before, describe, test } from 'node:test';
import { promisify } from 'node:util';

import { ask, failure, reach, replyText, send } from '../demo.mjs';
import { PATIENCE, withPage } from '../harness.mjs';
import { REPLIES, ROOT } from '../package.mjs';
import { startServer } from '../server.mjs';

const MOUNTS = { '/': `${ROOT}www/dist`, '/models': `${ROOT}models` };
/** What a strict host would send. */
const POLICY = "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'";

/** Storage in which every read takes longer. */
const SLEEP_MS = 5;
const sleepy = (script) => `{
  const { read } = FileSystemSyncAccessHandle.prototype;
  const clock = new Int32Array(new SharedArrayBuffer(4));
  FileSystemSyncAccessHandle.prototype.read = function (...args) {
    Atomics.wait(clock, 0, 0, ${SLEEP_MS});
    return read.apply(this, args);
  };
}
${script}`;

const VERSION = JSON.parse(await readFile(`${ROOT}pkg/package.json`, 'utf8')).version;

const quick = process.argv.includes('--quick');

describe('the demo page', { timeout: 4 * PATIENCE }, () => {
  let server;

  before(async () => {
    server = await startServer({ mounts: MOUNTS, isolated: true, csp: POLICY });
  });
  after(() => server.close());

  /** What the page showed of its progress while it loaded. */
  async function watchProgress(page) {
    await page.addInitScript(() => {
      globalThis.shown = [];
      const look = () => {
        const card = document.querySelector('[data-testid=progress]');
        if (card && !card.hidden) {
          const text = (id) => document.querySelector(`[data-testid=${id}]`).textContent;
          const line = `${text('phase')}: ${text('progress-text')}`;
          if (globalThis.shown.at(-1) !== line) globalThis.shown.push(line);
        }
      };
      new MutationObserver(look).observe(document, { subtree: true, childList: true, characterData: true, attributes: true });
    });
    return () => page.evaluate(() => globalThis.shown);
  }

  for (const backend of quick ? ['cpu'] : ['cpu', 'gpu']) {
    test(`${backend}: downloads, answers as the native CPU does, and needs no model files the next time`, async () => {
      await withPage(async (page) => {
        const progress = await watchProgress(page);
        const slowly = server.fault('/models/', { rate: 6e6 });
        await page.goto(`${server.origin}/?backend=${backend}`);
        await reach(page, 'ready');
        slowly();
        const shown = (await progress()).join('\n');
        assert.match(shown, /Downloading the model: [\d.]+ MiB of 19\.\d MiB · [\d.]+ MiB\/s · \d+ s left/);
        assert.match(shown, /Loading the model into memory/);
        assert.match(shown, /Warming up/);
        assert.equal(await ask(page, REPLIES[0].prompt), REPLIES[0].text);

        const gone = server.fault('/models/', { status: 404 });
        await page.reload();
        await reach(page, 'ready');
        assert.equal(await ask(page, REPLIES[1].prompt), REPLIES[1].text);
        gone();
        const pill = await page.getByTestId('backend-pill').innerText();
        assert.equal(pill, backend === 'gpu' ? 'WebGPU' : 'CPU');
      });
    });
  }

  test('shows speed, memory by kind against the budget, and the pool', async () => {
    await withPage(async (page) => {
      await page.setViewportSize({ width: 1200, height: 760 });
      await page.goto(`${server.origin}/?backend=cpu&budget=16MiB`);
      await reach(page, 'ready');
      assert.equal(await ask(page, REPLIES[3].prompt), REPLIES[3].text);
      assert.match(await page.getByTestId('speed').innerText(), /^[\d.]+$/);
      assert.equal(await page.getByTestId('memory-budget').innerText(), '16.0 MiB');
      const kinds = await page.getByTestId('memory-kinds').locator('[data-bytes]').all();
      const bytes = await Promise.all(kinds.map(async (kind) => Number(await kind.getAttribute('data-bytes'))));
      assert.ok(bytes.length >= 5);
      const total = bytes.reduce((sum, n) => sum + n, 0);
      assert.ok(total <= 16 * 2 ** 20);
      assert.equal(await page.getByTestId('memory-total').innerText(), `${(total / 2 ** 20).toFixed(1)} MiB`);
      assert.match(await page.getByTestId('pool-slots').innerText(), /^\d+ of 512$/);
      for (const id of ['pool-hits', 'pool-misses']) {
        assert.ok(Number((await page.getByTestId(id).innerText()).replace(/,/g, '')) > 0, id);
      }
      await ask(page, 'Please find me a hotel in San Francisco.');
      await mkdir(`${ROOT}tests/browser/out`, { recursive: true });
      await page.screenshot({ path: `${ROOT}tests/browser/out/demo.png` });
      // A model as small as this one fits anywhere, which is what the page then finds.
      await page.getByTestId('budget-choice').selectOption('auto');
      await page.getByText('512 of 512').waitFor();
    });
  });

  test('draws what each token waited for, while the reply is there and after', async () => {
    await withPage(async (page) => {
      const end = server.fault('flash-worker', { body: sleepy });
      await page.setViewportSize({ width: 1200, height: 760 });
      await page.goto(`${server.origin}/?backend=cpu&budget=16MiB`);
      await reach(page, 'ready');
      end();
      const chart = page.getByTestId('timeline');
      assert.equal(await chart.getAttribute('role'), 'img');
      assert.equal(await chart.locator('> *').count(), 0);
      assert.match(await page.getByTestId('waits-note').innerText(), /once there are any/);

      // Every number of columns there was while the reply came.
      await chart.evaluate((chart) => {
        globalThis.counts = [];
        const look = () => document.body.dataset.state === 'generating' && globalThis.counts.push(chart.childElementCount);
        new MutationObserver(look).observe(chart, { childList: true });
      });
      const { prompt, text, token_ids } = REPLIES[3];
      assert.equal(await ask(page, prompt), text);
      const counts = await page.evaluate(() => globalThis.counts);
      const growing = counts.filter((n) => n > 0 && n < token_ids.length);
      assert.ok(new Set(growing).size >= 2, `columns: ${counts.join()}`);

      const columns = await chart.locator('> *').evaluateAll((columns) => {
        const read = (e) => ({ ms: Number(e.dataset.milliseconds), height: e.getBoundingClientRect().height });
        return columns.map((e) => ({ ...read(e), parts: [...e.children].map(read) }));
      });
      assert.equal(columns.length, Math.min(64, token_ids.length));
      const sum = (list, of) => list.reduce((total, item) => total + of(item), 0);
      for (const { ms, height, parts } of columns) {
        assert.ok(ms > 0 && Math.abs(sum(parts, (part) => part.ms) - ms) < 0.01, `${ms} ms: ${JSON.stringify(parts)}`);
        assert.ok(Math.abs(sum(parts, (part) => part.height) - height) < 1, `${height} pixels: ${JSON.stringify(parts)}`);
      }
      const legend = async (part) => Number(await page.getByTestId(`waits-${part}`).getAttribute('data-milliseconds'));
      const [computing, flash] = [await legend('computing'), await legend('flash')];
      assert.ok(Math.abs(computing + flash - sum(columns, ({ ms }) => ms)) < 0.1);
      assert.ok(computing > 0 && flash >= SLEEP_MS * columns.length, `${flash} ms of flash in ${columns.length} tokens`);
      assert.equal(await page.getByTestId('waits-gpu').count(), 0);

      const label = await chart.getAttribute('aria-label');
      for (const part of ['computing', 'flash']) {
        const [name, time] = (await page.getByTestId(`waits-${part}`).innerText()).split('\n');
        assert.ok(label.includes(`${name} ${time}`), label);
      }
      assert.ok(label.includes(await page.getByTestId('waits-note').innerText()), label);

      // The latest token by layers, and another that is chosen.
      const layers = page.getByTestId('layers');
      assert.equal(await layers.getAttribute('data-layers'), '8');
      const told = async () => ({
        note: await page.getByTestId('layers-note').innerText(),
        waited: Number(await page.getByTestId('layers-flash').getAttribute('data-milliseconds')),
        demanded: Number(await page.getByTestId('layers-demand').getAttribute('data-count')),
        bars: (await layers.locator('path.part-demand').getAttribute('d')).split('M').length - 1,
        chosen: await chart.locator('> *').evaluateAll((all) => all.findIndex((e) => e.classList.contains('chosen'))),
      });
      const latest = await told();
      assert.match(latest.note, /^The latest token: a pass of .* 8 layers/);
      assert.ok(latest.demanded > 0 && latest.bars === latest.demanded, JSON.stringify(latest));
      assert.ok(latest.waited >= SLEEP_MS, JSON.stringify(latest));
      assert.equal(latest.chosen, columns.length - 1);
      assert.match(await layers.getAttribute('aria-label'), /The latest token: .*Waiting for flash \d.*Reads on demand \d+/);
      await page.getByTestId('token').press('ArrowLeft');
      const before = await told();
      assert.match(before.note, /^The token 1 before the latest/);
      assert.equal(before.chosen, columns.length - 2);
      await chart.locator('> *').nth(columns.length - 3).click();
      assert.match((await told()).note, /^The token 2 before the latest/);
      assert.equal(await page.getByTestId('layers-gpu').count(), 0);
    });
  });

  test('a reply streams, and can be stopped midway', async () => {
    await withPage(async (page) => {
      // Every text that the reply ever showed.
      await page.addInitScript(() => {
        globalThis.texts = [];
        new MutationObserver(() => {
          const text = document.querySelector('[data-testid=message-assistant] .text')?.textContent;
          if (text !== undefined && globalThis.texts.at(-1) !== text) globalThis.texts.push(text);
        }).observe(document, { subtree: true, childList: true, characterData: true });
      });
      await page.goto(`${server.origin}/?backend=gpu`);
      await reach(page, 'ready');
      const { prompt, text } = REPLIES[3];
      await send(page, prompt);
      await page.waitForFunction(() => globalThis.texts.length > 3);
      await page.getByTestId('stop').click();
      await reach(page, 'ready');
      const cut = await replyText(page, 0);
      assert.ok(cut.length > 0 && cut.length < text.length && text.startsWith(cut), cut);
      assert.match(await page.getByTestId('message-foot').first().innerText(), /^Stopped\./);
      const texts = await page.evaluate(() => globalThis.texts);
      for (const [i, shown] of texts.entries()) assert.ok(text.startsWith(shown), `text ${i}: ${shown}`);

      await page.getByTestId('clear').click();
      assert.equal(await ask(page, REPLIES[0].prompt), REPLIES[0].text);
    });
  });

  test('a failure is shown with what to do, and can be tried again', async () => {
    await withPage(async (page) => {
      const end = server.fault('/models/', { status: 500 });
      await page.goto(`${server.origin}/?backend=cpu`);
      await reach(page, 'failed');
      const { code, text } = await failure(page);
      assert.equal(code, 'http');
      assert.match(text, /500/);
      end();
      await page.getByTestId('retry').click();
      await reach(page, 'ready');

      await page.goto(`${server.origin}/?backend=cpu&budget=1MiB`);
      await reach(page, 'failed');
      const small = await failure(page);
      assert.equal(small.code, 'budget');
      assert.match(small.text, /\d+(\.\d+)? MiB/);
    });
  });

  test('it opens without a network once it was there, and answers', async () => {
    const host = await startServer({ mounts: MOUNTS, csp: POLICY });
    await withPage(async (page) => {
      await page.goto(`${host.origin}/?backend=cpu`);
      await reach(page, 'ready');
      await page.evaluate(() => navigator.serviceWorker.ready.then(() => {}));
      await page.waitForFunction(() => navigator.serviceWorker.controller?.state === 'activated');
      await host.close();
      await page.reload();
      await reach(page, 'ready');
      assert.equal(await ask(page, REPLIES[0].prompt), REPLIES[0].text);
      await page.getByTestId('clear').click();
      await page.getByTestId('budget-choice').selectOption('16MiB');
      await reach(page, 'loading', 'ready');
      await reach(page, 'ready');
      assert.equal(await page.getByTestId('memory-budget').innerText(), '16.0 MiB');
      assert.equal(await ask(page, REPLIES[1].prompt), REPLIES[1].text);
    }).finally(() => host.close());
  });

  test('a report is copied that tells the machine, the engine, the loading and the replies, and none of the text', async () => {
    await withPage(async (page) => {
      await page.context().grantPermissions(['clipboard-read', 'clipboard-write']);
      await page.goto(`${server.origin}/?backend=cpu&budget=16MiB`);
      await reach(page, 'ready');
      const { prompt, text } = REPLIES[3];
      await ask(page, prompt);
      await send(page, 'I need a hotel in London for two nights.');
      await reach(page, 'generating', 'ready');
      await reach(page, 'ready');
      await page.getByTestId('report').click();
      await page.getByTestId('report-status').filter({ hasText: 'Copied' }).waitFor();
      const copied = await page.evaluate(() => navigator.clipboard.readText());
      const report = JSON.parse(copied);
      assert.equal(report.outrider, VERSION);
      assert.equal(report.browser.userAgent, await page.evaluate(() => navigator.userAgent));
      assert.match(report.browser.screen, /^\d+ × \d+ at \d/);
      assert.ok(report.browser.cores > 0);
      assert.equal(report.browser.isolated, true);
      assert.ok(report.storage.usage > 18e6 && report.storage.quota > report.storage.usage);
      assert.ok(report.adapter === null || report.adapter.maxBufferSize > 0, JSON.stringify(report.adapter));
      assert.deepEqual(report.load.options, { model: `${server.origin}/models/concierge/`, backend: 'cpu', memoryBudget: '16MiB' });
      const phases = ({ load }) => load.phases.map(({ phase }) => phase).filter((phase) => phase !== 'verify');
      assert.deepEqual(phases(report), ['open', 'download', 'load', 'warmup']);
      assert.ok(report.load.phases.every(({ seconds }) => seconds >= 0));
      assert.ok(report.load.phases.find(({ phase }) => phase === 'download').bytes > 18e6 && report.load.outcome === 'ready');
      const { backend, memory, pool, notices } = report.engine;
      assert.deepEqual([backend.kind, memory.budget, pool.experts, notices.length >= 0], ['cpu', 16 * 2 ** 20, 512, true]);
      assert.ok(report.engine.tokens.length > 0 && report.engine.tokens.length <= 32);
      assert.equal(memory.entries.reduce((sum, entry) => sum + entry.bytes, 0), memory.total);
      assert.equal(report.replies.length, 2);
      assert.equal(report.replies[0].tokens, REPLIES[3].token_ids.length);
      for (const reply of report.replies) {
        assert.ok(reply.tokensPerSecond > 0 && reply.promptPerSecond > 0 && reply.firstTokenSeconds <= reply.seconds);
        assert.ok(reply.bytesRead > 0 && reply.misses > 0 && reply.outcome === 'stop');
      }
      assert.ok(report.events.some((event) => /^[\d.]+ s: ready$/.test(event)), report.events.join('\n'));
      assert.ok(!copied.includes(prompt) && !copied.includes(text) && !copied.includes('hotel'));

      // Leaving in good order is no sudden end.
      await page.reload();
      await reach(page, 'ready');
      await page.getByTestId('report').click();
      await page.getByTestId('report-status').filter({ hasText: 'Copied' }).waitFor();
      const second = JSON.parse(await page.evaluate(() => navigator.clipboard.readText()));
      assert.deepEqual(phases(second), ['open', 'load', 'warmup']);
      assert.ok(!second.events.some((event) => event.includes('suddenly')), second.events.join('\n'));
    });
  });

  test('where the clipboard is refused the report is selected; a failure and a sudden end are in it', async () => {
    await withPage(async (page) => {
      await page.setViewportSize({ width: 390, height: 760 });
      await page.addInitScript(() => {
        navigator.clipboard.writeText = () => Promise.reject(new DOMException('no', 'NotAllowedError'));
        sessionStorage.setItem('outrider-alive', '12.0 s: loading, visible');
      });
      await page.goto(`${server.origin}/?backend=cpu&budget=1MiB`);
      await reach(page, 'failed');
      await page.getByTestId('panel-toggle').click();
      await page.getByTestId('report').click();
      await page.getByTestId('report-status').filter({ hasText: 'selected' }).waitFor();
      const selected = await page.getByTestId('report-text').evaluate((area) => {
        return document.activeElement === area && area.value.slice(area.selectionStart, area.selectionEnd);
      });
      const report = JSON.parse(selected);
      assert.match(report.load.outcome, /^budget: /);
      assert.equal(report.engine, null);
      assert.match(report.events[0], /ended suddenly, after 12\.0 s: loading, visible$/);
    });
  });

  test('nothing in it is inline, and its policy refuses nothing', async () => {
    const html = await readFile(`${ROOT}www/dist/index.html`, 'utf8');
    for (const [script] of html.matchAll(/<script\b[^>]*>[^]*?<\/script>/g)) assert.match(script, /^<script [^>]*src="[^"]+"[^>]*><\/script>$/);
    assert.doesNotMatch(html, /<style|\s(style|on\w+)=|javascript:/i);
    await withPage(async (page) => {
      const refused = [];
      page.context().on('console', (message) => {
        if (/Content Security Policy/i.test(message.text())) refused.push(message.text());
      });
      await page.goto(`${server.origin}/?backend=cpu`);
      await reach(page, 'ready');
      assert.equal(await ask(page, REPLIES[0].prompt), REPLIES[0].text);
      await page.getByTestId('report').click();
      assert.deepEqual(refused, []);
    });
  });

  test('the command asks the page and prints its reply only', async () => {
    const command = ['tests/browser/ask.mjs', '--prompt', REPLIES[1].prompt, '--query', 'backend=cpu', '--isolated'];
    const run = promisify(execFile)(process.execPath, [...command, '/=www/dist', '/models=models'], { cwd: ROOT });
    const { stdout } = await run;
    assert.equal(stdout, `${REPLIES[1].text}\n`);
  });
});
