use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Message, Role, ToolCall};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its turn, or a stop string came.
    Stop,
    /// `max_tokens` or the end of the context was reached.
    Length,
    /// The model calls tools.
    ToolCalls,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    /// Tokens generated, the one that ended the turn included.
    pub completion_tokens: usize,
    pub total_tokens: usize,
    #[serde(default)]
    pub prompt_tokens_details: PromptTokensDetails,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptTokensDetails {
    /// Tokens that were known from the requests before and were not run again.
    pub cached_tokens: usize,
}

impl Usage {
    pub fn new(prompt_tokens: usize, completion_tokens: usize) -> Usage {
        let total_tokens = prompt_tokens + completion_tokens;
        Usage { prompt_tokens, completion_tokens, total_tokens, ..Usage::default() }
    }

    pub fn with_cached(mut self, cached_tokens: usize) -> Usage {
        self.prompt_tokens_details.cached_tokens = cached_tokens;
        self
    }
}

/// What a chunk adds to the message.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Calls come whole, each in one chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<ToolCall>>,
}

impl Delta {
    /// The first chunk of a reply.
    pub fn start() -> Delta {
        Delta { role: Some(Role::Assistant), content: Some(String::new()), tool_calls: None }
    }

    pub fn is_empty(&self) -> bool {
        *self == Delta::default()
    }
}

/// The message of a whole reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplyMessage {
    #[serde(flatten)]
    pub message: Message,
    /// Always null, and there because OpenAI's clients may count on it.
    #[serde(default)]
    pub refusal: (),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    pub index: usize,
    pub message: ReplyMessage,
    pub finish_reason: FinishReason,
    /// Always null, and there because OpenAI's clients may count on it.
    #[serde(default)]
    pub logprobs: (),
    /// Extension, if asked for: the tokens that were generated, the one that ended the turn included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChunkChoice {
    pub index: usize,
    pub delta: Delta,
    pub finish_reason: Option<FinishReason>,
    /// Extension, if asked for: the tokens that were generated since the chunk before, the one that ended the turn included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// A whole reply.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatCompletion {
    #[serde(flatten)]
    pub head: Head,
    pub object: String,
    pub choices: Vec<Choice>,
    pub usage: Usage,
    /// Extension: what the engine measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Value>,
}

/// A piece of a streamed reply.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatCompletionChunk {
    #[serde(flatten)]
    pub head: Head,
    pub object: String,
    /// Empty in the chunk that carries the usage.
    pub choices: Vec<ChunkChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// Extension: what the engine measured, in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Value>,
}

/// What a reply and all of its chunks have in common.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
}

impl Head {
    pub fn completion(&self, message: Message, finish_reason: FinishReason, usage: Usage) -> ChatCompletion {
        let message = ReplyMessage { message, refusal: () };
        ChatCompletion {
            head: self.clone(),
            object: "chat.completion".to_owned(),
            choices: vec![Choice { index: 0, message, finish_reason, logprobs: (), token_ids: None }],
            usage,
            timings: None,
        }
    }

    pub fn chunk(&self, delta: Delta, finish_reason: Option<FinishReason>) -> ChatCompletionChunk {
        self.chunk_of(vec![ChunkChoice { index: 0, delta, finish_reason, token_ids: None }])
    }

    /// The chunk after the last, for requests with `stream_options.include_usage`.
    pub fn usage_chunk(&self, usage: Usage) -> ChatCompletionChunk {
        ChatCompletionChunk { usage: Some(usage), ..self.chunk_of(Vec::new()) }
    }

    fn chunk_of(&self, choices: Vec<ChunkChoice>) -> ChatCompletionChunk {
        ChatCompletionChunk {
            head: self.clone(),
            object: "chat.completion.chunk".to_owned(),
            choices,
            usage: None,
            timings: None,
        }
    }
}
