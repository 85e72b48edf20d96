// The demo page in browsers that only a script of its own can drive: it clicks and types, and sees what is shown.

import assert from 'node:assert/strict';
import { describe, test } from 'node:test';

import { PATIENCE } from '../harness.mjs';
import { BROWSERS, REPLIES, ROOT } from '../package.mjs';
import { startServer } from '../server.mjs';

const POLICY = "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'";

const named = (name) => `[data-testid=${name}]`;
const REPLY = `${named('message-assistant')} .text`;

async function reach({ call }, ...states) {
  const state = await call('reach', 'body', 'data-state', [...states, 'failed']);
  if (!states.includes(state)) throw new Error(await text({ call }, 'error'));
}

async function text({ call }, name) {
  return (await call('texts', named(name)))[0];
}

async function send({ call }, prompt) {
  const replies = await call('texts', REPLY);
  await call('fill', named('input'), prompt);
  await call('click', named('send'));
  await call('count', REPLY, replies.length + 1);
}

async function ask(page, prompt) {
  await send(page, prompt);
  await reach(page, 'ready');
  return (await page.call('texts', REPLY)).at(-1);
}

for (const { name, gpu, skip, visit } of BROWSERS.filter((browser) => browser.visit)) {
  describe(`the demo page in ${name}`, { timeout: 4 * PATIENCE, skip }, () => {
    test('downloads, answers, stops, changes its budget, opens without a network, and says what fails', async (context) => {
      const server = await startServer({ mounts: { '/': `${ROOT}www/dist`, '/models': `${ROOT}models` }, csp: POLICY });
      context.after(() => server.close());
      const slowly = server.fault('/models/', { rate: 9e6 });
      // The GPU takes long there; `package.mjs` sees to it.
      const search = gpu ? '?backend=cpu' : '';
      await visit(server, search, [named('phase'), named('progress-text')], async (page) => {
        const { call } = page;
        await reach(page, 'ready');
        slowly();
        const phases = (await call('shown', named('phase'))).join('\n');
        assert.match(phases, /Downloading the model[^]*Loading the model into memory[^]*Warming up/);
        const figures = (await call('shown', named('progress-text'))).join('\n');
        assert.match(figures, /[\d.]+ MiB of 19\.\d MiB · [\d.]+ MiB\/s · \d+ s left/);
        assert.equal(await text(page, 'backend-pill'), 'CPU');
        if (!gpu) assert.match(await text(page, 'notice'), /CPU/);
        assert.equal(await ask(page, REPLIES[0].prompt), REPLIES[0].text);

        const gone = server.fault('/models/', { status: 404 });
        await page.reload();
        await reach(page, 'ready');
        assert.equal(await ask(page, REPLIES[1].prompt), REPLIES[1].text);
        gone();

        const { prompt, text: whole } = REPLIES[3];
        await call('click', named('clear'));
        await call('clickAfter', named('stop'), REPLY, 4);
        await send(page, prompt);
        await reach(page, 'ready');
        const cut = (await call('texts', REPLY))[0];
        assert.ok(cut.length > 0 && cut.length < whole.length && whole.startsWith(cut), cut);
        assert.match(await text(page, 'message-foot'), /^Stopped\./);

        await call('click', named('clear'));
        await call('fill', named('budget-choice'), '16MiB');
        await reach(page, 'ready');
        assert.equal(await text(page, 'memory-budget'), '16.0 MiB');
        assert.equal(await ask(page, prompt), whole);
        assert.ok(Number((await text(page, 'pool-misses')).replace(/,/g, '')) > 0);

        await call('controlled');
        const back = server.fault('/', { gone: true });
        await page.reload();
        await reach(page, 'ready');
        assert.equal(await ask(page, REPLIES[0].prompt), REPLIES[0].text);
        back();

        await call('goto', '/?backend=cpu&budget=1MiB');
        await reach(page, 'failed');
        assert.equal(await call('attribute', named('error'), 'data-code'), 'budget');
        assert.match(await text(page, 'error'), /\d+(\.\d+)? MiB/);
        assert.deepEqual(await call('problems'), []);
      });
    });
  });
}
