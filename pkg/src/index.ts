export { Engine, createEngine } from './engine.js';
export type { ChatCompletions } from './engine.js';
export { OutriderError } from './errors.js';
export type { ErrorCode, ErrorDetails } from './errors.js';
export { removeModel } from './storage.js';
export { ChatStream } from './stream.js';
export type { StreamPromise } from './stream.js';
export type * from './types.js';
export { VERSION } from './version.js';
