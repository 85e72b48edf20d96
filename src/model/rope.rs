//! Rotary embeddings: frequencies from what configurations say, stretched or not.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::bad_config;
use crate::error::Result;

/// Frequencies of the rotated pairs, and what cosines and sines are multiplied with.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Rope {
    pub inv_freq: Vec<f32>,
    pub scale: f32,
    /// What an attention that is not told otherwise multiplies its scores with beside `1/√dim`: see [`Parameters::mscale`].
    pub softmax_scale: f32,
}

/// Where a configuration says nothing.
pub(super) struct Defaults {
    pub theta: f64,
    /// Share of a head that is rotated.
    pub part: f64,
}

pub(super) const WHOLE_HEAD: Defaults = Defaults { theta: 10_000.0, part: 1.0 };

#[derive(Deserialize)]
struct Parameters {
    rope_type: Option<String>,
    /// What `rope_type` was called before.
    r#type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    /// How many times as long a context is than the model was first trained for.
    factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    attention_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
}

/// The parameters, whether a configuration has them in `rope_parameters` or, as older ones do, in `rope_scaling` and beside
/// it.
fn parameters(config: &Value) -> Result<Parameters> {
    let mut all = Map::new();
    for name in ["rope_theta", "partial_rotary_factor"] {
        all.extend(config.get(name).map(|value| (name.to_owned(), value.clone())));
    }
    for part in ["rope_scaling", "rope_parameters"] {
        match config.get(part) {
            None | Some(Value::Null) => {}
            Some(Value::Object(fields)) => all.extend(fields.clone()),
            Some(_) => return Err(bad_config(format!("`{part}` is no object"))),
        }
    }
    Parameters::deserialize(Value::Object(all)).map_err(bad_config)
}

impl Rope {
    /// For heads of `dim`.
    pub fn read(config: &Value, dim: usize, defaults: &Defaults) -> Result<Rope> {
        let p = parameters(config)?;
        let theta = positive("rope_theta", p.rope_theta.unwrap_or(defaults.theta))?;
        let rotary = (dim as f64 * p.partial_rotary_factor.unwrap_or(defaults.part)) as usize;
        if rotary > dim || !rotary.is_multiple_of(2) {
            return Err(bad_config(format!("{rotary} rotary dimensions in a head of {dim}")));
        }
        // Rounded as the reference does.
        let wave = |i: usize| libm::powf(theta as f32, (2 * i) as f32 / rotary as f32);
        let plain = Rope { inv_freq: (0..rotary / 2).map(|i| 1.0 / wave(i)).collect(), scale: 1.0, softmax_scale: 1.0 };
        match p.rope_type.as_deref().or(p.r#type.as_deref()).unwrap_or("default") {
            "default" => Ok(plain),
            "linear" => {
                let factor = p.factor()?;
                Ok(Rope { inv_freq: plain.inv_freq.iter().map(|f| f / factor as f32).collect(), ..plain })
            }
            "llama3" => p.llama3(plain),
            "yarn" => p.yarn(config, plain, theta, rotary),
            other => Err(bad_config(format!(
                "`rope_type` {other:?} is not supported; supported are default, linear, llama3 and yarn"
            ))),
        }
    }
}

impl Parameters {
    fn factor(&self) -> Result<f64> {
        positive("factor", self.factor.ok_or_else(|| bad_config("the scaled rope has no `factor`"))?)
    }

    fn original_context(&self, config: &Value) -> Result<f64> {
        let given = self.original_max_position_embeddings;
        let context = given.or_else(|| config.get("max_position_embeddings").and_then(Value::as_f64));
        let missing = || bad_config("the scaled rope has no `original_max_position_embeddings`");
        positive("original_max_position_embeddings", context.ok_or_else(missing)?)
    }

    /// Llama 3.1: slow frequencies are divided by the factor, fast ones kept, those between blended.
    fn llama3(&self, plain: Rope) -> Result<Rope> {
        let factor = self.factor()? as f32;
        let need = |name: &str, value: Option<f64>| {
            positive(name, value.ok_or_else(|| bad_config(format!("the scaled rope has no `{name}`")))?)
        };
        let (low, high) = (self.low_freq_factor, self.high_freq_factor);
        let (low, high) = (need("low_freq_factor", low)? as f32, need("high_freq_factor", high)? as f32);
        let context = need("original_max_position_embeddings", self.original_max_position_embeddings)? as f32;
        if low >= high {
            return Err(bad_config("`low_freq_factor` is no less than `high_freq_factor`"));
        }
        let stretched = |f: &f32| {
            let wavelength = 2.0 * std::f32::consts::PI / f;
            let smooth = (context / wavelength - low) / (high - low);
            if wavelength < context / high {
                *f
            } else if wavelength > context / low {
                f / factor
            } else {
                (1.0 - smooth) * f / factor + smooth * f
            }
        };
        Ok(Rope { inv_freq: plain.inv_freq.iter().map(stretched).collect(), ..plain })
    }

    /// YaRN (Peng et al., 2023).
    fn yarn(&self, config: &Value, plain: Rope, theta: f64, rotary: usize) -> Result<Rope> {
        let (factor, context) = (self.factor()?, self.original_context(config)?);
        if theta <= 1.0 {
            return Err(bad_config(format!("`rope_theta` is {theta}, and yarn needs more than 1")));
        }
        // The dimension whose wave turns so often over the original context.
        let dimension = |turns: f64| {
            rotary as f64 * libm::log(context / (turns * 2.0 * std::f64::consts::PI)) / (2.0 * libm::log(theta))
        };
        let turns = |name: &str, value: Option<f64>, default| positive(name, value.unwrap_or(default));
        let mut low = dimension(turns("beta_fast", self.beta_fast, 32.0)?);
        let mut high = dimension(turns("beta_slow", self.beta_slow, 1.0)?);
        if self.truncate.unwrap_or(true) {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(rotary as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        let stretched = |(i, f): (usize, &f32)| {
            let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            f / factor as f32 * ramp + f * (1.0 - ramp)
        };
        let inv_freq = plain.inv_freq.iter().enumerate().map(stretched).collect();
        let scale = match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(scale), ..) => positive("attention_factor", scale)?,
            (None, Some(own), Some(all)) if own != 0.0 && all != 0.0 => mscale(factor, own) / mscale(factor, all),
            _ => mscale(factor, 1.0),
        };
        // DeepSeek's own code scales the scores instead where `mscale_all_dim` is given.
        let all = self.mscale_all_dim.map_or(1.0, |all| mscale(factor, all));
        Ok(Rope { inv_freq, scale: scale as f32, softmax_scale: (all * all) as f32 })
    }
}

/// How much sharper attention has to be over a context `factor` times as long.
fn mscale(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * libm::log(factor) + 1.0 }
}

fn positive(name: &str, value: f64) -> Result<f64> {
    if value.is_finite() && value > 0.0 { Ok(value) } else { Err(bad_config(format!("`{name}` is {value}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn close(rope: &Rope, expected: &[f32]) {
        assert_eq!(rope.inv_freq.len(), expected.len());
        for (got, expected) in rope.inv_freq.iter().zip(expected) {
            assert!((got / expected - 1.0).abs() < 1e-5, "{got} where {expected} is expected");
        }
    }

    #[test]
    fn old_and_new_names_say_the_same() {
        let old = json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}});
        let new = json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}});
        let old = Rope::read(&old, 8, &WHOLE_HEAD).unwrap();
        assert_eq!(old, Rope::read(&new, 8, &WHOLE_HEAD).unwrap());
        close(&old, &[0.25, 0.25 / 5e5f32.powf(0.25), 0.25 / 5e5f32.powf(0.5), 0.25 / 5e5f32.powf(0.75)]);
    }

    /// Llama 3.1's own numbers: waves shorter than 2048 are kept, those longer than 8192 stretched eightfold.
    #[test]
    fn llama3_keeps_fast_and_stretches_slow() {
        let config = json!({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}});
        let plain = Rope::read(&json!({"rope_theta": 5e5}), 128, &WHOLE_HEAD).unwrap().inv_freq;
        let scaled = Rope::read(&config, 128, &WHOLE_HEAD).unwrap().inv_freq;
        for (plain, scaled) in plain.iter().zip(&scaled) {
            let wavelength = 2.0 * std::f64::consts::PI / f64::from(*plain);
            let smooth = ((8192.0 / wavelength - 1.0) / 3.0).clamp(0.0, 1.0);
            let expected = f64::from(*plain) * (smooth + (1.0 - smooth) / 8.0);
            assert!((f64::from(*scaled) / expected - 1.0).abs() < 1e-5);
        }
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[63], plain[63] / 8.0);
    }

    #[test]
    fn yarn_scales_what_its_parameters_say() {
        let yarn = |extra: Value| {
            let mut config = json!({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 40.0,
                "original_max_position_embeddings": 4096}});
            config["rope_scaling"].as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            Rope::read(&config, 64, &WHOLE_HEAD).unwrap()
        };
        let plain = yarn(json!({}));
        assert!((plain.scale - (0.1 * 40f32.ln() + 1.0)).abs() < 1e-6 && plain.softmax_scale == 1.0);
        assert_eq!((plain.inv_freq[0], plain.inv_freq[31] * 40.0), (1.0, 1.0 / 1e4f32.powf(62.0 / 64.0)));
        let deepseek = yarn(json!({"mscale": 0.707, "mscale_all_dim": 0.707}));
        let m = 0.0707 * 40f32.ln() + 1.0;
        assert!(deepseek.scale == 1.0 && (deepseek.softmax_scale - m * m).abs() < 1e-6);
        assert_eq!(yarn(json!({"attention_factor": 1.5})).scale, 1.5);
    }

    #[test]
    fn nonsense_is_refused() {
        for (config, named) in [
            (json!({"rope_theta": -1.0}), "rope_theta"),
            (json!({"partial_rotary_factor": 3.0}), "rotary"),
            (json!({"rope_scaling": {"type": "longrope"}}), "longrope"),
            (json!({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096}}), "factor"),
            (json!({"rope_scaling": {"type": "llama3", "factor": 8.0}}), "low_freq_factor"),
            (json!({"rope_scaling": 7}), "rope_scaling"),
        ] {
            let error = Rope::read(&config, 64, &WHOLE_HEAD).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
