//! A sequence's life: prefill, decode, sampling.

pub mod sampler;
