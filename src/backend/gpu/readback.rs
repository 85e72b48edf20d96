//! Reading buffers back: mapped by a callback, awaited as a future. Natively the wait drives the device; in a browser the
//! event loop does.

use futures_channel::oneshot;

use super::device::Device;
use crate::error::{Error, Result};

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
