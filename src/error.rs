//! One error type for the whole runtime. Every variant says what happened and what the caller can do about it, and has
//! a stable [`Error::code`] that the package hands to JavaScript.

use std::fmt;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Bytes, printed the way the budget options take them (`64MiB`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.unit() {
            Some((unit, bytes)) => write!(f, "{:.1} {unit}", self.0 as f64 / bytes as f64),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

impl Size {
    /// The largest unit that it has one of.
    fn unit(self) -> Option<(&'static str, u64)> {
        [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)].into_iter().find(|(_, bytes)| self.0 >= *bytes)
    }
}

/// Bytes that are needed, rounded up: whoever types in what was printed has enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needed(pub u64);

impl fmt::Display for Needed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Size(self.0).unit() {
            Some((unit, bytes)) => {
                let tenths = (u128::from(self.0) * 10).div_ceil(u128::from(bytes));
                write!(f, "{}.{} {unit}", tenths / 10, tenths % 10)
            }
            None => Size(self.0).fmt(f),
        }
    }
}

impl std::str::FromStr for Size {
    type Err = String;

    /// `64MiB`, `1.5 GiB`, `500MB`, `4096`. Units of a thousand and of 1024, of either case.
    fn from_str(s: &str) -> Result<Size, String> {
        let digits = s.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(s.len());
        let (number, unit) = s.split_at(digits);
        let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kb" => 1000,
            "m" | "mb" => 1_000_000,
            "g" | "gb" => 1_000_000_000,
            "kib" => 1 << 10,
            "mib" => 1 << 20,
            "gib" => 1 << 30,
            _ => return Err(format!("`{unit}` is not a unit of size; use one such as MiB, GiB or MB")),
        };
        let bytes = match number.parse::<u64>() {
            Ok(whole) => whole.checked_mul(factor),
            Err(_) => number.parse::<f64>().ok().map(|n| n * factor as f64).filter(|n| *n < 1e18).map(|n| n as u64),
        };
        bytes.map(Size).ok_or_else(|| format!("`{s}` is not a size; write one such as 64MiB"))
    }
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("{path} was not found; check the path or address")]
    NotFound { path: String },
    #[error("the server answered {status} for {url}; {}", http_advice(*.status))]
    Http { url: String, status: u16 },
    #[error("could not reach {url}: {reason}; check the connection and that the server allows cross-origin reads")]
    Network { url: String, reason: String },
    #[error("{path} is {actual} bytes long where {expected} were expected; download or copy it again")]
    Truncated { path: String, expected: u64, actual: u64 },
    #[error("bytes {offset}..{} of {path} do not match their hash; run `outrider verify`, then download that file again", .offset + .len)]
    Corrupt { path: String, offset: u64, len: u64 },
    #[error("{parts} parts of the pack are bad; download or copy again: {files}")]
    BadPack { parts: usize, files: String },
    #[error("the pack has format version {found}, this build reads {supported}; update Outrider or repack the model")]
    Version { found: u64, supported: u64 },
    #[error("the file is not a valid {what}: {reason}")]
    Format { what: &'static str, reason: String },
    #[error("architecture `{name}` is not supported; supported: {supported}")]
    UnknownArchitecture { name: String, supported: String },
    #[error("the model has no tensor `{name}`; the checkpoint is incomplete, download it again")]
    MissingTensor { name: String },
    #[error("the model has no {file}; put it beside the checkpoint and pack again")]
    MissingFile { file: String },
    #[error("tensor `{name}` cannot be stored as {dtype}: {reason}")]
    Encode { name: String, dtype: String, reason: String },
    #[error("a budget of {} is too small: this model needs at least {} at a context of {context} tokens", Size(*.budget), Needed(*.smallest))]
    Budget { budget: u64, smallest: u64, context: usize },
    #[error("the prompt has {prompt} tokens and the context holds {context}; shorten it or raise the context")]
    Context { prompt: usize, context: usize },
    #[error("the request is not valid: {0}")]
    Request(String),
    #[error("the chat template failed: {0}")]
    Template(String),
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
    #[error("the model's output is unusable: {0}; run `outrider verify`, and try the CPU backend")]
    Logits(String),
    #[error("the self-test failed on the {}: {reason}; {}", .backend.to_uppercase(), self_test_advice(.backend))]
    SelfTest { backend: &'static str, reason: String },
    #[error("no usable GPU: {0}; use the CPU backend")]
    NoGpu(String),
    #[error("the GPU failed: {0}; reload the engine")]
    Gpu(String),
    #[error("the GPU device was lost: {0}; reload the engine")]
    DeviceLost(String),
    /// `needed` is 0 where it is not known.
    #[error("storage is full{}; free some space or pick a smaller model", more_needed(*.needed))]
    Quota { needed: u64 },
    #[error("storage failed on {path}: {reason}")]
    Storage { path: String, reason: String },
    #[error("stopped by the caller")]
    Aborted,
    #[error("{path}: {source}")]
    Io { path: String, source: std::io::Error },
}

fn more_needed(bytes: u64) -> String {
    if bytes == 0 { String::new() } else { format!(": {bytes} more bytes are needed") }
}

fn self_test_advice(backend: &str) -> &'static str {
    match backend {
        "cpu" => "download or pack the model again",
        _ => "use the CPU backend, and if it fails there as well, download or pack the model again",
    }
}

fn http_advice(status: u16) -> &'static str {
    match status {
        404 => "check the address",
        401 | 403 => "the file needs permission",
        500.. => "try again later",
        _ => "check the address and the server",
    }
}

impl Error {
    /// A stable name for the kind of error, for programs to match on.
    pub fn code(&self) -> &'static str {
        match self {
            Error::NotFound { .. } => "not_found",
            Error::Http { .. } => "http",
            Error::Network { .. } => "network",
            Error::Truncated { .. } => "truncated",
            Error::Corrupt { .. } => "corrupt",
            Error::BadPack { .. } => "bad_pack",
            Error::Version { .. } => "version",
            Error::Format { .. } => "format",
            Error::UnknownArchitecture { .. } => "unknown_architecture",
            Error::MissingTensor { .. } => "missing_tensor",
            Error::MissingFile { .. } => "missing_file",
            Error::Encode { .. } => "encode",
            Error::Budget { .. } => "budget",
            Error::Context { .. } => "context",
            Error::Request(_) => "request",
            Error::Template(_) => "template",
            Error::Tokenizer(_) => "tokenizer",
            Error::Logits(_) => "logits",
            Error::SelfTest { .. } => "self_test",
            Error::NoGpu(_) => "no_gpu",
            Error::Gpu(_) => "gpu",
            Error::DeviceLost(_) => "device_lost",
            Error::Quota { .. } => "quota",
            Error::Storage { .. } => "storage",
            Error::Aborted => "aborted",
            Error::Io { .. } => "io",
        }
    }

    pub fn io(path: impl fmt::Display) -> impl FnOnce(std::io::Error) -> Error {
        move |source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::NotFound { path: path.to_string() },
            std::io::ErrorKind::StorageFull => Error::Quota { needed: 0 },
            _ => Error::Io { path: path.to_string(), source },
        }
    }

    pub fn format(what: &'static str, reason: impl fmt::Display) -> Error {
        Error::Format { what, reason: reason.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::{Needed, Size};

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let good = [
            ("64MiB", 64 << 20),
            ("3GiB", 3 << 30),
            ("500MB", 500_000_000),
            ("1.5 gib", 3 << 29),
            ("24m", 24_000_000),
            ("4096", 4096),
            ("0", 0),
        ];
        for (text, bytes) in good {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "MiB", "-1", "1.2.3", "5 parsecs", "99999999999GiB", "1e30", "NaN", "inf"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_said_to_be_needed_is_enough() {
        assert_eq!(Needed(9 << 20).to_string(), "9.0 MiB");
        assert_eq!(Needed((9 << 20) + 1).to_string(), "9.1 MiB");
        assert_eq!(Needed((1 << 20) - 1).to_string(), "1024.0 KiB");
        for bytes in (0..64).flat_map(|shift| [3, 5, 7, 9].map(|n: u64| n << shift >> 4)) {
            let Ok(Size(read)) = Needed(bytes).to_string().parse() else { continue };
            assert!(read >= bytes && read - bytes <= bytes / 10, "{bytes} was read back as {read}");
        }
    }
}
