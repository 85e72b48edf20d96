//! `qwen3`: as llama, with norms of queries and keys.

use serde_json::Value;

use super::Tensors;
use super::decoder::QkNorm;
use super::llama::dense;
use super::plan::Plan;
use crate::error::Result;

pub fn plan(config: &Value, tensors: &dyn Tensors) -> Result<Plan> {
    dense(config, QkNorm::Head, tensors)
}
