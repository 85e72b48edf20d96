//! What passes went through, recorded so that they can be looked at and replayed.

use serde::{Deserialize, Serialize};

use super::spans::Timing;
use super::{Origin, Shape};
use crate::{Error, Result};

/// A recording. Written as one JSON object a line: the header, then a pass each.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    pub shape: Shape,
    /// Bytes of one expert.
    pub expert_bytes: usize,
    /// Where it was recorded, if it was and is known.
    pub setup: Option<Setup>,
    pub passes: Vec<Pass>,
}

/// The first line of a recording.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    pub shape: Shape,
    pub expert_bytes: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub setup: Option<Setup>,
}

/// What a recording was made on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    pub model: String,
    pub backend: String,
    /// Slots in the pool.
    pub slots: usize,
    /// Positions a sequence can have.
    pub context: usize,
    /// Bytes that a budget holds beside the pool at least.
    pub core_bytes: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Pass {
    /// Tokens it took.
    pub rows: usize,
    /// By layer, `ids[row · top_k + rank]`.
    pub ids: Vec<Vec<u32>>,
    pub foreseen: Vec<Foreseen>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timing: Option<Timing>,
}

/// Scores of a layer's experts from an earlier state, `[rows, experts]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Foreseen {
    pub origin: Origin,
    pub layer: u32,
    pub scores: Vec<f32>,
}

/// No model has more layers, or experts in a layer.
const MOST_LAYERS: usize = 4096;
const MOST_EXPERTS: usize = 32768;
/// Nor larger experts.
const MOST_BYTES: usize = 1 << 31;

impl Trace {
    pub fn new(shape: Shape, expert_bytes: usize) -> Trace {
        Trace { shape, expert_bytes, setup: None, passes: Vec::new() }
    }

    /// Tokens of all passes.
    pub fn tokens(&self) -> usize {
        self.passes.iter().map(|pass| pass.rows).sum()
    }

    /// By layer, whether it chooses experts, as far as the passes tell.
    pub fn routed(&self) -> impl Iterator<Item = bool> {
        let chooses = |pass: &Pass, layer: usize| pass.ids.get(layer).is_some_and(|ids| !ids.is_empty());
        let routed = move |layer| self.passes.is_empty() || self.passes.iter().any(|pass| chooses(pass, layer));
        (0..self.shape.layers).map(routed)
    }

    /// Reads a recording, with or without spans.
    ///
    /// # Errors
    /// [`Error::Format`] where a line is not what it should be.
    pub fn parse(text: &str) -> Result<Trace> {
        let reader = Reader::new(text.lines().map(|line| Ok(line.to_owned())))?;
        let Header { shape, expert_bytes, setup } = reader.header().clone();
        Ok(Trace { shape, expert_bytes, setup, passes: reader.collect::<Result<_>>()? })
    }
}

/// Reads a recording pass by pass.
pub struct Reader<L> {
    header: Header,
    lines: L,
    /// Lines read.
    at: usize,
}

fn bad(line: usize, reason: impl std::fmt::Display) -> Error {
    Error::format("trace", format!("line {line}: {reason}"))
}

impl<L: Iterator<Item = std::io::Result<String>>> Reader<L> {
    /// Reads the header.
    ///
    /// # Errors
    /// [`Error::Format`] where it is not what it should be.
    pub fn new(mut lines: L) -> Result<Reader<L>> {
        let line = lines.next().ok_or_else(|| bad(1, "there is none"))?.map_err(|e| bad(1, e))?;
        let header: Header = serde_json::from_str(&line).map_err(|e| bad(1, e))?;
        let Shape { layers, experts, top_k } = header.shape;
        let is_model = (1..=MOST_LAYERS).contains(&layers)
            && experts <= MOST_EXPERTS
            && (1..=experts).contains(&top_k)
            && (1..=MOST_BYTES).contains(&header.expert_bytes);
        if !is_model {
            return Err(bad(1, "the shape is of no model"));
        }
        Ok(Reader { header, lines, at: 1 })
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    fn pass(&self, line: &str) -> Result<Pass> {
        let shape = self.header.shape;
        let pass: Pass = serde_json::from_str(line).map_err(|e| bad(self.at, e))?;
        // A layer without experts chooses none.
        let routed = |ids: &Vec<u32>| {
            (ids.is_empty() || Some(ids.len()) == pass.rows.checked_mul(shape.top_k))
                && ids.iter().all(|id| (*id as usize) < shape.experts)
        };
        let foreseen = |guess: &Foreseen| {
            (guess.layer as usize) < shape.layers
                && Some(guess.scores.len()) == pass.rows.checked_mul(shape.experts)
                && guess.scores.iter().all(|score| score.is_finite())
        };
        if pass.ids.len() != shape.layers || !pass.ids.iter().all(routed) || !pass.foreseen.iter().all(foreseen) {
            return Err(bad(self.at, "the pass does not fit the shape"));
        }
        match pass.timing.as_ref().and_then(|timing| timing.nonsense(shape)) {
            Some(reason) => Err(bad(self.at, reason)),
            None => Ok(pass),
        }
    }
}

impl<L: Iterator<Item = std::io::Result<String>>> Iterator for Reader<L> {
    type Item = Result<Pass>;

    fn next(&mut self) -> Option<Result<Pass>> {
        let line = self.lines.next()?;
        self.at += 1;
        Some(line.map_err(|e| bad(self.at, e)).and_then(|line| self.pass(&line)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = r#"{"shape": {"layers": 2, "experts": 4, "top_k": 1}, "expert_bytes": 100}"#;

    fn reason(text: &str) -> String {
        Trace::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn recordings_without_spans_are_read() {
        let text = format!("{HEADER}\n{}", r#"{"rows": 1, "ids": [[0], [3]], "foreseen": []}"#);
        let trace = Trace::parse(&text).unwrap();
        assert_eq!((trace.tokens(), &trace.passes[0].timing, trace.setup), (1, &None, None));
    }

    #[test]
    fn spans_come_back_as_they_were_written() {
        use crate::les::spans::{Awaited, Outcome, Span, What};
        let all = [
            What::Mix { layer: 1 },
            What::Foresee { origin: Origin::Embedding },
            What::Foresee { origin: Origin::Layer(0) },
            What::Run { layer: 0, pairs: 3 },
            What::Finish { layer: 0 },
            What::Upload { layer: 1, expert: 3 },
            What::Read { layer: 1, expert: 3, demand: true, outcome: Outcome::Cancelled },
            What::Stall { layer: 1, of: Awaited::Results },
            What::Logits,
        ];
        let spans = all.map(|what| Span { what, begin: 0.5, end: 0.75 }).to_vec();
        let timing = Some(Timing { begin: 0.25, end: 1.0, spans });
        let pass = Pass { rows: 1, ids: vec![vec![0], vec![1]], foreseen: vec![], timing };
        let text = format!("{HEADER}\n{}\n", serde_json::to_string(&pass).unwrap());
        assert_eq!(Trace::parse(&text).unwrap().passes, [pass]);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_line() {
        let timed = |timing: &str| {
            format!("{HEADER}\n{{\"rows\": 1, \"ids\": [[0], [3]], \"foreseen\": [], \"timing\": {timing}}}")
        };
        assert!(reason("").contains("line 1"));
        assert!(reason(&HEADER.replace('4', "0")).contains("no model"));
        assert!(reason(&HEADER.replace('2', "9223372036854775808")).contains("no model"));
        assert!(reason(&format!("{HEADER}\n{{\"rows\"")).contains("line 2"));
        let rows = r#"{"rows": 18446744073709551615, "ids": [[0], [3]], "foreseen": []}"#;
        assert!(reason(&format!("{HEADER}\n{rows}")).contains("line 2: the pass does not fit"));
        for (timing, expected) in [
            (r#"{"begin": 2.0, "end": 1.0, "spans": []}"#, "cannot last"),
            (r#"{"begin": -2.0, "end": 1.0, "spans": []}"#, "cannot last"),
            (r#"{"begin": 0.0, "end": 1e999, "spans": []}"#, "out of range"),
            (r#"{"begin": 0, "end": 1, "spans": [{"what": "mix", "layer": 2, "begin": 0, "end": 1}]}"#, "layer 2"),
            (r#"{"begin": 0, "end": 1, "spans": [{"what": "mix", "layer": 1, "begin": 1, "end": 0}]}"#, "cannot last"),
            (r#"{"begin": 0, "end": 1, "spans": [{"what": "nap", "begin": 0, "end": 1}]}"#, "nap"),
        ] {
            let said = reason(&timed(timing));
            assert!(said.contains("line 2: ") && said.contains(expected), "{timing}: {said}");
        }
    }
}
