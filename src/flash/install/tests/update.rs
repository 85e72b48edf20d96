//! Packs that change on the server, after and while they are installed.

use super::*;

/// [`small`] with one extent changed, one longer, so that those behind it move, and a file fewer.
fn changed() -> Server {
    let mut server = server(&[&[100, 4000, 64, 1], &[5000, 5000]]);
    edit(&mut server, 0, &[Some(b"a"), None, None, None]);
    edit(&mut server, 1, &[Some(&[7; 6000]), None]);
    server
}

/// Puts other contents into a file's extents, and both into the manifest.
fn edit(server: &mut Server, f: usize, contents: &[Option<&[u8]>]) {
    let manifest = String::from_utf8(server.files[MANIFEST].clone()).unwrap();
    let file = &describe(manifest.as_bytes()).unwrap()[f];
    let old = server.files[&file.name].clone();
    let (mut bytes, mut line) = (Vec::new(), String::new());
    for (extent, content) in file.extents.iter().zip(contents) {
        let kept = &old[extent.offset as usize..(extent.offset + extent.len) as usize];
        let content = content.unwrap_or(kept);
        line += &format!(" {} {} {}", bytes.len(), content.len(), blake3::hash(content).to_hex());
        bytes.extend(content);
        bytes.resize(bytes.len().next_multiple_of(64), 0);
    }
    let line = format!("{} {}{line}", file.name, bytes.len());
    let lines: Vec<&str> = manifest.lines().enumerate().map(|(i, l)| if i == f { &line } else { l }).collect();
    server.files.insert(MANIFEST.to_owned(), (lines.join("\n") + "\n").into_bytes());
    server.files.insert(file.name.clone(), bytes);
}

#[test]
fn an_unchanged_pack_costs_a_look_at_the_manifest() {
    let (server, store) = (small(), Memory::default());
    ensure_in(&server, &store).unwrap();
    server.requests.borrow_mut().clear();
    assert_eq!(update(&server, &store).unwrap().notice, None);
    assert_eq!(*server.requests.borrow(), [MANIFEST]);
    assert_complete(&server, &store);
}

#[test]
fn only_what_has_changed_is_fetched() {
    let (new, store) = (changed(), Memory::default());
    ensure_in(&small(), &store).unwrap();
    // Where the user does not want it, nothing changes.
    ensure_in(&new, &store).unwrap();
    assert_complete(&small(), &store);
    assert!(new.requests.borrow().is_empty());

    let outcome = update(&new, &store).unwrap();
    assert_eq!(outcome.notice, None);
    assert_complete(&new, &store);
    // The manifest is looked at twice; padding behind the last extent is fetched along with it.
    let manifest = new.files[MANIFEST].len();
    assert_eq!(new.sent.get(), 2 * manifest + 1 + 6000);
    let read = |name, len| {
        let installed =
            Installed::new(Memory { files: store.files.clone(), ..Memory::default() }, outcome.installation.clone());
        pollster::block_on(installed.read(name, 0, len)).unwrap().into_vec()
    };
    assert_eq!(read("shard-1.bin", 6000), [7; 6000]);

    // And back, and forth: names do not run out, and what was left behind is not taken for what it is not.
    for server in [small(), changed(), small()] {
        update(&server, &store).unwrap();
        assert_complete(&server, &store);
        ensure_in(&Server::default(), &store).unwrap();
    }
}

#[test]
fn whatever_fails_the_pack_from_before_is_used() {
    type Break = fn(&mut Server);
    let breaks: [(&str, Break, bool); 6] = [
        ("no server", |s| s.files.clear(), false),
        ("a file is missing", |s| drop(s.files.remove("shard-1.bin")), true),
        ("a file is cut short", |s| s.files.get_mut("shard-1.bin").unwrap().truncate(3000), true),
        ("an extent is wrong", |s| *s.flip.get_mut() = Some(("shard-1.bin".into(), 130, 99)), true),
        ("the connection is cut", |s| s.cut.set(Some((4000, true))), true),
        ("the manifest is none", |s| drop(s.files.insert(MANIFEST.to_owned(), b"<html>".repeat(9))), true),
    ];
    for (what, break_it, told) in breaks {
        let store = Memory::default();
        ensure_in(&small(), &store).unwrap();
        let mut broken = changed();
        break_it(&mut broken);
        let outcome = update(&broken, &store).unwrap();
        assert_eq!(outcome.notice.is_some(), told, "{what}: {:?}", outcome.notice);
        assert!(is_complete(&store), "{what}");
        let held = latest(&store).unwrap();
        for (name, bytes) in &small().files {
            assert_eq!(Some(bytes), store.files.borrow().get(held.place(name)), "{what}: {name}");
        }
        let new = changed();
        assert_eq!(update(&new, &store).unwrap().notice, None, "{what}");
        assert_complete(&new, &store);
    }
}

#[test]
fn an_update_without_room_is_left_alone() {
    let store = Memory::default();
    ensure_in(&small(), &store).unwrap();
    store.room.set(Some(1000));
    let notice = update(&changed(), &store).unwrap().notice.unwrap();
    assert!(notice.contains("storage is full"), "{notice}");
    assert_complete(&small(), &store);
}

#[test]
fn what_others_use_is_not_deleted() {
    let store = Memory::default();
    ensure_in(&small(), &store).unwrap();
    let before = store.files.borrow().clone();
    let policy = Policy { alone: false, ..UPDATE };
    pollster::block_on(ensure(&changed(), &store, &describe, &Watch::default(), policy)).unwrap();
    let gone: Vec<&String> = before.keys().filter(|name| !store.files.borrow().contains_key(*name)).collect();
    assert!(gone.is_empty(), "{gone:?}");
    update(&changed(), &store).unwrap();
    assert_complete(&changed(), &store);
}

#[test]
fn a_damaged_update_is_repaired() {
    let (server, store) = (changed(), Memory::default());
    ensure_in(&small(), &store).unwrap();
    update(&server, &store).unwrap();
    let place = latest(&store).unwrap().place("shard-1.bin").to_owned();
    assert_ne!(place, "shard-1.bin");
    store.files.borrow_mut().get_mut(&place).unwrap()[6100] ^= 1;
    distrust(&store);
    server.sent.set(0);
    ensure_in(&server, &store).unwrap();
    assert_complete(&server, &store);
    assert!(server.sent.get() < server.files[MANIFEST].len() + 5100, "{}", server.sent.get());
}

/// A pack that is replaced when so many bytes of it were sent: what is installed is the one or the other.
#[test]
fn a_pack_that_changes_while_it_is_fetched_is_fetched_as_it_is_now() {
    let manifest = small().files[MANIFEST].len();
    for tagged in [false, true] {
        for from in [0, 1, manifest, manifest + 1, manifest + 3000, manifest + 6000, manifest + 12_000] {
            let store = Memory::default();
            let server = Server { tagged, change: RefCell::new(Some((from, changed().files))), ..small() };
            server.cut.set(Some((from.max(manifest + 800), false)));
            update(&server, &store).unwrap_or_else(|e| panic!("{tagged}, {from}: {e}"));
            assert!(is_complete(&store));
            let held = latest(&store).unwrap();
            let now = if held.manifest == marker::hash(&changed().files[MANIFEST]) { changed() } else { small() };
            for (name, bytes) in now.files.iter().filter(|(name, _)| *name != "shard-2.bin") {
                assert_eq!(Some(bytes), store.files.borrow().get(held.place(name)), "{tagged}, {from}: {name}");
            }
        }
    }
}

#[test]
fn a_tag_that_changes_is_noticed_before_the_rest_is_fetched() {
    let big = |fill: u8| {
        let mut server = server(&[&[100, 60_000], &[50]]);
        edit(&mut server, 0, &[None, Some(&vec![fill; 60_000])]);
        server.tagged = true;
        server
    };
    let (server, store) = (big(1), Memory::default());
    let manifest = server.files[MANIFEST].len();
    *server.change.borrow_mut() = Some((manifest + 20_000, big(2).files));
    server.cut.set(Some((manifest + 20_000, false)));
    update(&server, &store).unwrap();
    assert_complete(&big(2), &store);
    // 20 KB of the old, the new manifest, and the new extent once; not the rest of the old one first.
    assert!(server.sent.get() < 2 * manifest + 20_000 + 61_000, "{}", server.sent.get());
}

#[test]
fn tags_that_say_nothing_do_no_harm() {
    let (server, store) = (Server { restless: true, ..small() }, Memory::default());
    server.cut.set(Some((3000, false)));
    update(&server, &store).unwrap();
    assert_complete(&server, &store);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Stopped after any number of reports, an update leaves the old pack usable, and the next goes on with it.
    #[test]
    fn an_update_stopped_anywhere_takes_nothing_away(stop in 1usize..24) {
        let (new, store) = (changed(), Memory::default());
        ensure_in(&small(), &store).unwrap();
        let watch = Watch { stop_after: Some(stop), ..Watch::default() };
        let result = pollster::block_on(ensure(&new, &store, &describe, &watch, UPDATE));
        prop_assert!(matches!(result, Ok(_) | Err(Error::Aborted)));
        let kept = pollster::block_on(ensure(&Server::default(), &store, &describe, &Watch::default(), UPDATE));
        prop_assert_eq!(kept.unwrap().notice, None);
        if result.is_err() {
            let held = latest(&store).unwrap();
            prop_assert_eq!(&held.manifest, &marker::hash(&small().files[MANIFEST]));
        }
        let before = new.sent.replace(0);
        update(&new, &store).unwrap();
        assert_complete(&new, &store);
        let whole = 6001 + 2 * new.files[MANIFEST].len();
        prop_assert!(before + new.sent.get() <= 2 * whole);
    }
}
