// Builds `dist`: JavaScript and types from `src`, and the wasm module that `cargo xtask build` has put into `wasm`.

import { execFileSync } from 'node:child_process';
import { cp, mkdir, rm } from 'node:fs/promises';
import { fileURLToPath } from 'node:url';

const root = new URL('..', import.meta.url);
const path = (name) => fileURLToPath(new URL(name, root));

await rm(path('dist'), { recursive: true, force: true });
for (const config of ['tsconfig.json', 'tsconfig.worker.json']) {
  // On Windows npm's commands are scripts, which need a shell.
  execFileSync('tsc', ['-p', config], { cwd: path('.'), stdio: 'inherit', shell: process.platform === 'win32' });
}
await mkdir(path('dist/wasm'), { recursive: true });
for (const file of ['outrider.js', 'outrider_bg.wasm']) {
  await cp(path(`wasm/${file}`), path(`dist/wasm/${file}`));
}
// npm packs what lies in the package's own directory.
for (const file of ['LICENSE-MIT', 'LICENSE-APACHE']) await cp(path(`../${file}`), path(file));
