//! A small HTTP server on this machine, which serves a pack as well or as badly as a test wants.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// How one request is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// As HTTP says, ranges included.
    Well,
    /// With nothing but this status.
    Status(u16),
    /// With the whole file, whatever range was asked for.
    Everything,
    /// As `Well`, but the connection ends half-way through the body.
    Cut,
    /// As `Well` about a range, but with a body of half the bytes, which the header admits.
    Short,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub method: String,
    /// Without the first slash.
    pub file: String,
    pub range: Option<(u64, u64)>,
}

type Rule = dyn Fn(&Request, usize) -> Answer + Send + Sync;

struct Shared {
    files: BTreeMap<String, Vec<u8>>,
    rule: Box<Rule>,
    requests: Mutex<Vec<Request>>,
    closed: AtomicBool,
}

pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    listener: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves `files`. `rule` is told every request and how many requests for the same file came before it.
    pub fn new(
        files: BTreeMap<String, Vec<u8>>,
        rule: impl Fn(&Request, usize) -> Answer + Send + Sync + 'static,
    ) -> Server {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (requests, closed) = (Mutex::default(), AtomicBool::new(false));
        let shared = Arc::new(Shared { files, rule: Box::new(rule), requests, closed });
        let for_listener = shared.clone();
        let listener = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if for_listener.closed.load(Ordering::SeqCst) {
                    break;
                }
                let shared = for_listener.clone();
                // A client that goes away is no failure of the server.
                std::thread::spawn(move || stream.and_then(|stream| shared.answer(stream)));
            }
        });
        Server { address, shared, listener: Some(listener) }
    }

    pub fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    pub fn requests(&self) -> Vec<Request> {
        self.shared.requests.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        let _ = self.listener.take().unwrap().join();
    }
}

impl Shared {
    fn answer(&self, stream: TcpStream) -> std::io::Result<()> {
        let mut lines = BufReader::new(&stream).lines();
        let first = lines.next().transpose()?.unwrap_or_default();
        let mut words = first.split(' ');
        let method = words.next().unwrap_or_default().to_owned();
        let file = words.next().unwrap_or_default().trim_start_matches('/').to_owned();
        let mut range = None;
        for line in lines {
            let line = line?.to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some((start, end)) = line.strip_prefix("range: bytes=").and_then(|r| r.split_once('-')) {
                range = Some((start.parse().unwrap(), end.parse().unwrap()));
            }
        }
        let request = Request { method, file, range };
        let answer = {
            let mut requests = self.requests.lock().unwrap();
            let before = requests.iter().filter(|r| r.file == request.file).count();
            requests.push(request.clone());
            (self.rule)(&request, before)
        };
        self.send(&request, answer, stream)
    }

    fn send(&self, request: &Request, answer: Answer, mut stream: TcpStream) -> std::io::Result<()> {
        let content = match (answer, self.files.get(&request.file)) {
            (Answer::Status(status), _) => return head(&mut stream, status, 0, None),
            (_, None) => return head(&mut stream, 404, 0, None),
            (_, Some(content)) => content.as_slice(),
        };
        let total = content.len();
        let range = request.range.filter(|_| answer != Answer::Everything);
        let (status, start, body) = match range {
            None => (200, 0, content),
            Some((start, _)) if start >= total as u64 => {
                return head(&mut stream, 416, 0, Some(format!("bytes */{total}")));
            }
            Some((start, end)) => (206, start, &content[start as usize..total.min(end as usize + 1)]),
        };
        let body = if answer == Answer::Short { &body[..body.len() / 2] } else { body };
        let range =
            (status == 206).then(|| format!("bytes {start}-{}/{total}", start + (body.len() as u64).max(1) - 1));
        head(&mut stream, status, body.len(), range)?;
        if request.method == "HEAD" {
            return Ok(());
        }
        if answer == Answer::Cut {
            stream.write_all(&body[..body.len() / 2])?;
            return stream.shutdown(Shutdown::Both);
        }
        stream.write_all(body)
    }
}

fn head(stream: &mut TcpStream, status: u16, length: usize, range: Option<String>) -> std::io::Result<()> {
    let range = range.map(|r| format!("Content-Range: {r}\r\n")).unwrap_or_default();
    write!(stream, "HTTP/1.1 {status} .\r\nConnection: close\r\nContent-Length: {length}\r\n{range}\r\n")
}

/// The files of a directory, by name.
pub fn files_of(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}
