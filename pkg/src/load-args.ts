import type { Internals } from './internal.js';

/** What the engine worker is asked to load. */
export interface LoadArgs {
  address: string;
  directory: string;
  /** Bytes; none for the whole model; `auto` for what turns out to work. */
  budget: number | null | 'auto';
  /** Names this engine in the record of what worked. */
  attempt: string;
  /** Whether it will be known that its page was closed, and engines of which it is. */
  watched: boolean;
  left: string[];
  backend: 'auto' | 'gpu' | 'cpu';
  context: number | null;
  f16: boolean;
  /** Record what happens when in each pass. */
  timeline: boolean;
  /** Bring what has changed on the server. */
  update: boolean;
  /** Open files as exclusively as Safari does. */
  exclusive: boolean;
  /** Begin with the experts of the visit before. */
  warm: boolean;
  internal: Internals | null;
}
