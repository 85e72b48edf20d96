//! Routed experts, from however a checkpoint stores them to an extent, and back.

use super::source::Source;
use crate::error::{Error, Result};
use crate::model::plan::ExpertShape;
use crate::tensor::{decode_row, encode};

/// One expert's gate, up and down, row by row, and their biases, which most have not.
#[derive(Debug, PartialEq)]
pub(super) struct Expert {
    pub matrices: [Vec<f32>; 3],
    pub biases: Option<[Vec<f32>; 3]>,
}

/// A matrix within a checkpoint's tensor.
struct Part {
    tensor: String,
    first: usize,
}

impl Source<'_> {
    /// A layer's expert as it lies in its extent.
    pub async fn expert(&self, shape: &ExpertShape, layer: usize, expert: usize) -> Result<Vec<u8>> {
        let names = self.experts.names(layer, expert);
        if self.experts.by_turns() {
            return self.expert_by_turns(shape, layer, expert).await?.to_extent(shape, &names);
        }
        let parts = self.expert_parts(shape, layer, expert)?;
        let mut extent = Vec::with_capacity(shape.bytes());
        for ((part, layout), name) in parts.iter().zip([shape.gate, shape.up, shape.down]).zip(names) {
            let matrix = self.checkpoint.matrix(&part.tensor, part.first, layout).await;
            // What is wrong with a tensor of all experts is wrong with one of them.
            extent.extend(matrix.map_err(|error| match error {
                Error::Encode { dtype, reason, .. } => Error::Encode { name, dtype, reason },
                other => other,
            })?);
        }
        Ok(extent)
    }

    /// Bytes of a layer's experts in the checkpoint.
    pub fn expert_bytes(&self, layer: usize) -> u64 {
        let prefix = self.experts.prefix(layer);
        self.tensors(|name| name.starts_with(&prefix)).map(|t| t.bytes).sum()
    }

    fn expert_parts(&self, shape: &ExpertShape, layer: usize, expert: usize) -> Result<[Part; 3]> {
        // What one expert has of each tensor, and how far into it each matrix begins.
        let (width, hidden) = (shape.gate.rows, shape.gate.cols);
        let [gate_up, down] = self.experts.fused(layer);
        let each = self.experts.each(layer, expert).filter(|_| self.checkpoint.find(&gate_up).is_none());
        let (tensors, own, starts) = match each {
            Some(names) => (names, [[width, hidden], [width, hidden], [hidden, width]], [0; 3]),
            None => {
                let own = [[2 * width, hidden], [2 * width, hidden], [hidden, width]];
                ([gate_up.clone(), gate_up, down], own, [0, width * hidden, 0])
            }
        };
        let mut parts = Vec::with_capacity(3);
        for ((tensor, own), start) in tensors.into_iter().zip(own).zip(starts) {
            let shape = &self.checkpoint.tensor(&tensor)?.shape;
            let fused = shape.len() == 3;
            if shape[usize::from(fused)..] != own || (fused && shape[0] <= expert) {
                return Err(misfit(&tensor, shape, expert, &own));
            }
            let skipped = if fused { expert * own[0] * own[1] } else { 0 };
            parts.push(Part { tensor, first: skipped + start });
        }
        Ok(parts.try_into().unwrap_or_else(|_| unreachable!("three matrices make an expert")))
    }

    /// An expert whose matrices are stored as `[in, out]`, gates and ups by turns.
    async fn expert_by_turns(&self, shape: &ExpertShape, layer: usize, expert: usize) -> Result<Expert> {
        let (width, hidden) = (shape.gate.rows, shape.gate.cols);
        let [gate_up, down] = &self.experts.fused(layer);
        if self.checkpoint.find(&format!("{gate_up}_blocks")).is_some() {
            let reason = "its experts are stored as MXFP4, which is not read; convert the checkpoint to bf16 first";
            return Err(Error::format("checkpoint", reason));
        }
        let both = self.part_of(gate_up, expert, &[hidden, 2 * width]).await?;
        let turn = |values: &[f32], turn: usize| values.iter().skip(turn).step_by(2).copied().collect::<Vec<f32>>();
        let [gate, up] = [0, 1].map(|which| transposed(&turn(&both, which), width));
        let down_values = transposed(&self.part_of(down, expert, &[width, hidden]).await?, hidden);
        let bias = self.part_of(&format!("{gate_up}_bias"), expert, &[2 * width]).await?;
        let down_bias = self.part_of(&format!("{down}_bias"), expert, &[hidden]).await?;
        let biases = [turn(&bias, 0), turn(&bias, 1), down_bias];
        Ok(Expert { matrices: [gate, up, down_values], biases: Some(biases) })
    }

    /// What one expert, of the shape `own`, has of a tensor of them all.
    async fn part_of(&self, name: &str, expert: usize, own: &[usize]) -> Result<Vec<f32>> {
        let shape = &self.checkpoint.tensor(name)?.shape;
        if shape.get(1..) != Some(own) || shape[0] <= expert {
            return Err(misfit(name, shape, expert, own));
        }
        let count = own.iter().product::<usize>();
        self.checkpoint.values(name, expert * count, count).await
    }
}

fn misfit(tensor: &str, shape: &[usize], expert: usize, own: &[usize]) -> Error {
    Error::format("checkpoint", format!("`{tensor}` has shape {shape:?}, expert {expert} needs {own:?} of it"))
}

/// `[rows, cols]` as `[cols, rows]`.
pub(super) fn transposed(values: &[f32], cols: usize) -> Vec<f32> {
    (0..cols).flat_map(|col| values.iter().skip(col).step_by(cols).copied()).collect()
}

impl Expert {
    /// As it lies in an extent. `names` are those of the matrices.
    ///
    /// # Errors
    /// [`Error::Encode`] for values that the shape's type cannot hold, and biases that are not finite.
    pub fn to_extent(&self, shape: &ExpertShape, names: &[String; 3]) -> Result<Vec<u8>> {
        let mut extent = Vec::with_capacity(shape.bytes());
        for ((values, layout), name) in self.matrices.iter().zip([shape.gate, shape.up, shape.down]).zip(names) {
            extent.extend(encode(&layout, name, values)?);
        }
        let biases = self.biases.iter().flatten().zip(shape.bias_offsets().into_iter().flatten());
        for ((values, at), name) in biases.zip(names) {
            if let Some(bad) = values.iter().find(|v| !v.is_finite()) {
                let (name, reason) = (format!("the bias of {name}"), format!("a value is {bad}"));
                return Err(Error::Encode { name, dtype: "f32".to_owned(), reason });
            }
            extent.resize(at, 0);
            extent.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        }
        extent.resize(shape.bytes(), 0);
        Ok(extent)
    }

    /// From an extent, whose length has been checked.
    pub fn from_extent(shape: &ExpertShape, extent: &[u8]) -> Expert {
        let layouts = [shape.gate, shape.up, shape.down];
        let matrix = |part: usize| {
            let layout = layouts[part];
            let bytes = &extent[shape.offsets()[part]..][..layout.bytes()];
            let mut values = vec![0.0; layout.rows * layout.cols];
            values
                .chunks_exact_mut(layout.cols)
                .enumerate()
                .for_each(|(row, out)| decode_row(&layout, bytes, row, out));
            values
        };
        let bias = |part: usize, at: usize| bytemuck::pod_collect_to_vec(&extent[at..at + 4 * layouts[part].rows]);
        let biases = shape.bias_offsets().map(|at| [0, 1, 2].map(|part| bias(part, at[part])));
        Expert { matrices: [0, 1, 2].map(matrix), biases }
    }
}
