import { requireBrowser } from './browser.js';
import { addressOf } from './engine.js';
import { describe, fail } from './errors.js';
import { ROOT, packDirectory } from './location.js';

/** Deletes a model from the browser's storage. Does nothing if it is not there. */
export async function removeModel(model: string | URL): Promise<void> {
  requireBrowser();
  const name = await packDirectory(addressOf(model));
  try {
    const root = await (await navigator.storage.getDirectory()).getDirectoryHandle(ROOT);
    await root.removeEntry(name, { recursive: true });
  } catch (error) {
    if ((error as DOMException).name === 'NotFoundError') return;
    const reason =
      (error as DOMException).name === 'NoModificationAllowedError'
        ? 'the model is in use; dispose of the engine and close other tabs that use it'
        : describe(error);
    throw fail('storage', `the model could not be deleted: ${reason}`, { path: name, reason }, error);
  }
}
