// What tests and benches ask of an engine. No part of the package's interface: it may change with any version.

/** The name of an option of `createEngine`, an {@link Internals}, and of a method of engines, which takes an {@link Ask}. */
export const INTERNAL: unique symbol = Symbol.for('outrider.internal') as never;

/** How flash is held back, by the model that `src/flash/throttled.rs` describes. Seconds, and bytes a second. */
export interface Throttle {
  bandwidth?: number;
  latency?: number;
  lanes?: number;
  jitter?: number;
  failOneIn?: number;
  hangOneIn?: number;
  seed?: number;
}

export interface Internals {
  /** Expert slots at most. */
  maxSlots?: number;
  /** Whether experts are foreseen by routers alone, whatever maps the pack has. */
  untrained?: boolean;
  /** From when the model is loaded. */
  throttle?: Throttle;
  /** Settings of the scheduler, `src/les/scheduler.rs`, that differ from what they are by default. */
  scheduling?: Record<string, number | boolean>;
}

export type Ask =
  /** At once, also while a reply is being generated. */
  | { op: 'throttle'; throttle: Throttle | null }
  /** A hash of every token's logits in a sequence of its own, run in passes of these widths in turn. */
  | { op: 'logits'; tokens: number[]; widths: number[] }
  | { op: 'counters' };
