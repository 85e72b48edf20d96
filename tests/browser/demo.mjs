// Driving the demo page, for the tests and for `cargo xtask demo --headless`.

import { PATIENCE } from './harness.mjs';

/** Waits until the page is in one of these states, see `www/src/main.ts`; one that failed says why. */
export async function reach(page, ...states) {
  const wanted = [...states, 'failed'];
  await page.waitForFunction((wanted) => wanted.includes(document.body.dataset.state), wanted, { timeout: PATIENCE });
  const state = await page.locator('body').getAttribute('data-state');
  if (state === 'failed' && !states.includes('failed')) throw new Error(await failure(page).then(({ text }) => text));
  return state;
}

/** What the page says went wrong. */
export async function failure(page) {
  const card = page.getByTestId('error');
  return { code: await card.getAttribute('data-code'), text: await card.locator('p').innerText() };
}

/** Asks as a user would, without waiting for the reply. */
export async function send(page, prompt) {
  await page.getByTestId('input').fill(prompt);
  await page.getByTestId('send').click();
}

/** Asks, and waits for the whole reply. */
export async function ask(page, prompt) {
  const before = await page.getByTestId('message-assistant').count();
  await send(page, prompt);
  await page.getByTestId('message-assistant').nth(before).waitFor();
  await reach(page, 'ready');
  return replyText(page, before);
}

export function replyText(page, n) {
  return page.getByTestId('message-assistant').nth(n).locator('.text').innerText();
}
