//! Fitting the maps that layers are forecast by: from what an earlier layer's router sees to what the layer's own router
//! will make of what it sees.
//!
//! A map is a matrix in the router's place, fitted by ridge regression to the scores that the router gave, with the
//! router itself as what little data leaves it at: it starts from the untrained forecast and corrects it. Since ridge
//! regression is linear in what it is fitted to, fitting the router's *input* and applying the router to it would give the
//! same matrix. There is no intercept: states that are scaled to one length have a large mean already, and on the bundled
//! model one gained 0.1 points of recall.
//!
//! Sums take `8 · hidden²` bytes a layer, and `8 · hidden · experts` a map, however much is seen.

use std::cell::RefCell;
use std::rc::Rc;

use super::{Engine, Want, load};
use crate::error::{Error, Result};
use crate::les::ridge::{Cross, Gram, dot, ridge};
use crate::les::trace::{Foreseen, Pass};
use crate::les::{Forecast, Origin, Recall, Shape};
use crate::model::map_name;
use crate::model::plan::{Op, Weight, WeightKind};
use crate::pack::Map;
use crate::tensor::{DType, Layout, decode_row, encode};

/// What corrections of the router weigh, tried in turn; see [`ridge`].
pub const WEIGHTS: [f64; 5] = [1e-4, 1e-3, 1e-2, 1e-1, 1.0];

/// What some tokens went through.
struct Observed {
    /// `[rows, hidden]`: the embeddings, then what each layer's router saw, before its norm.
    states: Vec<Vec<f32>>,
    pass: Pass,
}

/// A layer that is forecast.
struct Target {
    /// The norm before its router, and the router.
    norm: Vec<f32>,
    router: Vec<f32>,
    eps: f32,
}

/// A fitted map.
#[derive(Debug, Clone)]
pub struct Candidate {
    map: Map,
    /// What it decodes to, `[experts, hidden]`.
    values: Vec<f64>,
}

/// Maps, and how often they were right.
type Judge<'a> = (&'a [Candidate], Forecast);

/// How often what texts chose was named before.
#[derive(Debug, Clone, Default)]
pub struct Found {
    pub tokens: u64,
    /// By layer, then distance − 1: forecasts as the engine makes them.
    pub forecasts: Vec<Vec<Recall>>,
    /// By layer: the experts of the token before.
    pub previous: Vec<Recall>,
    /// By layer, as a control: its own router by the path of the forecasts. All there is.
    pub control: Vec<Recall>,
}

pub struct Calibration {
    shape: Shape,
    hidden: usize,
    depth: usize,
    targets: Vec<Target>,
    /// By origin, the embedding first; the last layer's foretells nothing.
    grams: Vec<Gram>,
    /// By layer, then distance − 1.
    crosses: Vec<Vec<Cross>>,
}

impl Calibration {
    /// # Errors
    /// [`Error::Request`] if the model's forecasts are of a form that maps cannot take the place of, or the engine is not on
    /// the CPU, where embeddings are at hand, or was not loaded [untrained](super::Options::untrained).
    pub async fn new(engine: &Engine, depth: usize) -> Result<Calibration> {
        let (shape, hidden) = (engine.experts.shape(), engine.plan().hidden);
        if engine.backend_info().kind != "cpu" {
            return Err(Error::Request("maps are fitted on the CPU backend".to_owned()));
        }
        let mut targets = Vec::new();
        for layer in &engine.plan().layers {
            let [Op::RmsNorm { w, groups: 1, eps, .. }, Op::MatMul { w: router, bias: None, add: false, .. }] =
                layer.foresee[..]
            else {
                return Err(Error::Request(
                    "this model's router is no norm and a matrix, so it has no maps".to_owned(),
                ));
            };
            if !layer.fitted.is_empty() {
                return Err(Error::Request("the model is to be loaded without the maps it has".to_owned()));
            }
            targets.push(Target { norm: values(engine, w).await?, router: values(engine, router).await?, eps });
        }
        let distances = |layer: usize| depth.min(layer + 1);
        Ok(Calibration {
            shape,
            hidden,
            depth,
            targets,
            grams: vec![Gram::new(hidden); shape.layers],
            crosses: (0..shape.layers).map(|l| vec![Cross::new(shape.experts, hidden); distances(l)]).collect(),
        })
    }

    /// Adds a text to what maps are fitted to.
    pub async fn learn(&mut self, engine: &mut Engine, tokens: &[u32]) -> Result<()> {
        engine.reset()?;
        for tokens in tokens.chunks(engine.chunk()) {
            let observed = engine.observe(tokens, 0).await?;
            for row in 0..tokens.len() {
                let states: Vec<Vec<f64>> = (0..self.grams.len()).map(|o| self.unit(&observed, o, row)).collect();
                self.grams.iter_mut().zip(&states).for_each(|(gram, x)| gram.add(x));
                for (layer, crosses) in self.crosses.iter_mut().enumerate() {
                    let scores = own_scores(&observed.pass, layer);
                    let scores = &scores[row * self.shape.experts..][..self.shape.experts];
                    for (distance, cross) in (1..).zip(crosses) {
                        cross.add(&states[layer + 1 - distance], scores);
                    }
                }
            }
        }
        Ok(())
    }

    /// A state scaled to a mean square of 1, which is what norms have in common.
    fn unit(&self, observed: &Observed, origin: usize, row: usize) -> Vec<f64> {
        let state = &observed.states[origin][row * self.hidden..][..self.hidden];
        let square = state.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / self.hidden as f64;
        let scale = 1.0 / (square + f64::from(self.targets[origin.saturating_sub(1)].eps)).sqrt();
        state.iter().map(|x| f64::from(*x) * scale).collect()
    }

    /// Maps of all layers and distances.
    ///
    /// # Errors
    /// [`Error::Format`] where what was seen is not finite, [`Error::Encode`] where the type cannot hold a map.
    pub fn fit(&self, weight: f64, dtype: DType) -> Result<Vec<Candidate>> {
        let layout = Layout::new(dtype, self.shape.experts, self.hidden);
        let mut maps = Vec::new();
        for (layer, (target, crosses)) in self.targets.iter().zip(&self.crosses).enumerate() {
            for (distance, cross) in (1..).zip(crosses) {
                let gram = &self.grams[layer + 1 - distance];
                let fitted = ridge(gram, cross, &target.norm, &target.router, weight);
                let fitted = fitted.ok_or_else(|| Error::format("model", "what its routers see is not finite"))?;
                let bytes = encode(&layout, &map_name(layer, distance), &fitted)?;
                let values = decode(&layout, &bytes).into_iter().map(f64::from).collect();
                maps.push(Candidate { map: Map { layer, distance, layout, bytes }, values });
            }
        }
        Ok(maps)
    }

    /// Adds a text to what is known of how often maps are right.
    async fn judge(&self, engine: &mut Engine, tokens: &[u32], judges: &mut [Judge<'_>]) -> Result<()> {
        engine.reset()?;
        for tokens in tokens.chunks(engine.chunk()) {
            let observed = engine.observe(tokens, 0).await?;
            for (maps, forecast) in judges.iter_mut() {
                forecast.begin();
                for candidate in *maps {
                    let Map { layer, distance, .. } = candidate.map;
                    let scores = self.scores(&observed, candidate);
                    forecast.predicted(origin(layer, distance), layer as u32, &scores);
                }
                (0..).zip(&observed.pass.ids).for_each(|(layer, ids)| forecast.routed(layer, ids));
            }
        }
        Ok(())
    }

    fn scores(&self, observed: &Observed, Candidate { map, values }: &Candidate) -> Vec<f32> {
        let norm = &self.targets[map.layer].norm;
        let mut scores = Vec::with_capacity(observed.pass.rows * self.shape.experts);
        for row in 0..observed.pass.rows {
            let state = self.unit(observed, map.layer + 1 - map.distance, row);
            let x: Vec<f64> = state.iter().zip(norm).map(|(x, w)| x * f64::from(*w)).collect();
            scores.extend(values.chunks_exact(self.hidden).map(|w| dot(w, &x) as f32));
        }
        scores
    }

    /// Of maps fitted with different weights, for each layer and distance the one that names most of what these texts
    /// choose; none where that is no more than the router itself does.
    pub async fn choose(
        &self,
        engine: &mut Engine,
        texts: &[&[u32]],
        candidates: &[Vec<Candidate>],
    ) -> Result<Vec<Map>> {
        let mut judges: Vec<_> = candidates.iter().map(|maps| (&maps[..], Forecast::new(self.shape))).collect();
        for tokens in texts {
            self.judge(engine, tokens, &mut judges).await?;
        }
        let untrained = engine.recall(texts, self.depth).await?.forecasts;
        let named = |(maps, forecast): &Judge<'_>, at: usize| {
            let Map { layer, distance, .. } = maps[at].map;
            forecast.recall(layer, distance).unwrap_or_default().found
        };
        // Of equals the last, which is the one nearest to the router.
        let best = |at: usize| judges.iter().max_by_key(|judge| named(judge, at)).map(|judge| (judge, at));
        let best = (0..candidates.first().map_or(0, Vec::len)).filter_map(best);
        let better = best.filter(|(judge, at)| {
            let Map { layer, distance, .. } = judge.0[*at].map;
            named(judge, *at) > untrained[layer][distance - 1].found
        });
        Ok(better.map(|((maps, _), at)| maps[at].map.clone()).collect())
    }
}

impl Engine {
    /// How often forecasts of up to `depth` layers ahead name what texts choose.
    ///
    /// # Errors
    /// [`Error::SelfTest`] where the control fails, and those of running the model.
    pub async fn recall(&mut self, texts: &[&[u32]], depth: usize) -> Result<Found> {
        let shape = self.experts.shape();
        let mut forecast = Forecast::new(shape);
        let mut found = Found { previous: vec![Recall::default(); shape.layers], ..Found::default() };
        for tokens in texts {
            self.reset()?;
            let mut before: Vec<Vec<u32>> = vec![Vec::new(); shape.layers];
            for tokens in tokens.chunks(self.chunk()) {
                let Observed { pass, .. } = self.observe(tokens, depth).await?;
                found.tokens += tokens.len() as u64;
                forecast.begin();
                for guess in &pass.foreseen {
                    forecast.predicted(guess.origin, guess.layer, &guess.scores);
                }
                for (layer, ids) in pass.ids.iter().enumerate() {
                    forecast.routed(layer as u32, ids);
                    for ids in ids.chunks_exact(shape.top_k) {
                        let last = std::mem::replace(&mut before[layer], ids.to_vec());
                        let of = if last.is_empty() { 0 } else { ids.len() as u64 };
                        let named = ids.iter().filter(|id| last.contains(id)).count() as u64;
                        found.previous[layer] = [found.previous[layer], Recall { found: named, of }].into_iter().sum();
                    }
                }
            }
        }
        let recall = |layer, distance| forecast.recall(layer, distance).unwrap_or_default();
        let distances = |layer: usize| (1..=depth.min(layer + 1)).map(|distance| recall(layer, distance)).collect();
        found.forecasts = (0..shape.layers).map(distances).collect();
        found.control = (0..shape.layers).map(|layer| recall(layer, 0)).collect();
        check_control(&found.control, self.backend_info().kind)?;
        Ok(found)
    }

    /// Runs a chunk and returns all that forecasts of so many layers ahead could be made from, and what they are; each layer's
    /// own scores among them.
    async fn observe(&mut self, tokens: &[u32], depth: usize) -> Result<Observed> {
        let states = Rc::new(RefCell::new(Vec::new()));
        self.record(depth);
        if let Some(recorder) = &mut self.experts.recorder {
            recorder.states = Some(states.clone());
        }
        let done = self.forward(tokens, Want::Nothing, None).await;
        let pass = self.take_recording().and_then(|mut trace| trace.passes.pop());
        done?;
        Ok(Observed { states: states.take(), pass: pass.expect("a pass was run") })
    }
}

/// A router that is forecast by itself from its own state names all that it chooses, or figures beside it mean nothing.
fn check_control(control: &[Recall], backend: &'static str) -> Result<()> {
    match control.iter().position(|recall| recall.found != recall.of) {
        Some(layer) => {
            let Recall { found, of } = control[layer];
            let reason = format!("layer {layer}'s own router names {found} of the {of} experts that it chose");
            Err(Error::SelfTest { backend, reason })
        }
        None => Ok(()),
    }
}

/// Where a forecast of a layer from a distance is made.
fn origin(layer: usize, distance: usize) -> Origin {
    layer.checked_sub(distance).map_or(Origin::Embedding, |origin| Origin::Layer(origin as u32))
}

/// What a layer chose by.
fn own_scores(pass: &Pass, layer: usize) -> &[f32] {
    let own = |guess: &&Foreseen| guess.origin == Origin::Layer(guess.layer) && guess.layer as usize == layer;
    pass.foreseen.iter().find(own).map_or(&[], |guess| &guess.scores)
}

/// A weight as the kernels compute with it.
async fn values(engine: &Engine, weight: Weight) -> Result<Vec<f32>> {
    let spec = &engine.plan().weights[weight.0];
    let mut bytes = engine.pack.core(&spec.tensor).await?;
    match spec.kind {
        WeightKind::Matrix(layout) => Ok(decode(&layout, &bytes)),
        WeightKind::Vector { map, .. } => {
            load::apply(map, &mut bytes)?;
            Ok(bytemuck::pod_collect_to_vec(&bytes))
        }
    }
}

fn decode(layout: &Layout, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; layout.rows * layout.cols];
    values.chunks_exact_mut(layout.cols).enumerate().for_each(|(row, out)| decode_row(layout, bytes, row, out));
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{BackendChoice, Options};
    use crate::les::Settings;

    /// Forecasts go by what each architecture chooses by: from its own state a router names what it chose, in every layer.
    #[test]
    fn every_router_foresees_itself() {
        let tokens: Vec<u32> = (0..37).map(|i| 2 + (i * 97 + i * i * 31) % 250).collect();
        let models =
            ["qwen3_5_moe/a", "qwen3_moe/b", "olmoe/a", "granitemoe/a", "gpt_oss/a", "lfm2_moe/a", "deepseek_v2/a"];
        let cases = models.iter().flat_map(|m| [(m, BackendChoice::Cpu), (m, BackendChoice::Gpu)]);
        for (model, backend) in cases {
            let place = format!("{}/tests/data/golden/{model}", env!("CARGO_MANIFEST_DIR"));
            let options = Options { backend, ..Options::default() };
            let pass = pollster::block_on(async {
                let pack = crate::import::open_model(&place).await?;
                let mut engine = Engine::load(pack, &options, |_, _| ()).await?;
                // Layer by layer: layers that are submitted together keep no scores of their own.
                engine.set_scheduling(Settings { run_ahead: 0, ..engine.scheduling() });
                Ok::<_, Error>(engine.observe(&tokens, 0).await?.pass)
            });
            let pass = match pass {
                Err(Error::NoGpu(_)) if std::env::var_os("OUTRIDER_SKIP_GPU_TESTS").is_some() => continue,
                pass => pass.unwrap(),
            };
            let mut routed = 0;
            for (layer, ids) in pass.ids.iter().enumerate().filter(|(_, ids)| !ids.is_empty()) {
                let scores = own_scores(&pass, layer);
                let (experts, top_k) = (scores.len() / tokens.len(), ids.len() / tokens.len());
                for (scores, ids) in scores.chunks_exact(experts).zip(ids.chunks_exact(top_k)) {
                    let mut order: Vec<u32> = (0..experts as u32).collect();
                    order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b)));
                    let chosen: std::collections::BTreeSet<u32> = ids.iter().copied().collect();
                    assert_eq!(chosen, order[..top_k].iter().copied().collect(), "{model}, layer {layer}");
                }
                routed += 1;
            }
            assert!(routed > 1, "{model}");
        }
    }

    #[test]
    fn a_control_that_misses_anything_is_an_error() {
        let all = Recall { found: 4000, of: 4000 };
        assert!(check_control(&[all, Recall::default(), all], "cpu").is_ok());
        let error = check_control(&[all, Recall { found: 3999, of: 4000 }], "cpu").unwrap_err();
        assert!(error.code() == "self_test" && error.to_string().contains("layer 1's own router"), "{error}");
    }
}
