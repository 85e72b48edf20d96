// One error type for everything that can go wrong, with a stable code to match on.

/**
 * What kind of error it is. Those of the runtime itself say what happened to the model, the server, the storage or the
 * request; `worker` (a worker died or could not start), `panic` (a bug in the runtime), `disposed` and `unsupported` (the
 * browser lacks something) come from the package.
 */
export type ErrorCode =
  | 'not_found'
  | 'http'
  | 'network'
  | 'truncated'
  | 'corrupt'
  | 'version'
  | 'format'
  | 'unknown_architecture'
  | 'missing_tensor'
  | 'missing_file'
  | 'budget'
  | 'context'
  | 'request'
  | 'template'
  | 'tokenizer'
  | 'logits'
  | 'self_test'
  | 'no_gpu'
  | 'gpu'
  | 'device_lost'
  | 'quota'
  | 'storage'
  | 'aborted'
  | 'worker'
  | 'panic'
  | 'disposed'
  | 'unsupported'
  | (string & {});

export type ErrorDetails = Readonly<Record<string, string | number>>;

/** An error as it travels between threads. */
export interface ErrorData {
  code: ErrorCode;
  message: string;
  details: ErrorDetails;
}

export class OutriderError extends Error {
  override readonly name = 'OutriderError';
  readonly code: ErrorCode;
  /** What the message is about, by name: `status`, `url`, `smallest`, `needed`, `path`, … */
  readonly details: ErrorDetails;

  constructor(data: ErrorData, options?: { cause?: unknown }) {
    super(data.message, options);
    this.code = data.code;
    this.details = data.details;
  }
}

export function fail(code: ErrorCode, message: string, details: ErrorDetails = {}, cause?: unknown): OutriderError {
  return new OutriderError({ code, message, details }, cause === undefined ? undefined : { cause });
}

export function aborted(cause?: unknown): OutriderError {
  return fail('aborted', 'stopped by the caller', {}, cause);
}

/** Whatever was thrown, ready to be posted. */
export function toData(error: unknown): ErrorData {
  if (error instanceof Error || (typeof error === 'object' && error !== null)) {
    const { code, message, details } = error as { code?: unknown; message?: unknown; details?: unknown };
    // A DOMException's code is a number.
    if (typeof code === 'string') {
      return { code, message: String(message), details: (details ?? {}) as ErrorDetails };
    }
  }
  const name = error instanceof Error && error.name !== 'Error' ? `${error.name}: ` : '';
  return { code: 'worker', message: name + describe(error), details: {} };
}

export function describe(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
