use proptest::prelude::*;

use super::*;

const SHAPE: Shape = Shape { layers: 4, experts: 8, top_k: 2 };

fn key(layer: u32, expert: u32) -> Key {
    Key { layer, expert }
}

fn scheduler(slots: usize, settings: Settings) -> Scheduler {
    Scheduler::new(SHAPE, Pool::new(SHAPE, slots), settings)
}

/// Carries actions out against a model of memory, and checks what must never happen.
struct World {
    scheduler: Scheduler,
    slots: Vec<Option<Key>>,
    /// Reads outstanding, with whether each is waited for and whether it was cancelled.
    reads: Vec<(Key, bool, bool)>,
    memory: Vec<Key>,
    layer: u32,
    ids: Vec<u32>,
    done: Vec<bool>,
    lost: bool,
    /// Tokens of the pass, and by expert its reads, those that failed or were cancelled left out.
    rows: usize,
    reads_of: [u32; SHAPE.layers * SHAPE.experts],
}

impl World {
    fn new(slots: usize, settings: Settings) -> World {
        World {
            scheduler: scheduler(slots, settings),
            slots: vec![None; slots],
            reads: Vec::new(),
            memory: Vec::new(),
            layer: 0,
            ids: Vec::new(),
            done: Vec::new(),
            lost: false,
            rows: 1,
            reads_of: [0; SHAPE.layers * SHAPE.experts],
        }
    }

    fn begin(&mut self, rows: usize) {
        self.scheduler.on(Event::Begin { rows });
        self.reads.iter_mut().for_each(|read| read.1 = false);
        (self.rows, self.reads_of) = (rows, [0; _]);
    }

    fn route(&mut self, layer: u32, ids: &[u32]) {
        self.route_ran(layer, ids, false);
    }

    /// A layer whose experts may all have run when its choice is known.
    fn route_ran(&mut self, layer: u32, ids: &[u32], ran: bool) {
        (self.layer, self.ids) = (layer, ids.to_vec());
        self.done = vec![ran; ids.len()];
        self.scheduler.on(if ran { Event::Ran { layer, ids } } else { Event::Routed { layer, ids } });
        let waits = |key: &Key| key.layer == layer && (0..ids.len()).any(|i| ids[i] == key.expert && !self.done[i]);
        self.reads.iter_mut().for_each(|(key, waited, _)| *waited = waits(key));
        if !self.scheduler.settings().keep {
            self.slots
                .iter_mut()
                .filter(|held| held.is_some_and(|key| key.layer == layer))
                .for_each(|held| *held = None);
        }
    }

    /// Does one thing. `false` if there is nothing to do.
    fn act(&mut self) -> bool {
        let settings = *self.scheduler.settings();
        let Some(action) = self.scheduler.next_action() else { return false };
        match action {
            Action::Read { key, demand } => {
                assert!(self.reads.iter().all(|read| read.0 != key) && !self.memory.contains(&key), "read twice");
                assert!(!self.slots.contains(&Some(key)), "read though it is there");
                self.reads_of[SHAPE.index(key)] += 1;
                assert!(self.rows == 1 || self.reads_of[SHAPE.index(key)] == 1, "read twice for several tokens");
                let waited = self.reads.iter().any(|read| read.1);
                assert!(demand || !waited, "a guess while something is waited for");
                assert!(demand || self.reads.len() < settings.guesses);
                assert!(!demand || key.layer == self.layer && self.ids.contains(&key.expert));
                self.reads.push((key, demand, false));
                assert!(self.reads.len() + self.memory.len() <= settings.reads, "more in memory than was allowed");
            }
            Action::Cancel { key } => {
                let read = self.reads.iter_mut().find(|read| read.0 == key).expect("it is being read");
                assert!(!read.2, "cancelled twice");
                read.2 = true;
            }
            Action::Upload { key, slot } => {
                let at = self.memory.iter().position(|held| *held == key).expect("its bytes are here");
                self.memory.swap_remove(at);
                if let Some(held) = self.slots[slot as usize].replace(key) {
                    let needed = |i: &usize| held.layer == self.layer && self.ids[*i] == held.expert && !self.done[*i];
                    assert!(!(0..self.ids.len()).any(|i| needed(&i)), "{held:?} was needed and made room");
                }
            }
            Action::Drop { key } => {
                let at = self.memory.iter().position(|held| *held == key).expect("its bytes are here");
                self.memory.swap_remove(at);
            }
            Action::Run { items } => {
                for item in items {
                    let at = item.row as usize * SHAPE.top_k + item.rank as usize;
                    assert!(!std::mem::replace(&mut self.done[at], true), "run twice");
                    assert_eq!(self.slots[item.slot as usize], Some(key(self.layer, self.ids[at])));
                }
            }
            Action::Lost { key } => {
                assert!(key.layer == self.layer && self.ids.contains(&key.expert));
                self.lost = true;
            }
        }
        true
    }

    /// Ends one of the outstanding reads: `how` draws which, and what becomes of it.
    fn end_read(&mut self, how: u32, failures: bool) {
        let at = how as usize % self.reads.len();
        let (key, _, cancelled) = self.reads.swap_remove(at);
        let again = &mut self.reads_of[SHAPE.index(key)];
        let event = match how / 64 % 8 {
            0 if failures => {
                *again = again.saturating_sub(1);
                Event::Failed { key }
            }
            1..4 if cancelled => {
                *again = again.saturating_sub(1);
                Event::Cancelled { key }
            }
            _ => {
                self.memory.push(key);
                Event::Arrived { key }
            }
        };
        self.scheduler.on(event);
    }

    /// Runs a layer to its end, with reads that end in any order. `false` if it was lost.
    fn finish(&mut self, draw: &mut impl FnMut() -> u32, failures: bool) -> bool {
        loop {
            // Events come at any moment, not only when there is nothing to do.
            if !self.reads.is_empty() && draw().is_multiple_of(3) {
                self.end_read(draw(), failures);
                continue;
            }
            if self.act() {
                if std::mem::take(&mut self.lost) {
                    return false;
                }
                continue;
            }
            assert_eq!(self.scheduler.layer_done(), self.done.iter().all(|done| *done));
            if self.scheduler.layer_done() {
                return true;
            }
            assert!(!self.reads.is_empty(), "stuck: nothing to do, nothing to wait for");
            self.end_read(draw(), failures);
        }
    }
}

fn any_settings() -> impl Strategy<Value = Settings> {
    let numbers = (1usize..6, 0usize..4, 0usize..4, 0usize..4, 0.0f64..1.0, 0.0f64..1.0);
    (numbers, any::<(bool, bool, bool)>()).prop_map(
        |((reads, guesses, lanes, depth, least_chance, saturated), flags)| {
            let (ready_first, keep, singly) = flags;
            Settings { reads, guesses, lanes, depth, least_chance, saturated, ready_first, keep, singly, run_ahead: 0 }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Whatever the order of events, every layer ends, runs each pair once on its own expert, and holds what it may.
    #[test]
    fn every_layer_ends(
        slots in 2usize..40, settings in any_settings(), failures: bool,
        passes in prop::collection::vec((1usize..5, any::<u32>()), 1..12),
        hot in prop::collection::vec(1e-3f32..=1.0, 0..32),
    ) {
        let mut world = World::new(slots, settings);
        world.scheduler.set_hot_list(&hot_list(&hot));
        for (rows, seed) in passes {
            let mut state = seed | 1;
            let mut draw = move || { state ^= state << 13; state ^= state >> 17; state ^= state << 5; state >> 3 };
            world.begin(rows);
            for layer in 0..SHAPE.layers as u32 {
                if draw() % 8 == 0 { world.scheduler.on(Event::Flash { busy: f64::from(draw() % 100) / 100.0 }); }
                let ids: Vec<u32> = (0..rows).flat_map(|_| {
                    let first = draw() % 8;
                    [first, (first + 1 + draw() % 7) % 8]
                }).collect();
                let scores: Vec<f32> = (0..rows * SHAPE.experts).map(|_| draw() as f32 / 1e6).collect();
                for target in world.scheduler.wants(Some(layer)) {
                    world.scheduler.on(Event::Predicted { origin: Origin::Layer(layer), layer: target, scores: &scores });
                }
                // They were in slots when the layer was submitted, wherever they are by now.
                world.route_ran(layer, &ids, draw() % 4 == 0);
                // A pass that is lost, or left, is followed by another as if nothing had been.
                if !world.finish(&mut draw, failures) || draw() % 40 == 0 { break; }
            }
        }
    }
}

fn hot_list(rates: &[f32]) -> HotList {
    HotList { shape: SHAPE, entries: rates.iter().enumerate().map(|(i, rate)| (SHAPE.key(i), *rate)).collect() }
}

/// Before the first pass the pool is filled from an earlier visit, and what is there is found.
#[test]
fn an_earlier_visit_warms_the_pool() {
    let rates: Vec<f32> = (0..32).map(|i| 1.0 / (1.0 + i as f32)).collect();
    for guesses in [0, 2] {
        let mut world = World::new(10, Settings { guesses, ..Settings::default() });
        world.scheduler.set_hot_list(&hot_list(&rates));
        while world.act() || !world.reads.is_empty() {
            if !world.reads.is_empty() {
                world.end_read(64 * 7, false);
            }
        }
        let warm = if guesses > 0 { 10 } else { 0 };
        let expected: Vec<_> = [2, 3].map(|expert| world.scheduler.pool().slot_of(key(0, expert)).is_some()).into();
        world.begin(1);
        world.route(0, &[2, 3]);
        assert!(world.finish(&mut || 64 * 7, false));
        let counts = world.scheduler.counts();
        assert!(expected == [guesses > 0; 2] && counts.warm_reads == warm, "{counts:?}");
        assert_eq!([counts.hits, counts.warm_used], [if guesses > 0 { 2 } else { 0 }; 2]);
        assert_eq!(counts.guesses_used, 0);
    }
}

/// What this visit is known to need does not make room for what an earlier one needed less.
#[test]
fn an_earlier_visit_gives_way() {
    let mut world = World::new(8, Settings::default());
    for _ in 0..40 {
        world.begin(1);
        for layer in 0..4 {
            world.route(layer, &[0, 1]);
            assert!(world.finish(&mut || 64 * 7, false));
        }
    }
    world.scheduler.set_hot_list(&hot_list(&[0.5; 32]));
    world.begin(1);
    while world.act() {}
    assert_eq!(world.scheduler.counts().warm_reads, 0);
}

/// A layer with everything in its slots needs no reads, and what a sure guess brought is found.
#[test]
fn a_guess_becomes_a_hit() {
    let mut world = World::new(8, Settings::default());
    let mut draw = || 0;
    let mut scores = [0.0; 8];
    (scores[3], scores[5]) = (9.0, 8.0);
    for _ in 0..20 {
        world.begin(1);
        world.route(0, &[0, 1]);
        world.scheduler.on(Event::Predicted { origin: Origin::Layer(0), layer: 1, scores: &scores });
        while world.act() || !world.reads.is_empty() {
            if !world.reads.is_empty() {
                world.end_read(64 * 7, false);
            }
        }
        world.route(1, &[3, 5]);
        assert!(world.finish(&mut draw, false));
    }
    let counts = world.scheduler.counts();
    assert_eq!(counts.demand_reads, 2, "{counts:?}");
    assert_eq!((counts.guess_reads, counts.guesses_used), (2, 2));
    assert_eq!(counts.hits, 20 * 4 - 2);
}

#[test]
fn what_is_waited_for_overtakes_guesses() {
    let mut world = World::new(8, Settings { reads: 2, lanes: 1, ..Settings::default() });
    let mut scores = [0.0; 8];
    (scores[3], scores[5]) = (9.0, 8.0);
    world.begin(1);
    world.scheduler.on(Event::Predicted { origin: Origin::Embedding, layer: 0, scores: &scores });
    while world.act() {}
    assert_eq!(world.reads, [(key(0, 3), false, false), (key(0, 5), false, false)]);
    world.route(0, &[3, 1]);
    while world.act() {}
    // What turned out to be needed goes on; the other is cancelled, and its place is the needed one's.
    assert_eq!(world.reads, [(key(0, 3), true, false), (key(0, 5), false, true)]);
    world.reads.pop();
    world.scheduler.on(Event::Cancelled { key: key(0, 5) });
    while world.act() {}
    assert_eq!(world.reads, [(key(0, 3), true, false), (key(0, 1), true, false)]);
    assert_eq!(world.scheduler.counts().late, 1);
}

/// More experts than there are slots take them in the order in which they arrive, and run in it.
#[test]
fn experts_stream_through_the_pool_in_order_of_arrival() {
    let mut world = World::new(2, Settings { reads: 4, guesses: 0, singly: true, ..Settings::default() });
    world.begin(4);
    world.route(1, &[0, 1, 2, 3, 4, 5, 6, 7]);
    let (mut arrived, mut ran) = (Vec::new(), Vec::new());
    // Of the reads under way now the last and now the first ends.
    for last in [true, false].into_iter().cycle() {
        loop {
            let before = world.done.clone();
            if !world.act() {
                break;
            }
            ran.extend((0..8).filter(|i| world.done[*i] && !before[*i]));
        }
        if world.scheduler.layer_done() {
            break;
        }
        let at = if last { world.reads.len() - 1 } else { 0 };
        let (key, ..) = world.reads.remove(at);
        arrived.push(key.expert as usize);
        world.memory.push(key);
        world.scheduler.on(Event::Arrived { key });
    }
    assert_eq!(ran, arrived);
    assert_ne!(ran, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(world.scheduler.counts().demand_reads, 8);
}

#[test]
fn a_read_is_tried_twice() {
    let mut world = World::new(8, Settings::default());
    world.begin(1);
    world.route(2, &[6, 7]);
    while world.act() {}
    for _ in 0..2 {
        assert!(!world.lost);
        let at = world.reads.iter().position(|read| read.0 == key(2, 6)).expect("it is tried again");
        world.reads.swap_remove(at);
        world.scheduler.on(Event::Failed { key: key(2, 6) });
        while world.act() {}
    }
    assert!(world.lost);
    // The next pass begins afresh, with what had been on its way.
    world.lost = false;
    world.begin(1);
    world.route(2, &[6, 7]);
    assert!(world.finish(&mut || 64 * 7, false));
}
