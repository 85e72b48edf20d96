//! What is kept of a sequence, so that the next prompt runs only what is new.
//!
//! Keys and values have a place for each position, so a sequence goes back by forgetting the later ones. Recurrent and
//! convolution states cannot be taken back: a sequence returns to a *checkpoint*, a copy taken on the way, and runs again
//! what follows it. Which tokens the states have taken in is compared token by token, so what is reused is always what a
//! fresh run would have computed, to the bit: a pass does not depend on how the tokens before it were cut into passes.

use super::{Engine, Want};
use crate::error::{Error, Result};

/// Tokens after which there is a new checkpoint in a reply, so that little is run again when it was stopped, and which are
/// worth one in a prompt.
const STEP: usize = 32;
/// Tokens at the end of a prompt that are run by themselves, after a checkpoint: more than a chat template puts after what
/// was said, and few, because a pass of their own reads their experts once more.
const TAIL: usize = 8;

/// What a checkpoint is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Where a prompt was continued: later prompts are likely to part from this one after it.
    Turn,
    /// In a reply; the next one of any kind takes its place.
    Reply,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Checkpoint {
    position: usize,
    slot: usize,
    place: Place,
}

/// Which checkpoints there are: all of the present sequence, by ascending position. The beginning is always one more.
#[derive(Debug)]
pub(super) struct Checkpoints {
    slots: usize,
    kept: Vec<Checkpoint>,
}

impl Checkpoints {
    pub(super) fn new(slots: usize) -> Checkpoints {
        Checkpoints { slots, kept: Vec::with_capacity(slots) }
    }

    fn at_or_before(&self, position: usize) -> Option<Checkpoint> {
        self.kept.iter().rev().find(|c| c.position <= position).copied()
    }

    pub(super) fn forget_after(&mut self, position: usize) {
        self.kept.retain(|c| c.position <= position && c.position > 0);
    }

    fn last(&self) -> usize {
        self.kept.last().map_or(0, |c| c.position)
    }

    /// A slot for a checkpoint after all others, if it is worth one. What was in it is forgotten.
    fn take_slot(&mut self, position: usize, place: Place) -> Option<usize> {
        if self.slots == 0 || (self.slots == 1 && place == Place::Reply) {
            return None;
        }
        let replaced = match self.kept.iter().position(|c| c.place == Place::Reply) {
            Some(i) => i,
            None if self.kept.len() == self.slots => self.least_useful(position),
            None => return (0..self.slots).find(|slot| self.kept.iter().all(|c| c.slot != *slot)),
        };
        Some(self.kept.remove(replaced).slot)
    }

    /// The checkpoint without which least is expected to be run again, when there is a new one at `end`. Who returns to
    /// between a checkpoint and the next has to run what lies between it and the one before as well; the further back
    /// from the end, the rarer, so that what is kept gets sparser towards the beginning.
    fn least_useful(&self, end: usize) -> usize {
        let position = |i: usize| self.kept.get(i).map_or(end, |c| c.position);
        let cost = |i: usize| {
            let before = if i == 0 { 0 } else { position(i - 1) };
            let (gap, reach) = (position(i) - before, position(i + 1) - position(i));
            gap as f64 * reach as f64 / (end - position(i)) as f64
        };
        (0..self.kept.len()).min_by(|a, b| cost(*a).total_cmp(&cost(*b))).unwrap_or(0)
    }
}

impl Engine {
    /// Tokens of the last prompt that did not have to be run.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Makes the sequence the longest beginning of `prompt` that need not be run again, and returns its length. That is
    /// always less than all of it, because the last token has to be run for its logits.
    ///
    /// Works after an error too: then the states are those of a checkpoint, or none.
    pub fn resume(&mut self, prompt: &[u32]) -> Result<usize> {
        let most = self.shared(prompt);
        if self.torn || most < self.position() {
            self.go_back(most)?;
        }
        Ok(self.position())
    }

    /// Tokens that the sequence and a prompt begin with alike, without the prompt's last.
    fn shared(&self, prompt: &[u32]) -> usize {
        let alike = self.sequence.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        alike.min(prompt.len().saturating_sub(1))
    }

    fn go_back(&mut self, most: usize) -> Result<()> {
        self.torn = true;
        let position = if self.plan().checkpointed().next().is_none() {
            most
        } else if let Some(checkpoint) = self.checkpoints.at_or_before(most) {
            self.backend.restore(checkpoint.slot)?;
            checkpoint.position
        } else {
            return self.reset();
        };
        self.sequence.truncate(position);
        self.checkpoints.forget_after(position);
        self.torn = false;
        Ok(())
    }

    /// Makes `prompt` the sequence, running only what is new, and returns the logits of its last token.
    ///
    /// # Errors
    /// [`Error::Context`] if it is longer than the context; the sequence is then what it was before.
    pub async fn prefill(&mut self, prompt: &[u32]) -> Result<Vec<f32>> {
        if prompt.is_empty() {
            return Err(Error::Request("the prompt is empty".to_owned()));
        }
        if prompt.len() > self.context() {
            return Err(Error::Context { prompt: prompt.len(), context: self.context() });
        }
        let (shared, step) = (self.shared(prompt), self.chunk().min(STEP));
        self.cached = self.resume(prompt)?;
        self.keep(Place::Turn)?;
        // Where two prompts parted a third may part as well, as new conversations do after the same instructions.
        if shared >= self.position() + step {
            self.forward(&prompt[self.position()..shared], Want::Nothing, None).await?;
            self.keep(Place::Turn)?;
        }
        // A reply that is asked for again, or shown otherwise by the chat template, parts at the prompt's end.
        let rest = &prompt[self.position()..];
        let splits = rest.len() > step && self.checkpoints.slots > 0 && self.plan().checkpointed().next().is_some();
        let (before, last) = rest.split_at(if splits { rest.len() - step.min(TAIL) } else { 0 });
        if !before.is_empty() {
            self.forward(before, Want::Nothing, None).await?;
            self.keep(Place::Turn)?;
        }
        self.forward(last, Want::Last, None).await
    }

    /// Runs one token of a reply and returns its logits.
    pub async fn decode(&mut self, token: u32) -> Result<Vec<f32>> {
        let logits = self.forward(&[token], Want::Last, None).await?;
        if self.position() >= self.checkpoints.last() + STEP {
            self.keep(Place::Reply)?;
        }
        Ok(logits)
    }

    /// Makes a checkpoint of the states as they are.
    fn keep(&mut self, place: Place) -> Result<()> {
        let position = self.position();
        match self.checkpoints.kept.last_mut() {
            Some(last) if last.position == position => last.place = place,
            None if position == 0 => {}
            _ => {
                if let Some(slot) = self.checkpoints.take_slot(position, place) {
                    self.backend.save(slot)?;
                    self.checkpoints.kept.push(Checkpoint { position, slot, place });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(slots: usize, places: impl IntoIterator<Item = (usize, Place)>) -> Checkpoints {
        let mut checkpoints = Checkpoints::new(slots);
        for (position, place) in places {
            if let Some(slot) = checkpoints.take_slot(position, place) {
                checkpoints.kept.push(Checkpoint { position, slot, place });
            }
            let mut used: Vec<_> = checkpoints.kept.iter().map(|c| c.slot).collect();
            used.sort_unstable();
            used.dedup();
            assert!(used.len() == checkpoints.kept.len() && used.iter().all(|slot| *slot < slots));
            assert!(checkpoints.kept.is_sorted_by_key(|c| c.position));
        }
        checkpoints
    }

    fn positions(checkpoints: &Checkpoints) -> Vec<usize> {
        checkpoints.kept.iter().map(|c| c.position).collect()
    }

    #[test]
    fn turns_get_sparser_towards_the_beginning() {
        let checkpoints = kept(4, (1..=64).map(|turn| (100 * turn, Place::Turn)));
        let found = positions(&checkpoints);
        assert_eq!(found[3], 6400);
        let gaps: Vec<_> = found.windows(2).map(|w| w[1] - w[0]).collect();
        assert!(gaps.is_sorted_by(|a, b| a >= b) && gaps[0] >= 4 * gaps[2], "{found:?}");
    }

    #[test]
    fn a_reply_has_one_at_most() {
        use Place::{Reply, Turn};
        let places = [(50, Turn), (90, Turn), (122, Reply), (154, Reply), (186, Reply)];
        assert_eq!(positions(&kept(4, places)), [50, 90, 186]);
        assert_eq!(positions(&kept(4, [&places[..], &[(200, Turn)]].concat())), [50, 90, 200]);
        assert_eq!(positions(&kept(1, places)), [90]);
        assert!(positions(&kept(0, places)).is_empty());
        assert_eq!(kept(2, places).kept.len(), 2);
    }

    #[test]
    fn going_back_finds_the_nearest_before() {
        let mut checkpoints = kept(4, [50, 90, 120].map(|position| (position, Place::Turn)));
        let at = |checkpoints: &Checkpoints, position| checkpoints.at_or_before(position).map(|c| c.position);
        assert_eq!(
            [49, 50, 89, 90, 1000].map(|p| at(&checkpoints, p)),
            [None, Some(50), Some(50), Some(90), Some(120)]
        );
        checkpoints.forget_after(90);
        assert_eq!((positions(&checkpoints), checkpoints.last()), (vec![50, 90], 90));
        checkpoints.forget_after(0);
        assert_eq!(checkpoints.last(), 0);
    }
}
