//! `rollback`: returns to the policy that was in force before. Also, as a second process, the guard of
//! `apply --confirm`.

use std::time::Duration;

use clap::Args;

use super::{
    apply, detach,
    outcome::{Done, Exit},
    output::Output,
};
use crate::{
    kernel::rollback::{RolledBack, revert, rollback},
    paths::Paths,
};

#[derive(Debug, Args)]
pub(super) struct RollbackArguments {
    /// Wait this many seconds first.
    #[arg(long, hide = true, requires = "guard")]
    after: Option<u64>,
    /// Return to what was in force before the apply with this token, if that still waits for confirmation.
    #[arg(long, hide = true)]
    guard: Option<String>,
}

pub(super) fn run(paths: &Paths, arguments: &RollbackArguments, out: &mut Output) -> Done {
    std::thread::sleep(Duration::from_secs(arguments.after.unwrap_or(0)));
    let done = match &arguments.guard {
        Some(token) => revert(paths, token)?,
        None => rollback(paths, || out.note("waiting for another smc-policy to finish"))?,
    };
    match done {
        RolledBack::To { policy, config, outcome } => {
            apply::report(&policy, config.observe, &outcome, out);
        }
        RolledBack::ToNothing(detached) => detach::report(detached, out),
        RolledBack::NotWaiting => return Ok(Exit::No),
    }
    Ok(Exit::Ok)
}
