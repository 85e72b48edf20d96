// A service worker that keeps the page for visits without a network. While there is one, it is asked first, so that a new
// version is seen at once. The model is none of its business: the package keeps it, and asks for it past any cache.

// Both are filled in by the build.
const VERSION = '';
const FILES = [];

const CACHE = `outrider-page-${VERSION}`;

self.addEventListener('install', (event) => {
  const keep = async () => (await caches.open(CACHE)).addAll(FILES);
  event.waitUntil(keep().then(() => self.skipWaiting()));
});

self.addEventListener('activate', (event) => {
  const tidy = async () => {
    for (const name of await caches.keys()) {
      if (name.startsWith('outrider-page-') && name !== CACHE) await caches.delete(name);
    }
    await self.clients.claim();
  };
  event.waitUntil(tidy());
});

self.addEventListener('fetch', (event) => {
  const { request } = event;
  const own = new URL(request.url).origin === location.origin;
  if (own && request.method === 'GET' && request.cache !== 'no-store') event.respondWith(answer(request));
});

async function answer(request) {
  try {
    return await fetch(request);
  } catch (error) {
    const cache = await caches.open(CACHE);
    const kept = await cache.match(request.mode === 'navigate' ? './' : request, { ignoreSearch: true });
    if (kept) return kept;
    throw error;
  }
}
