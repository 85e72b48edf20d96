//! The key-value pairs at the head of a GGUF file.

use std::collections::HashMap;

use crate::error::{Error, Result};

/// Types of values, by their number in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl Kind {
    const ALL: [Kind; 13] = [
        Kind::U8,
        Kind::I8,
        Kind::U16,
        Kind::I16,
        Kind::U32,
        Kind::I32,
        Kind::F32,
        Kind::Bool,
        Kind::String,
        Kind::Array,
        Kind::U64,
        Kind::I64,
        Kind::F64,
    ];

    pub fn from_id(id: u32) -> Option<Kind> {
        Kind::ALL.get(usize::try_from(id).ok()?).copied()
    }

    /// Bytes of a value, of texts and arrays the least there can be.
    pub fn bytes(self) -> usize {
        match self {
            Kind::U8 | Kind::I8 | Kind::Bool => 1,
            Kind::U16 | Kind::I16 => 2,
            Kind::U32 | Kind::I32 | Kind::F32 => 4,
            Kind::U64 | Kind::I64 | Kind::F64 | Kind::String => 8,
            Kind::Array => 12,
        }
    }

    /// A value of a type of fixed size.
    pub fn scalar(self, bytes: &[u8]) -> Value {
        fn take<const N: usize>(bytes: &[u8]) -> [u8; N] {
            bytes[..N].try_into().expect("as many bytes as its type has")
        }
        match self {
            Kind::U8 => Value::Unsigned(bytes[0].into()),
            Kind::I8 => Value::Signed((bytes[0] as i8).into()),
            Kind::U16 => Value::Unsigned(u16::from_le_bytes(take(bytes)).into()),
            Kind::I16 => Value::Signed(i16::from_le_bytes(take(bytes)).into()),
            Kind::U32 => Value::Unsigned(u32::from_le_bytes(take(bytes)).into()),
            Kind::I32 => Value::Signed(i32::from_le_bytes(take(bytes)).into()),
            Kind::F32 => Value::Float(f32::from_le_bytes(take(bytes)).into()),
            Kind::Bool => Value::Bool(bytes[0] != 0),
            Kind::U64 => Value::Unsigned(u64::from_le_bytes(take(bytes))),
            Kind::I64 => Value::Signed(i64::from_le_bytes(take(bytes))),
            Kind::F64 => Value::Float(f64::from_le_bytes(take(bytes))),
            Kind::String | Kind::Array => unreachable!("not of fixed size"),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    Texts(Texts),
    /// Numbers as they lie in the file.
    Numbers(Kind, Vec<u8>),
}

impl Value {
    fn unsigned(&self) -> Option<u64> {
        match *self {
            Value::Unsigned(n) => Some(n),
            Value::Signed(n) => n.try_into().ok(),
            _ => None,
        }
    }

    pub fn float(&self) -> Option<f64> {
        match *self {
            Value::Float(x) => Some(x),
            _ => None,
        }
    }

    pub fn signed(&self) -> Option<i64> {
        match *self {
            Value::Unsigned(n) => n.try_into().ok(),
            Value::Signed(n) => Some(n),
            _ => None,
        }
    }
}

/// Texts one after the other, in no more memory than they take in the file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Texts {
    all: String,
    ends: Vec<usize>,
}

impl Texts {
    pub fn push(&mut self, text: &str) {
        self.all.push_str(text);
        self.ends.push(self.all.len());
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn get(&self, at: usize) -> Option<&str> {
        let end = *self.ends.get(at)?;
        Some(&self.all[at.checked_sub(1).map_or(0, |before| self.ends[before])..end])
    }

    pub fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).filter_map(|at| self.get(at))
    }
}

/// Values by their keys.
#[derive(Debug, Default)]
pub struct Metadata {
    /// What is said in errors to be at fault.
    pub file: String,
    pub values: HashMap<String, Value>,
}

impl Metadata {
    pub fn bad(&self, reason: impl std::fmt::Display) -> Error {
        Error::format("GGUF file", format!("{}: {reason}", self.file))
    }

    fn get<'a, T>(&'a self, key: &str, what: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(value) => Ok(Some(value)),
                None => Err(self.bad(format!("`{}` is not {what}", key.escape_default()))),
            },
        }
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.get(key, "a text", |value| match value {
            Value::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    pub fn texts(&self, key: &str) -> Result<Option<&Texts>> {
        self.get(key, "an array of texts", |value| match value {
            Value::Texts(texts) => Some(texts),
            _ => None,
        })
    }

    pub fn unsigned(&self, key: &str) -> Result<Option<u64>> {
        self.get(key, "a number from 0 on", Value::unsigned)
    }

    /// A size or a count.
    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        self.get(key, "a size", |value| value.unsigned()?.try_into().ok())
    }

    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        self.get(key, "a number", Value::float)
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.get(key, "true or false", |value| match *value {
            Value::Bool(b) => Some(b),
            _ => None,
        })
    }

    /// Elements of an array, each as a value of its type.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<Value>>> {
        self.get(key, "an array of numbers", |value| match value {
            Value::Numbers(kind, bytes) => Some(bytes.chunks_exact(kind.bytes()).map(|b| kind.scalar(b)).collect()),
            _ => None,
        })
    }

    /// A size that a model has one of, or one a layer: then the one of all layers that have any.
    pub fn size_of_layers(&self, key: &str) -> Result<Option<usize>> {
        if !matches!(self.values.get(key), Some(Value::Numbers(..))) {
            return self.size(key);
        }
        let numbers = self.numbers(key)?.unwrap_or_default();
        let mut sizes = numbers.iter().map(Value::unsigned).filter(|n| *n != Some(0));
        let first = sizes.next().flatten();
        if first.is_none() || sizes.any(|n| n != first) {
            return Err(self.bad(format!("`{}` is not the same size for all layers", key.escape_default())));
        }
        Ok(first.and_then(|n| n.try_into().ok()))
    }

    pub fn needed<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.bad(format!("`{key}` is missing")))
    }
}
