//! Machines as files: what the simulator is told of a phone, and where each figure comes from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::simulate::Machine;
use crate::{Error, Result};

/// A machine with a model: those that come with the program are for the flagship's experts and core.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    pub name: String,
    pub description: String,
    pub machine: Machine,
    /// By field of `machine`: what it rests on.
    pub assumptions: BTreeMap<String, String>,
}

/// A figure that a machine is described by.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its path in the file.
    pub name: &'static str,
    pub of: fn(&mut Machine) -> &mut f64,
}

/// All that can be varied; lanes are whole.
pub const FIELDS: [Field; 14] = [
    Field { name: "flash.bandwidth", of: |m| &mut m.flash.bandwidth },
    Field { name: "flash.latency", of: |m| &mut m.flash.latency },
    Field { name: "mix", of: |m| &mut m.mix },
    Field { name: "expert", of: |m| &mut m.expert },
    Field { name: "finish", of: |m| &mut m.finish },
    Field { name: "head", of: |m| &mut m.head },
    Field { name: "foresee", of: |m| &mut m.foresee },
    Field { name: "upload", of: |m| &mut m.upload },
    Field { name: "readback", of: |m| &mut m.readback },
    Field { name: "skipped", of: |m| &mut m.skipped },
    Field { name: "begin", of: |m| &mut m.begin },
    Field { name: "request", of: |m| &mut m.request },
    Field { name: "alert", of: |m| &mut m.alert },
    Field { name: "wake", of: |m| &mut m.wake },
];

const BUILT_IN: [(&str, &str); 2] = [
    ("iphone-17-pro-max", include_str!("../../profiles/iphone-17-pro-max.json")),
    ("iphone-18-pro-max", include_str!("../../profiles/iphone-18-pro-max.json")),
];

impl Profile {
    /// One that comes with the program.
    pub fn named(name: &str) -> Option<Result<Profile>> {
        BUILT_IN.iter().find(|(known, _)| *known == name).map(|(_, text)| Profile::parse(text))
    }

    /// Names of those that come with the program.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// # Errors
    /// [`Error::Format`] names the field that is wrong.
    pub fn parse(text: &str) -> Result<Profile> {
        let bad = |reason: String| Error::format("device profile", reason);
        let profile: Profile = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
        let mut machine = profile.machine;
        for Field { name, of } in FIELDS {
            let value = *of(&mut machine);
            if !value.is_finite() || value < 0.0 {
                return Err(bad(format!("`{name}` is {value}; it must be finite and not negative")));
            }
        }
        if machine.flash.bandwidth == 0.0 || machine.flash.lanes == 0 {
            return Err(bad("`flash` needs a bandwidth above 0 and at least one lane".to_owned()));
        }
        let known = |name: &String| name == "flash.lanes" || FIELDS.iter().any(|field| field.name == name);
        match profile.assumptions.keys().find(|name| !known(name)) {
            Some(name) => Err(bad(format!("`assumptions` names `{name}`, which is no field of `machine`"))),
            None => Ok(profile),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_built_in_explain_every_field() {
        for name in Profile::names() {
            let profile = Profile::named(name).unwrap().unwrap();
            assert_eq!(profile.name, name);
            let mut machine = profile.machine;
            let is_explained = |field: &Field| profile.assumptions.contains_key(field.name);
            assert!(FIELDS.iter().all(|field| is_explained(field) || *(field.of)(&mut machine) == 0.0));
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let good = BUILT_IN[0].1;
        for (from, to) in
            [("\"lanes\": 2", "\"lanes\": 0"), ("\"mix\": 0", "\"mix\": -0"), ("\"upload\"", "\"uplaod\"")]
        {
            let bad = good.replacen(from, to, 1);
            assert_ne!(bad, good);
            assert!(matches!(Profile::parse(&bad), Err(Error::Format { .. })), "{to}");
        }
    }
}
