// The worker's end of the calls that `rpc.ts` makes.

import { fail, toData } from './errors.js';
import type { Call, Reply } from './rpc.js';

declare const self: DedicatedWorkerGlobalScope;

export interface Context {
  id: number;
  emit(value: unknown): void;
}

/** A value to be answered with, and what of it moves instead of being copied. */
export class Moved {
  constructor(
    readonly value: unknown,
    readonly transfer: Transferable[],
  ) {}
}

/** Answers calls. Returns a function that reports a failure after which nothing works. */
export function serve(handlers: Record<string, (args: never, context: Context) => unknown>): (error: unknown) => void {
  const post = (reply: Reply, transfer: Transferable[] = []) => self.postMessage(reply, transfer);
  const fatal = (error: unknown) => post({ kind: 'fatal', error: toData(error) });

  self.addEventListener('message', ({ data: { id, op, args } }: MessageEvent<Call>) => {
    if (op === 'life') return hold(args as string, () => post({ kind: 'alive' }));
    const emit = (value: unknown) => post({ id, kind: 'event', value });
    const run = async () => {
      const handler = handlers[op];
      if (!handler) throw fail('worker', `unknown operation ${op}`);
      return handler(args as never, { id, emit });
    };
    run().then(
      (value) => {
        if (value instanceof Moved) post({ id, kind: 'result', value: value.value }, value.transfer);
        else post({ id, kind: 'result', value });
      },
      (error: unknown) => post({ id, kind: 'error', error: toData(error) }),
    );
  });
  return fatal;
}

function hold(life: string, held: () => void): void {
  // Without locks a silent death goes unnoticed; errors and closing are still reported.
  if (!navigator.locks) return;
  void navigator.locks.request(life, () => {
    held();
    return new Promise(() => {});
  });
}
