// The package's types: OpenAI's shapes for chat, and this runtime's own for everything around it.

export interface EngineOptions {
  /** Address of a pack directory (the one that holds `manifest.json`), absolute or relative to the page. */
  model: string | URL;
  /**
   * Everything allocated stays below this: bytes, or text such as `'512MiB'`. Without it the whole model is resident.
   * `'auto'` begins low, takes more from visit to visit, and less after what ended the page; the notices say so.
   */
  memoryBudget?: number | 'auto' | (string & {});
  /** `'auto'` (the default) takes the GPU where there is one and says so in the notices where there is none. */
  backend?: 'auto' | 'gpu' | 'cpu';
  /** Tokens a conversation may have, at most what the model was made for. */
  context?: number;
  /**
   * Multiplies in `f16` on GPUs with `shader-f16`: coarser, and on some faster. Where it cannot be had, the notices say
   * so. Off by default.
   */
  f16?: boolean;
  /**
   * `'safari'` keeps to what Safari on an iPhone offers, whatever this browser does: files with one handle at a time, no
   * f16. For trying that path where no iPhone is at hand; everything else the runtime uses, Safari has.
   */
  profile?: 'safari';
  /**
   * What to do about a model that is in the browser's storage and has changed at its address. `'auto'` (the default) asks
   * the server, fetches what differs, and goes on with what is there when that fails, with a notice; without a network it
   * goes on at once. `'never'` does not ask.
   */
  update?: 'auto' | 'never';
  /**
   * Begin with the experts that earlier visits used, which are read after loading, until a request comes, so that the first
   * tokens wait for less. No reply depends on it. On by default; `false` neither reads nor keeps which they were.
   */
  warmStart?: boolean;
  /**
   * Record what happens when while tokens are computed, for `stats().tokens[].pass`. No reply depends on it; a token takes a
   * little longer. Off by default.
   */
  timeline?: boolean;
  /** Stops loading; what was downloaded is kept for the next attempt. */
  signal?: AbortSignal | null | undefined;
  onProgress?: (progress: Progress) => void;
  /**
   * Where `engine-worker.js` is, absolute or relative to the page, with the package's other files around it. For builds
   * that do not bring workers along, see the README.
   */
  workerUrl?: string | URL;
}

export interface Progress {
  /**
   * `open`: looking for the model in the browser's storage; `verify`: checking what an earlier visit left; `download`;
   * `load`: bringing the resident part into memory; `warmup`: a first pass, so that the first reply is not the slow one,
   * which is the model's self-test where it has one. A GPU that fails it gives way to the CPU, beginning with `load` again.
   */
  phase: 'open' | 'verify' | 'download' | 'load' | 'warmup';
  /** Bytes done of the phase's `total`; both 0 where the phase is not counted in bytes. */
  done: number;
  total: number;
  /** Over the last seconds, once known. */
  bytesPerSecond?: number;
  secondsLeft?: number;
}

/** What memory is used for, in bytes. */
export type MemoryKind = 'core' | 'state' | 'checkpoint' | 'workspace' | 'staging' | 'host' | 'pool';

/** How the model's files are read, as found when it was loaded. */
export interface FlashStats {
  /** Through synchronous handles, or as slices of a `File`. */
  way: 'sync' | 'slice';
  /** Workers that read one file at a time. */
  lanes: number;
  /** Of this way, with files that the system may hold in memory. */
  bytesPerSecond: number;
  /** Every way that was tried; 0 where the browser can not read so. */
  measured: { way: 'sync' | 'slice'; lanes: number; bytesPerSecond: number }[];
  /** What finding that out took. */
  milliseconds: number;
}

export interface Stats {
  backend: {
    kind: 'cpu' | 'gpu';
    detail: string;
    /** Milliseconds from handing work to the GPU until its result is back, with next to no work; null on the CPU. */
    readback: number | null;
  };
  flash: FlashStats;
  memory: {
    /** The most that may be allocated. */
    budget: number;
    total: number;
    entries: { kind: MemoryKind; bytes: number }[];
    /** Size of the wasm memory, in which some of the entries lie: all of them with the CPU, `host` and `staging` with the GPU. */
    wasm: number;
  };
  /**
   * Experts found in the pool and not, and bytes read from flash, since loading; `bytesGuessed` of these ahead of need.
   * `warmed` experts were read because earlier visits used them, which is in both, and `warmedUsed` of these were then
   * found.
   */
  pool: {
    slots: number;
    experts: number;
    hits: number;
    misses: number;
    bytesRead: number;
    bytesGuessed: number;
    warmed: number;
    warmedUsed: number;
  };
  /** Of the reply in progress, or the last one; tokens per second, 0 before there are any. */
  speed: { prefill: number; decode: number };
  /** Of the same reply: what each of its latest tokens waited for, at most 128, the latest first. */
  tokens: TokenTimes[];
  context: number;
  /** What the user should know, such as why the CPU is used. */
  notices: string[];
}

/** What one token of a reply cost since the one before it; the first token of a reply, since the reply began. */
export interface TokenTimes {
  /** All of its time. What is in neither of the two waits below is the host's work. */
  milliseconds: number;
  /** Of these, milliseconds that layers waited for experts to be read. */
  flash: number;
  /** Of these, milliseconds that the host waited for routing and logits: for the GPU; with the CPU, that is computing. */
  results: number;
  /** Experts that were needed and found in the pool, and those that were not. */
  hits: number;
  misses: number;
  /** Bytes of experts that were asked of flash, and of these, bytes asked for ahead of need. */
  bytesRead: number;
  bytesGuessed: number;
  /** With the `timeline` option: the last pass that it took. Of the latest tokens, as far back as 2048 spans go. */
  pass?: PassTimes;
}

/** What happened when in one pass through the model, in milliseconds since it began. */
export interface PassTimes {
  milliseconds: number;
  /** By their ends. */
  spans: Span[];
}

/**
 * Something that took from `begin` to `end`. The host does one thing at a time; reads go on beside that, and may have begun
 * before the pass, at a time below 0. Layers count from 0.
 */
export type Span = { begin: number; end: number } & (
  | {
      /**
       * Computing, on the CPU; with the GPU, handing it over. `mix`: a layer up to its router; `run`: so many pairs of a token
       * and an expert; `finish`: the shared expert and the sum.
       */
      what: 'mix' | 'finish';
      layer: number;
    }
  | { what: 'run'; layer: number; pairs: number }
  /** Guessing what later layers need, from what one of them sees or from the embedding. */
  | { what: 'foresee'; origin: { layer: number } | 'embedding' }
  /** Putting an expert into its slot of the pool. */
  | { what: 'upload'; layer: number; expert: number }
  /** Reading an expert, on `demand` or as a guess, until it was taken up. */
  | { what: 'read'; layer: number; expert: number; demand: boolean; outcome: 'arrived' | 'failed' | 'cancelled' }
  /** The host waited: for experts to be read, or for the GPU, with what that computes meanwhile. */
  | { what: 'stall'; layer: number; of: 'bytes' | 'results' }
  /** Logits; with the GPU, the wait for them. */
  | { what: 'logits' }
);

export interface TextPart {
  type: 'text';
  text: string;
}

/** What other runtimes take and this one refuses, with a `request` error: images, sound, files. */
export interface OtherPart {
  type: string & {};
}

/** A message as it is sent. Whatever the `openai` package's types allow fits, and replies do as they are. */
export interface ChatMessage {
  role: 'system' | 'developer' | 'user' | 'assistant' | 'tool' | (string & {});
  /** May be absent only where an assistant calls tools. */
  content?: string | (TextPart | OtherPart)[] | null;
  name?: string;
  tool_call_id?: string;
  tool_calls?: (ToolCall | OtherTool)[];
}

export interface ToolCall {
  id: string;
  type: 'function';
  function: { name: string; arguments: string };
}

export interface Tool {
  type: 'function';
  function: { name: string; description?: string; parameters?: Record<string, unknown> };
}

/** Tools that are no functions, which are refused with a `request` error. */
export interface OtherTool {
  type: 'custom';
}

/**
 * OpenAI's request, whose other parameters are ignored where they cannot change the reply (`user`, `metadata`). Those
 * below that only one value is allowed for are refused with a `request` error otherwise.
 */
export interface ChatCompletionRequest {
  messages: ChatMessage[];
  model?: string;
  stream?: boolean | null;
  stream_options?: { include_usage?: boolean } | null;
  max_tokens?: number | null;
  max_completion_tokens?: number | null;
  temperature?: number | null;
  top_p?: number | null;
  /** Extension: 0 for no limit. */
  top_k?: number | null;
  seed?: number | null;
  stop?: string | string[] | null;
  tools?: (Tool | OtherTool)[];
  /** `'auto'` or `'none'`. */
  tool_choice?: 'auto' | 'none' | 'required' | { type: string } | null;
  /** Only text. */
  response_format?: { type: string } | null;
  /** Only 1. */
  n?: number | null;
  /** Only 0. */
  frequency_penalty?: number | null;
  /** Only 0. */
  presence_penalty?: number | null;
  /** Only false. */
  logprobs?: boolean | null;
  /** Only empty. */
  logit_bias?: Record<string, number> | null;
  /** Extension, by vLLM's name: choices carry the ids of the tokens generated. */
  return_token_ids?: boolean | null;
  /** Extension, by llama.cpp's name: `false` runs the whole prompt again. The reply is the same. */
  cache_prompt?: boolean | null;
  /** Extension: variables of the model's chat template, such as `enable_thinking`. */
  chat_template_kwargs?: Record<string, unknown> | null;
}

export interface ChatCompletionRequestStreaming extends ChatCompletionRequest {
  stream: true;
}

export interface ChatCompletionRequestWhole extends ChatCompletionRequest {
  stream?: false | null;
}

export type FinishReason = 'stop' | 'length' | 'tool_calls';

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  /** Tokens that were known from the requests before and were not run again. */
  prompt_tokens_details: { cached_tokens: number };
}

/** What the engine measured, by the names that llama.cpp's server uses. Milliseconds, and tokens a second. */
export interface Timings {
  /** Tokens of the prompt that were known, and those that were run. */
  cache_n: number;
  prompt_n: number;
  prompt_ms: number;
  prompt_per_second: number;
  predicted_n: number;
  predicted_ms: number;
  predicted_per_second: number;
}

export interface ChatCompletion {
  id: string;
  object: 'chat.completion';
  created: number;
  model: string;
  choices: {
    index: number;
    message: { role: 'assistant'; content: string | null; refusal: null; tool_calls?: ToolCall[] };
    finish_reason: FinishReason;
    logprobs: null;
    token_ids?: number[];
  }[];
  usage: Usage;
  timings?: Timings;
}

export interface ChatCompletionChunk {
  id: string;
  object: 'chat.completion.chunk';
  created: number;
  model: string;
  choices: {
    index: number;
    delta: { role?: 'assistant'; content?: string | null; tool_calls?: (ToolCall & { index: number })[] };
    finish_reason: FinishReason | null;
    /** Those since the chunk before, the one that ended the turn included. */
    token_ids?: number[];
  }[];
  usage?: Usage | null;
  /** In the last chunk. */
  timings?: Timings;
}

export interface RequestOptions {
  /** Stops the reply; the iterator, or the promise, ends with an `aborted` error. */
  signal?: AbortSignal | null | undefined;
}
