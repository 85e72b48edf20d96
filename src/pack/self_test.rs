//! What a pack's weights compute, so that whoever loads it can tell whether kernels and bytes are right before the first
//! token.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

/// Tokens and logits that a self-test may have: enough for any that is made here, too few to be a burden.
const MAX_TOKENS: usize = 64;
const MAX_TOP: usize = 64;

/// A sequence and what the CPU backend computed for it, on the weights as they are stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelfTest {
    pub tokens: Vec<u32>,
    /// In order of position.
    pub rows: Vec<SelfTestRow>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelfTestRow {
    /// Which of the tokens the logits follow.
    pub position: usize,
    /// The likeliest tokens and their logits, by descending logit.
    pub top: Vec<(u32, f32)>,
}

impl SelfTest {
    /// Checks everything against a vocabulary.
    pub(super) fn validate(&self, vocab: usize) -> Result<(), String> {
        let tokens = self.tokens.len();
        if tokens == 0 || tokens > MAX_TOKENS || self.rows.is_empty() {
            return Err(format!("{} rows of {tokens} tokens; it has 1 to {MAX_TOKENS} tokens", self.rows.len()));
        }
        let named = self.tokens.iter().chain(self.rows.iter().flat_map(|r| r.top.iter().map(|(id, _)| id)));
        if let Some(id) = named.into_iter().find(|id| **id as usize >= vocab) {
            return Err(format!("token {id} of {vocab}"));
        }
        if !self.rows.is_sorted_by(|a, b| a.position < b.position) {
            return Err("its rows are out of order".into());
        }
        for SelfTestRow { position, top } in &self.rows {
            if *position >= tokens {
                return Err(format!("a row at position {position} of {tokens}"));
            }
            if top.is_empty() || top.len() > MAX_TOP {
                return Err(format!("{} logits at position {position}; it has 1 to {MAX_TOP}", top.len()));
            }
            if !top.iter().all(|(_, logit)| logit.is_finite()) || !top.is_sorted_by(|a, b| a.1 >= b.1) {
                return Err(format!("the logits at position {position} do not descend"));
            }
            if top.iter().map(|(id, _)| id).collect::<HashSet<_>>().len() < top.len() {
                return Err(format!("a token appears twice at position {position}"));
            }
        }
        Ok(())
    }
}
