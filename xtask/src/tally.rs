//! Counts of tests, read from what the test runners print.

use std::fmt;
use std::ops::AddAssign;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
}

impl Tally {
    /// A check that is one thing, not a suite.
    pub fn one(passed: bool) -> Tally {
        Tally { passed: passed.into(), failed: (!passed).into(), skipped: 0 }
    }

    /// What a line says about a suite, if it is a line of totals: cargo-nextest's, libtest's or Node's (whose totals
    /// come in several lines).
    pub fn of_line(line: &str) -> Option<Tally> {
        let line = line.trim();
        if let Some(rest) = line.strip_prefix("Summary [") {
            return Some(Tally::of_clauses(rest.split_once("tests run:").or(rest.split_once("test run:"))?.1));
        }
        if let Some(rest) = line.strip_prefix("test result: ") {
            return Some(Tally::of_clauses(rest.split_once(". ")?.1));
        }
        let (word, count) = line.strip_prefix("ℹ ").or(line.strip_prefix("# "))?.split_once(' ')?;
        let count = count.parse().ok()?;
        let mut tally = Tally::default();
        match word {
            "pass" => tally.passed = count,
            "fail" | "cancelled" => tally.failed = count,
            "skipped" | "todo" => tally.skipped = count,
            _ => return None,
        }
        Some(tally)
    }

    /// `11 passed (1 slow), 1 failed, 2 skipped`, with commas or semicolons.
    fn of_clauses(text: &str) -> Tally {
        let mut tally = Tally::default();
        for clause in text.split([',', ';']) {
            let mut words = clause.split_whitespace();
            let Some(count) = words.next().and_then(|n| n.parse::<u64>().ok()) else { continue };
            match words.next() {
                Some("passed") => tally.passed += count,
                Some("failed" | "timed" | "exec") => tally.failed += count,
                Some("skipped" | "ignored") => tally.skipped += count,
                _ => {}
            }
        }
        tally
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
        if self.skipped > 0 {
            write!(f, ", {} skipped", self.skipped)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Tally;

    fn tally(passed: u64, failed: u64, skipped: u64) -> Option<Tally> {
        Some(Tally { passed, failed, skipped })
    }

    #[test]
    fn totals_of_every_runner_are_read() {
        let of = Tally::of_line;
        assert_eq!(of("     Summary [   0.5s] 14 tests run: 12 passed (1 slow), 2 failed, 3 skipped"), tally(12, 2, 3));
        assert_eq!(of("     Summary [   9.0s] 2 tests run: 1 passed, 1 timed out, 0 skipped"), tally(1, 1, 0));
        assert_eq!(of("     Summary [   9.0s] 1 test run: 1 passed, 0 skipped"), tally(1, 0, 0));
        assert_eq!(of("test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out"), tally(5, 0, 1));
        assert_eq!(of("test result: FAILED. 5 passed; 2 failed; 0 ignored; 0 measured"), tally(5, 2, 0));
        assert_eq!(of("ℹ pass 6"), tally(6, 0, 0));
        assert_eq!(of("# cancelled 2"), tally(0, 2, 0));
    }

    #[test]
    fn other_lines_say_nothing() {
        for line in ["", "ok 5 passed", "ℹ tests 6", "ℹ duration_ms 12", "# Subtest: pass 5", "running 3 tests"] {
            assert_eq!(Tally::of_line(line), None, "{line}");
        }
    }
}
