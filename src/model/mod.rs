//! What a model is: its configuration, its forward pass as a [`plan`], its tokenizer.

pub mod plan;
