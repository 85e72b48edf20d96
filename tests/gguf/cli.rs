//! GGUF files on the command line.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::SafeTensors;

use crate::common::{outrider, repository};
use crate::http::{Answer, Server};

const FILE: &str = "tests/data/gguf/qwen3_5_moe-q4_k_m.gguf";

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn works(args: &[&str]) -> (String, String) {
    let out = outrider(args);
    assert!(out.status.success(), "{args:?}: {}", out.stderr);
    (out.stdout, out.stderr)
}

fn fails(args: &[&str], reason: &str) {
    let out = outrider(args);
    assert_eq!(out.status.code(), Some(1), "{args:?}: {}", out.stdout);
    assert!(out.stderr.contains(reason), "{args:?}: {}", out.stderr);
}

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(path).unwrap())).collect()
}

fn logits(model: &str) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("out.safetensors");
    works(&["logits", model, "--backend", "cpu", "--tokens", "1,2,300", "--out", text(&file)]);
    let bytes = std::fs::read(file).unwrap();
    SafeTensors::deserialize(&bytes).unwrap().tensor("logits").unwrap().data().to_vec()
}

#[test]
fn a_file_becomes_a_pack_that_chats() {
    let (file, place) = (repository(FILE), tempfile::tempdir().unwrap());
    let (packed, plain) = (place.path().join("a"), place.path().join("b"));
    let (stdout, stderr) = works(&["pack", text(&file), "-o", text(&packed)]);
    assert!(stdout.contains("experts in q4, the rest in q8") && stderr.is_empty(), "{stdout}{stderr}");
    works(&["verify", text(&packed)]);
    let (shown, _) = works(&["inspect", text(&packed)]);
    for part in ["name          Qwen3_5_Moe", "qwen3_5_moe_text", "made from     qwen3_5_moe-q4_k_m.gguf 3.2 MiB", "q4"]
    {
        assert!(shown.contains(part), "`{part}` in {shown}");
    }
    let chat =
        |model: &str| works(&["chat", model, "hi", "--max-tokens", "4", "--backend", "cpu", "--cold", "--seed", "1"]).0;
    assert!(!chat(text(&packed)).is_empty());

    // What is computed from the file itself is what is computed from a pack without loss.
    let (stdout, _) = works(&["pack", text(&file), "-o", text(&plain), "--quant", "f32", "--name", "plain"]);
    assert!(stdout.contains("experts in f32, the rest in f32"), "{stdout}");
    assert_eq!(logits(text(&file)), logits(text(&plain)));
    assert_eq!(chat(text(&file)), chat(text(&plain)));
}

#[test]
fn a_file_is_inspected() {
    let file = repository(FILE);
    let (shown, _) = works(&["inspect", text(&file)]);
    let parts = [
        "name          Qwen3_5_Moe",
        "architecture  qwen3_5_moe_text\n",
        "Q4_K",
        "experts       4 a layer, 2 a token",
        "makes         tokenizer.json",
        "makes         chat_template.jinja",
        "total         3.2 MiB (3319840 bytes)",
    ];
    for part in parts {
        assert!(shown.contains(part), "`{part}` in {shown}");
    }
    let (all, _) = works(&["inspect", text(&file), "--tensors"]);
    assert!(
        all.starts_with(&shown) && all.contains("model.layers.3.self_attn.q_proj.weight  [512, 256] Q4_K"),
        "{all}"
    );
}

#[test]
fn a_file_is_packed_from_its_address() {
    let (file, place) = (repository(FILE), tempfile::tempdir().unwrap());
    let (near, far) = (place.path().join("near"), place.path().join("far"));
    let served = BTreeMap::from([("models/m.gguf".to_owned(), std::fs::read(&file).unwrap())]);
    let server = Server::new(served, |_, _| Answer::Well);
    let address = format!("{}models/m.gguf", server.url());
    works(&["pack", &address, "-o", text(&far)]);
    std::fs::copy(&file, place.path().join("m.gguf")).unwrap();
    works(&["pack", text(&place.path().join("m.gguf")), "-o", text(&near)]);
    assert_eq!(files(&near), files(&far));
    assert_eq!(logits(&address), logits(text(&file)));
    // Reads are of ranges, and none is of more than a window.
    assert!(
        server.requests().iter().filter(|r| r.method == "GET").all(|r| r.range.is_some_and(|(a, b)| b - a < 4 << 20))
    );
    fails(&["inspect", &format!("{}none.gguf", server.url())], "404");
}

#[test]
fn what_is_wrong_is_said() {
    let place = tempfile::tempdir().unwrap();
    let never = place.path().join("never");
    fails(&["pack", "no/such/m.gguf", "-o", text(&never)], "no/such was not found");
    fails(&["pack", text(&place.path().join("m.gguf")), "-o", text(&never)], "m.gguf was not found");
    fails(&["pack", text(&repository("tests/data/golden/qwen3_5_moe/a")), "-o", text(&never)], "--quant q4");
    let bad = place.path().join("bad.gguf");
    std::fs::write(&bad, "not found").unwrap();
    for args in [&["pack", text(&bad), "-o", text(&never)][..], &["chat", text(&bad), "hi"], &["inspect", text(&bad)]] {
        fails(args, "bad.gguf: it begins with `not ` instead of `GGUF`");
    }
    assert!(!never.exists());
}
