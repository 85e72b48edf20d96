//! The shaders: one file a kernel under `shaders/`, with shared code behind `//!import name` lines.
//!
//! A kernel is made a [`Variant`] by constants, put in front of its source, and by choosing what stands behind the
//! imports that have several implementations (`decode`, `reduce`, `scalar`).

use std::fmt::Write;

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../../shaders/", $name, ".wgsl")))),*]
    };
}

const FILES: &[(&str, &str)] = files![
    "attention",
    "attention_combine",
    "attention_scores",
    "attention_softmax",
    "attention_values",
    "bias_none",
    "bias_vector",
    "chunk",
    "clamp",
    "conv_silu",
    "decode_f16",
    "decode_f32",
    "decode_q4",
    "decode_q8",
    "delta_gates",
    "delta_net",
    "expert_down",
    "expert_gate_up",
    "expert_lookup",
    "gated_conv",
    "gated_rms_norm",
    "glu_clamped",
    "glu_silu",
    "grid",
    "head_norm_rope",
    "kv_append",
    "load_group",
    "math",
    "matmul",
    "matrix",
    "moe_combine",
    "reduce_one",
    "reduce_planes",
    "reduce_tree",
    "rms_norm",
    "router_rank",
    "router_scores",
    "router_weights",
    "scalar_f16",
    "scalar_f32",
    "silu_mul",
    "squares",
    "work",
];

/// One pipeline's worth of source.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Variant {
    pub kernel: &'static str,
    /// `const NAME: u32 = value;`
    pub constants: Vec<(&'static str, u32)>,
    /// Which file stands behind an import.
    pub imports: Vec<(&'static str, &'static str)>,
}

impl Variant {
    /// The whole WGSL module.
    pub fn source(&self) -> String {
        let mut text = String::new();
        self.expand(self.kernel, &mut Vec::new(), &mut text);
        let mut out = String::new();
        // Directives come before everything else, whichever file asks for them.
        for directive in text.lines().filter(|line| is_directive(line)) {
            writeln!(out, "{directive}").expect("writing to a string");
        }
        for (name, value) in &self.constants {
            writeln!(out, "const {name}: u32 = {value}u;").expect("writing to a string");
        }
        for line in text.lines().filter(|line| !is_directive(line)) {
            writeln!(out, "{line}").expect("writing to a string");
        }
        out
    }

    fn expand(&self, file: &'static str, done: &mut Vec<&'static str>, out: &mut String) {
        let (name, text) = FILES.iter().find(|(name, _)| *name == file).expect("every shader file is listed");
        if done.contains(name) {
            return;
        }
        done.push(name);
        for line in text.lines() {
            match line.strip_prefix("//!import ") {
                Some(import) => {
                    let chosen = self.imports.iter().find(|(name, _)| *name == import).map(|(_, file)| *file);
                    let listed = FILES.iter().find(|(name, _)| *name == import).map(|(name, _)| *name);
                    let file =
                        chosen.or(listed).unwrap_or_else(|| panic!("{name}.wgsl imports `{import}`, which is no file"));
                    self.expand(file, done, out);
                }
                None => {
                    out.push_str(line);
                    out.push('\n');
                }
            }
        }
    }
}

fn is_directive(line: &str) -> bool {
    line.starts_with("enable ")
}
