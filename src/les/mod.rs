//! Lookahead Expert Scheduling: which experts are read, when, and what makes room for them.
//!
//! A layer's router names its experts only when the layer is reached, too late for flash to be idle until then. So later
//! layers are *forecast* from what is known earlier, and experts that are likely to be needed are read while the layers
//! before them compute. What a forecast gets wrong costs time, never a result: a layer runs exactly the experts that its
//! router chose, and waits for those that are not there.
//!
//! Everything here is pure. Events go in, actions come out; time, threads and devices are the engine's, or the
//! simulator's.
//!
//! - [`Pool`]: what is in which slot, and which expert is worth least.
//! - [`Forecast`]: how likely each expert of the next layers is to be needed, learned as it goes.
//! - [`Scheduler`]: what to do next, within [`Settings`].
//! - [`HotList`]: what is worth having in the pool at the beginning of the next visit.
//! - [`RunAhead`]: how many layers are submitted before their routing is known.
//! - [`FlashModel`]: how long reads take.
//! - [`trace`], [`spans`], [`replay`], [`simulate`]: what passes went through and when, what other policies would have
//!   read, and what the scheduler would make of it on another machine.
//! - [`ridge`]: fitting the maps by which layers are forecast better than by their routers.
//! - [`profile`], [`synthetic`]: such machines, and routing made up for models that cannot be run here.

use serde::{Deserialize, Serialize};

mod device;
mod forecast;
mod hot;
mod pool;
pub mod profile;
pub mod replay;
pub mod ridge;
mod run_ahead;
mod scheduler;
mod settings;
pub mod simulate;
pub mod spans;
pub mod synthetic;
pub mod trace;

pub use device::{FlashModel, FlashSpeed, Load};
pub use forecast::{Forecast, Origin, Recall};
pub use hot::{Frequencies, HotList};
pub use pool::{Policy, Pool};
pub use run_ahead::RunAhead;
pub use scheduler::{Action, Counts, Event, Scheduler};
pub use settings::Settings;

/// An expert of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub layer: u32,
    pub expert: u32,
}

/// How many layers there are, how many experts in each, and how many of them a token chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    pub layers: usize,
    /// Of the layer that has most.
    pub experts: usize,
    pub top_k: usize,
}

impl Shape {
    pub fn keys(&self) -> usize {
        self.layers * self.experts
    }

    pub fn index(&self, key: Key) -> usize {
        key.layer as usize * self.experts + key.expert as usize
    }

    pub fn key(&self, index: usize) -> Key {
        Key { layer: (index / self.experts) as u32, expert: (index % self.experts) as u32 }
    }
}
