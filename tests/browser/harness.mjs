// What every browser test shares: one Chromium for the whole run, and a fresh browser context (its own storage) a test.

import { chromium } from 'playwright-core';

/** Without --enable-unsafe-webgpu, and with --disable-gpu, there is no WebGPU adapter on a machine without a GPU. */
const ARGS = [
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-quic',
  '--disable-sync',
  '--enable-unsafe-webgpu',
  '--no-first-run',
  '--no-sandbox',
];

/** Software rendering on a busy machine is slow, and no test measures time by its time-out. */
export const PATIENCE = 180_000;

export function launchOptions(executablePath = process.env.OUTRIDER_CHROMIUM) {
  if (!executablePath) {
    throw new Error('OUTRIDER_CHROMIUM must name a Chromium executable (cargo xtask test sets it)');
  }
  return { executablePath, args: ARGS, ignoreDefaultArgs: ['--disable-gpu'], timeout: PATIENCE };
}

const launched = new Map();

/** This run's browser of that executable, or of the plain Chromium. */
export function browser(executablePath) {
  if (!launched.has(executablePath)) launched.set(executablePath, chromium.launch(launchOptions(executablePath)));
  return launched.get(executablePath);
}

export async function closeBrowser(executablePath) {
  const launching = launched.get(executablePath);
  launched.delete(executablePath);
  await (await launching)?.close();
}

export async function closeBrowsers() {
  for (const executablePath of launched.keys()) await closeBrowser(executablePath);
}

/**
 * Starts a browser of its own on a profile that outlives it, at a page like `fixtures/bare.html`, and calls
 * `use(page, kill)`: `page.call(name, ...args)` calls what that page defines, `kill()` ends all of the browser's processes
 * without a word.
 */
export async function withKillable(profile, url, use) {
  const context = await chromium.launchPersistentContext(profile, { ...launchOptions(), headless: true });
  const page = await context.newPage();
  await page.goto(url);
  await page.waitForFunction(() => 'outrider' in globalThis);
  const call = (name, ...args) => page.evaluate(([name, args]) => globalThis[name](...args), [name, args]);
  const session = await context.browser()?.newBrowserCDPSession();
  const pids = (await session.send('SystemInfo.getProcessInfo')).processInfo.map(({ id }) => id);
  const kill = () => {
    for (const pid of pids) {
      try {
        process.kill(pid, 'SIGKILL');
      } catch {
        // It went with another.
      }
    }
  };
  try {
    return await use({ call }, kill);
  } finally {
    await context.close().catch(() => {});
  }
}

/**
 * Calls `use(page)` with a page in a context of its own. Fails if a script in it threw an error that nothing caught;
 * when anything fails, what the page wrote to its console is printed. `executablePath` names another Chromium.
 */
export async function withPage(use, executablePath) {
  const context = await (await browser(executablePath)).newContext();
  const console = [];
  const errors = [];
  // On the context, so that pages opened later and their workers are heard too.
  context.on('console', (message) => console.push(`${message.type()}: ${message.text()}`));
  context.on('weberror', (error) => errors.push(error.error()));
  try {
    const page = await context.newPage();
    page.setDefaultTimeout(PATIENCE);
    await use(page);
    if (errors.length > 0) throw new AggregateError(errors, `the page threw: ${errors.map(String).join('; ')}`);
  } catch (error) {
    for (const line of console.slice(-40)) globalThis.console.error(`  page | ${line}`);
    throw error;
  } finally {
    await context.close();
  }
}
