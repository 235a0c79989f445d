//! `detach`: takes the policy away.

use clap::Args;
use serde::Serialize;

use super::{
    outcome::{Done, Exit},
    output::Output,
};
use crate::{
    kernel::detach::{self as kernel, Detached},
    paths::Paths,
};

#[derive(Debug, Args)]
pub(super) struct DetachArguments {}

#[derive(Serialize)]
struct DetachDocument {
    was_in_force: bool,
    restored: Option<String>,
    removed: Vec<String>,
    warnings: Vec<String>,
}

pub(super) fn run(paths: &Paths, _: &DetachArguments, out: &mut Output) -> Done {
    let done = kernel::detach(paths, || out.note("waiting for another smc-policy to finish"))?;
    report(done, out);
    Ok(Exit::Ok)
}

/// Says what was done. Shared with `rollback`.
pub(super) fn report(done: Detached, out: &mut Output) {
    for warning in &done.warnings {
        out.warn(warning);
    }
    out.text(match (done.was_in_force, &done.restored) {
        (true, Some(_)) => "Detached.",
        (true, None) => "Detached: every connection may negotiate SMC.",
        (false, _) if done.removed.is_empty() => "Nothing was attached.",
        (false, _) => "Removed what a killed process had left; no policy was in force.",
    });
    if let Some(name) = &done.restored {
        out.text(&format!("net.smc.hs_ctrl is '{name}' again."));
    }
    out.json(&DetachDocument {
        was_in_force: done.was_in_force,
        restored: done.restored,
        removed: done.removed,
        warnings: done.warnings,
    });
}
