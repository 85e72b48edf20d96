//! Files that a pack carries along.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use crate::error::{Error, Result};

/// These files, by name. JSON is stored without insignificant spaces.
pub fn read(paths: &[PathBuf]) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for path in paths {
        let mut bytes = fs::read(path).map_err(Error::io(path.display()))?;
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        if name.ends_with(".json") {
            serde_json::from_slice::<serde::de::IgnoredAny>(&bytes)
                .map_err(|e| Error::format("checkpoint", format!("{}: {e}", path.display())))?;
            strip_spaces(&mut bytes);
        }
        files.insert(name, bytes);
    }
    Ok(files)
}

/// Removes what lies between the tokens of valid JSON.
fn strip_spaces(json: &mut Vec<u8>) {
    let (mut quoted, mut escaped) = (false, false);
    json.retain(|&b| {
        let keep = quoted || !b.is_ascii_whitespace();
        match b {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            _ => {}
        }
        keep
    });
}

#[cfg(test)]
mod tests {
    #[test]
    fn spaces_go_only_between_tokens() {
        let mut json = br#" { "a b" : [ 1 , "\" \\" , "x \\\" y" ],
            "c":	null } "#
            .to_vec();
        let before: serde_json::Value = serde_json::from_slice(&json).unwrap();
        super::strip_spaces(&mut json);
        assert_eq!(json, br#"{"a b":[1,"\" \\","x \\\" y"],"c":null}"#);
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&json).unwrap(), before);
    }
}
