//! The memory budget is hard: what the process allocates while it loads and generates stays within the ledger.
//! One test in a binary of its own, because the allocator counts for the whole process.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{engine, greedy};
use outrider::Error;
use outrider::engine::{BackendChoice, Options};

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grown(bytes: usize) {
    let now = NOW.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator unchanged; only sizes are counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grown(size);
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn allocations_stay_within_the_budget() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/concierge");
    let smallest_for = |too_small: u64| {
        let options = Options { backend: BackendChoice::Cpu, budget: Some(too_small), ..Options::default() };
        let pack = pollster::block_on(outrider::import::open_model(model.to_str().unwrap())).unwrap();
        match pollster::block_on(outrider::engine::Engine::load(pack, &options, |_, _| {})) {
            Err(Error::Budget { budget, smallest, .. }) if budget == too_small => smallest,
            other => panic!("a budget of {too_small} bytes: {:?}", other.map(|_| "loaded")),
        }
    };
    let smallest = smallest_for(1);
    assert_eq!(smallest_for(smallest - 1), smallest);
    // Longer than the longest pass.
    let prompt: Vec<u32> = (3..603).collect();
    let (mut outputs, mut chunks) = (Vec::new(), Vec::new());
    for budget in [smallest, smallest + (1 << 20), 2 * smallest, 64 << 20] {
        let before = NOW.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        let options = Options { backend: BackendChoice::Cpu, budget: Some(budget), ..Options::default() };
        let mut engine = engine(&model, &options);
        outputs.push(greedy(&mut engine, &prompt, 24).0);
        let peak = (PEAK.load(Ordering::Relaxed) - before) as u64;
        let total = engine.ledger().total();
        assert!(total <= budget, "the ledger has {total} bytes of a budget of {budget}");
        assert!(peak <= total, "{peak} bytes were allocated where the ledger has {total}");
        chunks.push(engine.chunk());
        println!("budget {budget}: ledger {total}, peak {peak}, {} slots, chunk {}", engine.slots(), engine.chunk());
    }
    assert!(outputs.windows(2).all(|w| w[0] == w[1]), "the output depends on the budget");
    assert!(chunks[0] == 1 && chunks.is_sorted_by(|a, b| a < b), "more memory is for longer passes too: {chunks:?}");
}
