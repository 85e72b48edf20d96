//! The adapter and device: requested with WebGPU's default limits and no features but f16 where asked for, watched for errors and loss.

use std::sync::{Arc, Mutex, PoisonError};

use super::pipelines::Cache;
use super::tuning::Tuning;
use crate::error::{Error, Result};

/// A GPU. Clones share the device and its pipelines, so that several backends can live on one.
#[derive(Clone)]
pub struct Device {
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    pub(super) tuning: Tuning,
    pub(super) pipelines: Arc<Mutex<Cache>>,
    detail: String,
    fault: Arc<Mutex<Option<Fault>>>,
}

/// The first thing that went wrong outside of a call's own error handling.
#[derive(Clone)]
enum Fault {
    Lost(String),
    Error(String),
}

fn record(fault: &Mutex<Option<Fault>>, new: Fault) {
    let mut fault = fault.lock().unwrap_or_else(PoisonError::into_inner);
    // A loss explains whatever errors came before it.
    if fault.is_none() || matches!(new, Fault::Lost(_)) {
        *fault = Some(new);
    }
}

impl Device {
    /// The most powerful adapter there is. With `f16`, matrices are multiplied in f16 if the adapter can, see
    /// [`Device::f16`]; rounding is coarser then.
    ///
    /// # Errors
    /// [`Error::NoGpu`] with the reason if there is no adapter or it refuses a device.
    pub async fn request(f16: bool) -> Result<Device> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        let options = wgpu::RequestAdapterOptions {
            power_preference: wgpu::PowerPreference::HighPerformance,
            ..Default::default()
        };
        let adapter = instance.request_adapter(&options).await.map_err(|e| Error::NoGpu(e.to_string()))?;
        let f16 = f16 && adapter.features().contains(wgpu::Features::SHADER_F16);
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("outrider"),
            required_features: if f16 { wgpu::Features::SHADER_F16 } else { wgpu::Features::empty() },
            required_limits: wgpu::Limits::defaults(),
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            ..Default::default()
        };
        let (device, queue) = adapter.request_device(&descriptor).await.map_err(|e| Error::NoGpu(e.to_string()))?;
        let mut made = Device::from_parts(&adapter.get_info(), device, queue);
        if f16 {
            made.tuning.f16 = true;
            made.detail.push_str(", f16");
        }
        Ok(made)
    }

    /// Takes over a device that exists already. Its uncaptured-error and device-lost callbacks are replaced. f16 is
    /// not used.
    pub fn from_parts(info: &wgpu::AdapterInfo, device: wgpu::Device, queue: wgpu::Queue) -> Device {
        let fault = Arc::new(Mutex::new(None));
        let on_error = fault.clone();
        device.on_uncaptured_error(Arc::new(move |e: wgpu::Error| {
            tracing::error!("uncaptured GPU error: {e}");
            record(&on_error, Fault::Error(e.to_string()));
        }));
        let on_loss = fault.clone();
        device.set_device_lost_callback(move |reason, message| {
            record(&on_loss, Fault::Lost(if message.is_empty() { format!("{reason:?}") } else { message }));
        });
        let names = adapter_names(info, &device);
        let software = ["swiftshader", "llvmpipe", "lavapipe", "basic render"];
        let on_cpu = info.device_type == wgpu::DeviceType::Cpu
            || names.iter().any(|n| software.iter().any(|s| n.to_lowercase().contains(s)));
        let detail = format!("{}, {}", names.join(" "), info.backend);
        Device { device, queue, tuning: Tuning::new(on_cpu), pipelines: Arc::default(), detail, fault }
    }

    /// Whether matrices are multiplied in f16.
    pub fn f16(&self) -> bool {
        self.tuning.f16
    }

    /// The adapter's name and API, and `f16` where that is in use.
    pub fn detail(&self) -> &str {
        &self.detail
    }

    pub(super) fn forget_pipelines(&self) {
        *self.pipelines.lock().unwrap_or_else(PoisonError::into_inner) = Cache::default();
    }

    /// Fails if the device was lost or reported an error since it was made.
    pub(super) fn check(&self) -> Result<()> {
        match self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone() {
            None => Ok(()),
            Some(Fault::Lost(reason)) => Err(Error::DeviceLost(reason)),
            Some(Fault::Error(reason)) => Err(Error::Gpu(reason)),
        }
    }

    /// Runs `make` and reports what it did wrong as the call's own error.
    pub(super) async fn scoped<T>(&self, make: impl FnOnce() -> T) -> Result<T> {
        let scopes = [wgpu::ErrorFilter::Validation, wgpu::ErrorFilter::OutOfMemory, wgpu::ErrorFilter::Internal]
            .map(|filter| self.device.push_error_scope(filter));
        let made = make();
        // All scopes close before anything is awaited, innermost first.
        let errors: Vec<_> = scopes.into_iter().rev().map(|scope| scope.pop()).collect();
        for error in errors {
            if let Some(e) = error.await {
                self.check()?;
                return Err(Error::Gpu(e.to_string()));
            }
        }
        self.check()?;
        Ok(made)
    }
}

/// What the adapter calls itself.
#[cfg(not(target_arch = "wasm32"))]
fn adapter_names(info: &wgpu::AdapterInfo, _device: &wgpu::Device) -> Vec<String> {
    vec![info.name.clone()]
}

/// What the browser tells about the adapter: vendor and architecture; the name is mostly withheld.
#[cfg(target_arch = "wasm32")]
fn adapter_names(info: &wgpu::AdapterInfo, device: &wgpu::Device) -> Vec<String> {
    use js_sys::Reflect;
    let mut names = Vec::new();
    if let Some(device) = device.as_webgpu()
        && let Ok(js) = Reflect::get(device.as_ref(), &"adapterInfo".into())
    {
        let field = |name: &str| Reflect::get(&js, &name.into()).ok().and_then(|v| v.as_string());
        names.extend(["vendor", "architecture"].iter().filter_map(|name| field(name)));
    }
    names.push(info.name.clone());
    names.retain(|n| !n.is_empty());
    names
}
