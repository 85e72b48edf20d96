//! `qwen3_next`: Qwen3-Next. As Qwen3.5's mixture, but that DeltaNet's projections are fused, key head by key head.

use serde_json::Value;

use super::delta_net::Projections;
use super::plan::Plan;
use super::qwen3_5_moe::{Variant, hybrid};
use super::{Tensors, rope};
use crate::error::Result;

pub fn plan(config: &Value, tensors: &dyn Tensors) -> Result<Plan> {
    let variant = Variant {
        projections: Projections::Fused,
        rope: rope::Defaults { theta: 10_000.0, part: 0.25 },
        renormalise: config["norm_topk_prob"].as_bool().unwrap_or(true),
    };
    hybrid(config, &variant, tensors)
}
