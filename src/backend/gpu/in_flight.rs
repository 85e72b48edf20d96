//! Submissions that the GPU has not finished. Safari on iOS fails with more than a few, and each may hold on to memory, so
//! there are never more than [`SUBMISSIONS`].

use std::collections::VecDeque;

use futures_channel::oneshot;

use super::device::Device;
use crate::error::{Error, Result};

/// Outstanding at a time: one that the GPU works on and one that waits for it.
pub const SUBMISSIONS: usize = 2;

#[derive(Default)]
pub struct InFlight {
    waiting: VecDeque<(wgpu::SubmissionIndex, oneshot::Receiver<()>)>,
    most: usize,
}

impl InFlight {
    /// Takes note of what was just submitted.
    pub fn add(&mut self, device: &Device, submission: wgpu::SubmissionIndex) {
        let (send, done) = oneshot::channel();
        device.queue.on_submitted_work_done(move || {
            // The receiver is gone with its backend.
            let _ = send.send(());
        });
        self.forget_done();
        self.waiting.push_back((submission, done));
        self.most = self.most.max(self.waiting.len());
    }

    /// The most there ever were, as far as the host knew.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Waits until so many are left.
    pub async fn down_to(&mut self, device: &Device, count: usize) -> Result<()> {
        loop {
            self.forget_done();
            if self.waiting.len() <= count {
                return Ok(());
            }
            // It stays in line until it is done, for this future may be dropped.
            let Some((submission, done)) = self.waiting.front_mut() else { return Ok(()) };
            let wait = wgpu::PollType::Wait { submission_index: Some(submission.clone()), timeout: None };
            let polled = device.device.poll(wait);
            device.check()?;
            polled.map_err(|e| Error::Gpu(e.to_string()))?;
            // Dropped without an answer when the device is lost.
            let answered = done.await;
            device.check()?;
            answered.map_err(|_| Error::DeviceLost("it did not finish its work".to_owned()))?;
            self.waiting.pop_front();
        }
    }

    fn forget_done(&mut self) {
        while let Some((_, done)) = self.waiting.front_mut()
            && !matches!(done.try_recv(), Ok(None))
        {
            self.waiting.pop_front();
        }
    }
}
