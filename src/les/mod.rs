//! Lookahead Expert Scheduling. Pure: no clock, no input or output, no knowledge of GPU or JavaScript.
//!
//! The [`Pool`] decides which experts hold which slots and in which waves a layer's work runs.

mod pool;

pub use pool::{Load, Pool, PoolStats, Wave};
