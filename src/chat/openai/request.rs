use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};

/// The body of a chat completion request. What it asks for beyond what is listed here is ignored where it cannot change
/// the reply (`user`, `metadata`), and refused by [`check`](Self::check) where it would.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct ChatRequest {
    pub model: Option<String>,
    pub messages: Vec<Message>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    /// Most tokens to generate; `max_completion_tokens` is its newer name and wins.
    pub max_tokens: Option<usize>,
    pub max_completion_tokens: Option<usize>,
    /// 0 to 2; 0 is greedy.
    pub temperature: Option<f32>,
    /// 0 to 1.
    pub top_p: Option<f32>,
    /// Extension: 0 for no limit.
    pub top_k: Option<usize>,
    pub seed: Option<i64>,
    pub stop: Option<Stop>,
    /// Only 1.
    pub n: Option<u32>,
    /// Functions the model may call; whether it can depends on its chat template.
    pub tools: Option<Vec<Value>>,
    /// `auto` or `none`.
    pub tool_choice: Option<Value>,
    /// Only `text`.
    pub response_format: Option<ResponseFormat>,
    /// Extension, by vLLM's name: the reply carries the ids of its tokens.
    pub return_token_ids: Option<bool>,
    /// Extension, by llama.cpp's name: `false` runs the whole prompt again, whatever is known from requests before. The
    /// reply is the same.
    pub cache_prompt: Option<bool>,
    /// Extension: variables of the model's chat template, such as `enable_thinking`.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// The following only at their neutral values.
    pub frequency_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub logprobs: Option<bool>,
    pub logit_bias: Option<Map<String, Value>>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub struct StreamOptions {
    /// Whether a last chunk without choices carries the usage.
    pub include_usage: Option<bool>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "`stop` must be a string or an array of strings")]
pub enum Stop {
    One(String),
    Any(Vec<String>),
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ResponseFormat {
    #[serde(rename = "type")]
    pub kind: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

/// A message of a conversation, the model's replies included.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    pub role: Role,
    /// May be absent only where an assistant calls tools.
    pub content: Option<Content>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<ToolCall>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Extension: what the model thought before this reply, for templates that show it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "`content` must be a string or an array of parts")]
pub enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// A part of a message's content. Only those of type `text` are supported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    #[serde(rename = "type")]
    pub kind: String,
    pub text: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Its place among the reply's calls; only in chunks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<usize>,
    #[serde(default)]
    pub id: String,
    #[serde(rename = "type", default = "function")]
    pub kind: String,
    pub function: FunctionCall,
}

fn function() -> String {
    "function".to_owned()
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionCall {
    pub name: String,
    /// A JSON object, as text. The model wrote it: it need not match the function's schema.
    pub arguments: String,
}

fn invalid<T>(reason: impl Into<String>) -> Result<T> {
    Err(Error::Request(reason.into()))
}

impl ChatRequest {
    /// A request with these messages and defaults for everything else.
    pub fn new(messages: Vec<Message>) -> ChatRequest {
        ChatRequest { messages, ..Default::default() }
    }

    /// Reads and [`check`](Self::check)s a request. [`Error::Request`] says what is wrong with it.
    pub fn from_json(json: &str) -> Result<ChatRequest> {
        let request: ChatRequest = serde_json::from_str(json).map_err(|e| Error::Request(e.to_string()))?;
        request.check()?;
        Ok(request)
    }

    /// [`Error::Request`] naming the first thing that is out of range or not supported.
    pub fn check(&self) -> Result<()> {
        if self.messages.is_empty() {
            return invalid("`messages` is empty, at least one message is needed");
        }
        for (i, message) in self.messages.iter().enumerate() {
            message.check(i)?;
        }
        let max = [("max_tokens", self.max_tokens), ("max_completion_tokens", self.max_completion_tokens)];
        if let Some((name, _)) = max.iter().find(|(_, max)| *max == Some(0)) {
            return invalid(format!("`{name}` is 0, it must be at least 1"));
        }
        let ranges = [("temperature", self.temperature, 2.0), ("top_p", self.top_p, 1.0)];
        for (name, value, most) in ranges {
            if let Some(value) = value.filter(|v| !(0.0..=most).contains(v)) {
                return invalid(format!("`{name}` is {value}, it must be between 0 and {most}"));
            }
        }
        if let Some(n) = self.n.filter(|&n| n != 1) {
            return invalid(format!("`n` is {n}, only 1 reply can be generated at a time"));
        }
        if self.stop_strings().iter().any(|stop| stop.is_empty()) {
            return invalid("`stop` has an empty string");
        }
        if let Some(format) = self.response_format.as_ref().filter(|f| f.kind != "text") {
            return invalid(format!("`response_format` is `{}`, only `text` is supported", format.kind));
        }
        if let Some(choice) = self.tool_choice.as_ref().filter(|c| !c.is_null() && *c != "auto" && *c != "none") {
            return invalid(format!("`tool_choice` is {choice}, only \"auto\" and \"none\" are supported"));
        }
        for (i, tool) in self.tools.iter().flatten().enumerate() {
            if tool["type"] != "function" || !tool["function"]["name"].is_string() {
                return invalid(format!("`tools[{i}]` is not of the type `function` with a name"));
            }
        }
        let unsupported = [
            ("frequency_penalty", self.frequency_penalty.is_some_and(|p| p != 0.0)),
            ("presence_penalty", self.presence_penalty.is_some_and(|p| p != 0.0)),
            ("logprobs", self.logprobs == Some(true)),
            ("logit_bias", self.logit_bias.as_ref().is_some_and(|b| !b.is_empty())),
        ];
        match unsupported.iter().find(|(_, asked)| *asked) {
            Some((name, _)) => invalid(format!("`{name}` is not supported")),
            None => Ok(()),
        }
    }

    pub fn stop_strings(&self) -> &[String] {
        match &self.stop {
            None => &[],
            Some(Stop::One(stop)) => std::slice::from_ref(stop),
            Some(Stop::Any(stops)) => stops,
        }
    }

    /// The functions the model may call, if there are any and it may.
    pub fn usable_tools(&self) -> Option<&[Value]> {
        let forbidden = self.tool_choice.as_ref().is_some_and(|choice| choice == "none");
        self.tools.as_deref().filter(|tools| !tools.is_empty() && !forbidden)
    }
}

impl Message {
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message {
            role,
            content: Some(Content::Text(content.into())),
            name: None,
            tool_calls: None,
            tool_call_id: None,
            reasoning_content: None,
        }
    }

    fn check(&self, index: usize) -> Result<()> {
        let calls_tools = self.role == Role::Assistant && self.tool_calls.as_ref().is_some_and(|c| !c.is_empty());
        match &self.content {
            None if !calls_tools => invalid(format!("`messages[{index}]` has no content")),
            Some(Content::Parts(parts)) => {
                let other = parts.iter().enumerate().find(|(_, part)| part.kind != "text" || part.text.is_none());
                other.map_or(Ok(()), |(i, part)| {
                    let at = format!("`messages[{index}].content[{i}]`");
                    match part.kind.as_str() {
                        "text" => invalid(format!("{at} has no text")),
                        kind => invalid(format!("{at} is of the type `{kind}`, only `text` is supported")),
                    }
                })
            }
            _ => Ok(()),
        }
    }

    /// The content's text, all parts joined.
    pub fn text(&self) -> String {
        match &self.content {
            None => String::new(),
            Some(Content::Text(text)) => text.clone(),
            Some(Content::Parts(parts)) => parts.iter().filter_map(|part| part.text.as_deref()).collect(),
        }
    }

    /// The message as chat templates expect it: content as one string, arguments of tool calls as objects.
    pub(crate) fn for_template(&self, knows_developer: bool) -> Value {
        let role = match self.role {
            Role::Developer if !knows_developer => Role::System,
            role => role,
        };
        let mut message = json!({"role": role, "content": self.text()});
        let optional = [
            ("name", &self.name),
            ("tool_call_id", &self.tool_call_id),
            ("reasoning_content", &self.reasoning_content),
        ];
        for (key, value) in optional {
            if let Some(value) = value {
                message[key] = json!(value);
            }
        }
        if let Some(calls) = self.tool_calls.as_ref().filter(|calls| !calls.is_empty()) {
            let calls = calls.iter().map(|call| {
                let text = &call.function.arguments;
                let arguments = serde_json::from_str(text).ok().filter(Value::is_object).unwrap_or_else(|| json!(text));
                let function = json!({"name": call.function.name, "arguments": arguments});
                json!({"id": call.id, "type": call.kind, "function": function})
            });
            message["tool_calls"] = calls.collect();
        }
        message
    }
}
