//! What the kernels' shape depends on: the adapter and whether f16 was asked for, and nothing else, so that results are the same bits whatever the
//! budget, the width of a batch or the load.

/// Keys in a block of attention.
pub const ATTENTION_BLOCK: u32 = 128;
/// Work items of one expert that are computed together.
pub const ITEMS_A_TILE: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Largest buffer, which is always bound whole.
    pub max_binding: u64,
    /// Invocations that share one row of a matrix.
    pub matmul_lanes: u32,
    /// Invocations that share one part of a norm.
    pub norm_lanes: u32,
    /// Invocations that share one column of a DeltaNet state.
    pub delta_lanes: u32,
    /// Invocations of a workgroup.
    pub workgroup: u32,
    /// Matrices are multiplied in f16, see `shaders/scalar_f16.wgsl`.
    pub f16: bool,
    /// Bytes that attention's scratch buffers may take, beyond what one token needs.
    pub attention_scratch: u64,
}

impl Tuning {
    /// GPUs have lanes to spare and cheap barriers; adapters that run on the CPU have neither.
    pub fn new(on_cpu: bool) -> Tuning {
        let lanes = |gpu| if on_cpu { 1 } else { gpu };
        Tuning {
            max_binding: 128 << 20,
            matmul_lanes: lanes(16),
            norm_lanes: lanes(64),
            delta_lanes: lanes(8),
            workgroup: if on_cpu { 64 } else { 128 },
            f16: false,
            attention_scratch: 4 << 20,
        }
    }
}
