//! How long flash takes, as a model: what the throttled flash holds reads back by, and what the simulator reckons with.

use serde::{Deserialize, Serialize};

/// What flash can do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlashSpeed {
    /// Bytes a second, all lanes together.
    pub bandwidth: f64,
    /// Seconds from asking until the first byte, which lanes overlap.
    pub latency: f64,
    /// Reads carried out at once.
    pub lanes: usize,
}

/// Flash with a queue: a read waits for a lane, then for its latency, then for the bus that all lanes share.
#[derive(Debug, Clone)]
pub struct FlashModel {
    speed: FlashSpeed,
    /// When each lane is free, and the bus.
    lanes: Vec<f64>,
    bus: f64,
    busy: f64,
}

impl FlashModel {
    pub fn new(speed: FlashSpeed) -> FlashModel {
        FlashModel { speed, lanes: vec![0.0; speed.lanes.max(1)], bus: 0.0, busy: 0.0 }
    }

    pub fn speed(&self) -> FlashSpeed {
        self.speed
    }

    /// A read of some bytes asked for at a time. Returns when it is done; times must not go back.
    pub fn read(&mut self, now: f64, bytes: usize) -> f64 {
        let lane = self.lanes.iter_mut().min_by(|a, b| a.total_cmp(b)).expect("there is a lane");
        let transfer = bytes as f64 / self.speed.bandwidth;
        let start = (lane.max(now) + self.speed.latency).max(self.bus);
        let end = start + transfer;
        (*lane, self.bus) = (end, end);
        self.busy += transfer;
        end
    }

    /// Seconds of transfer so far.
    pub fn busy(&self) -> f64 {
        self.busy
    }
}

/// The share of the time that was spent waiting, of late.
#[derive(Debug, Clone, Copy, Default)]
pub struct Load {
    time: f64,
    waited: f64,
    share: f64,
}

impl Load {
    /// What a new pass counts for.
    const WEIGHT: f64 = 0.1;

    /// Takes in the time and what has been waited altogether; to be asked once a pass.
    pub fn share(&mut self, time: f64, waited: f64) -> f64 {
        let (passed, spent) = (time - self.time, waited - self.waited);
        if passed > 0.0 {
            self.share += Self::WEIGHT * ((spent / passed).clamp(0.0, 1.0) - self.share);
        }
        (self.time, self.waited) = (time, waited);
        self.share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_overlap_latency_but_not_bytes() {
        let speed = FlashSpeed { bandwidth: 1000.0, latency: 1.0, lanes: 1 };
        let mut one = FlashModel::new(speed);
        assert_eq!([one.read(0.0, 1000), one.read(0.0, 1000), one.read(10.0, 1000)], [2.0, 4.0, 12.0]);
        let mut two = FlashModel::new(FlashSpeed { lanes: 2, ..speed });
        assert_eq!([two.read(0.0, 1000), two.read(0.0, 1000), two.read(0.0, 1000)], [2.0, 3.0, 4.0]);
        assert_eq!(two.busy(), 3.0);
    }
}
