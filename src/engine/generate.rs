//! Prefill and decode, token by token.

use super::Engine;
use super::sampler::Sampler;
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
    /// Continues `prompt`, of which only what is new is run (see [`prefill`](Self::prefill)), by up to `max_tokens` tokens,
    /// each handed to `on_token` as soon as it is chosen, together with the engine, whose counters can be read there.
    pub async fn generate(
        &mut self,
        prompt: &[u32],
        sampler: &mut Sampler,
        max_tokens: usize,
        mut on_token: impl FnMut(&Engine, u32) -> Next,
    ) -> Result<End> {
        if prompt.len() >= self.context() {
            return Err(Error::Context { prompt: prompt.len(), context: self.context() });
        }
        let mut logits = self.prefill(prompt).await?;
        for n in 1..=max_tokens {
            let token = sampler.sample(&logits)?;
            if on_token(self, token) == Next::Stop {
                return Ok(End::Stopped);
            }
            if n == max_tokens || self.position() >= self.context() {
                break;
            }
            logits = self.decode(token).await?;
        }
        Ok(End::Length)
    }
}
