//! The one error type of the build tool: a line that says what went wrong and what to do next.

use std::{fmt, io, path::Path};

/// Result of everything in this crate.
pub(crate) type Result<T> = std::result::Result<T, Error>;

/// What went wrong, in one line, and the next step if there is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Error {
    what: String,
    next: Option<String>,
    may_pass: bool,
}

impl Error {
    /// An error without an obvious next step.
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), next: None, may_pass: false }
    }

    /// Adds what the reader should do about it.
    pub(crate) fn next(mut self, step: impl Into<String>) -> Self {
        self.next = Some(step.into());
        self
    }

    /// Marks a failure that is not expected a second time.
    pub(crate) fn that_may_pass(mut self) -> Self {
        self.may_pass = true;
        self
    }

    /// Whether it is worth trying again.
    pub(crate) fn may_pass(&self) -> bool {
        self.may_pass
    }

    /// An operation on a file that failed; `doing` reads like "read" or "create".
    pub(crate) fn io(doing: &str, path: &Path, error: &io::Error) -> Self {
        Self::new(format!("cannot {doing} {}: {error}", path.display()))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        match &self.next {
            Some(next) => write!(f, "; {next}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_step_follows_on_the_same_line() {
        let error = Error::new("qemu is missing").next("run `cargo xtask setup`");
        assert_eq!(error.to_string(), "qemu is missing; run `cargo xtask setup`");
    }
}
