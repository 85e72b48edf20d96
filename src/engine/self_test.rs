//! The self-test of a pack: what its weights compute on the CPU backend, recorded when the pack is made, and held against
//! what the backend at hand computes when it is loaded. Kernels that a driver gets wrong are found that way before the
//! first token, and bytes that are not what the pack was made with.

use super::{BackendChoice, Engine, Options, Want};
use crate::error::{Error, Result};
use crate::model::plan::{Weight, WeightKind};
use crate::pack::{Pack, SelfTest, SelfTestRow};

/// Tokens of a recorded self-test, and the positions whose logits are kept: two passes, so that states are carried over.
const TOKENS: usize = 16;
const POSITIONS: [usize; 2] = [11, 15];
/// Logits kept of each.
const TOP: usize = 8;
/// Sequences to choose from.
const CANDIDATES: usize = 4;

/// A rounding of f16, relative to the value.
const HALF: f32 = 1.0 / 2048.0;

/// How far a logit may be off.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tolerance {
    pub absolute: f32,
    /// Of the largest logit in the row.
    pub relative: f32,
}

impl Tolerance {
    /// The CPU backend gives the same bits everywhere; what is left is room for a recording of another build.
    pub const CPU: Tolerance = Tolerance { absolute: 2e-4, relative: 0.0 };
    /// What every f32 kernel is held to.
    pub const F32: Tolerance = Tolerance { absolute: 2e-3, relative: 0.0 };
    /// Measured on the bundled pack: 1.9 roundings of the largest logit. Room for a few times that, because other GPUs add
    /// up in another order; a swap of experts, which changes logits by ten times as much, is no error but is coarser than
    /// was recorded, and f32 is the better choice then.
    pub const F16: Tolerance = Tolerance { absolute: 2e-3, relative: 8.0 * HALF };
}

/// What a sequence does to logits when every value that a norm scales by is off by a rounding of f16.
struct Candidate {
    tokens: Vec<u32>,
    rows: Vec<Vec<f32>>,
    noise: f32,
}

impl Engine {
    /// Runs the pack's self-test, as much of it as the context holds, and forgets the sequence.
    ///
    /// # Errors
    /// [`Error::SelfTest`] if a logit is off.
    pub(super) async fn self_test(&mut self, test: &SelfTest, tolerance: Tolerance) -> Result<()> {
        let kind = self.backend_info().kind;
        let failed = |reason| Error::SelfTest { backend: kind, reason };
        self.reset()?;
        let mut first = 0;
        for SelfTestRow { position, top } in &test.rows {
            if *position >= self.context() {
                break;
            }
            let logits = self.forward(&test.tokens[first..=*position], Want::Last, None).await?;
            first = position + 1;
            compare(&logits, top, tolerance).map_err(failed)?;
        }
        self.reset()
    }
}

/// Holds a row of logits against those recorded. All others must lie below the least of these, so that the likeliest
/// token is the same wherever it is clear.
fn compare(logits: &[f32], top: &[(u32, f32)], tolerance: Tolerance) -> Result<(), String> {
    let largest = top.iter().fold(0.0f32, |m, (_, l)| m.max(l.abs()));
    let bound = tolerance.absolute + tolerance.relative * largest;
    // NaN is within no bound.
    let within = |value: f32, bound: f32| value <= bound;
    for (id, expected) in top {
        let got = logits[*id as usize];
        if !within((got - expected).abs(), bound) {
            return Err(format!("token {id} has the logit {got} where {expected} was recorded"));
        }
    }
    let least = top.iter().fold(f32::INFINITY, |m, (_, l)| m.min(*l)) + bound;
    let named = |id: usize| top.iter().any(|t| t.0 as usize == id);
    match logits.iter().enumerate().find(|(id, l)| !within(**l, least) && !named(*id)) {
        Some((id, got)) => Err(format!("token {id} has the logit {got} where at most {least} was expected")),
        None => Ok(()),
    }
}

/// Computes a self-test for a pack, on the CPU backend. Of a few sequences that span the vocabulary it takes the one whose
/// logits change least under noise, so that rounding of another kind neither swaps experts nor looks like an error.
///
/// # Errors
/// [`Error::Logits`] if the weights give none, and whatever loading gives.
pub async fn record_self_test(pack: Pack) -> Result<SelfTest> {
    let top_k = pack.manifest().config["num_experts_per_tok"].as_u64().unwrap_or(1) as usize;
    let options = Options {
        backend: BackendChoice::Cpu,
        context: Some(TOKENS),
        chunk: Some(TOKENS),
        max_slots: Some(TOKENS.saturating_mul(top_k)),
        max_checkpoints: 0,
        self_test: false,
        ..Options::default()
    };
    let mut engine = Engine::load(pack, &options, |_, _| {}).await?;
    let vocab = engine.plan().vocab;
    let mut candidates = Vec::new();
    for n in 0..CANDIDATES {
        let tokens = sequence(n, vocab);
        let rows = rows(&mut engine, &tokens).await?;
        candidates.push(Candidate { tokens, rows, noise: 0.0 });
    }
    roughen(&mut engine).await?;
    for candidate in &mut candidates {
        let rough = rows(&mut engine, &candidate.tokens).await?;
        let pairs = candidate.rows.iter().flatten().zip(rough.iter().flatten());
        candidate.noise = pairs.fold(0.0, |m, (a, b)| m.max((a - b).abs()));
        tracing::debug!("self-test {:?}: {} off under noise", candidate.tokens, candidate.noise);
    }
    let calmest = candidates.into_iter().min_by(|a, b| a.noise.total_cmp(&b.noise)).expect("there are some");
    let rows = calmest.rows.iter().zip(POSITIONS).map(|(row, position)| SelfTestRow { position, top: top(row) });
    Ok(SelfTest { rows: rows.collect(), tokens: calmest.tokens })
}

/// Tokens from every part of the vocabulary, in no order.
fn sequence(n: usize, vocab: usize) -> Vec<u32> {
    let place = |i: usize| ((7 * i + 3 * n) % TOKENS * CANDIDATES + n) as u64;
    (0..TOKENS).map(|i| (place(i) * vocab as u64 / (TOKENS * CANDIDATES) as u64) as u32).collect()
}

async fn rows(engine: &mut Engine, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
    engine.reset()?;
    let (mut rows, mut first) = (Vec::new(), 0);
    for position in POSITIONS {
        let row = engine.forward(&tokens[first..=position], Want::Last, None).await?;
        first = position + 1;
        if let Some(id) = row.iter().position(|l| !l.is_finite()) {
            return Err(Error::Logits(format!("token {id} has the logit {}", row[id])));
        }
        rows.push(row);
    }
    Ok(rows)
}

fn top(row: &[f32]) -> Vec<(u32, f32)> {
    let mut order: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    order.truncate(TOP);
    order
}

/// Makes every vector of the model, those that norms scale by above all, off by up to a rounding of f16.
async fn roughen(engine: &mut Engine) -> Result<()> {
    let mut random = 0x9e37_79b9u32;
    for i in 0..engine.plan().weights.len() {
        let spec = engine.plan().weights[i].clone();
        let WeightKind::Vector { map, .. } = spec.kind else { continue };
        let mut bytes = engine.pack.core(&spec.tensor).await?;
        super::load::apply(map, &mut bytes)?;
        for value in bytes.as_chunks_mut::<4>().0 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let noise = random as f32 / u32::MAX as f32 * 2.0 - 1.0;
            *value = (f32::from_le_bytes(*value) * (1.0 + HALF * noise)).to_le_bytes();
        }
        engine.backend.write_weight(Weight(i), &bytes).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLERANCE: Tolerance = Tolerance { absolute: 0.1, relative: 0.0 };

    #[test]
    fn logits_that_are_off_are_found() {
        let top = [(2, 5.0), (0, 3.0)];
        assert_eq!(compare(&[3.05, 1.0, 4.95], &top, TOLERANCE), Ok(()));
        for (logits, id) in [
            ([3.0, 1.0, 4.8], "token 2 "),
            ([3.2, 1.0, 5.0], "token 0 "),
            ([3.0, 3.2, 5.0], "token 1 "),
            ([3.0, f32::NAN, 5.0], "token 1 "),
            ([3.0, 1.0, f32::NAN], "token 2 "),
            ([3.0, 1.0, f32::INFINITY], "token 2 "),
        ] {
            let reason = compare(&logits, &top, TOLERANCE).unwrap_err();
            assert!(reason.starts_with(id), "{reason}");
        }
    }

    #[test]
    fn sequences_span_the_vocabulary() {
        for vocab in [1, 7, 257, 248_320] {
            for n in 0..CANDIDATES {
                let tokens = sequence(n, vocab);
                assert!(tokens.iter().all(|t| (*t as usize) < vocab), "{tokens:?}");
                for part in 0..TOKENS.min(vocab / TOKENS) {
                    let ids = (part * vocab / TOKENS) as u32..=((part + 1) * vocab / TOKENS) as u32;
                    assert!(tokens.iter().any(|t| ids.contains(t)), "{tokens:?}: none in {ids:?}");
                }
            }
        }
    }
}
