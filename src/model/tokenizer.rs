//! Text to tokens and back, by the model's own `tokenizer.json`, whole or as a stream.

use std::sync::{Arc, LazyLock};

use tokenizers::decoders::DecoderWrapper;

use crate::error::{Error, Result};

/// A model's tokenizer. Clones share one vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    byte_level: bool,
}

fn failed(e: tokenizers::Error) -> Error {
    Error::Tokenizer(e.to_string())
}

impl Tokenizer {
    /// From the bytes of a `tokenizer.json`. [`Error::Tokenizer`] if they are not one.
    pub fn from_json(json: &[u8]) -> Result<Tokenizer> {
        let mut inner = tokenizers::Tokenizer::from_bytes(json)
            .map_err(|e| Error::Tokenizer(format!("tokenizer.json cannot be read: {e}")))?;
        // Some files keep the settings of their training run; a prompt must be neither cut nor padded.
        inner.with_truncation(None).map_err(failed)?;
        inner.with_padding(None);
        let byte_level = matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_)));
        Ok(Tokenizer { inner: Arc::new(inner), byte_level })
    }

    /// Tokens of `text`. Special tokens written out in it become their ids; none are added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.inner.encode_fast(text, false).map_err(failed)?.get_ids().to_vec())
    }

    /// Text of `ids`, without the special tokens if `skip_special`. Bytes that are not UTF-8 become U+FFFD and ids
    /// outside the vocabulary nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner.decode(ids, skip_special).map_err(failed)
    }

    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Number of tokens, added ones included. The model's head may have more rows than this.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Decodes token after token, see [`TextStream`].
    pub fn stream(&self, skip_special: bool) -> TextStream {
        let pending = if self.byte_level { Pending::Bytes(Vec::new()) } else { Pending::Tokens(Window::default()) };
        TextStream { tokenizer: self.clone(), skip_special, pending }
    }

    /// The token's text as the vocabulary writes it, unless it is unknown or to be skipped.
    fn piece(&self, id: u32, skip_special: bool) -> Option<String> {
        let added = self.inner.get_added_vocabulary();
        let piece = added.simple_id_to_token(id).or_else(|| self.inner.id_to_token(id))?;
        (!skip_special || !added.is_special_token(&piece)).then_some(piece)
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

/// Incremental decoding: what [`push`](Self::push) and [`finish`](Self::finish) return, joined, is what
/// [`Tokenizer::decode`] gives for all tokens at once, and a character comes out whole, with its last token. The work
/// per token does not grow with the text.
///
/// (Tokenizers that spell bytes as `<0xE2>` decode a run of them as a whole; there, only text that is valid UTF-8 is
/// promised to be the same.)
#[derive(Debug, Clone)]
pub struct TextStream {
    tokenizer: Tokenizer,
    skip_special: bool,
    pending: Pending,
}

#[derive(Debug, Clone)]
enum Pending {
    /// Tokens are byte strings: the beginning of a character that is not complete yet.
    Bytes(Vec<u8>),
    /// A token's text depends on its neighbours.
    Tokens(Window),
}

/// Tokens around the point up to which text was returned.
#[derive(Debug, Clone, Default)]
struct Window {
    ids: Vec<u32>,
    /// How many of `ids` were returned already; they are kept as the others' context.
    done: usize,
    /// What those decode to.
    text: String,
}

impl TextStream {
    /// The text that is certain with this token: possibly none, possibly several characters.
    pub fn push(&mut self, id: u32) -> Result<String> {
        let Some(piece) = self.tokenizer.piece(id, self.skip_special) else { return Ok(String::new()) };
        match &mut self.pending {
            Pending::Bytes(bytes) => {
                push_bytes(&piece, bytes);
                Ok(take_complete(bytes))
            }
            Pending::Tokens(window) => window.push(&self.tokenizer, id),
        }
    }

    /// What is left when no more tokens come: nothing, unless the last character is cut off.
    pub fn finish(&mut self) -> Result<String> {
        match &mut self.pending {
            Pending::Bytes(bytes) => Ok(String::from_utf8_lossy(&std::mem::take(bytes)).into_owned()),
            Pending::Tokens(window) => {
                let rest = window.rest(&self.tokenizer)?;
                *window = Window::default();
                Ok(rest)
            }
        }
    }
}

impl Window {
    /// A UTF-8 character has at most this many bytes, so fewer that are invalid may yet become one.
    const LONGEST: usize = 4;

    fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.rest(tokenizer)?;
        let invalid = text.chars().rev().take_while(|&c| c == char::REPLACEMENT_CHARACTER).count();
        if text.is_empty() || (1..Self::LONGEST).contains(&invalid) {
            return Ok(String::new());
        }
        self.ids.drain(..self.done);
        self.done = self.ids.len();
        self.text = tokenizer.decode(&self.ids, false)?;
        Ok(text)
    }

    /// Text of the tokens not returned yet.
    fn rest(&self, tokenizer: &Tokenizer) -> Result<String> {
        let all = tokenizer.decode(&self.ids, false)?;
        match all.strip_prefix(&self.text) {
            Some(rest) => Ok(rest.to_owned()),
            // Invalid bytes can turn a valid run before them invalid as well; what was returned stays.
            None => tokenizer.decode(&self.ids[self.done..], false),
        }
    }
}

/// Byte-level vocabularies write every byte as one printable character (Radford et al., 2019): itself where it is
/// printable Latin-1, else the next unused character from U+0100 on.
static BYTES: LazyLock<Vec<Option<u8>>> = LazyLock::new(|| {
    let mut table = vec![None; 0x144];
    let mut unused = 0x100;
    for byte in 0..=255u8 {
        if matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
            table[byte as usize] = Some(byte);
        } else {
            table[unused] = Some(byte);
            unused += 1;
        }
    }
    table
});

/// Appends the bytes a byte-level token stands for. A token that uses other characters was added as plain text.
fn push_bytes(piece: &str, out: &mut Vec<u8>) {
    let start = out.len();
    for c in piece.chars() {
        match BYTES.get(c as usize).copied().flatten() {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                out.extend_from_slice(piece.as_bytes());
                return;
            }
        }
    }
}

/// Takes everything but the beginning of an incomplete character; what can never become valid is replaced.
fn take_complete(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut used = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        used += chunk.valid().len();
        let last = used + chunk.invalid().len() == bytes.len();
        let may_continue = last && std::str::from_utf8(chunk.invalid()).is_err_and(|e| e.error_len().is_none());
        if may_continue || chunk.invalid().is_empty() {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        used += chunk.invalid().len();
    }
    bytes.drain(..used);
    text
}

#[cfg(test)]
mod tests;
