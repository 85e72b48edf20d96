//! The largest single allocation of the current thread, to show that no number in a file makes the runtime allocate by
//! it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

pub struct Watching;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn seen(bytes: usize) {
    // While a thread ends there is nothing to count into.
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(bytes)));
}

// SAFETY: every call goes to the system's allocator unchanged; only sizes are looked at.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        seen(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        seen(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        seen(size);
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Bytes of the largest allocation that `f` makes on this thread, and what it returns.
pub fn largest<T>(f: impl FnOnce() -> T) -> (usize, T) {
    LARGEST.with(|largest| largest.set(0));
    let result = f();
    (LARGEST.with(Cell::get), result)
}
