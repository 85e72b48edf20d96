//! Stopped in the middle, by a caller, a signal or a kill.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use outrider::Result;
use outrider::engine::Engine;
use outrider::engine::generate::Next;
use outrider::engine::sampler::{Sampler, Sampling};

use crate::common::{self, outrider, repository};
use crate::http::{Answer, Server, files_of};
use crate::{assert_error, cpu, forward};

#[test]
fn a_stopped_call_is_aborted_and_the_engine_goes_on() {
    let mut engine = common::engine(&repository("models/concierge"), &cpu());
    let generate = |engine: &mut Engine, stop_after: usize| -> Result<Vec<u32>> {
        let mut sampler = Sampler::new(Sampling::greedy())?;
        let mut tokens = Vec::new();
        engine.stop_flag().clear();
        let on_token = |engine: &Engine, token| {
            tokens.push(token);
            if tokens.len() == stop_after {
                engine.stop_flag().stop();
            }
            Next::Continue
        };
        pollster::block_on(engine.generate(&[1, 2, 3], &mut sampler, 12, on_token))?;
        Ok(tokens)
    };
    let whole = generate(&mut engine, usize::MAX).unwrap();
    assert_eq!(whole.len(), 12);
    assert_error(generate(&mut engine, 5), "aborted", &["stopped"]);
    assert_error(forward(&mut engine), "request", &["reset"]);
    assert_eq!(generate(&mut engine, usize::MAX).unwrap(), whole);
}

fn spawn(args: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outrider"));
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[cfg(unix)]
fn interrupt(child: &Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
}

/// The server holds the reply back until the signal has been sent, so that there is a reply to interrupt.
#[cfg(unix)]
#[test]
fn an_interrupt_ends_the_reply() {
    let reached = Arc::new(Barrier::new(2));
    // After the self-test, whose tokens need fewer than that.
    let (at, rule) = (500, reached.clone());
    let files = files_of(&repository("models/concierge"));
    let server = Server::new(files, move |request, before| {
        match request.file.as_str() {
            // Once to say that it is time, once to be told that it was done.
            "experts-00000.bin" if before == at => {
                rule.wait();
                rule.wait();
            }
            // The program learns of the signal on a thread of its own.
            "experts-00000.bin" if before > at => std::thread::sleep(Duration::from_millis(5)),
            _ => {}
        }
        Answer::Well
    });
    let prompt = "Can you find me a restaurant in San Jose?";
    let url = server.url();
    let args = ["chat", &url, prompt, "--backend", "cpu", "--temperature", "0", "--max-slots", "4"];
    let child = spawn(&args);
    reached.wait();
    interrupt(&child);
    reached.wait();
    let out = child.wait_with_output().unwrap();
    let (stdout, stderr) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
    assert_eq!(out.status.code(), Some(1), "{stdout}{stderr}");
    assert!(stderr.contains("stopped by the caller"), "{stderr}");
    let model = repository("models/concierge");
    let whole =
        outrider(&["chat", model.to_str().unwrap(), prompt, "--cold", "--backend", "cpu", "--temperature", "0"]).stdout;
    assert!(whole.starts_with(stdout.trim_end()) && stdout.len() < whole.len(), "{stdout:?} of {whole:?}");
}

#[cfg(unix)]
#[test]
fn an_interrupt_between_replies_ends_the_program() {
    let model = repository("models/concierge");
    let mut child = spawn(&["chat", model.to_str().unwrap(), "--cold", "--backend", "cpu", "--max-tokens", "4"]);
    // Kept open: there could be another turn.
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"hi\n").unwrap();
    let (mut stdout, mut stderr) = (BufReader::new(child.stdout.take().unwrap()), child.stderr.take().unwrap());
    let mut reply = String::new();
    stdout.read_line(&mut reply).unwrap();
    assert!(!reply.trim().is_empty());
    let (send, summary) = channel();
    std::thread::spawn(move || {
        // What the reply took is printed after it; then it is over.
        let mut byte = [0];
        while stderr.read(&mut byte).unwrap_or(0) > 0 {
            if byte == *b"]" {
                let _ = send.send(());
            }
        }
    });
    summary.recv().unwrap();
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

/// Whenever it is killed, a pack is there as a whole or not at all, and the next run is not in its way.
#[test]
fn a_killed_pack_leaves_no_target() {
    let place = tempfile::tempdir().unwrap();
    let (target, partial) = (place.path().join("pack"), place.path().join(".pack.partial"));
    let golden = repository(common::GOLDEN_CHECKPOINTS[1]);
    // So many files that there is time between the first and the last.
    let args =
        ["pack", golden.to_str().unwrap(), "-o", target.to_str().unwrap(), "--quant", "f32", "--max-shard", "128KiB"];
    let mut killed = false;
    for _ in 0..20 {
        let mut child = Command::new(env!("CARGO_BIN_EXE_outrider"))
            .args(args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let writing = || std::fs::read_dir(&partial).is_ok_and(|mut files| files.next().is_some());
        while !writing() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        if target.exists() {
            assert!(outrider(&["verify", target.to_str().unwrap()]).status.success());
            std::fs::remove_dir_all(&target).unwrap();
        } else {
            assert!(partial.exists(), "nothing was written yet");
            killed = true;
            break;
        }
    }
    assert!(killed, "the command was always done before it could be killed");
    assert!(outrider(&args).status.success());
    assert!(outrider(&["verify", target.to_str().unwrap()]).status.success());
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 1);
}
