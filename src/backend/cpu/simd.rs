//! [`kernels::matmul`] compiled for the vectors at hand. On wasm the whole build has 128-bit SIMD; on x86-64 the
//! widest of AVX-512, AVX2 and SSE2 is chosen at run time.

use super::kernels::{self, RowPair, RowsRef, Then};
use crate::tensor::Layout;

pub type MatMul = unsafe fn(&Layout, &[u8], RowsRef<'_>, &mut [f32], usize, &[RowPair], Then<'_>, &mut [f32]);

/// The best `matmul` for this machine, and its name.
#[derive(Debug, Clone, Copy)]
pub struct Simd {
    name: &'static str,
    matmul: MatMul,
}

macro_rules! compiled_for {
    ($name:ident, $features:literal) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        fn $name(
            layout: &Layout,
            weights: &[u8],
            x: RowsRef<'_>,
            y: &mut [f32],
            y_stride: usize,
            pairs: &[RowPair],
            then: Then<'_>,
            scratch: &mut [f32],
        ) {
            kernels::matmul(layout, weights, x, y, y_stride, pairs, then, scratch);
        }
    };
}

compiled_for!(matmul_avx2, "avx2,f16c");
compiled_for!(matmul_avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c");

impl Simd {
    /// What the compiler was told every machine has.
    pub fn baseline() -> Simd {
        let name = if cfg!(target_arch = "wasm32") { "simd128" } else { "baseline" };
        Simd { name, matmul: kernels::matmul }
    }

    /// Every variant this machine can run, the best last.
    pub fn available() -> Vec<Simd> {
        #[allow(unused_mut, reason = "only x86-64 has more than one")]
        let mut all = vec![Simd::baseline()];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
                all.push(Simd { name: "avx2", matmul: matmul_avx2 });
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    all.push(Simd { name: "avx512", matmul: matmul_avx512 });
                }
            }
        }
        all
    }

    pub fn detect() -> Simd {
        *Simd::available().last().expect("the baseline is always there")
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    /// See [`kernels::matmul`].
    pub fn matmul(
        &self,
        layout: &Layout,
        weights: &[u8],
        x: RowsRef<'_>,
        y: &mut [f32],
        y_stride: usize,
        pairs: &[RowPair],
        then: Then<'_>,
        scratch: &mut [f32],
    ) {
        // SAFETY: `available` offers a variant only where its instruction set was detected.
        unsafe { (self.matmul)(layout, weights, x, y, y_stride, pairs, then, scratch) }
    }
}
