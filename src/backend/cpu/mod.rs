//! The CPU backend: the reference for every kernel, with SIMD for x86-64 and wasm.
