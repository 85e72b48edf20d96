// Tells pages that were closed, reloaded or put out of sight from those that the browser ended: the former have time to
// write that down. What is written must be there at once, which only this storage does.

const KEY = 'outrider-left';
/** Ids kept; older ones have been read long ago. */
const KEPT = 16;

/** Ids of engines whose pages went as pages do. */
export function departed(): string[] {
  try {
    const ids: unknown = JSON.parse(localStorage.getItem(KEY) ?? '[]');
    return Array.isArray(ids) ? ids.filter((id) => typeof id === 'string') : [];
  } catch {
    return [];
  }
}

/**
 * Keeps a record of whether the page of an engine is gone or out of sight. Returns what ends that, or undefined where it
 * cannot be done, as in workers.
 */
export function watch(id: string): (() => void) | undefined {
  if (!globalThis.document || !canStore()) return undefined;
  const set = (gone: boolean) => {
    const ids = departed().filter((other) => other !== id);
    if (gone) ids.push(id);
    try {
      localStorage.setItem(KEY, JSON.stringify(ids.slice(-KEPT)));
    } catch {
      // The page counts as ended by the browser then, which costs a step.
    }
  };
  const leave = () => set(true);
  const look = () => set(document.visibilityState === 'hidden');
  addEventListener('pagehide', leave);
  addEventListener('pageshow', look);
  document.addEventListener('visibilitychange', look);
  if (document.visibilityState === 'hidden') leave();
  return () => {
    removeEventListener('pagehide', leave);
    removeEventListener('pageshow', look);
    document.removeEventListener('visibilitychange', look);
  };
}

function canStore(): boolean {
  try {
    localStorage.setItem(`${KEY}-probe`, '');
    localStorage.removeItem(`${KEY}-probe`);
    return true;
  } catch {
    return false;
  }
}
