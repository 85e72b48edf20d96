// Compiled, never run: code written for the `openai` package's types takes what this package gives, and the reverse.

import type OpenAI from 'openai';
import type {
  ChatCompletion,
  ChatCompletionChunk,
  ChatCompletionCreateParams,
  ChatCompletionCreateParamsNonStreaming,
  ChatCompletionCreateParamsStreaming,
  ChatCompletionMessageParam,
  ChatCompletionTool,
} from 'openai/resources/chat/completions';
import type * as outrider from 'outrider';
import { createEngine } from 'outrider';

/** What application code needs of a client. Functions as properties, so that parameters are compared strictly. */
interface Client {
  chat: {
    completions: {
      create: {
        (body: ChatCompletionCreateParamsNonStreaming, options?: Options): PromiseLike<ChatCompletion>;
        (body: ChatCompletionCreateParamsStreaming, options?: Options): PromiseLike<AsyncIterable<ChatCompletionChunk>>;
      };
    };
  };
}

type Options = Pick<OpenAI.RequestOptions, 'signal'>;

async function streamed(client: Client, messages: ChatCompletionMessageParam[]): Promise<string> {
  const stream = await client.chat.completions.create(
    { model: 'concierge', messages, stream: true, stream_options: { include_usage: true }, temperature: 0 },
    { signal: new AbortController().signal },
  );
  let text = '';
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? '';
    for (const call of chunk.choices[0]?.delta.tool_calls ?? []) text += call.function?.arguments ?? '';
  }
  return text;
}

async function conversation(client: Client, tools: ChatCompletionTool[]): Promise<ChatCompletionMessageParam[]> {
  const messages: ChatCompletionMessageParam[] = [
    { role: 'developer', content: 'Be brief.' },
    { role: 'user', content: [{ type: 'text', text: 'Find me a table.' }], name: 'guest' },
  ];
  const { choices, usage } = await client.chat.completions.create({ model: 'concierge', messages, tools, seed: 1, stop: ['.'] });
  const { message, finish_reason, logprobs } = choices[0]!;
  messages.push(message);
  for (const call of message.tool_calls ?? []) messages.push({ role: 'tool', tool_call_id: call.id, content: '[]' });
  return finish_reason === 'tool_calls' && logprobs === null && usage ? messages : [];
}

export async function use(openai: OpenAI): Promise<void> {
  const engine = await createEngine({ model: 'https://example.org/models/concierge/' });
  for (const client of [openai, engine]) {
    await streamed(client, [{ role: 'user', content: 'Hello' }]);
    await conversation(client, [{ type: 'function', function: { name: 'find', parameters: { type: 'object' }, strict: null } }]);
  }
}

/** Fails to compile where `A` is not assignable to `B`. */
type Fits<A extends B, B> = A;

export type Requests = [
  Fits<ChatCompletionCreateParams, outrider.ChatCompletionRequest>,
  Fits<ChatCompletionCreateParamsNonStreaming, outrider.ChatCompletionRequestWhole>,
  Fits<ChatCompletionCreateParamsStreaming, outrider.ChatCompletionRequestStreaming>,
  Fits<ChatCompletionMessageParam, outrider.ChatMessage>,
  Fits<ChatCompletion['choices'][number]['message'], outrider.ChatMessage>,
  Fits<outrider.ChatCompletion['choices'][number]['message'], outrider.ChatMessage>,
];

export type Replies = [
  Fits<outrider.ChatCompletion, ChatCompletion>,
  Fits<outrider.ChatCompletionChunk, ChatCompletionChunk>,
  Fits<outrider.Usage, OpenAI.CompletionUsage>,
  Fits<outrider.ToolCall, OpenAI.ChatCompletionMessageToolCall>,
  Fits<outrider.Tool, OpenAI.ChatCompletionTool>,
  Fits<outrider.ChatCompletion['choices'][number]['message'], ChatCompletionMessageParam>,
];

// @ts-expect-error What does not fit is found: a whole reply is no chunk.
export type Whole = Fits<outrider.ChatCompletion, ChatCompletionChunk>;
// @ts-expect-error Nor is a request fine whose messages are none.
export const wrong: outrider.ChatCompletionRequest = { messages: [{ content: 3 }] };
