//! Turns the tokens a model generates into the deltas of a reply, and knows when it is over.

use serde_json::Value;

use super::openai::{Content, Delta, FinishReason, FunctionCall, Message, Role, ToolCall, Usage};
use super::stop::StopFilter;
use super::tools::ToolParser;
use crate::error::Result;
use crate::model::tokenizer::{TextStream, Tokenizer};

/// What ends a reply and how it is read.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    /// Tokens that end the turn. They give no text.
    pub stop_tokens: Vec<u32>,
    /// Strings that end the reply. Neither they nor what follows is given out. None is empty.
    pub stop_strings: Vec<String>,
    /// Most tokens to generate, at least 1.
    pub max_tokens: usize,
    /// Calls to these are taken out of the text; none are looked for without any.
    pub tools: Vec<Value>,
    /// Makes the ids of tool calls unique: that of the reply.
    pub id: String,
}

/// A reply while it is generated: tokens in, deltas out.
#[derive(Debug, Clone)]
pub struct Reply {
    rules: Rules,
    prompt_tokens: usize,
    completion_tokens: usize,
    text: TextStream,
    stops: StopFilter,
    tools: Option<ToolParser>,
    content: String,
    calls: Vec<ToolCall>,
    finish: Option<FinishReason>,
}

impl Reply {
    pub fn new(tokenizer: &Tokenizer, mut rules: Rules, prompt_tokens: usize) -> Reply {
        Reply {
            prompt_tokens,
            completion_tokens: 0,
            text: tokenizer.stream(true),
            stops: StopFilter::new(std::mem::take(&mut rules.stop_strings)),
            tools: (!rules.tools.is_empty()).then(|| ToolParser::new(&rules.tools)),
            content: String::new(),
            calls: Vec::new(),
            finish: None,
            rules,
        }
    }

    /// Takes the next token; the delta may be empty. Tokens after the end are ignored, so that several can be generated
    /// at once.
    pub fn push(&mut self, token: u32) -> Result<Delta> {
        if self.finish.is_some() {
            return Ok(Delta::default());
        }
        self.completion_tokens += 1;
        if self.rules.stop_tokens.contains(&token) {
            return self.end(FinishReason::Stop);
        }
        let text = self.text.push(token)?;
        let before = self.stops.push(&text);
        let last = self.stops.stopped() || self.completion_tokens >= self.rules.max_tokens;
        let reason = if self.stops.stopped() { FinishReason::Stop } else { FinishReason::Length };
        if last { self.end_with(before, reason) } else { Ok(self.add(&before, false)) }
    }

    /// Ends the reply from outside, for instance because the context is full or the user stopped it. Gives out what was
    /// held back.
    pub fn end(&mut self, reason: FinishReason) -> Result<Delta> {
        if self.finish.is_some() {
            return Ok(Delta::default());
        }
        self.end_with(String::new(), reason)
    }

    fn end_with(&mut self, mut text: String, reason: FinishReason) -> Result<Delta> {
        if !self.stops.stopped() {
            let cut_off = self.text.finish()?;
            text += &self.stops.push(&cut_off);
            text += &self.stops.finish();
        }
        let delta = self.add(&text, true);
        let calls_tools = reason == FinishReason::Stop && !self.calls.is_empty();
        self.finish = Some(if calls_tools { FinishReason::ToolCalls } else { reason });
        Ok(delta)
    }

    fn add(&mut self, text: &str, last: bool) -> Delta {
        let (content, calls) = match &mut self.tools {
            None => (text.to_owned(), Vec::new()),
            Some(tools) => {
                let (mut content, mut calls) = tools.push(text);
                if last {
                    let (rest, call) = tools.finish();
                    content += &rest;
                    calls.extend(call);
                }
                (content, calls)
            }
        };
        self.content += &content;
        let calls: Vec<_> = calls.into_iter().map(|function| self.numbered(function)).collect();
        Delta {
            role: None,
            content: (!content.is_empty()).then_some(content),
            tool_calls: (!calls.is_empty()).then_some(calls),
        }
    }

    fn numbered(&mut self, function: FunctionCall) -> ToolCall {
        let index = self.calls.len();
        let id = format!("call_{}_{index}", self.rules.id);
        let call = ToolCall { index: None, id, kind: "function".to_owned(), function };
        self.calls.push(call.clone());
        ToolCall { index: Some(index), ..call }
    }

    /// Why the reply is over, once it is.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    pub fn usage(&self) -> Usage {
        Usage::new(self.prompt_tokens, self.completion_tokens)
    }

    /// The whole reply so far, as the message that continues the conversation.
    pub fn message(&self) -> Message {
        let called = !self.calls.is_empty();
        let content = (!called || !self.content.is_empty()).then(|| Content::Text(self.content.clone()));
        let tool_calls = called.then(|| self.calls.clone());
        Message { content, tool_calls, ..Message::new(Role::Assistant, "") }
    }
}
