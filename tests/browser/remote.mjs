// Browsers without an automation protocol that this suite could use: started with an address, they drive themselves.
// The page asks its server for what to do next and posts what came of it (`fixtures/driver.js`).

import { spawn } from 'node:child_process';
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import os from 'node:os';
import path from 'node:path';

import { PATIENCE } from './harness.mjs';

const DRIVER = await readFile(new URL('fixtures/driver.js', import.meta.url));

/** A whole reply may be waited for in one call. */
const CALL_PATIENCE = 2 * PATIENCE;

/** Commands on their way to a page, and back. */
export class Remote {
  #commands = [];
  #waiting = [];
  #poll;
  #id = 0;
  #ended;

  /** Answers the page's requests; see `startServer`'s `routes`. */
  handle(request, response) {
    if (request.url.endsWith('/driver.js')) {
      response.setHeader('Content-Type', 'text/javascript; charset=utf-8');
      response.end(DRIVER);
      return;
    }
    if (request.url.includes('/next')) {
      this.#poll?.end();
      this.#poll = response;
      this.#hand();
      return;
    }
    let text = '';
    request.on('data', (chunk) => (text += chunk));
    request.on('end', () => {
      response.end();
      const { id, result, error } = JSON.parse(text);
      const waiting = this.#waiting[id];
      delete this.#waiting[id];
      if (error) waiting?.reject(new Error(`the page failed: ${error}`));
      else waiting?.resolve(result);
    });
  }

  call(name, ...args) {
    return new Promise((resolve, reject) => {
      if (this.#ended) return reject(this.#ended);
      const id = this.#id++;
      // A page that was left, or that never came, cannot tell.
      const late = () => reject(new Error(`the page did not answer \`${name}\` within ${CALL_PATIENCE / 1000} s`));
      const timer = setTimeout(late, CALL_PATIENCE);
      const settle = (act) => (value) => {
        clearTimeout(timer);
        act(value);
      };
      this.#waiting[id] = { resolve: settle(resolve), reject: settle(reject) };
      this.#commands.push({ id, name, args });
      this.#hand();
    });
  }

  /** Fails whatever is waited for, because no page will answer any more. */
  end(error) {
    this.#ended = error;
    for (const waiting of this.#waiting) waiting?.reject(error);
    this.#waiting = [];
    this.#poll?.destroy();
  }

  #hand() {
    const poll = this.#poll;
    if (!poll || poll.destroyed || this.#commands.length === 0) return;
    this.#poll = undefined;
    poll.setHeader('Content-Type', 'application/json');
    poll.end(JSON.stringify(this.#commands.shift()));
  }
}

/** How each is started with a profile of its own: {command, args, env}. */
export const BROWSERS = {
  async Firefox(executable, profile, url, more = {}) {
    const prefs = {
      'browser.aboutwelcome.enabled': false,
      'browser.shell.checkDefaultBrowser': false,
      'browser.startup.page': 0,
      'datareporting.policy.dataSubmissionEnabled': false,
      'dom.storageManager.prompt.testing': true,
      'dom.storageManager.prompt.testing.allow': true,
      'dom.webgpu.enabled': true,
      'dom.webgpu.workers.enabled': true,
      'gfx.webgpu.ignore-blocklist': true,
      'network.captive-portal-service.enabled': false,
      'network.connectivity-service.enabled': false,
      'services.settings.server': 'data:,',
      'toolkit.telemetry.enabled': false,
      ...more,
    };
    const lines = Object.entries(prefs).map(([name, value]) => `user_pref(${JSON.stringify(name)}, ${JSON.stringify(value)});`);
    await writeFile(path.join(profile, 'user.js'), lines.join('\n'));
    return { command: executable, args: ['--headless', '--no-remote', '--profile', profile, url], env: {} };
  },

  async WebKit(executable, profile, url) {
    const features = 'AccessHandle,FileSystem,FileSystemWritableStream,StorageAPI,StorageAPIEstimate';
    const args = [`--features=${features.split(',').map((feature) => `+${feature}`).join(',')}`, url];
    const home = { HOME: profile, XDG_DATA_HOME: profile, XDG_CACHE_HOME: profile, XDG_CONFIG_HOME: profile };
    // MiniBrowser has no headless mode.
    return { command: 'xvfb-run', args: ['-a', executable, ...args], env: { ...home, WEBKIT_DISABLE_COMPOSITING_MODE: '1' } };
  },
};

/**
 * Starts a browser at `url` and calls `use(remote)`; ends it, and everything it started, afterwards. `prefs` are set on
 * top of those that all tests share, in Firefox.
 */
export async function withRemoteBrowser(name, executable, url, remote, use, prefs) {
  const profile = await mkdtemp(path.join(os.tmpdir(), `outrider-${name}-`));
  const { command, args, env } = await BROWSERS[name](executable, profile, url, prefs);
  // A process group of its own, so that all of its processes can be ended; what they leave behind goes with the profile.
  const child = spawn(command, args, { env: { ...process.env, TMPDIR: profile, ...env }, detached: true, stdio: ['ignore', 'ignore', 'pipe'] });
  let log = '';
  child.stderr.on('data', (chunk) => (log = (log + chunk).slice(-4000)));
  const ended = new Promise((resolve) => {
    child.on('exit', (code) => resolve(new Error(`${name} ended with ${code}: ${log}`)));
    child.on('error', (error) => resolve(new Error(`${name} could not be started: ${error.message}`)));
  });
  void ended.then((error) => remote.end(error));
  try {
    return await use(remote);
  } finally {
    try {
      process.kill(-child.pid, 'SIGTERM');
      const timer = setTimeout(() => process.kill(-child.pid, 'SIGKILL'), 5000);
      await ended;
      clearTimeout(timer);
    } catch {
      // It is gone already.
    }
    await rm(profile, { recursive: true, force: true, maxRetries: 10, retryDelay: 100 });
  }
}
