//! Requests and replies in the shapes of OpenAI's chat completions API.

mod reply;
mod request;

pub use reply::{
    ChatCompletion, ChatCompletionChunk, Choice, ChunkChoice, Delta, FinishReason, Head, PromptTokensDetails,
    ReplyMessage, Usage,
};
pub use request::{
    ChatRequest, Content, FunctionCall, Message, Part, ResponseFormat, Role, Stop, StreamOptions, ToolCall,
};
