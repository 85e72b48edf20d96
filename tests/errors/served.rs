//! Packs on servers that are missing, broken, or simple.

use outrider::Result;
use outrider::engine::Engine;
use outrider::flash::HttpFlash;

use crate::common;
use crate::http::{Answer, Request, Server};
use crate::{assert_error, cpu, forward, run, small};

fn load(server: &Server) -> Result<Engine> {
    common::load(HttpFlash::new(&server.url()), &cpu())
}

fn load_and_run(server: &Server) -> Result<Vec<f32>> {
    forward(&mut load(server)?)
}

/// A server that answers one file badly, and everything else well.
fn bad(file: &'static str, answer: Answer) -> Server {
    Server::new(small(), move |r, _| if r.file == file { answer } else { Answer::Well })
}

#[test]
fn a_served_pack_is_the_pack() {
    let server = Server::new(small(), |_, _| Answer::Well);
    assert_eq!(load_and_run(&server).unwrap(), run(small()).unwrap());
    let whole = |r: &Request| r.method == "GET" && r.range.is_none();
    assert!(!server.requests().iter().any(whole), "only what is needed is asked for");
}

#[test]
fn a_server_without_ranges_serves_too() {
    let server = Server::new(small(), |_, _| Answer::Everything);
    assert_eq!(load_and_run(&server).unwrap(), run(small()).unwrap());
}

#[test]
fn a_server_without_head_serves_too() {
    let server = Server::new(small(), |r, _| if r.method == "HEAD" { Answer::Status(405) } else { Answer::Well });
    assert_eq!(load_and_run(&server).unwrap(), run(small()).unwrap());
}

#[test]
fn what_is_not_there_is_named_by_its_address() {
    let server = Server::new(Default::default(), |_, _| Answer::Well);
    let address = server.url() + "manifest.json";
    assert_error(load(&server).map(|_| ()), "http", &["404", &address, "check the address"]);
    let mut files = small();
    files.remove("experts-00000.bin");
    let server = Server::new(files, |_, _| Answer::Well);
    assert_error(load(&server).map(|_| ()), "http", &["404", "experts-00000.bin"]);
}

#[test]
fn a_failing_or_guarded_server_says_so() {
    for (status, advice) in [(500, "try again later"), (503, "try again later"), (403, "permission")] {
        let server = bad("manifest.json", Answer::Status(status));
        assert_error(load(&server).map(|_| ()), "http", &[&status.to_string(), "manifest.json", advice]);
        // Later, in the middle of a pass.
        let server = Server::new(small(), move |r, _| match r.file.as_str() {
            "experts-00000.bin" if r.method == "GET" => Answer::Status(status),
            _ => Answer::Well,
        });
        assert_error(load_and_run(&server), "http", &[&status.to_string(), "experts-00000.bin", advice]);
    }
}

#[test]
fn a_connection_that_breaks_is_tried_again() {
    // Every file's first answers break off: its size comes first, without a body, then two reads.
    let server = Server::new(small(), |_, before| if before < 3 { Answer::Cut } else { Answer::Well });
    assert_eq!(load_and_run(&server).unwrap(), run(small()).unwrap());
}

#[test]
fn a_connection_that_always_breaks_is_an_error() {
    let server = bad("core-00000.bin", Answer::Cut);
    assert_error(load(&server).map(|_| ()), "network", &["core-00000.bin", "check the connection"]);
    let tries = server.requests().iter().filter(|r| r.file == "core-00000.bin" && r.method == "GET").count();
    assert_eq!(tries, 4);
    let server = bad("experts-00000.bin", Answer::Cut);
    assert_error(load_and_run(&server), "network", &["experts-00000.bin"]);
}

/// Half of a range, by a server that says so: the pack must not run on what is missing.
#[test]
fn a_body_shorter_than_the_range_is_an_error() {
    for file in ["core-00000.bin", "embedding-00000.bin", "experts-00000.bin"] {
        let server = Server::new(small(), move |r, _| match r.method.as_str() {
            "GET" if r.file == file => Answer::Short,
            _ => Answer::Well,
        });
        assert_error(load_and_run(&server), "network", &[file]);
    }
}

/// A file that is shorter than the manifest says is found before anything is read.
#[test]
fn a_truncated_file_is_found_on_opening() {
    let mut files = small();
    files.get_mut("experts-00000.bin").unwrap().truncate(5000);
    let server = Server::new(files, |_, _| Answer::Well);
    assert_error(load(&server).map(|_| ()), "truncated", &["experts-00000.bin", "5000", "again"]);
}

#[test]
fn a_flipped_byte_on_the_way_is_corrupt() {
    let mut files = small();
    files.get_mut("core-00000.bin").unwrap()[0] ^= 1;
    let server = Server::new(files, |_, _| Answer::Well);
    assert_error(load(&server).map(|_| ()), "corrupt", &["core-00000.bin"]);
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let address = Server::new(small(), |_, _| Answer::Well).url();
    let result = common::load(HttpFlash::new(&address), &cpu()).map(|_| ());
    assert_error(result, "network", &[&address, "could not reach"]);
    let result = common::load(HttpFlash::new("http://exa mple/"), &cpu()).map(|_| ());
    assert_error(result, "request", &["exa mple", "not an address"]);
}
