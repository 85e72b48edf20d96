//! A program's steps, made real: pipelines, shared by steps of the same variant, and bind groups.

use std::collections::HashMap;
use std::sync::PoisonError;

use super::device::Device;
use super::program::{Grid, Program, Step, Usage};
use super::shader::Variant;

/// A dispatch that is ready to be encoded.
pub struct Dispatch {
    pub pipeline: wgpu::ComputePipeline,
    pub bind_group: wgpu::BindGroup,
    pub grid: Grid,
}

/// Creates the buffers of a program.
pub fn buffers(device: &Device, program: &Program) -> Vec<wgpu::Buffer> {
    use wgpu::BufferUsages as U;
    let create = |spec: &super::program::BufferSpec| {
        let usage = match spec.usage {
            Usage::Storage => U::STORAGE | U::COPY_SRC | U::COPY_DST,
            Usage::Uniform => U::UNIFORM | U::COPY_DST,
            Usage::Pass => U::UNIFORM | U::STORAGE | U::COPY_DST,
            Usage::Readback => U::MAP_READ | U::COPY_DST,
        };
        let descriptor =
            wgpu::BufferDescriptor { label: Some(&spec.label), size: spec.bytes, usage, mapped_at_creation: false };
        device.device.create_buffer(&descriptor)
    };
    program.buffers.iter().map(create).collect()
}

/// What was compiled on a device so far.
#[derive(Default)]
pub struct Cache {
    /// By which of the buffers are written.
    layouts: HashMap<Vec<bool>, wgpu::BindGroupLayout>,
    pipelines: HashMap<Variant, wgpu::ComputePipeline>,
}

impl Cache {
    fn get(&mut self, device: &wgpu::Device, step: &Step) -> (wgpu::ComputePipeline, wgpu::BindGroupLayout) {
        let writes: Vec<bool> = step.buffers.iter().map(|(_, write)| *write).collect();
        let layout = self.layouts.entry(writes).or_insert_with_key(|writes| bind_group_layout(device, writes)).clone();
        let compile = |variant: &Variant| compute_pipeline(device, variant, &layout);
        (self.pipelines.entry(step.variant.clone()).or_insert_with_key(compile).clone(), layout)
    }
}

/// Makes dispatches of steps.
pub struct Pipelines<'a> {
    pub device: &'a Device,
    pub program: &'a Program,
    pub buffers: &'a [wgpu::Buffer],
}

impl Pipelines<'_> {
    pub fn dispatches(&self, steps: Vec<Step>) -> Vec<Dispatch> {
        steps.into_iter().map(|s| self.dispatch(s)).collect()
    }

    pub fn dispatch(&self, step: Step) -> Dispatch {
        let device = &self.device.device;
        let cache = &self.device.pipelines;
        let (pipeline, layout) = cache.lock().unwrap_or_else(PoisonError::into_inner).get(device, &step);
        let bound = |buffer, offset, size| wgpu::BufferBinding { buffer, offset, size: std::num::NonZero::new(size) };
        let params = bound(&self.buffers[self.program.params.0], step.params, step.params_len);
        // A kernel that writes the passes cannot have them bound as uniforms as well.
        let pass = match step.over.offset() {
            Some(offset) => bound(&self.buffers[self.program.passes.0], offset, 8),
            None => params.clone(),
        };
        let whole = step.buffers.iter().map(|(id, _)| self.buffers[id.0].as_entire_buffer_binding());
        let entries: Vec<_> = [pass, params]
            .into_iter()
            .chain(whole)
            .enumerate()
            .map(|(i, b)| wgpu::BindGroupEntry { binding: i as u32, resource: wgpu::BindingResource::Buffer(b) })
            .collect();
        let descriptor =
            wgpu::BindGroupDescriptor { label: Some(step.variant.kernel), layout: &layout, entries: &entries };
        Dispatch { pipeline, bind_group: device.create_bind_group(&descriptor), grid: step.grid }
    }
}

fn bind_group_layout(device: &wgpu::Device, writes: &[bool]) -> wgpu::BindGroupLayout {
    let uniform = [wgpu::BufferBindingType::Uniform; 2];
    let storage = writes.iter().map(|write| wgpu::BufferBindingType::Storage { read_only: !write });
    let entries: Vec<_> = uniform
        .into_iter()
        .chain(storage)
        .enumerate()
        .map(|(i, ty)| wgpu::BindGroupLayoutEntry {
            binding: i as u32,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
            count: None,
        })
        .collect();
    device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries })
}

fn compute_pipeline(device: &wgpu::Device, variant: &Variant, layout: &wgpu::BindGroupLayout) -> wgpu::ComputePipeline {
    let label = Some(variant.kernel);
    let source = wgpu::ShaderSource::Wgsl(variant.source().into());
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor { label, source });
    let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label,
        bind_group_layouts: &[Some(layout)],
        immediate_size: 0,
    });
    // Every kernel writes its workgroup memory before it reads it.
    let compilation_options =
        wgpu::PipelineCompilationOptions { zero_initialize_workgroup_memory: false, ..Default::default() };
    device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label,
        layout: Some(&layout),
        module: &module,
        entry_point: Some("main"),
        compilation_options,
        cache: None,
    })
}
