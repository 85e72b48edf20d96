//! `chat --trace` and what reads its recordings.

use std::path::Path;

use serde_json::Value;

use super::{GOLDEN_CHECKPOINTS, chat, fails, outrider, repository, text, works};

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
    for part in ["concierge on the CPU, 96 slots", "stall: demand reads", "slowest token", "median token", "█"] {
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

#[test]
fn a_trace_is_simulated_within_a_budget() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.jsonl");
    record(&file);
    let phone = ["simulate", "--trace", text(&file), "--profile", "iphone-17-pro-max"];
    let simulate = |more: &[&str]| json(&[&phone[..], more].concat());
    let slots = |report: &Value| report["slots"].as_u64().unwrap();
    let small = simulate(&["--budget", "13MB"]);
    let large = simulate(&["--budget", "16MB"]);
    assert!(slots(&small) >= 4 && slots(&large) > slots(&small), "{small}");
    // What three megabytes more hold is the same whoever says what lies beside the pool, but for a slot cut off.
    let model = repository("models/concierge");
    let with = |budget| slots(&simulate(&["--budget", budget, "--model", text(&model)]));
    assert!((with("16MB") - with("13MB")).abs_diff(slots(&large) - slots(&small)) <= 1);
    assert_eq!(slots(&simulate(&["--slots", "77"])), 77);

    fails(&[&phone[..], &["--budget", "1MB"]].concat(), "a budget of 976.6 KiB is too small");
    assert_eq!(outrider(&phone).status.code(), Some(2), "neither budget nor slots");
    let recorded = std::fs::read_to_string(&file).unwrap();
    let (header, passes) = recorded.split_once('\n').unwrap();
    let mut header: Value = serde_json::from_str(header).unwrap();
    header.as_object_mut().unwrap().remove("setup");
    std::fs::write(&file, format!("{header}\n{passes}")).unwrap();
    fails(&[&phone[..], &["--budget", "16MB"]].concat(), "--model");
    let other = repository(GOLDEN_CHECKPOINTS[0]);
    fails(&[&phone[..], &["--budget", "16MB", "--model", text(&other)]].concat(), "the trace is not of this model");
}

#[test]
fn a_measured_profile_can_be_simulated() {
    let dir = tempfile::tempdir().unwrap();
    let (file, trace) = (dir.path().join("here.json"), dir.path().join("chat.jsonl"));
    record(&trace);
    let model = repository("models/concierge");
    let measure = ["profile", text(&model), "--backend", "cpu", "--tokens", "8", "--slowness", "4", "-o", text(&file)];
    assert!(works(&measure).stdout.is_empty());
    let profile: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(profile["name"], "concierge-cpu");
    let explained = |field: &str| profile["assumptions"][field].as_str().is_some_and(|reason| !reason.is_empty());
    for (field, value) in profile["machine"].as_object().unwrap() {
        let parts = value.as_object().map(|parts| parts.keys().map(|part| format!("{field}.{part}")).collect());
        assert!(
            parts.unwrap_or_else(|| vec![field.clone()]).iter().all(|field| explained(field)),
            "{field}: {profile}"
        );
    }
    for field in ["mix", "expert", "finish", "head"] {
        assert!(profile["machine"][field].as_f64().unwrap() > 0.0, "{profile}");
    }
    let report = json(&["simulate", "--trace", text(&trace), "--profile", text(&file), "--slots", "96"]);
    assert_eq!(report["profile"], "concierge-cpu");
    assert!(report["rows"][0]["tokens_per_second"].as_f64().unwrap() > 0.0, "{report}");
    fails(&["profile", text(&model), "--tokens", "0"], "needs a token");
    fails(&["profile", text(&model), "--slowness", "nan"], "slowness above 0");
}

#[test]
fn predictions_stand_beside_what_is_measured() {
    let (model, texts) = (repository("models/concierge"), repository("tests/data/concierge/dialogues.jsonl"));
    let run = ["lookahead", text(&model), "--text", text(&texts), "--rounds", "1", "--tokens", "4", "--slots", "80"];
    let report = json(&[&run[..], &["--slowness", "3", "--predict"]].concat());
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 7);
    let number = |value: &Value| value.as_f64().unwrap();
    for row in rows {
        let (predicted, speedup) = (&row["predicted"], number(&row["speedup"]));
        let error = number(&predicted["speedup"]) / speedup - 1.0;
        assert!((number(&predicted["error"]) - error).abs() < 1e-9 && number(&predicted["time"]) > 0.0, "{row}");
    }
    assert_eq!(number(&rows[0]["predicted"]["speedup"]), 1.0);
    let verdict = &report["verdict"];
    assert!(number(&verdict["worst_error"]) >= number(&verdict["median_error"]), "{verdict}");
    assert!(verdict["pairs"].is_u64() && verdict["misordered"].is_array(), "{verdict}");
}

#[test]
fn a_prompt_is_measured_against_its_bound() {
    let (model, texts) = (repository("models/concierge"), repository("tests/data/concierge/dialogues.jsonl"));
    let run = ["prefill", text(&model), "--text", text(&texts), "--rounds", "1", "--tokens", "90", "--slots", "80"];
    let report = json(&[&run[..], &["--slowness", "3", "--chunks", "30,auto"]].concat());
    let rows = report["rows"].as_array().unwrap();
    let number = |row: &Value, field: &str| row[field].as_f64().unwrap();
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["30", "auto", "auto, in a chat"]);
    for row in rows {
        let bound = number(row, "compute").max(number(row, "reading"));
        assert!(bound > 0.0 && number(row, "over") > 0.0 && number(row, "time") > 0.0, "{row}");
        assert!(number(row, "bytes") >= number(row, "distinct_bytes"), "the pool is empty before: {row}");
    }
    // In one pass every expert is read once; guesses may add some that are not needed.
    assert!(number(&rows[0], "reads") > 1.5 * number(&rows[1], "reads"), "{report}");
    assert!(number(&rows[1], "bytes") < 1.05 * number(&rows[1], "distinct_bytes"), "{report}");
    let none = outrider(&[&run[..], &["--chunks", "0"]].concat());
    assert!(none.status.code() == Some(2) && none.stderr.contains("neither a number of tokens nor auto"));
    let long = ["prefill", text(&model), "--text", text(&texts), "--tokens", "100000"];
    fails(&long, "for a prompt of 100000");
}
