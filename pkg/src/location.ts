// Which directory of the Origin Private File System belongs to which address.

/** The directory that holds all packs. */
export const ROOT = 'outrider';

/** The address of a pack directory in one spelling. */
export function packAddress(model: string | URL, base: string | undefined): string {
  const url = new URL(model, base);
  url.hash = '';
  if (url.pathname.endsWith('/manifest.json')) url.pathname = url.pathname.slice(0, -'manifest.json'.length);
  if (!url.pathname.endsWith('/')) url.pathname += '/';
  return url.href;
}

/** The address of one of a pack's files; what follows a `?` may be a signature and is kept. */
export function fileAddress(pack: string, file: string): string {
  const url = new URL(pack);
  url.pathname += encodeURIComponent(file);
  return url.href;
}

export async function packDirectory(address: string): Promise<string> {
  const hash = await crypto.subtle.digest('SHA-256', new TextEncoder().encode(address));
  return Array.from(new Uint8Array(hash, 0, 16), (byte) => byte.toString(16).padStart(2, '0')).join('');
}
