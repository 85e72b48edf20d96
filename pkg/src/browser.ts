import { fail } from './errors.js';

/** Where the package can be imported but not run (Node, an insecure page), throws an error that says what is missing. */
export function requireBrowser(): void {
  if (!globalThis.isSecureContext || typeof Worker !== 'function') {
    throw fail('unsupported', 'Outrider runs in a browser with workers, in a page served over https or from localhost');
  }
  if (typeof navigator.storage?.getDirectory !== 'function') {
    throw fail('unsupported', 'this browser has no private file system for the model; update it or use another');
  }
}
