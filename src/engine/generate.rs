//! Prefill and decode, token by token.

use super::sampler::Sampler;
use super::{Engine, Want};
use crate::error::{Error, Result};

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The receiver of tokens said so.
    Stopped,
    /// `max_tokens` were generated, or the context is full.
    Length,
}

/// What the receiver of a token wants next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Continue,
    Stop,
}

impl Engine {
    /// Starts a new sequence with `prompt` and generates up to `max_tokens` tokens, each handed to `on_token` as soon
    /// as it is chosen, together with the engine, whose counters can be read there.
    pub async fn generate(
        &mut self,
        prompt: &[u32],
        sampler: &mut Sampler,
        max_tokens: usize,
        mut on_token: impl FnMut(&Engine, u32) -> Next,
    ) -> Result<End> {
        if prompt.is_empty() {
            return Err(Error::Request("the prompt is empty".to_owned()));
        }
        if prompt.len() >= self.context() {
            return Err(Error::Context { prompt: prompt.len(), context: self.context() });
        }
        self.reset()?;
        let mut logits = self.forward(prompt, Want::Last, None).await?;
        for n in 1..=max_tokens {
            let token = sampler.sample(&logits)?;
            if on_token(self, token) == Next::Stop {
                return Ok(End::Stopped);
            }
            if n == max_tokens || self.position() >= self.context() {
                break;
            }
            logits = self.forward(&[token], Want::Last, None).await?;
        }
        Ok(End::Length)
    }
}
