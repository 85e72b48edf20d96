// What the tests share: the package as npm publishes it, packed, and unpacked where a project has it, without the network.

import { execFile } from 'node:child_process';
import { mkdir } from 'node:fs/promises';
import { createRequire } from 'node:module';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

export const PACKAGE = fileURLToPath(new URL('..', import.meta.url));

const run = promisify(execFile);

/** Packs `dist` into `directory`: {filename, size, unpackedSize, files: [{path, size}]}. */
export async function pack(directory) {
  const { stdout } = await run('npm', ['pack', '--json', '--offline', '--ignore-scripts', '--pack-destination', directory], {
    cwd: PACKAGE,
    // On Windows npm is a script, which needs a shell.
    shell: process.platform === 'win32',
  });
  const told = JSON.parse(stdout);
  // An array, or by name with newer versions of npm.
  return Object.values(told)[0];
}

/** Unpacks the tarball into the `node_modules` of the project in `directory`; returns where the package is. */
export async function install(directory, { filename }, tarballs = directory) {
  const place = path.join(directory, 'node_modules', 'outrider');
  await mkdir(place, { recursive: true });
  await run('tar', ['-xzf', path.join(tarballs, filename), '-C', place, '--strip-components', '1']);
  return place;
}

/** Runs the TypeScript compiler. Its errors are in the `stdout` of what is thrown. */
export function tsc(args, cwd = PACKAGE) {
  const manifest = createRequire(import.meta.url).resolve('typescript/package.json');
  return run(process.execPath, [path.join(path.dirname(manifest), 'bin', 'tsc'), ...args], { cwd });
}
