//! What a pack is made from, whatever form it comes in.

use std::collections::BTreeMap;

use futures_util::future::LocalBoxFuture;
use serde_json::Value;

use crate::error::{Error, Result};
use crate::tensor::{DType, Layout};

/// A tensor that can be packed, without its values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    pub shape: Vec<usize>,
    /// The smallest type that holds its weights as they are.
    pub exact: DType,
    /// Bytes in its file.
    pub bytes: u64,
}

impl Described {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A model as it is published. Tensors have the names, shapes and values that `transformers` gives them.
pub trait Weights {
    /// What the model is called if nobody says otherwise.
    fn name(&self) -> String;

    fn licence(&self) -> Option<String> {
        None
    }

    /// As in `config.json`.
    fn config(&self) -> &Value;

    /// The files that hold the tensors, and their sizes.
    fn files(&self) -> Vec<(String, u64)>;

    /// Bytes of one of those files.
    fn read<'a>(&'a self, file: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Vec<u8>>>;

    /// The tensors' names, in no order; those that are stored as one may have one name here and be found by several.
    fn names(&self) -> Vec<&str>;

    fn find(&self, name: &str) -> Option<Described>;

    /// `count` values of a tensor, beginning with the `first`; both are multiples of its last dimension.
    fn values<'a>(&'a self, name: &'a str, first: usize, count: usize) -> LocalBoxFuture<'a, Result<Vec<f32>>>;

    /// The same as a matrix in its device layout, without loss if its type is [`Described::exact`].
    fn matrix<'a>(&'a self, name: &'a str, first: usize, layout: Layout) -> LocalBoxFuture<'a, Result<Vec<u8>>>;

    /// Files that a pack carries along: the tokenizer and its like, by name.
    fn carried(&self) -> Result<BTreeMap<String, Vec<u8>>>;

    fn tensor(&self, name: &str) -> Result<Described> {
        self.find(name).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })
    }

    /// Bytes that the values take without loss.
    fn exact_bytes(&self) -> u64 {
        let bytes = |t: Described| Layout::new(t.exact, 1, t.len()).checked_bytes().map_or(u64::MAX, |n| n as u64);
        self.names().iter().filter_map(|name| self.find(name)).map(bytes).fold(0, u64::saturating_add)
    }
}
