use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;

use futures_util::future::LocalBoxFuture;
use proptest::prelude::*;

mod update;

use super::*;

type Files = BTreeMap<String, Vec<u8>>;

/// A server's files, and what goes wrong with them.
#[derive(Default)]
struct Server {
    files: Files,
    requests: RefCell<Vec<String>>,
    sent: Cell<usize>,
    /// The connection fails once this many bytes were sent; `true`: for good, else once.
    cut: Cell<Option<(usize, bool)>>,
    /// A byte that arrives flipped, that many times.
    flip: RefCell<Option<(String, usize, u32)>>,
    status: Cell<Option<u16>>,
    /// What takes the place of a file once that many bytes were sent.
    change: RefCell<Option<(usize, Files)>>,
    /// Whether a file's tag says which content it has; else it says nothing.
    tagged: bool,
    /// Tags that differ each time though the content does not.
    restless: bool,
}

impl Server {
    fn content(&self, file: &str) -> Option<Vec<u8>> {
        let change = self.change.borrow();
        let changed = change.as_ref().filter(|(from, _)| self.sent.get() >= *from).and_then(|(_, f)| f.get(file));
        changed.or_else(|| self.files.get(file)).cloned()
    }
}

struct Answer<'a> {
    server: &'a Server,
    file: String,
    content: Vec<u8>,
    tag: Option<String>,
    at: usize,
    end: usize,
}

const PIECE: usize = 777;

impl Source for Server {
    fn get<'a>(&'a self, file: &'a str, range: Option<Range<u64>>) -> LocalBoxFuture<'a, Result<Box<dyn Body + 'a>>> {
        Box::pin(async move {
            self.requests.borrow_mut().push(file.to_owned());
            let content = self.content(file);
            if let Some(status) = if content.is_some() { self.status.get() } else { Some(404) } {
                return Err(Error::Http { url: file.to_owned(), status });
            }
            let content = content.unwrap();
            let len = content.len();
            let range = range.map_or(0..len, |r| (r.start as usize).min(len)..(r.end as usize).min(len));
            let mut tag = self.tagged.then(|| blake3::hash(&content).to_string());
            if self.restless {
                tag = Some(self.requests.borrow().len().to_string());
            }
            let (at, end) = (range.start, range.end);
            Ok(Box::new(Answer { server: self, file: file.to_owned(), content, tag, at, end }) as Box<dyn Body + 'a>)
        })
    }

    fn peek<'a>(&'a self, file: &'a str, _: bool) -> LocalBoxFuture<'a, Result<Box<dyn Body + 'a>>> {
        self.get(file, None)
    }

    fn pause(&self, _: u32) -> LocalBoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

impl Body for Answer<'_> {
    fn next(&mut self) -> LocalBoxFuture<'_, Result<Option<Bytes>>> {
        Box::pin(async {
            let server = self.server;
            let mut end = (self.at + PIECE).min(self.end);
            if let Some((cut, for_good)) = server.cut.get() {
                end = end.min(self.at + cut.saturating_sub(server.sent.get()));
                if end == self.at && self.at < self.end {
                    if !for_good {
                        server.cut.set(None);
                    }
                    return Err(Error::Network { url: self.file.clone(), reason: "cut".into() });
                }
            }
            if end == self.at {
                return Ok(None);
            }
            let mut bytes = self.content[self.at..end].to_vec();
            if let Some((file, at, times)) = &mut *server.flip.borrow_mut()
                && *file == self.file
                && (self.at..end).contains(at)
                && *times > 0
            {
                bytes[*at - self.at] ^= 1;
                *times -= 1;
            }
            server.sent.set(server.sent.get() + bytes.len());
            self.at = end;
            Ok(Some(Bytes::Owned(bytes)))
        })
    }

    fn tag(&self) -> Option<String> {
        self.tag.clone()
    }
}

#[derive(Default)]
struct Memory {
    files: RefCell<BTreeMap<String, Vec<u8>>>,
    room: Cell<Option<u64>>,
}

impl Flash for Memory {
    fn read<'a>(&'a self, file: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Bytes>> {
        Box::pin(async move {
            let files = self.files.borrow();
            let bytes = files.get(file).ok_or_else(|| Error::NotFound { path: file.to_owned() })?;
            let part = bytes.get(offset as usize..offset as usize + len);
            part.map(|b| Bytes::Owned(b.to_vec())).ok_or_else(|| Error::Truncated {
                path: file.to_owned(),
                expected: offset + len as u64,
                actual: bytes.len() as u64,
            })
        })
    }

    fn size<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<u64>> {
        let size = self.files.borrow().get(file).map(|b| b.len() as u64);
        Box::pin(async move { size.ok_or_else(|| Error::NotFound { path: file.to_owned() }) })
    }
}

impl Store for Memory {
    fn write<'a>(&'a self, file: &'a str, offset: u64, bytes: Bytes) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let mut files = self.files.borrow_mut();
            let held = files.entry(file.to_owned()).or_default();
            let end = offset as usize + bytes.len();
            held.resize(held.len().max(end), 0);
            bytes.copy_to(&mut held[offset as usize..end]);
            Ok(())
        })
    }

    fn resize<'a>(&'a self, file: &'a str, len: u64) -> LocalBoxFuture<'a, Result<()>> {
        self.files.borrow_mut().entry(file.to_owned()).or_default().resize(len as usize, 0);
        Box::pin(async { Ok(()) })
    }

    fn flush<'a>(&'a self, _: &'a str) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn remove<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<()>> {
        self.files.borrow_mut().remove(file);
        Box::pin(async { Ok(()) })
    }

    fn list(&self) -> LocalBoxFuture<'_, Result<Vec<String>>> {
        Box::pin(async { Ok(self.files.borrow().keys().cloned().collect()) })
    }

    fn free(&self) -> LocalBoxFuture<'_, Result<Option<u64>>> {
        Box::pin(async { Ok(self.room.get()) })
    }
}

#[derive(Default)]
struct Watch {
    seen: RefCell<Vec<Progress>>,
    stop_after: Option<usize>,
}

impl Observer for Watch {
    fn progress(&self, progress: Progress) {
        self.seen.borrow_mut().push(progress);
    }
    fn aborted(&self) -> bool {
        self.stop_after.is_some_and(|n| self.seen.borrow().len() >= n)
    }
}

/// The manifest of these tests: a file a line, `name size (offset len hash)…`.
fn describe(manifest: &[u8]) -> Result<Vec<File>> {
    let text = std::str::from_utf8(manifest).map_err(|e| Error::format("manifest", e))?;
    let number = |s: &str| s.parse::<u64>().map_err(|e| Error::format("manifest", e));
    text.lines()
        .map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let extents = words
                .get(2..)
                .ok_or_else(|| Error::format("manifest", "a line without a size"))?
                .chunks(3)
                .map(|e| {
                    let hash = blake3::Hash::from_hex(e[2]).map_err(|e| Error::format("manifest", e))?;
                    Ok(Extent { offset: number(e[0])?, len: number(e[1])?, hash: *hash.as_bytes() })
                })
                .collect::<Result<_>>()?;
            Ok(File { name: words[0].to_owned(), size: number(words[1])?, extents })
        })
        .collect()
}

/// Serves files made of extents of the given lengths, each padded to 64 bytes.
fn server(files: &[&[usize]]) -> Server {
    let mut server = Server::default();
    let mut manifest = String::new();
    for (f, lens) in files.iter().enumerate() {
        let (mut bytes, mut line) = (Vec::new(), String::new());
        for (e, &len) in lens.iter().enumerate() {
            let content: Vec<u8> = (0..len).map(|i| (i * 31 + e * 7 + f * 13 + i / 256) as u8).collect();
            line += &format!(" {} {len} {}", bytes.len(), blake3::hash(&content).to_hex());
            bytes.extend(content);
            bytes.resize(bytes.len().next_multiple_of(64), 0);
        }
        manifest += &format!("shard-{f}.bin {}{line}\n", bytes.len());
        server.files.insert(format!("shard-{f}.bin"), bytes);
    }
    server.files.insert(MANIFEST.to_owned(), manifest.into_bytes());
    server
}

fn small() -> Server {
    server(&[&[100, 4000, 64, 1], &[5000, 5000], &[]])
}

const STAY: Policy = Policy { update: false, alone: true };
const UPDATE: Policy = Policy { update: true, alone: true };

fn ensure_in(server: &Server, store: &Memory) -> Result<()> {
    pollster::block_on(ensure(server, store, &describe, &Watch::default(), STAY)).map(drop)
}

fn update(server: &Server, store: &Memory) -> Result<Outcome> {
    pollster::block_on(ensure(server, store, &describe, &Watch::default(), UPDATE))
}

fn latest(store: &Memory) -> Option<Installation> {
    pollster::block_on(Installation::latest(store)).unwrap()
}

fn is_complete(store: &Memory) -> bool {
    latest(store).is_some_and(|held| pollster::block_on(held.complete(store)).unwrap().is_some())
}

fn distrust(store: &Memory) {
    pollster::block_on(latest(store).unwrap().distrust(store)).unwrap();
}

/// The store holds what the server has, and nothing else.
fn assert_complete(server: &Server, store: &Memory) {
    assert!(is_complete(store));
    let held = latest(store).unwrap();
    for name in server.files.keys() {
        assert_eq!(server.content(name).as_ref(), store.files.borrow().get(held.place(name)), "{name}");
    }
    for name in store.files.borrow().keys() {
        assert!(MARKERS.contains(&name.as_str()) || held.owns(name), "{name} was left behind");
    }
}

#[test]
fn installs_then_needs_no_server() {
    let (server, store) = (small(), Memory::default());
    let watch = Watch::default();
    pollster::block_on(ensure(&server, &store, &describe, &watch, STAY)).unwrap();
    assert_complete(&server, &store);
    let seen = watch.seen.into_inner();
    assert_eq!(seen.last().map(|p| (p.phase, p.done)), seen.last().map(|p| (Phase::Download, p.total)));
    assert!(seen.windows(2).all(|w| w[0].phase != w[1].phase || w[0].done <= w[1].done));

    let gone = Server::default();
    ensure_in(&gone, &store).unwrap();
    assert!(gone.requests.borrow().is_empty());
}

#[test]
fn heals_what_was_evicted_or_damaged() {
    let (server, store) = (small(), Memory::default());
    ensure_in(&server, &store).unwrap();
    store.files.borrow_mut().remove("shard-1.bin");
    ensure_in(&server, &store).unwrap();
    assert_complete(&server, &store);

    store.files.borrow_mut().get_mut("shard-0.bin").unwrap()[200] ^= 1;
    distrust(&store);
    server.sent.set(0);
    ensure_in(&server, &store).unwrap();
    assert_complete(&server, &store);
    let manifest = server.files[MANIFEST].len();
    assert_eq!(server.sent.get(), manifest + 4000, "only the damaged extent is fetched");
}

#[test]
fn replaces_another_pack_at_the_same_address() {
    let (old, store) = (server(&[&[10], &[20], &[30], &[40]]), Memory::default());
    ensure_in(&old, &store).unwrap();
    distrust(&store);
    let new = small();
    ensure_in(&new, &store).unwrap();
    assert_complete(&new, &store);
    assert!(!store.files.borrow().contains_key("shard-3.bin"));
}

#[test]
fn half_a_marker_is_none() {
    let (server, store) = (small(), Memory::default());
    ensure_in(&server, &store).unwrap();
    store.files.borrow_mut().get_mut(MARKERS[0]).unwrap().truncate(20);
    ensure_in(&server, &store).unwrap();
    assert_complete(&server, &store);
}

#[test]
fn one_wrong_answer_is_asked_for_again_two_are_an_error() {
    let (server, store) = (small(), Memory::default());
    *server.flip.borrow_mut() = Some(("shard-0.bin".into(), 130, 1));
    ensure_in(&server, &store).unwrap();
    assert_complete(&server, &store);

    let (server, store) = (small(), Memory::default());
    *server.flip.borrow_mut() = Some(("shard-0.bin".into(), 130, 9));
    match ensure_in(&server, &store) {
        Err(Error::Corrupt { path, offset: 128, len: 4000 }) => assert_eq!(path, "shard-0.bin"),
        other => panic!("{other:?}"),
    }
    assert!(!is_complete(&store));
}

#[test]
fn server_errors_are_typed() {
    let store = Memory::default();
    for status in [404, 500] {
        let server = small();
        server.status.set(Some(status));
        assert!(matches!(ensure_in(&server, &store), Err(Error::Http { status: s, .. }) if s == status));
    }
    let mut server = small();
    server.files.remove("shard-1.bin");
    assert!(matches!(ensure_in(&server, &store), Err(Error::Http { status: 404, .. })));

    let mut server = small();
    server.files.get_mut("shard-1.bin").unwrap().truncate(6000);
    match ensure_in(&server, &store) {
        Err(Error::Truncated { path, actual: 6000, .. }) => assert_eq!(path, "shard-1.bin"),
        other => panic!("{other:?}"),
    }

    let mut server = small();
    server.files.get_mut("shard-1.bin").unwrap().extend([0; 2000]);
    assert!(matches!(ensure_in(&server, &Memory::default()), Err(Error::Format { .. })));
}

#[test]
fn a_broken_connection_resumes_a_dead_one_is_an_error() {
    let (server, store) = (small(), Memory::default());
    server.cut.set(Some((3000, false)));
    ensure_in(&server, &store).unwrap();
    assert_complete(&server, &store);

    let (server, store) = (small(), Memory::default());
    server.cut.set(Some((3000, true)));
    assert!(matches!(ensure_in(&server, &store), Err(Error::Network { .. })));
    assert!(!is_complete(&store));
}

#[test]
fn a_full_store_is_refused_before_the_first_byte() {
    let (server, store) = (small(), Memory::default());
    store.room.set(Some(10_000));
    let total: usize = server.files.iter().filter(|(name, _)| *name != MANIFEST).map(|(_, bytes)| bytes.len()).sum();
    let missing = (total - 10_000) as u64;
    assert!(matches!(ensure_in(&server, &store), Err(Error::Quota { needed }) if needed == missing));
    assert_eq!(*server.requests.borrow(), [MANIFEST]);
    assert!(store.files.borrow().is_empty());
}

#[test]
fn a_refused_manifest_costs_nothing_else() {
    let (server, store) = (small(), Memory::default());
    let refuse = |_: &[u8]| Err(Error::Budget { budget: 1, smallest: 2, context: 3 });
    let result = pollster::block_on(ensure(&server, &store, &refuse, &Watch::default(), STAY));
    assert!(matches!(result, Err(Error::Budget { .. })));
    assert_eq!(*server.requests.borrow(), [MANIFEST]);
}

#[test]
fn bad_shapes_are_refused() {
    let hash = blake3::hash(b"").to_hex();
    for line in [
        format!("installed.json 10 0 10 {hash}"),
        format!("a 10 0 11 {hash}"),
        format!("a 10 5 5 {hash} 0 5 {hash}"),
        format!("a 10 0 6 {hash} 5 5 {hash}"),
        format!("a 10 {} 5 {hash}", u64::MAX - 2),
        format!("a 10 0 0 {hash}"),
    ] {
        let server = Server { files: [(MANIFEST.to_owned(), line.clone().into_bytes())].into(), ..Server::default() };
        assert!(matches!(ensure_in(&server, &Memory::default()), Err(Error::Format { .. })), "{line}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Stopped after any number of reports, an installation is incomplete and says so; resumed, it is whole.
    #[test]
    fn stopped_anywhere_it_resumes(
        shards in prop::collection::vec(prop::collection::vec(1usize..9000, 0..6), 1..4),
        stop in 1usize..40,
    ) {
        let shards: Vec<&[usize]> = shards.iter().map(Vec::as_slice).collect();
        let (server, store) = (server(&shards), Memory::default());
        let watch = Watch { stop_after: Some(stop), ..Watch::default() };
        match pollster::block_on(ensure(&server, &store, &describe, &watch, STAY)) {
            Ok(_) => {}
            Err(Error::Aborted) => {
                prop_assert!(!is_complete(&store));
                server.sent.set(0);
                ensure_in(&server, &store).unwrap();
                let total: usize = server.files.values().map(Vec::len).sum();
                prop_assert!(server.sent.get() <= total);
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
        assert_complete(&server, &store);
    }
}
