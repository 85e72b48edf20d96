//! The command line: what it prints where, how it exits, what it writes, and what it leaves alone.

mod common;
#[path = "common/http.rs"]
mod http;
#[path = "cli/traces.rs"]
mod traces;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{GOLDEN_CHECKPOINTS, Output, outrider, repository};
use http::{Answer, Server, files_of};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use tempfile::TempDir;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs a command that must work.
#[track_caller]
fn works(args: &[&str]) -> Output {
    let out = outrider(args);
    assert_eq!(out.status.code(), Some(0), "{args:?}: {}", out.stderr);
    out
}

/// Runs a command that must fail, saying `reason` on standard error and nothing on standard output.
#[track_caller]
fn fails(args: &[&str], reason: &str) {
    let out = outrider(args);
    assert_eq!(out.status.code(), Some(1), "{args:?}: {}", out.stderr);
    assert!(out.stderr.contains(reason), "expected `{reason}`: {}", out.stderr);
    assert!(out.stderr.starts_with("error: ") && out.stdout.is_empty(), "{}", out.stdout);
}

fn pack(checkpoint: &Path, to: &Path, more: &[&str]) -> Output {
    outrider(&[&["pack", text(checkpoint), "-o", text(to)], more].concat())
}

/// A checkpoint that can chat: the small random one with the trained model's tokenizer, whose ids it has too few of; only
/// good for packing.
fn checkpoint() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let golden = repository(GOLDEN_CHECKPOINTS[0]);
    let names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];
    let tokenizer = names.map(|name| repository("tests/data/concierge").join(name));
    for file in [golden.join("config.json"), golden.join("model.safetensors")].iter().chain(&tokenizer) {
        std::fs::copy(file, dir.path().join(file.file_name().unwrap())).unwrap();
    }
    dir
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = files_of(dir).into_keys().collect();
    names.sort_unstable();
    names
}

#[test]
fn a_checkpoint_goes_into_a_pack_and_back() {
    let (from, place) = (checkpoint(), tempfile::tempdir().unwrap());
    let (packed, back, again) = (place.path().join("a"), place.path().join("b"), place.path().join("c"));
    let options = ["--quant", "q4", "--core", "q8", "--name", "tiny", "--licence", "MIT", "--max-shard", "64KiB"];
    let out = pack(from.path(), &packed, &options);
    assert!(out.status.success() && out.stderr.is_empty(), "{}", out.stderr);
    assert!(out.stdout.starts_with(text(&packed)) && out.stdout.lines().count() == 1, "{}", out.stdout);
    let files = files_of(&packed);
    assert!(files.iter().filter(|(name, _)| name.ends_with(".bin")).all(|(_, bytes)| bytes.len() <= 64 << 10));

    let out = works(&["inspect", text(&packed), "--tensors"]);
    let lines = [
        "name          tiny",
        "licence       MIT",
        "architecture  qwen3_5_moe_text",
        "embedding     257 × 64 q8",
        "experts       4 layers of 8 × 4.0 KiB q4",
        "file          tokenizer.json",
        "made from     model.safetensors",
        "budget        at least",
        "lm_head.weight  [257, 64] q8",
        "model.layers.0.mlp.gate.weight  [8, 64] f16",
        "model.norm.weight  [64] f32",
    ];
    for line in lines {
        assert!(out.stdout.lines().any(|l| l.starts_with(line)), "no `{line}` in:\n{}", out.stdout);
    }
    assert!(out.stderr.is_empty());
    let total: usize = files.iter().filter(|(name, _)| *name != "manifest.json").map(|(_, bytes)| bytes.len()).sum();
    assert!(out.stdout.contains(&format!("({total} bytes)")), "{}", out.stdout);

    let out = works(&["verify", text(&packed)]);
    assert!(out.stdout.contains("extents are good") && out.stderr.is_empty(), "{}", out.stdout);

    works(&["unpack", text(&packed), "-o", text(&back)]);
    let mut expected = names(from.path());
    assert_eq!(names(&back), expected);
    expected.retain(|name| name.starts_with("tokenizer") || name.ends_with(".jinja"));
    for name in expected {
        assert_eq!(files_of(&back)[&name], files[&name], "{name}");
    }

    // What was quantised once is on the grid already: packing it again loses next to nothing.
    assert!(pack(&back, &again, &["--quant", "f32"]).status.success());
    let logits = |model: &Path| results(model, &["--tokens", "1,2,3"]).0["logits"].1.clone();
    let (a, b) = (logits(&packed), logits(&again));
    assert!(common::max_difference(&bytemuck::pod_collect_to_vec(&a), &bytemuck::pod_collect_to_vec(&b)) < 2e-4);
}

/// Shape, bytes and type of everything in a file of results.
type Results = BTreeMap<String, (Vec<usize>, Vec<u8>, Dtype)>;

fn results(model: &Path, args: &[&str]) -> (Results, Output) {
    results_on("cpu", model, args)
}

fn results_on(backend: &str, model: &Path, args: &[&str]) -> (Results, Output) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("out.safetensors");
    let out = works(&[&["logits", text(model), "--backend", backend, "--out", text(&file)], args].concat());
    let bytes = std::fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let read = |name: &str| {
        let tensor = tensors.tensor(name).unwrap();
        (tensor.shape().to_vec(), tensor.data().to_vec(), tensor.dtype())
    };
    (tensors.names().into_iter().map(|name| (name.to_owned(), read(name))).collect(), out)
}

#[test]
fn logits_writes_the_documented_tensors() {
    let model = repository(GOLDEN_CHECKPOINTS[0]);
    let (tokens, vocab, hidden, layers, k) = (5, 257, 64, 4, 2);
    let (found, out) = results(&model, &["--tokens", "1,2,3,4,5", "--greedy", "3"]);
    assert!(out.stdout.is_empty(), "{}", out.stdout);
    let mut expected = BTreeMap::from([
        ("logits".to_owned(), (vec![tokens, vocab], Dtype::F32)),
        ("hidden".to_owned(), (vec![layers + 1, tokens, hidden], Dtype::F32)),
        ("greedy".to_owned(), (vec![3], Dtype::I32)),
    ]);
    for layer in 0..layers {
        expected.insert(format!("topk.{layer}"), (vec![tokens, k], Dtype::I32));
        expected.insert(format!("weights.{layer}"), (vec![tokens, k], Dtype::F32));
    }
    let shapes: BTreeMap<_, _> = found.iter().map(|(name, t)| (name.clone(), (t.0.clone(), t.2))).collect();
    assert_eq!(shapes, expected);

    let floats = |name: &str| -> Vec<f32> { bytemuck::pod_collect_to_vec(&found[name].1) };
    let ints = |name: &str| -> Vec<i32> { bytemuck::pod_collect_to_vec(&found[name].1) };
    assert!(floats("logits").iter().chain(&floats("hidden")).all(|v| v.is_finite()));
    let last = &floats("logits")[(tokens - 1) * vocab..];
    let best = (0..vocab).max_by(|a, b| last[*a].total_cmp(&last[*b])).unwrap();
    assert_eq!(ints("greedy")[0], best as i32);
    for layer in 0..layers {
        assert!(ints(&format!("topk.{layer}")).iter().all(|id| (0..8).contains(id)));
        for weights in floats(&format!("weights.{layer}")).chunks(k) {
            assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5 && weights[0] >= weights[1], "{weights:?}");
        }
    }
    // Passes of one token give the same, and without `--greedy` the tensor is there but empty.
    let (one, _) = results(&model, &["--tokens", "1,2,3,4,5", "--chunk", "1"]);
    for name in ["logits", "hidden", "topk.3", "weights.0"] {
        assert_eq!(one[name], found[name], "{name}");
    }
    assert_eq!(one["greedy"].0, [0]);

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("out.safetensors");
    let run = |tokens| ["logits", text(&model), "--backend", "cpu", "--out", text(&file), "--tokens", tokens];
    fails(&run("1,257"), "token 257 is outside the vocabulary of 257");
    fails(&run(&vec!["1"; 513].join(",")), "the context holds 512");
    assert!(!file.exists());
}

fn chat(model: &str, more: &[&str]) -> Output {
    let prompt = "Can you find me a restaurant in San Jose?";
    let greedy = ["--backend", "cpu", "--temperature", "0", "--cold"];
    let length = if more.contains(&"--max-tokens") { &[][..] } else { &["--max-tokens", "8"] };
    works(&[&["chat", model, prompt], &greedy[..], length, more].concat())
}

#[test]
fn chat_prints_the_reply_and_nothing_else() {
    let model = repository("models/concierge");
    let whole = chat(text(&model), &[]);
    assert!(whole.stdout.ends_with('\n') && whole.stdout.lines().count() == 1, "{:?}", whole.stdout);
    assert!(whole.stdout.trim().len() > 8 && !whole.stdout.contains("<|"), "{:?}", whole.stdout);
    assert!(whole.stderr.contains(" written"), "{}", whole.stderr);
    let short = chat(text(&model), &["--chunk", "5", "--max-tokens", "3"]);
    assert!(short.stderr.contains(" 3 written"), "{}", short.stderr);
    assert!(whole.stdout.starts_with(short.stdout.trim_end()), "{:?}, {:?}", short.stdout, whole.stdout);
    // The budget and how the prompt is cut into passes change nothing.
    let small = chat(text(&model), &["--budget", "12MiB", "--chunk", "3"]);
    assert_eq!(small.stdout, whole.stdout);
    let first = whole.stdout.split(' ').next().unwrap();
    let stopped = chat(text(&model), &["--stop", &whole.stdout[first.len()..first.len() + 3]]);
    assert_eq!(stopped.stdout.trim_end(), first);
}

#[test]
fn chat_over_http_says_the_same() {
    let model = repository("models/concierge");
    let server = Server::new(files_of(&model), |_, _| Answer::Well);
    let expected = chat(text(&model), &[]).stdout;
    let url = server.url();
    for address in [url.clone(), format!("{url}manifest.json"), format!("{url}manifest.json#x")] {
        assert_eq!(chat(&address, &["--max-slots", "40"]).stdout, expected, "{address}");
    }
    fails(&["chat", &format!("{url}none/"), "hi"], "404");
}

/// Each line of standard input is a turn of one conversation.
#[test]
fn a_conversation_goes_on_until_input_ends() {
    let model = repository("models/concierge");
    let args = ["chat", text(&model), "--backend", "cpu", "--temperature", "0", "--max-tokens", "8", "--cold"];
    let mut child = Command::new(env!("CARGO_BIN_EXE_outrider"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let turns = "/undo\nCan you find me a restaurant in San Jose?\n\nSomething Italian.\n/retry\n/undo\n/retry\n/clear\n/retry\n";
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), turns.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    let (stdout, stderr) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
    assert!(out.status.success(), "{stderr}");
    let replies: Vec<_> = stdout.lines().collect();
    assert_eq!(replies.len(), 4, "{stdout}");
    assert_eq!(Some(replies[0]), chat(text(&model), &[]).stdout.lines().next());
    assert!(replies[2] == replies[1] && replies[3] == replies[0], "asked again: {stdout}");
    assert_eq!(stderr.matches("nothing was asked yet").count(), 2, "{stderr}");
    let read: Vec<u32> = stderr.lines().filter_map(|l| l.strip_prefix('[')?.split(' ').next()?.parse().ok()).collect();
    assert!(read.len() == 4 && read[1] > read[0] + 8, "the second prompt holds the first turn: {stderr}");
    assert!(stderr.lines().filter(|l| l.contains(" of them known,")).count() >= 2, "{stderr}");
}

#[test]
fn eval_prints_a_table_or_json() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("texts.jsonl");
    let model = repository("models/concierge");
    let run = |more: &[&'static str]| {
        let args: Vec<String> =
            ["eval", text(&model), "--backend", "cpu", "--text", text(&file)].map(Into::into).into();
        args.into_iter().chain(more.iter().map(|s| (*s).to_owned())).collect::<Vec<_>>()
    };
    let run = |more: &[&'static str]| -> Output {
        let args = run(more);
        outrider(&args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    std::fs::write(&file, "{\"text\": \"I want a restaurant\"}\n\n{\"ids\": [1, 5, 7]}\n").unwrap();
    let out = run(&[]);
    assert!(out.status.success() && out.stdout.starts_with("tokens") && out.stdout.contains("in 2 texts"));
    let out = run(&["--json", "--limit", "1"]);
    let found: serde_json::Value = serde_json::from_str(&out.stdout).unwrap();
    assert_eq!(found["texts"], 1);
    let cases = [
        ("{\"ids\": [1, 4096]}", "4096"),
        ("{\"ids\": [1]}", "two tokens"),
        ("", "two tokens"),
        ("{}\n", "line 1"),
        ("{\"ids\": [1, 2]}\n\nnone", "line 3"),
    ];
    for (content, reason) in cases {
        std::fs::write(&file, content).unwrap();
        let out = run(&[]);
        assert_eq!(out.status.code(), Some(1), "{content}");
        assert!(out.stderr.contains(reason) && out.stdout.is_empty(), "{content}: {}{}", out.stderr, out.stdout);
    }
}

#[test]
fn only_a_pack_gives_way_to_a_pack_and_only_when_asked() {
    let golden = repository(GOLDEN_CHECKPOINTS[0]);
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("pack");
    let quantise =
        |quant: &'static str, more: &[&'static str]| pack(&golden, &target, &[&["--quant", quant], more].concat());
    let refused = |out: Output, reason: &str| {
        assert_eq!(out.status.code(), Some(1), "{}", out.stdout);
        assert!(out.stderr.contains(reason) && out.stdout.is_empty(), "{}", out.stderr);
    };
    // An empty directory is as good as none.
    std::fs::create_dir(&target).unwrap();
    assert!(quantise("q4", &[]).status.success());
    let before = files_of(&target);
    refused(quantise("q8", &[]), "--force");
    assert_eq!(files_of(&target), before);
    assert!(quantise("q8", &["--force"]).status.success());
    assert_ne!(files_of(&target), before);
    assert_eq!(names(&target), before.into_keys().collect::<Vec<_>>());

    // Nor does a website, whose manifest.json is another, or a program's configuration.
    let unpacked = place.path().join("unpacked");
    works(&["unpack", text(&target), "-o", text(&unpacked)]);
    for (file, content) in [("notes.txt", "x"), ("manifest.json", "{\"name\": \"site\"}"), ("config.json", "{}")] {
        let other = place.path().join("other");
        std::fs::create_dir(&other).unwrap();
        std::fs::write(other.join(file), content).unwrap();
        refused(pack(&golden, &other, &["--quant", "q4", "--force"]), "no pack but something else");
        let unpack = ["unpack", text(&target), "-o", text(&other), "--force"];
        refused(outrider(&unpack), "no checkpoint but something else");
        refused(pack(&golden, &other, &["--quant", "q4"]), "exists");
        assert_eq!(std::fs::read_to_string(other.join(file)).unwrap(), content);
        std::fs::remove_dir_all(other).unwrap();
    }
    refused(outrider(&["unpack", text(&target), "-o", text(&unpacked)]), "--force");
    works(&["unpack", text(&target), "-o", text(&unpacked), "--force"]);
    refused(pack(&golden, &unpacked, &["--quant", "q4", "--force"]), "no pack but something else");
    let mut left: Vec<PathBuf> = std::fs::read_dir(place.path()).unwrap().map(|e| e.unwrap().path()).collect();
    left.sort_unstable();
    assert_eq!(left, [target, unpacked], "nothing else is left");
}

#[test]
fn wrong_arguments_exit_with_two() {
    let cases: [&[&str]; 6] = [
        &[],
        &["nonsense"],
        &["pack", "x"],
        &["pack", "x", "-o", "y", "--quant", "q5"],
        &["chat", "x", "--budget", "many"],
        &["chat", "x", "--backend", "tpu"],
    ];
    for args in cases {
        let out = outrider(args);
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        assert!(out.stdout.is_empty() && !out.stderr.is_empty(), "{args:?}");
    }
    for args in [&["--help"][..], &["--version"], &["pack", "--help"]] {
        assert!(!works(args).stdout.is_empty());
    }
}

#[test]
fn paths_that_are_not_there_are_named() {
    for command in ["inspect", "verify"] {
        fails(&[command, "no/such/pack"], "no/such/pack was not found");
    }
    fails(&["chat", "no/such/model", "hi"], "no/such/model was not found");
    let golden = repository(GOLDEN_CHECKPOINTS[0]);
    fails(&["verify", text(&golden)], "manifest.json was not found");
    fails(&["pack", text(&repository("models/concierge")), "-o", "never", "--quant", "q4"], "no config.json");
    fails(&["pack", text(&golden), "-o", "/", "--quant", "q4"], "names no directory");
}

/// As with `| head`: a reader that has gone away is no failure, and never a panic. A full disk is a failure.
#[test]
fn nobody_has_to_read_the_output() {
    let (golden, place) = (repository(GOLDEN_CHECKPOINTS[0]), tempfile::tempdir().unwrap());
    let (packed, back) = (place.path().join("a"), place.path().join("b"));
    let model = repository("models/concierge");
    let texts = place.path().join("texts.jsonl");
    std::fs::write(&texts, "{\"ids\": [1, 2]}").unwrap();
    let commands: [&[&str]; 6] = [
        &["pack", text(&golden), "-o", text(&packed), "--quant", "q4"],
        &["unpack", text(&packed), "-o", text(&back)],
        &["verify", text(&packed)],
        &["inspect", text(&packed), "--tensors"],
        &["eval", text(&model), "--text", text(&texts), "--backend", "cpu"],
        &["chat", text(&model), "hi", "--max-tokens", "4", "--backend", "cpu", "--cold"],
    ];
    for args in commands {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_outrider"));
        let out = command.args(args).stdin(Stdio::null()).stdout(writer).output().unwrap();
        let stderr = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(0), "{args:?}: {stderr}");
        assert!(!stderr.contains("error") && !stderr.contains("panicked"), "{args:?}: {stderr}");
    }
    #[cfg(target_os = "linux")]
    for args in &commands[2..5] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_outrider"));
        let out = command.args(*args).stdin(Stdio::null()).stdout(full).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{args:?}");
        assert!(String::from_utf8(out.stderr).unwrap().contains("storage is full"), "{args:?}");
    }
}

#[test]
fn a_phone_is_predicted() {
    let args = ["simulate", "--flagship", "--profile", "iphone-17-pro-max", "--tokens", "16", "--json"];
    let report: serde_json::Value = serde_json::from_str(&works(&args).stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let speed = |row: &serde_json::Value| row["tokens_per_second"].as_f64().unwrap();
    let (first, last) = (&rows[0], &rows[rows.len() - 1]);
    assert_eq!((&first["name"], &last["name"]), (&"on demand".into(), &"everything resident".into()));
    let between = |row: &serde_json::Value| speed(row) > speed(first) && speed(row) < speed(last);
    assert!(rows[1..rows.len() - 1].iter().all(between), "{report}");
    assert!(speed(&rows[2]) > speed(&rows[1]), "overlap gains: {report}");
    assert!(rows[1..rows.len() - 1].iter().all(|row| row["efficiency"].as_f64().unwrap() <= 1.0), "{report}");
    let effects: Vec<f64> =
        report["sensitivity"].as_array().unwrap().iter().map(|change| change["effect"].as_f64().unwrap()).collect();
    assert!(effects.len() == 12 && effects.is_sorted_by(|a, b| a >= b), "{report}");

    let again = works(&args).stdout;
    assert_eq!(serde_json::from_str::<serde_json::Value>(&again).unwrap(), report);
}

#[test]
fn phones_are_compared_in_a_table() {
    let args = ["simulate", "--flagship", "--table", "--tokens", "8", "--json"];
    let report: serde_json::Value = serde_json::from_str(&works(&args).stdout).unwrap();
    let cells = report["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 2 * 3 * 4);
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    let row = |cell: &serde_json::Value, name: &str| {
        cell["rows"].as_array().unwrap().iter().find(|row| row["name"] == name).unwrap().clone()
    };
    let speed = |cell: &serde_json::Value, name: &str| number(&row(cell, name)["tokens_per_second"]);
    let ahead = |cell: &serde_json::Value| speed(cell, "+ look-ahead");
    for cell in cells {
        let bound = number(&cell["bound"]);
        assert!(speed(cell, "on demand") < ahead(cell) && ahead(cell) <= bound, "{cell}");
        assert!(bound <= speed(cell, "everything resident"), "{cell}");
        let look = row(cell, "+ look-ahead");
        // At most one for each layer and one for the logits.
        assert!((1.0..=41.0).contains(&number(&look["readbacks"])), "{look}");
        let round_trips = number(&look["readbacks"]) * number(&cell["readback"]);
        assert!((number(&look["stall_roundtrip"]) - round_trips).abs() < 1e-6, "{look}");
        assert!((1.0..=40.0).contains(&number(&look["stalls"])) && number(&look["stall_bytes"]) > 0.0, "{look}");
        assert_eq!(cell["smallest"].is_null(), number(&cell["budget"]) > 1.5e9, "{cell}");
    }
    // Longer readbacks are slower, larger pools and faster phones faster. A pool for the experts of one layer is not
    // compared: what is guessed at changes with the readback, and there matters more.
    for same in [4..8, 8..12, 16..20, 20..24] {
        assert!(cells[same].is_sorted_by(|a, b| ahead(a) > ahead(b)));
    }
    assert!([0, 4, 8].map(|i| ahead(&cells[i])).is_sorted());
    assert!((0..12).all(|i| ahead(&cells[12 + i]) > ahead(&cells[i])));
    let shown = works(&args[..5]).stdout;
    let rows = shown.lines().filter(|line| line.starts_with("| iphone-"));
    assert_eq!(rows.count(), cells.len());
    assert!(
        shown.contains("What iphone-18-pro-max rests on") && shown.contains("- `flash.bandwidth` 3.2 GB/s: published")
    );
    assert_eq!(outrider(&["simulate", "--flagship", "--table", "--budget", "3GB"]).status.code(), Some(2));
}

#[test]
fn a_broken_profile_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("phone.json");
    let good = std::fs::read_to_string(repository("profiles/iphone-17-pro-max.json")).unwrap();
    std::fs::write(&file, good.replace("1600000000.0", "-1.0")).unwrap();
    fails(&["simulate", "--flagship", "--profile", text(&file)], "`flash.bandwidth` is -1");
    std::fs::write(&file, good.replace("\"mix\"", "\"mixed\"")).unwrap();
    fails(&["simulate", "--flagship", "--profile", text(&file)], "unknown field `mixed`");
    fails(&["simulate", "--flagship", "--profile", "phone-of-nobody"], "was not found");
    fails(&["simulate", "--flagship", "--profile", "iphone-17-pro-max", "--budget", "1GB"], "is too small");
}

/// The pool of the next chat begins with what this one used, unless that is not wanted; damaged, it is as if it were not.
#[test]
fn chat_begins_with_what_the_last_one_used() {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files_of(&repository("models/concierge")) {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    let (model, list) = (text(dir.path()), dir.path().join(".hot"));
    let prompt = ["chat", model, "I need a hotel in London.", "--backend", "cpu", "--temperature", "0"];
    let run = |more: &[&str]| works(&[&prompt[..], &["--max-tokens", "8", "--max-slots", "80"], more].concat()).stdout;
    let kept = || std::fs::metadata(&list).is_ok_and(|list| list.is_file() && list.len() > 500);
    let cold = run(&["--cold"]);
    assert!(!list.exists());
    for _ in 0..2 {
        assert!(run(&[]) == cold && kept());
    }
    std::fs::write(&list, "nonsense").unwrap();
    assert!(run(&[]) == cold && kept());
    works(&["verify", model]);
    // Where it cannot be written, it is not.
    std::fs::remove_file(&list).unwrap();
    std::fs::create_dir(&list).unwrap();
    assert!(run(&[]) == cold);
    let partial = |e: &std::fs::DirEntry| e.file_name().to_string_lossy().ends_with(".partial");
    assert!(!std::fs::read_dir(dir.path()).unwrap().flatten().any(|e| partial(&e)), "something is left behind");
}

/// A model without experts goes through every command as others do.
#[test]
fn a_dense_model_is_packed_and_runs() {
    let place = tempfile::tempdir().unwrap();
    let (from, packed) = (repository("tests/data/golden/qwen3/a"), place.path().join("pack"));
    assert!(pack(&from, &packed, &["--quant", "q8"]).status.success());
    let out = works(&["inspect", text(&packed)]).stdout;
    for line in ["architecture  qwen3", "experts       none", "budget        at least"] {
        assert!(out.lines().any(|l| l.starts_with(line)), "no `{line}` in:\n{out}");
    }
    works(&["verify", text(&packed)]);
    let of = |backend: &str| results_on(backend, &packed, &["--tokens", "1,2,3,200", "--greedy", "4"]).0;
    let (cpu, gpu) = (of("cpu"), of("gpu"));
    let logits = |of: &Results| bytemuck::pod_collect_to_vec::<u8, f32>(&of["logits"].1);
    assert!(common::max_difference(&logits(&cpu), &logits(&gpu)) < 2e-3);
    assert_eq!(cpu["greedy"], gpu["greedy"]);
}
