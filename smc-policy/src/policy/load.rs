//! From texts to a checked policy.

use super::{
    diagnostic::{Diagnostic, SourceFile},
    model::Policy,
};

/// A policy that can be used, and what is odd about it.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The policy.
    pub policy: Policy,
    /// Lints; all of them warnings.
    pub warnings: Vec<Diagnostic>,
}

/// Reads a policy. `files` are in the order of `folder::files`; none is fine: everything is allowed.
///
/// # Errors
/// Everything that is wrong in any of the files, in the order of the files, with the lints that could be told.
#[allow(clippy::todo, reason = "skeleton")]
pub fn load(files: &[SourceFile]) -> Result<Loaded, Vec<Diagnostic>> {
    let _ = files;
    todo!()
}
