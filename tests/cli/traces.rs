//! `chat --trace` and what reads its recordings.

use std::path::Path;

use serde_json::Value;

use super::{chat, fails, repository, text, works};

/// A short chat with a small pool, recorded.
fn record(file: &Path) {
    let model = repository("models/concierge");
    let plain = chat(text(&model), &["--max-slots", "96"]);
    assert_eq!(chat(text(&model), &["--max-slots", "96", "--trace", text(file)]).stdout, plain.stdout);
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&works(&[args, &["--json"]].concat()).stdout).unwrap()
}

#[test]
fn a_trace_says_where_the_time_went() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.jsonl");
    record(&file);
    let report = json(&["trace", text(&file)]);
    assert_eq!(report["setup"]["slots"], 96);
    assert!(report["prompt_tokens"].as_u64().unwrap() > 8, "{report}");
    assert_eq!(report["layers"].as_array().unwrap().len(), 8);
    let number = |value: &Value| value.as_f64().unwrap();
    let parts: Vec<f64> = report["milliseconds"].as_object().unwrap().values().map(number).collect();
    assert!(parts.iter().all(|part| *part >= 0.0) && parts.iter().sum::<f64>() > 0.0, "{report}");
    assert!(number(&report["demand_bytes"]) > 0.0 && number(&report["speculative_bytes"]) > 0.0, "{report}");
    for share in [&report["hit"], &report["overlap"], &report["recall"][0]["recall"]] {
        assert!((0.0..=1.0).contains(&number(share)), "{report}");
    }
    assert!(number(&report["slowest"]["milliseconds"]) >= number(&report["median"]["milliseconds"]));

    let shown = works(&["trace", text(&file)]).stdout;
    for part in ["concierge on the CPU, 96 slots", "waiting for demand reads", "slowest token", "median token", "█"] {
        assert!(shown.contains(part), "no `{part}` in:\n{shown}");
    }
}

#[test]
fn a_damaged_trace_is_refused_with_the_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.jsonl");
    record(&file);
    let good = std::fs::read(&file).unwrap();
    let lines: Vec<&[u8]> = good.split_inclusive(|byte| *byte == b'\n').collect();
    let try_with = |content: &[u8], reason: &str| {
        std::fs::write(&file, content).unwrap();
        fails(&["trace", text(&file)], reason);
        fails(&["trace", text(&file), "--json"], reason);
    };
    try_with(b"", "line 1");
    try_with(lines[1], "line 1");
    try_with(&good[..good.len() - 9], &format!("line {}", lines.len()));
    try_with(&[lines[0], lines[1], b"\xff\xfe\n"].concat(), "line 3");
    try_with(&[lines[0], b"{\"rows\": 1, \"ids\": [], \"foreseen\": []}"].concat(), "line 2: the pass does not fit");
    try_with(lines[0], "no pass of one token");
    fails(&["trace", "no/such/trace"], "no/such/trace was not found");
    let model = repository("models/concierge");
    fails(&["chat", text(&model), "hi", "--backend", "cpu", "--trace", "no/such/place"], "no/such/place was not found");
}
