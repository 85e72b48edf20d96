// Conversations in every browser: what is known is not run again, and the tokens are those of a fresh run.

import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';

import { PATIENCE } from '../harness.mjs';
import { BROWSERS, chat, load, servePackage } from '../package.mjs';

const TURNS = ['Can you find me a restaurant in San Jose?', 'Something Italian, please.', 'Yes, for two people at 7 pm.'];

for (const { name, gpu, skip, some, less, open } of BROWSERS) describe(`conversations in ${name}`, { timeout: 8 * PATIENCE, skip }, () => {
  let server;

  before(async () => {
    server = await servePackage();
  });
  after(() => server.close());

  const asked = (messages, more) => ({ messages, temperature: 0, max_tokens: 24, return_token_ids: true, ...more });

  function conversation(page, diagnostic = () => {}) {
    /** Asks, and holds the numbers against each other. */
    async function ask(messages, more = {}) {
      const reply = await chat(page, asked(messages, more));
      assert.ifError(reply.error && new Error(reply.error.message));
      const { usage, timings } = reply;
      const cached = usage.prompt_tokens_details.cached_tokens;
      assert.equal(timings.cache_n, cached);
      assert.equal(timings.prompt_n, usage.prompt_tokens - cached);
      assert.ok(timings.prompt_n > 0);
      diagnostic(`${usage.prompt_tokens} tokens, ${cached} cached, ${timings.prompt_n} run`);
      const { message, token_ids } = reply.choices[0];
      return { message, tokens: token_ids, cached, ran: timings.prompt_n, prompt: usage.prompt_tokens };
    }

    /** Asks, and once more with nothing known. */
    async function askTwice(messages) {
      const reply = await ask(messages);
      const fresh = await ask(messages, { cache_prompt: false });
      assert.equal(fresh.cached, 0);
      assert.deepEqual(reply.tokens, fresh.tokens, 'the tokens of a fresh run');
      return reply;
    }
    return { ask, askTwice };
  }

  const user = (content) => ({ role: 'user', content });

  for (const backend of some(gpu ? ['cpu', 'gpu'] : ['cpu'])) {
    test(`${backend}: turns, an edit and a retry run what is new, and say what a fresh run says`, async (context) => {
      await open(server, async (page) => {
        const { error, stats } = await load(page, { backend });
        assert.ifError(error);
        assert.ok(stats.memory.entries.find((entry) => entry.kind === 'checkpoint').bytes > 0);
        const { ask, askTwice } = conversation(page, (text) => context.diagnostic(text));
        const messages = [];
        const prompts = [];
        for (const text of TURNS) {
          messages.push(user(text));
          const reply = await ask(messages);
          const known = prompts.at(-1) ?? 0;
          assert.ok(known === 0 || reply.cached > known, `${reply.cached} of ${reply.prompt} tokens, ${known} in the turn before`);
          prompts.push(reply.prompt);
          messages.push(reply.message);
        }
        const whole = messages.slice(0, -1);
        const again = await ask(whole);
        assert.deepEqual(again.message, messages.at(-1));
        assert.ok(again.cached > prompts[1], 'a retry runs the last message at most');
        const edited = [...whole.slice(0, 2), user('Something Mexican, please.')];
        const change = await askTwice(edited);
        assert.ok(change.cached >= prompts[0], 'the first turn is not run again');
        // From nothing known.
        await askTwice(whole);
      });
    });
  }

  test('a stopped reply is gone on from', less, async () => {
    await open(server, async (page) => {
      assert.ifError((await load(page, { backend: 'cpu' })).error);
      const { askTwice } = conversation(page);
      const first = [user('I need a hotel in London for two nights.')];
      const stopped = await page.call('stream', { messages: first, max_tokens: 400, temperature: 1, seed: 1 }, 3);
      assert.equal(stopped.error?.code, 'aborted');
      const written = stopped.chunks.map((chunk) => chunk.choices[0]?.delta.content ?? '').join('');
      await askTwice([...first, { role: 'assistant', content: written }, user('Cheaper, please.')]);
      await askTwice(first);
    });
  });

  test('a conversation that outgrew the context goes on without some of its messages', less, async () => {
    await open(server, async (page) => {
      assert.ifError((await load(page, { backend: 'cpu', context: 160 })).error);
      const { ask } = conversation(page);
      const messages = [user(TURNS[0])];
      const first = await ask(messages);
      messages.push(first.message, user('room '.repeat(200)));
      const { error } = await chat(page, asked(messages));
      assert.equal(error?.code, 'context');
      assert.ok(error.details.prompt > 160, JSON.stringify(error.details));
      assert.equal(error.details.context, 160);
      messages[2] = user(TURNS[1]);
      const second = await ask(messages);
      assert.ok(second.cached > first.prompt, 'what was refused cost nothing');
    });
  });
});
