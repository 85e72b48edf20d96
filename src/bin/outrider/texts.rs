//! Texts that a command runs a model on: one JSON object a line.

use std::path::Path;

use outrider::chat::Chat;
use outrider::engine::Engine;
use outrider::{Error, Result};
use serde::Deserialize;

#[derive(Deserialize)]
struct Line {
    text: Option<String>,
    ids: Option<Vec<u32>>,
}

/// The tokens of each text, of the first `limit`. A tokenizer is needed only where a line brings none.
pub async fn read(path: &Path, limit: Option<usize>, engine: &Engine) -> Result<Vec<Vec<u32>>> {
    let content = std::fs::read_to_string(path).map_err(Error::io(path.display()))?;
    let lines = content.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let mut chat = None;
    let mut texts = Vec::new();
    for (number, line) in lines.take(limit.unwrap_or(usize::MAX)) {
        let bad = |reason: String| Error::format("text", format!("line {}: {reason}", number + 1));
        let line: Line = serde_json::from_str(line).map_err(|e| bad(e.to_string()))?;
        texts.push(match (line.ids, line.text) {
            (Some(ids), _) => ids,
            (None, Some(text)) => {
                if chat.is_none() {
                    chat = Some(Chat::of_pack(engine.pack()).await?);
                }
                chat.as_ref().expect("made above").tokenizer().encode(&text)?
            }
            (None, None) => return Err(bad("it has neither `text` nor `ids`".to_owned())),
        });
    }
    Ok(texts)
}
