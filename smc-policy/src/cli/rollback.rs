//! `rollback`: returns to the policy that was in force before. Also, as a second process, the guard of
//! `apply --confirm`.

use std::{
    env,
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    time::Duration,
};

use clap::Args;

use super::{
    apply,
    outcome::{Done, Exit, Failure},
    output::Output,
};
use crate::{
    kernel::{
        apply::{Outcome, Request, detach},
        capability,
        record::Record,
        state::State,
        store,
    },
    paths::Paths,
};

#[derive(Debug, Args)]
pub(super) struct RollbackArguments {
    /// Wait this many seconds first.
    #[arg(long, hide = true)]
    after: Option<u64>,
    /// Do nothing unless this generation is in force.
    #[arg(long, hide = true)]
    if_generation: Option<u64>,
    /// Nothing was in force before: detach.
    #[arg(long, hide = true)]
    to_nothing: bool,
}

pub(super) fn run(paths: &Paths, arguments: &RollbackArguments, out: &mut Output) -> Done {
    if let Some(seconds) = arguments.after {
        std::thread::sleep(Duration::from_secs(seconds));
    }
    capability::require("returning to the previous policy")?;
    let state = State::read(paths)?;
    let generation = state.instance.as_ref().map(|i| i.generation());
    if let Some(wanted) = arguments.if_generation
        && generation != Some(wanted)
    {
        out.note(&format!("Generation {wanted} is no longer in force; nothing was changed."));
        return Ok(Exit::No);
    }
    if arguments.to_nothing {
        detach(paths, || {})?;
        return Ok(Exit::Ok);
    }
    let record = wanted(paths, generation.is_some())?;
    let (files, policy) = apply::policy_of(&record, out)?;
    let request = Request {
        sources: &files,
        policy: &policy,
        origin: &record.origin,
        observe: record.observe,
        replace_foreign: false,
    };
    apply::put_in_force(paths, &request, out)?;
    Ok(Exit::Ok)
}

/// The policy before the one in force; after a `detach` or a reboot, the last good one.
fn wanted(paths: &Paths, in_force: bool) -> Result<Record, Failure> {
    let found = if in_force { store::previous(&paths.state)? } else { store::current(&paths.state)? };
    found.ok_or_else(|| {
        Failure::usage(format!(
            "no earlier policy is kept in {}: there is nothing to return to",
            paths.state.display()
        ))
    })
}

/// Starts the process that returns to what was in force before `outcome` when `time` is over. It is in a process group
/// of its own: a terminal that goes away does not take it along.
pub(super) fn spawn_guard(outcome: &Outcome, time: Duration) -> Result<Child, Failure> {
    let program = env::current_exe().map_err(|e| Failure::usage(format!("cannot find this program: {e}")))?;
    let mut command = Command::new(program);
    command.args(["rollback", "--after", &time.as_secs().to_string()]);
    command.args(["--if-generation", &outcome.generation.to_string()]);
    if outcome.before.is_none() {
        command.arg("--to-nothing");
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn().map_err(
        |e| Failure::usage(format!("cannot start the process that would return to the old policy: {e}")),
    )
}
