// Runs the browser suite in one process, so that all specs share one browser. `--quick` leaves the slow ones out,
// `--full` makes them longer.

import { readdirSync } from 'node:fs';
import { after } from 'node:test';

import { closeBrowser } from './harness.mjs';

after(closeBrowser);

const specs = new URL('specs/', import.meta.url);
for (const file of readdirSync(specs).sort()) {
  if (file.endsWith('.mjs')) await import(new URL(file, specs));
}
