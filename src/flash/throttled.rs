//! Flash that is slower, and less reliable, than what it wraps: for measurements and tests.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use futures_util::future::LocalBoxFuture;
use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg32;
use serde::{Deserialize, Serialize};

use super::{Bytes, Flash};
use crate::clock;
use crate::error::{Error, Result};
use crate::les::{FlashModel, FlashSpeed};

/// Reads shorter than this pass unhindered: rows of an embedding, not experts.
const LEAST: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Throttle {
    /// Bytes a second, all lanes together; 0 for as many as there are.
    pub bandwidth: f64,
    /// Seconds until the first byte.
    pub latency: f64,
    pub lanes: usize,
    /// Up to so many seconds more, drawn anew for each read: they end in another order than they began.
    pub jitter: f64,
    /// Of so many reads one fails; 0 for none.
    pub fail_one_in: u32,
    /// Of so many reads one is never answered; 0 for none.
    pub hang_one_in: u32,
    pub seed: u64,
}

impl Default for Throttle {
    fn default() -> Throttle {
        Throttle { bandwidth: 0.0, latency: 0.0, lanes: 2, jitter: 0.0, fail_one_in: 0, hang_one_in: 0, seed: 0 }
    }
}

pub struct Throttled {
    inner: Rc<dyn Flash>,
    throttle: Cell<Option<Throttle>>,
    model: RefCell<FlashModel>,
    random: RefCell<Pcg32>,
    failed: Cell<u64>,
}

impl Throttled {
    /// Unhindered until [`set`](Self::set).
    pub fn new(inner: Rc<dyn Flash>) -> Throttled {
        let speed = FlashSpeed { bandwidth: f64::INFINITY, latency: 0.0, lanes: 1 };
        let random = RefCell::new(Pcg32::seed_from_u64(0));
        Throttled {
            inner,
            throttle: Cell::new(None),
            model: RefCell::new(FlashModel::new(speed)),
            random,
            failed: Cell::new(0),
        }
    }

    /// Holds back the reads from now on.
    pub fn set(&self, throttle: Option<Throttle>) {
        self.throttle.set(throttle);
        if let Some(t) = throttle {
            let bandwidth = if t.bandwidth > 0.0 { t.bandwidth } else { f64::INFINITY };
            let speed = FlashSpeed { bandwidth, latency: t.latency, lanes: t.lanes };
            self.model.replace(FlashModel::new(speed));
            self.random.replace(Pcg32::seed_from_u64(t.seed));
        }
    }

    /// Reads that were made to fail so far.
    pub fn failed(&self) -> u64 {
        self.failed.get()
    }

    fn draw(&self, one_in: u32) -> bool {
        one_in > 0 && self.random.borrow_mut().next_u32().is_multiple_of(one_in)
    }
}

impl Flash for Throttled {
    fn read<'a>(&'a self, file: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Bytes>> {
        let Some(throttle) = self.throttle.get().filter(|_| len >= LEAST) else {
            return self.inner.read(file, offset, len);
        };
        let now = clock::now();
        let jitter = f64::from(self.random.borrow_mut().next_u32()) / f64::from(u32::MAX) * throttle.jitter;
        let end = self.model.borrow_mut().read(now, len) + jitter;
        let (fails, hangs) = (self.draw(throttle.fail_one_in), self.draw(throttle.hang_one_in));
        let bytes = self.inner.read(file, offset, len);
        Box::pin(async move {
            let bytes = bytes.await;
            if hangs {
                std::future::pending::<()>().await;
            }
            if end > clock::now() {
                clock::sleep_until(end).await;
            }
            if fails {
                self.failed.set(self.failed.get() + 1);
                return Err(Error::Storage { path: file.to_owned(), reason: "made to fail".to_owned() });
            }
            bytes
        })
    }

    fn size<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<u64>> {
        self.inner.size(file)
    }
}
