//! The GPU backend: wgpu, WGSL at WebGPU's default limits.
