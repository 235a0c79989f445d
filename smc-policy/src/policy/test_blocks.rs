//! The `[[test]]` blocks: what the policy itself says it must decide.

use super::{diagnostic::Diagnostic, model::Policy};

/// Runs every `[[test]]`; one finding for each that does not hold or must say more. Empty: all hold.
#[allow(clippy::todo, reason = "skeleton")]
pub fn run_tests(policy: &Policy) -> Vec<Diagnostic> {
    let _ = policy;
    todo!()
}
