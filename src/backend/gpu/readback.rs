//! Reading buffers back: mapped by a callback, awaited as a future. Natively the wait drives the device; in a browser the
//! event loop does.

use std::ops::Range;

use futures_channel::oneshot;

use super::device::Device;
use super::program::{Activation, Id};
use super::{Gpu, floats};
use crate::clock;
use crate::error::{Error, Result};
use crate::model::plan::Buf;

/// A buffer on its way to the host.
pub struct Readback {
    done: oneshot::Receiver<Result<(), wgpu::BufferAsyncError>>,
    bytes: u64,
}

impl Readback {
    /// Asks for the first `bytes` of `buffer`, which must not be in use by a submission to come.
    pub fn start(buffer: &wgpu::Buffer, bytes: u64) -> Readback {
        let (send, done) = oneshot::channel();
        buffer.map_async(wgpu::MapMode::Read, 0..bytes, move |result| {
            // The receiver is gone when the caller stopped waiting.
            let _ = send.send(result);
        });
        Readback { done, bytes }
    }

    /// Waits for the bytes, which `submission` and those before it write, and gives the buffer back.
    pub async fn finish(
        self,
        device: &Device,
        buffer: &wgpu::Buffer,
        submission: wgpu::SubmissionIndex,
    ) -> Result<Vec<u8>> {
        let wait = wgpu::PollType::Wait { submission_index: Some(submission), timeout: None };
        if let Err(e) = device.device.poll(wait) {
            // Another poll delivers the news if the device was lost.
            let _ = device.device.poll(wgpu::PollType::Poll);
            device.check()?;
            return Err(Error::Gpu(e.to_string()));
        }
        let mapped = self.done.await;
        device.check()?;
        match mapped {
            Ok(Ok(())) => {}
            // Nothing else fails to be mapped; the news of the loss itself may come a moment later.
            Ok(Err(e)) => return Err(Error::DeviceLost(format!("a result could not be read back: {e}"))),
            Err(_) => return Err(Error::DeviceLost("a result could not be read back".to_owned())),
        }
        let view = buffer.get_mapped_range(0..self.bytes).map_err(|e| Error::Gpu(e.to_string()))?;
        let bytes = view.to_vec();
        drop(view);
        buffer.unmap();
        Ok(bytes)
    }
}

/// Round trips timed, at most, and the seconds they may take together.
pub(super) const TRIALS: usize = 5;
const TRIAL_SECONDS: f64 = 0.25;

impl Gpu {
    /// Frees a read-back buffer from a read that was never finished.
    pub(super) fn free(&mut self, target: Id) {
        if let Some(i) = self.reading.iter().position(|r| *r == target) {
            self.reading.swap_remove(i);
            self.buffer(target).unmap();
        }
    }

    /// Records a copy to a read-back buffer that is free, to offset `at` of it. Returns where the copy ends.
    pub(super) fn copy_back(&mut self, source: Id, range: Range<u64>, target: Id, at: u64) -> u64 {
        let (source, buffer) = (self.buffer(source).clone(), self.buffer(target).clone());
        let len = range.end - range.start;
        self.encoder().copy_buffer_to_buffer(&source, range.start, &buffer, at, len);
        at + len
    }

    /// Submits and asks for the first `bytes` of a read-back buffer.
    pub(super) async fn start_read(&mut self, target: Id, bytes: u64) -> Result<(Readback, wgpu::SubmissionIndex)> {
        self.make_way().await?;
        let submission = self.submit().ok_or_else(|| Error::Gpu("nothing was recorded to read back".to_owned()))?;
        self.reading.push(target);
        self.stats.readbacks += 1;
        self.stats.readback_bytes += bytes;
        Ok((Readback::start(self.buffer(target), bytes), submission))
    }

    pub(super) async fn finish_read(
        &mut self,
        target: Id,
        (read, submission): (Readback, wgpu::SubmissionIndex),
    ) -> Result<Vec<u8>> {
        let bytes = read.finish(&self.device, &self.buffers[target.0], submission).await?;
        self.reading.retain(|r| *r != target);
        // All writes so far came before what was read back.
        self.queued = 0;
        Ok(bytes)
    }

    /// Rows of an activation buffer, without their padding.
    pub(super) async fn read_rows(&mut self, buf: Buf, rows: Range<usize>) -> Result<Vec<f32>> {
        let Activation { id, width, stride, .. } = self.program.activations[buf.0];
        let target = self.program.read_rows;
        let batch = (self.program.buffers[target.0].bytes / (4 * stride as u64)) as usize;
        let mut out = Vec::with_capacity(rows.len() * width);
        let mut first = rows.start;
        while first < rows.end {
            let last = rows.end.min(first + batch);
            let range = 4 * (first * stride) as u64..4 * (last * stride) as u64;
            self.free(target);
            let bytes = self.copy_back(id, range, target, 0);
            let read = self.start_read(target, bytes).await?;
            let bytes = self.finish_read(target, read).await?;
            for row in bytes.chunks_exact(4 * stride) {
                out.extend(floats(&row[..4 * width]));
            }
            first = last;
        }
        Ok(out)
    }

    /// Seconds from submitting a copy of a few bytes until they are here: the median of a few tries.
    pub(super) async fn time_round_trip(&mut self) -> Result<f64> {
        let source = self.program.activations[self.plan.residual.0].id;
        let target = self.program.read_rows;
        let begun = clock::now();
        let mut times = Vec::with_capacity(TRIALS);
        while times.len() < TRIALS && (times.is_empty() || clock::now() - begun < TRIAL_SECONDS) {
            self.free(target);
            self.copy_back(source, 0..4, target, 0);
            let start = clock::now();
            let read = self.start_read(target, 4).await?;
            self.finish_read(target, read).await?;
            times.push(clock::now() - start);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}
