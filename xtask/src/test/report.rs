//! What ran where, and how it went.

use std::{collections::BTreeMap, fmt, time::Duration};

/// Results of one step.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Tests, or whole checks, that passed.
    pub(crate) passed: usize,
    /// What failed, each in one line.
    pub(crate) failed: Vec<String>,
    /// What did not run, and why.
    pub(crate) skipped: Vec<Skip>,
    /// Where it ran, if that is worth a word: a kernel's version.
    pub(crate) place: String,
}

/// Something that did not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Skip {
    /// The test or check.
    pub(crate) name: String,
    /// What it would have needed.
    pub(crate) reason: String,
}

impl Tally {
    /// A check that passes or fails as a whole.
    pub(crate) fn of_check(result: crate::error::Result<()>) -> Self {
        match result {
            Ok(()) => Self { passed: 1, ..Self::default() },
            Err(error) => Self { failed: vec![error.to_string()], ..Self::default() },
        }
    }

    /// Adds the results of one of several machines, whose names then begin with the machine's.
    pub(crate) fn add(&mut self, machine: &str, other: Self) {
        self.passed += other.passed;
        self.failed.extend(other.failed.into_iter().map(|line| format!("{machine}: {line}")));
        let named = |skip: Skip| Skip { name: format!("{machine}: {}", skip.name), ..skip };
        self.skipped.extend(other.skipped.into_iter().map(named));
    }
}

/// Results of all steps, in order.
#[derive(Debug, Default)]
pub(crate) struct Report {
    steps: Vec<(String, Tally, Duration)>,
}

impl Report {
    /// Adds a step.
    pub(crate) fn add(&mut self, step: &str, tally: Tally, took: Duration) {
        self.steps.push((step.to_owned(), tally, took));
    }

    /// Whether nothing failed.
    pub(crate) fn is_good(&self) -> bool {
        self.steps.iter().all(|(_, tally, _)| tally.failed.is_empty())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.steps.iter().map(|(step, ..)| step.len()).max().unwrap_or(0).max(4);
        writeln!(f, "{:<width$}  {:>8}  {:>6}  {:>6}  {:>7}", "step", "time", "passed", "failed", "skipped")?;
        for (step, tally, took) in &self.steps {
            let Tally { passed, failed, skipped, place } = tally;
            let seconds = format!("{:.1} s", took.as_secs_f64());
            let (failed, skipped) = (failed.len(), skipped.len());
            let line =
                format!("{step:<width$}  {seconds:>8}  {passed:>6}  {failed:>6}  {skipped:>7}  {place}");
            writeln!(f, "{}", line.trim_end())?;
        }
        for (step, tally, _) in &self.steps {
            let mut by_reason: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            for skip in &tally.skipped {
                by_reason.entry(&skip.reason).or_default().push(&skip.name);
            }
            for (reason, names) in by_reason {
                writeln!(f, "skipped on {step}, {reason}: {}", names.join(", "))?;
            }
        }
        for (step, tally, _) in &self.steps {
            for failure in &tally.failed {
                writeln!(f, "FAILED on {step}: {failure}")?;
            }
        }
        let sum =
            |count: fn(&Tally) -> usize| self.steps.iter().map(|(_, tally, _)| count(tally)).sum::<usize>();
        let (passed, failed, skipped) =
            (sum(|t| t.passed), sum(|t| t.failed.len()), sum(|t| t.skipped.len()));
        writeln!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_has_the_sums_and_skips_are_named() {
        let mut report = Report::default();
        report.add("fmt", Tally::of_check(Ok(())), Duration::from_millis(400));
        let skip = |name: &str| Skip { name: name.into(), reason: "needs hs_ctrl".into() };
        let tally = Tally {
            passed: 3,
            skipped: vec![skip("a"), skip("b")],
            place: "Linux 6.1".into(),
            failed: vec![],
        };
        report.add("6.1-debian", tally, Duration::from_secs(9));
        assert!(report.is_good());
        report.add("deny", Tally::of_check(Err(crate::error::Error::new("GPL"))), Duration::ZERO);
        assert!(!report.is_good());
        let text = report.to_string();
        assert!(text.contains("skipped on 6.1-debian, needs hs_ctrl: a, b\n"), "{text}");
        assert!(text.contains("FAILED on deny: GPL\n"), "{text}");
        assert!(text.ends_with("\n4 passed, 1 failed, 2 skipped\n"), "{text}");
    }
}
