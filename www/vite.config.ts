import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { type Plugin, defineConfig } from 'vite';

const PUBLIC = ['icon.svg', 'icon-192.png', 'icon-512.png', 'manifest.webmanifest'];

/** Emits `offline.js` with the names of what the build is made of. They hold hashes, so together they are a version. */
function offline(): Plugin {
  return {
    name: 'offline',
    apply: 'build',
    generateBundle(_, bundle) {
      const files = ['./', ...PUBLIC, ...Object.keys(bundle).filter((file) => file !== 'index.html').sort()];
      const version = createHash('sha256').update(files.join()).digest('hex').slice(0, 12);
      const source = readFileSync(new URL('offline.js', import.meta.url), 'utf8')
        .replace("VERSION = ''", `VERSION = '${version}'`)
        .replace('FILES = []', `FILES = ${JSON.stringify(files)}`);
      this.emitFile({ type: 'asset', fileName: 'offline.js', source });
    },
  };
}

export default defineConfig({
  // The page may be put in any directory of any static host.
  base: './',
  plugins: [offline()],
  worker: { format: 'es' },
  build: {
    target: 'es2022',
    // Nothing inline: the page runs under a policy that allows its own files only.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
});
