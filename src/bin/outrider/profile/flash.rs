//! What flash can do, measured on a pack's experts.

use std::rc::Rc;
use std::sync::mpsc::channel;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_channel::oneshot;
use futures_util::StreamExt;
use futures_util::future::{FutureExt, poll_fn};
use futures_util::stream::FuturesUnordered;
use outrider::engine::ALERT;
use outrider::flash::Flash;
use outrider::les::FlashSpeed;
use outrider::pack::Pack;
use outrider::{Error, Result};
use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg32;

use crate::statistics::median;

/// Reads one after the other, and how often that is repeated.
const READS: usize = 40;
const REPEATS: usize = 5;
/// Reads under way at once that are tried.
const LANES: [usize; 4] = [1, 2, 4, 8];
/// What a further lane must gain to count.
const GAIN: f64 = 1.05;

/// Reads of so many bytes.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    pub bytes: usize,
    /// Under way at once.
    pub reads: usize,
    /// Bytes a second, and seconds of a read that is alone. Medians.
    pub bandwidth: f64,
    pub seconds: f64,
}

pub struct Measured {
    pub speed: FlashSpeed,
    pub samples: Vec<Sample>,
}

/// The shard with most experts, and its size.
fn largest(pack: &Pack) -> Result<(String, u64)> {
    let manifest = pack.manifest();
    let experts = manifest.experts.iter().flat_map(|experts| experts.layers.iter().flatten().flatten());
    let mut bytes = vec![0; manifest.shards.len()];
    experts.for_each(|extent| bytes[manifest.extents[*extent].shard] += manifest.extents[*extent].bytes);
    let shard = (0..bytes.len()).max_by_key(|shard| bytes[*shard]).filter(|shard| bytes[*shard] > 0);
    let shard = shard.ok_or_else(|| Error::Request("the model has no experts to read".to_owned()))?;
    Ok((manifest.shards[shard].file.clone(), manifest.shards[shard].bytes))
}

/// Reads by size and by how many are under way. `wake` is what a waiting host adds to a read alone.
pub async fn measure(pack: &Pack, wake: f64) -> Result<Measured> {
    let (file, size) = largest(pack)?;
    let (expert, flash) = (pack.expert_bytes(), pack.flash());
    let mut samples = Vec::new();
    for bytes in [expert / 4, expert, 4 * expert].into_iter().filter(|bytes| *bytes as u64 <= size) {
        for reads in LANES {
            let mut repeats = Vec::new();
            for seed in 0..REPEATS as u64 {
                repeats.push(sample(flash, &file, size, bytes, reads, seed).await?);
            }
            let of = |part: fn(&Sample) -> f64| median(repeats.iter().map(part).collect());
            samples.push(Sample { bytes, reads, bandwidth: of(|s| s.bandwidth), seconds: of(|s| s.seconds) });
        }
    }
    let mut lanes = samples.iter().filter(|sample| sample.bytes == expert);
    let mut best = *lanes.next().ok_or_else(|| Error::Request("an expert does not fit its file".to_owned()))?;
    for sample in lanes {
        if sample.bandwidth > GAIN * best.bandwidth {
            best = *sample;
        }
    }
    let of_experts = samples.iter().filter(|sample| sample.bytes == expert);
    let bandwidth = of_experts.map(|sample| sample.bandwidth).fold(0.0, f64::max);
    let alone = samples.iter().find(|sample| sample.bytes == expert && sample.reads == 1).map_or(0.0, |s| s.seconds);
    let slept = if alone > ALERT { wake } else { 0.0 };
    let latency = (alone - slept - expert as f64 / bandwidth).max(0.0);
    Ok(Measured { speed: FlashSpeed { bandwidth, latency, lanes: best.reads }, samples })
}

async fn sample(flash: &Rc<dyn Flash>, file: &str, size: u64, bytes: usize, reads: usize, seed: u64) -> Result<Sample> {
    let mut random = Pcg32::seed_from_u64(seed);
    let places = (size - bytes as u64) / 4096 + 1;
    let mut read = || flash.read(file, random.next_u64() % places * 4096, bytes);
    let mut under_way = FuturesUnordered::new();
    let mut seconds = Vec::new();
    let start = Instant::now();
    let mut asked = start;
    for _ in 0..READS + reads {
        if under_way.len() == reads {
            alertly(under_way.next()).await.transpose()?;
            seconds.push(asked.elapsed().as_secs_f64());
        }
        asked = Instant::now();
        under_way.push(read());
        // On its way before the next is asked for.
        if let Some(Some(ended)) = under_way.next().now_or_never() {
            ended?;
            seconds.push(asked.elapsed().as_secs_f64());
        }
    }
    let bandwidth = (seconds.len() * bytes) as f64 / start.elapsed().as_secs_f64();
    Ok(Sample { bytes, reads, bandwidth, seconds: median(seconds) })
}

/// Waits as the engine does: looks again and again before it sleeps.
async fn alertly<F: Future + Unpin>(mut future: F) -> F::Output {
    let start = Instant::now();
    poll_fn(|context| {
        loop {
            if let Poll::Ready(output) = future.poll_unpin(context) {
                return Poll::Ready(output);
            }
            if start.elapsed().as_secs_f64() >= ALERT {
                return Poll::Pending;
            }
            std::hint::spin_loop();
        }
    })
    .await
}

/// Seconds from an answer until a host that has gone to sleep over it goes on.
pub fn wake() -> f64 {
    let (asks, asked) = channel::<oneshot::Sender<Instant>>();
    let answering = std::thread::spawn(move || {
        for answer in asked {
            std::thread::sleep(Duration::from_secs_f64(3.0 * ALERT));
            let _ = answer.send(Instant::now());
        }
    });
    let late = || {
        let (sender, answer) = oneshot::channel();
        asks.send(sender).ok()?;
        let answered = pollster::block_on(alertly(answer)).ok()?;
        Some(answered.elapsed().as_secs_f64())
    };
    let found = (0..READS).filter_map(|_| late()).collect();
    drop(asks);
    let _ = answering.join();
    median(found)
}
