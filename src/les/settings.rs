//! What can be chosen about scheduling. It changes speed, never a result.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Settings {
    /// Experts that are being read, or have been and wait for a slot, at most.
    pub reads: usize,
    /// Guesses being read at most; 0 turns look-ahead off.
    pub guesses: usize,
    /// Reads that flash carries out at once: of more, the last have not begun and can be cancelled.
    pub lanes: usize,
    /// Layers ahead that are guessed at.
    pub depth: usize,
    /// The likelihood from which a guess is worth a read while flash has nothing else to do.
    pub least_chance: f64,
    /// The share of the time waited for flash from which guesses are read one at a time. In virtual time, over a range of flash
    /// speeds and with no round trip, two at a time are faster below 0.35 and slower above.
    pub saturated: f64,
    /// Experts that are there run while others are read. Without it a layer waits for all it needs.
    pub ready_first: bool,
    /// Experts stay for later tokens. Without it every layer reads all it needs.
    pub keep: bool,
    /// One expert an action, for backends whose kernels run while the caller waits, so that it can see to reads between.
    pub singly: bool,
    /// Layers submitted before their routing is known, at most, where the backend can look slots up itself. Without
    /// `ready_first` and `keep` none are.
    pub run_ahead: usize,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            reads: 4,
            guesses: 2,
            lanes: 2,
            depth: 2,
            least_chance: 0.3,
            saturated: 0.35,
            ready_first: true,
            keep: true,
            singly: false,
            run_ahead: usize::MAX,
        }
    }
}

impl Settings {
    /// What suits a device whose results take so many seconds to come back. Flash would stand still as long at every layer,
    /// so that more is guessed at once and farther ahead the longer it is, also where flash is what limits; where it takes
    /// hardly any time that only delays what is waited for. Chosen in virtual time on the flagship's routing, see
    /// `benches/README.md`.
    pub fn for_round_trip(self, seconds: f64) -> Settings {
        match seconds {
            0.0..2e-4 => self,
            2e-4..1e-3 => Settings { saturated: 0.5, ..self },
            1e-3..3e-3 => Settings { depth: 3, guesses: 3, saturated: 1.0, ..self },
            _ => Settings { depth: 3, guesses: 4, saturated: 1.0, ..self },
        }
    }

    /// The same but for some, by the names they have in JSON: `{"depth": 3}`.
    ///
    /// # Errors
    /// [`Error::Request`] for a name that there is not, or a value it cannot have.
    pub fn with(self, changes: &Value) -> Result<Settings> {
        let bad = |e| Error::Request(format!("scheduling: {e}"));
        let mut all = serde_json::to_value(self).map_err(bad)?;
        for (name, value) in changes.as_object().into_iter().flatten() {
            all[name] = value.clone();
        }
        let settings: Settings = serde_json::from_value(all).map_err(bad)?;
        match settings.reads {
            0 => Err(Error::Request("scheduling: with `reads` 0 nothing could be read".to_owned())),
            _ => Ok(settings),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn more_is_guessed_the_longer_results_take() {
        let guesses = [0.0, 5e-4, 1e-3, 2e-3, 1e-2].map(|seconds| Settings::default().for_round_trip(seconds).guesses);
        assert_eq!(guesses, [2, 2, 3, 3, 4]);
    }

    #[test]
    fn some_are_changed() {
        let settings = Settings::default();
        let with = |changes| settings.with(&changes);
        assert_eq!(with(json!({"depth": 3, "runAhead": 0})).unwrap(), Settings { depth: 3, run_ahead: 0, ..settings });
        assert_eq!(with(Value::Null).unwrap(), settings);
        for changes in [json!({"deep": 3}), json!({"depth": -1}), json!({"reads": 0})] {
            assert!(matches!(with(changes), Err(Error::Request(_))));
        }
    }
}
