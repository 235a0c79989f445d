//! Reading the output of Rust's test harness.

/// What one or more test binaries reported.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Tests that passed (a test that skips itself passes as far as the harness knows).
    pub(crate) passed: usize,
    /// Names of tests that failed.
    pub(crate) failed: Vec<String>,
    /// Tests marked `#[ignore]`, documentation tests marked `ignore`.
    pub(crate) ignored: usize,
    /// Binaries that came to their end.
    pub(crate) finished: usize,
}

/// Adds up what is in the output. Only closing lines and lists of failures are read: the lines of single tests may be
/// torn apart by what programs under test print.
pub(crate) fn read(output: &str) -> Counts {
    let mut counts = Counts::default();
    let mut names = Vec::new();
    for line in output.lines().map(|line| line.trim_end_matches('\r')) {
        if line == "failures:" {
            // Comes twice: first with the tests' output, then as the list of names.
            names.clear();
        } else if let Some(name) = line.strip_prefix("    ") {
            names.push(name.to_owned());
        } else if let Some(result) = line.strip_prefix("test result: ") {
            let count = |what: &str| {
                let words: Vec<&str> =
                    result.split([' ', ';', '.']).filter(|word| !word.is_empty()).collect();
                let at = words.iter().position(|word| *word == what)?;
                words.get(at.checked_sub(1)?)?.parse().ok()
            };
            counts.finished += 1;
            counts.passed += count("passed").unwrap_or(0);
            counts.ignored += count("ignored").unwrap_or(0);
            let failed = count("failed").unwrap_or(0);
            counts.failed.extend(names.drain(..).rev().take(failed).rev());
            names.clear();
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_added_up() {
        let output = "\nrunning 2 tests\ntest a ... ok\ntest b ... tool: noise\nok\n\n\
            test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n\n\
            running 3 tests\ntest c ... FAILED\n\nfailures:\n\n---- x::c stdout ----\n    indented\nfailures:\n\n\
            failures:\n    x::c\n    d\n\n\
            test result: FAILED. 0 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s\n";
        let counts = read(output);
        assert_eq!(
            counts,
            Counts { passed: 2, failed: vec!["x::c".into(), "d".into()], ignored: 1, finished: 2 }
        );
    }

    #[test]
    fn a_binary_that_died_has_not_finished() {
        assert_eq!(read("running 1 test\ntest a ... "), Counts::default());
    }
}
