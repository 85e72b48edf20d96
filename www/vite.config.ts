import { defineConfig } from 'vite';

export default defineConfig({
  // The page may be put in any directory of any static host.
  base: './',
  worker: { format: 'es' },
  build: {
    target: 'es2022',
    // Nothing inline: the page runs under a policy that allows its own files only.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
});
