// Runs the browser suite in one process, so that all specs share one browser. `--quick` leaves the slow ones out,
// `--full` makes them longer.

import { readdirSync } from 'node:fs';
import { after, describe } from 'node:test';

import { closeBrowsers } from './harness.mjs';

const specs = new URL('specs/', import.meta.url);

// A suite around all others: hooks outside of any wait until nothing keeps the process alive, and the browser does.
describe('browser suite', async () => {
  after(closeBrowsers);
  for (const file of readdirSync(specs).sort()) {
    if (file.endsWith('.mjs')) await import(new URL(file, specs));
  }
});
