//! Stop strings, found across the pieces of a stream.

/// Bytes at the end of `text` that may be the beginning of one of `strings`: the longest suffix that is a proper prefix.
pub(super) fn held_suffix<'a>(text: &str, strings: impl IntoIterator<Item = &'a str>) -> usize {
    let longest = |s: &str| {
        let lengths = (1..s.len().min(text.len() + 1)).rev();
        lengths.into_iter().find(|&n| s.is_char_boundary(n) && text.ends_with(&s[..n]))
    };
    strings.into_iter().filter_map(longest).max().unwrap_or(0)
}

/// Passes text through up to the first stop string: the first to be complete, so that the way the text is cut into
/// pieces does not matter.
#[derive(Debug, Clone)]
pub struct StopFilter {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

impl StopFilter {
    /// `stops` are not empty strings.
    pub fn new(stops: Vec<String>) -> StopFilter {
        StopFilter { stops, held: String::new(), stopped: false }
    }

    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// The text that is certainly before a stop string.
    pub fn push(&mut self, text: &str) -> String {
        if self.stopped {
            return String::new();
        }
        self.held.push_str(text);
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str()).map(|at| (at + stop.len(), at)));
        let keep = match found.min() {
            Some((_, at)) => {
                self.held.truncate(at);
                self.stopped = true;
                0
            }
            None => held_suffix(&self.held, self.stops.iter().map(String::as_str)),
        };
        self.held.drain(..self.held.len() - keep).collect()
    }

    /// What was held back, when no more text comes.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn filtered<'a>(stops: &[&str], pieces: impl IntoIterator<Item = &'a str>) -> (Vec<String>, bool) {
        let mut filter = StopFilter::new(stops.iter().map(|&s| s.to_owned()).collect());
        let mut out: Vec<_> = pieces.into_iter().map(|piece| filter.push(piece)).collect();
        out.push(filter.finish());
        (out, filter.stopped())
    }

    #[test]
    fn text_is_held_only_while_it_may_become_a_stop_string() {
        let (out, stopped) = filtered(&["\n\nUser:"], ["Hello", "\n", "you\n", "\nUse", "ful", "\n\nUser", ": hi"]);
        assert!(stopped);
        assert_eq!(out, ["Hello", "", "\nyou", "", "\n\nUseful", "", "", ""]);
        assert_eq!(filtered(&["END"], ["a EN"]), (vec!["a ".to_owned(), "EN".to_owned()], false));
        assert_eq!(filtered(&["é🏝"], ["xé", "🏝y"]), (vec!["x".to_owned(), String::new(), String::new()], true));
        assert_eq!(filtered(&[], ["as ", "is"]).0.concat(), "as is");
    }

    #[test]
    fn the_stop_string_complete_first_counts_and_of_two_the_longer() {
        assert_eq!(filtered(&["abcd", "bc"], ["xabcd"]).0.concat(), "xa");
        assert_eq!(filtered(&["c", "abc"], ["xabcd"]).0.concat(), "x");
        assert_eq!(filtered(&["aab"], ["aaab"]).0.concat(), "a");
    }

    proptest! {
        #[test]
        fn the_text_ends_at_the_first_stop_however_it_is_cut(
            text in "[abé🏝]{0,30}",
            stops in prop::collection::vec("[abé🏝]{1,5}", 0..4),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            let ends = text.char_indices().map(|(i, c)| i + c.len_utf8());
            let at_end = |end: usize| stops.iter().filter(|s| text[..end].ends_with(*s)).map(|s| end - s.len()).min();
            let expected = ends.into_iter().find_map(at_end);
            let mut cuts: Vec<_> = cuts.iter().map(|c| text.floor_char_boundary(c.index(text.len() + 1))).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let stops: Vec<_> = stops.iter().map(String::as_str).collect();
            let (out, stopped) = filtered(&stops, cuts.windows(2).map(|w| &text[w[0]..w[1]]));
            prop_assert_eq!(out.concat(), &text[..expected.unwrap_or(text.len())]);
            prop_assert_eq!(stopped, expected.is_some());
        }
    }
}
