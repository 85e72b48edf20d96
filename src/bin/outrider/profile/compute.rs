//! What the parts of a token's computation take, from the spans of passes of one token.

use outrider::Result;
use outrider::engine::{Engine, Want};
use outrider::les::Settings;
use outrider::les::spans::{Awaited, What};
use outrider::les::trace::Trace;
use outrider::model::plan::{Op, Plan, Weight};

use crate::statistics::median;

/// A token, and whether a new sequence begins with it.
pub type Token = (u32, bool);

/// Seconds: medians over tokens, means over layers.
#[derive(Debug, Clone, Copy, Default)]
pub struct Costs {
    pub mix: f64,
    /// One expert.
    pub expert: f64,
    pub finish: f64,
    pub head: f64,
    /// One later layer's router and what the forecast makes of its scores.
    pub foresee: f64,
    pub upload: Option<f64>,
    /// A layer's wait for a device's results; 0 where there is none.
    pub results: f64,
    /// The rest of a pass.
    pub rest: f64,
    /// Reads in a pass.
    pub reads: f64,
}

/// Runs tokens one after the other and layer by layer, with forecasts of so many layers ahead.
pub async fn run(engine: &mut Engine, tokens: &[Token], depth: usize) -> Result<Costs> {
    let settings = engine.scheduling();
    engine.set_scheduling(Settings { run_ahead: 0, ..settings });
    engine.record(depth);
    for &(token, first) in tokens {
        if first {
            engine.reset()?;
        }
        engine.forward(&[token], Want::Last, None).await?;
    }
    engine.set_scheduling(settings);
    Ok(Costs::of(&engine.take_recording().expect("it was begun above")))
}

/// Of values by layer the medians, of those the mean: layers differ, and what happens now and then is not their own.
fn typical(by_layer: Vec<Vec<f64>>) -> f64 {
    let medians: Vec<f64> = by_layer.into_iter().filter(|values| !values.is_empty()).map(median).collect();
    medians.iter().sum::<f64>() / medians.len().max(1) as f64
}

impl Costs {
    fn of(trace: &Trace) -> Costs {
        let layers = vec![Vec::new(); trace.shape.layers];
        let [mut mix, mut expert, mut finish, mut foresee, mut results] = [(); 5].map(|()| layers.clone());
        let [mut head, mut upload, mut rest, mut reads] = [(); 4].map(|()| Vec::new());
        for pass in &trace.passes {
            let Some(timing) = &pass.timing else { continue };
            let (mut known, mut asked) = (0.0, 0.0);
            for span in &timing.spans {
                let seconds = span.seconds();
                match span.what {
                    What::Mix { layer } => mix[layer as usize].push(seconds),
                    What::Run { layer, pairs } => expert[layer as usize].push(seconds / f64::from(pairs)),
                    What::Finish { layer } => finish[layer as usize].push(seconds),
                    What::Stall { layer, of: Awaited::Results } => results[layer as usize].push(seconds),
                    What::Foresee { origin } => {
                        let targets = pass.foreseen.iter().filter(|guess| guess.origin == origin);
                        let first = targets.clone().map(|guess| guess.layer as usize).min().unwrap_or(0);
                        foresee[first].push(seconds / targets.count().max(1) as f64);
                    }
                    What::Upload { .. } => upload.push(seconds),
                    What::Logits => head.push(seconds),
                    What::Stall { of: Awaited::Bytes, .. } => {}
                    What::Read { .. } => {
                        asked += 1.0;
                        continue;
                    }
                }
                known += seconds;
            }
            rest.push(timing.seconds() - known);
            reads.push(asked);
        }
        Costs {
            mix: typical(mix),
            expert: typical(expert),
            finish: typical(finish),
            head: median(head),
            foresee: typical(foresee),
            upload: (!upload.is_empty()).then(|| median(upload)),
            results: typical(results),
            rest: median(rest),
            reads: reads.iter().sum::<f64>() / reads.len().max(1) as f64,
        }
    }

    /// What a device computes shows only as a whole, in the waits for its results: divided by the bytes of the weights
    /// that each part reads.
    pub fn divided(self, plan: &Plan, layers: usize, readback: f64) -> Costs {
        let bytes = |ops: &[Op]| -> f64 {
            let weight = |op: &Op| if let Op::MatMul { w, .. } = op { weight_bytes(plan, *w) } else { 0.0 };
            ops.iter().map(weight).sum()
        };
        let (count, top_k) = (layers as f64, plan.top_k() as f64);
        let parts = [
            plan.layers.iter().map(|layer| bytes(&layer.mix)).sum::<f64>(),
            count * top_k * plan.expert.map_or(0.0, |expert| expert.bytes() as f64),
            plan.layers.iter().map(|layer| bytes(&layer.shared)).sum(),
            bytes(&plan.head),
        ];
        let handed = count * (self.results - readback + top_k * self.expert + self.finish) + self.head - readback;
        let second = handed.max(0.0) / parts.iter().sum::<f64>();
        let [mix, expert, finish, head] = parts.map(|bytes| bytes * second);
        Costs { mix: mix / count, expert: expert / count / top_k, finish: finish / count, head, ..self }
    }
}

fn weight_bytes(plan: &Plan, weight: Weight) -> f64 {
    plan.weights[weight.0].bytes() as f64
}
