// Asks the demo page one question in headless Chromium and prints its reply, and nothing else, on standard output.
//
//   node ask.mjs --prompt TEXT [--port N] [--query TEXT] [--isolated] /=www/dist /models=models

import { parseArgs } from 'node:util';

import { ask, reach } from './demo.mjs';
import { closeBrowser, withPage } from './harness.mjs';
import { parseMounts, startServer } from './server.mjs';

const { values, positionals } = parseArgs({
  options: {
    prompt: { type: 'string' },
    port: { type: 'string', default: '0' },
    query: { type: 'string', default: '' },
    isolated: { type: 'boolean' },
  },
  allowPositionals: true,
});
if (!values.prompt) {
  console.error('nothing to ask: give --prompt TEXT');
  process.exit(2);
}

const server = await startServer({
  mounts: parseMounts(positionals),
  port: Number(values.port),
  isolated: values.isolated,
});
try {
  await withPage(async (page) => {
    await page.goto(`${server.origin}/?${values.query}`);
    await reach(page, 'ready');
    for (const notice of await page.getByTestId('notice').allInnerTexts()) if (notice) console.error(`page: ${notice}`);
    console.error(`page: runs on ${await page.getByTestId('backend').innerText()}`);
    console.log(await ask(page, values.prompt));
    console.error(`page: ${await page.getByTestId('speed').innerText()} tokens/s`);
  });
} catch (error) {
  console.error(`the page failed: ${error.message}`);
  process.exitCode = 1;
} finally {
  await closeBrowser();
  await server.close();
}
