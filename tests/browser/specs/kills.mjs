// An install survives the browser being killed at any moment. Run with `--full` for as many kills as are worth a release.

import assert from 'node:assert/strict';
import { mkdtemp, rm } from 'node:fs/promises';
import os from 'node:os';
import path from 'node:path';
import { after, before, describe, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import { PATIENCE, withKillable } from '../harness.mjs';
import { MODEL, REPLIES, answersAsRecorded, load, servePackage } from '../package.mjs';

const KILLS = process.argv.includes('--full') ? 20 : process.argv.includes('--quick') ? 0 : 6;

describe('a browser that is killed', { timeout: 4 * PATIENCE, skip: KILLS === 0 && '--quick' }, () => {
  let server;
  let profile;

  before(async () => {
    server = await servePackage();
    profile = await mkdtemp(path.join(os.tmpdir(), 'outrider-kills-'));
  });
  after(async () => {
    await server.close();
    await rm(profile, { recursive: true, force: true, maxRetries: 10, retryDelay: 100 });
  });

  /** Starts the browser on the profile that all starts share, and calls `use(page, kill)`. */
  const start = (use) => withKillable(profile, `${server.origin}/bare.html`, use);

  test(`${KILLS} kills while a model is installed, and it is whole in the end`, async (context) => {
    // Numerical Recipes' generator: the moments are the same in every run.
    let seed = 20261130;
    const random = () => (seed = (seed * 1664525 + 1013904223) % 2 ** 32) / 2 ** 32;
    const slow = server.fault(MODEL, { rate: 3e6 });
    const sent = () => server.log.filter((r) => r.path.endsWith('.bin')).reduce((sum, r) => sum + r.bytes, 0);
    const kept = [];
    for (let n = 0; n < KILLS; n += 1) {
      await start(async (page, kill) => {
        // Every other time with handles that leave room for no other, and must not outlive their browser.
        const mode = n % 2 ? { profile: 'safari' } : {};
        const loading = page.call('load', { model: MODEL, backend: 'cpu', ...mode }).catch(() => undefined);
        await sleep(500 + 1200 * random());
        kept.push(await page.call('verified'));
        kill();
        await loading;
      });
    }
    slow();
    await start(async (page) => {
      const { error, progress } = await load(page, { backend: 'cpu' });
      assert.ifError(error && new Error(error.message));
      const from = progress.find((p) => p.phase === 'download')?.done ?? 'all';
      context.diagnostic(`found in place at each start: ${kept.join(', ')}, at the last: ${from}; ${sent()} bytes sent`);
      await answersAsRecorded(page, REPLIES.slice(0, 2));
    });
    // Nothing was begun anew: what was sent again is what was under way when the browser died.
    assert.ok(sent() < 20e6 + KILLS * 3e6, `${sent()} bytes were sent`);
    const found = kept.filter((n) => n > 0);
    assert.deepEqual(found, found.toSorted((a, b) => a - b), 'what was in place stayed in place');
    assert.ok(found.length > KILLS / 4, 'installs went on from where they were');
  });
});
