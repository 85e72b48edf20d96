// Numbers for people.

export function bytes(n: number): string {
  if (n >= 2 ** 30) return `${(n / 2 ** 30).toFixed(2)} GiB`;
  if (n >= 2 ** 20) return `${(n / 2 ** 20).toFixed(1)} MiB`;
  if (n >= 2 ** 10) return `${(n / 2 ** 10).toFixed(0)} KiB`;
  return `${n} bytes`;
}

export function duration(seconds: number): string {
  if (seconds < 1.5) return '1 s';
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 90 * 60) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** Of something that may take less than a second. */
export function time(milliseconds: number): string {
  if (milliseconds >= 999.5) return `${(milliseconds / 1000).toFixed(1)} s`;
  return `${milliseconds.toFixed(milliseconds < 9.95 ? 1 : 0)} ms`;
}

export const count = (n: number): string => n.toLocaleString('en');

/** Speeds below ten are worth a digit after the point. */
export const rate = (n: number): string => (n > 0 ? n.toFixed(n < 100 ? 1 : 0) : '–');
