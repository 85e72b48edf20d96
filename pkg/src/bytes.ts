import { fail } from './errors.js';

const UNITS: Record<string, number> = { '': 1, k: 2 ** 10, m: 2 ** 20, g: 2 ** 30 };

/** Reads a number of bytes such as `67108864`, `'64MiB'` or `'1.5 GiB'`; `MB` and `M` are taken as `MiB`. */
export function parseBytes(size: number | string): number {
  const match = /^\s*(\d+(?:\.\d+)?)\s*(?:([kmg])(?:i?b)?|b)?\s*$/i.exec(String(size));
  const bytes = match ? Number(match[1]) * UNITS[(match[2] ?? '').toLowerCase()]! : Number.NaN;
  if (!Number.isSafeInteger(Math.round(bytes)) || bytes <= 0) {
    throw fail('request', `the memory budget \`${size}\` is not a number of bytes, such as 67108864 or '64MiB'`);
  }
  return Math.round(bytes);
}
