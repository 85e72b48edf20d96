//! f32 rows to stored blocks.
use super::Layout;
use crate::error::Result;

pub fn encode(_layout: &Layout, _name: &str, _values: &[f32]) -> Result<Vec<u8>> {
    unimplemented!()
}
