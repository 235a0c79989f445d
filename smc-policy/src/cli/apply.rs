//! `apply`: puts a policy in force and says what that changes.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::{
    check, live,
    outcome::{Done, Exit, Failure},
    output::{Output, Style},
    rollback, sources,
    words::{count, duration, parse_duration},
};
use crate::{
    kernel::{
        apply::{self as kernel, Outcome, Request},
        hs_ctrl, lock,
        record::Record,
    },
    paths::Paths,
    policy::{Change, Policy, SourceFile, diff},
};

#[derive(Debug, Args)]
pub(super) struct ApplyArguments {
    /// Files, or folders of *.toml; without any: the vendor's and the administrator's policy.d.
    paths: Vec<PathBuf>,
    /// enforce the policy, or only observe: decide and count, and let every connection negotiate.
    #[arg(long, value_enum, default_value_t = Mode::Enforce)]
    mode: Mode,
    /// Take over from another program that net.smc.hs_ctrl names; `detach` restores it.
    #[arg(long)]
    replace: bool,
    /// Return to what was in force unless Enter is pressed within this time (60s, 5m).
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    confirm: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    Enforce,
    Observe,
}

#[derive(Serialize)]
struct ApplyDocument<'a> {
    hook: &'static str,
    mode: &'static str,
    generation: u64,
    /// "none", "first", "switched" or "replaced".
    change: &'static str,
    rules: usize,
    changes: &'a [Change],
    /// Live SMC connections that the policy would deny now; `null`: they could not be listed.
    live_denied: Option<Vec<live::Denied>>,
    warnings: &'a [String],
}

/// The word for a mode.
pub(super) fn mode_name(observe: bool) -> &'static str {
    if observe { "observe" } else { "enforce" }
}

pub(super) fn run(paths: &Paths, arguments: &ApplyArguments, out: &mut Output) -> Done {
    let (origin, files) = sources::read_absolute(paths, &arguments.paths)?;
    let policy = check::usable(&files, out)?;
    let request = Request {
        sources: &files,
        policy: &policy,
        origin: &origin,
        observe: arguments.mode == Mode::Observe,
        replace_foreign: arguments.replace,
    };
    let outcome = put_in_force(paths, &request, out)?;
    match arguments.confirm {
        Some(time) if outcome.change != kernel::Change::None => confirm(paths, &outcome, time, out),
        _ => Ok(Exit::Ok),
    }
}

/// Applies, and says what changed. Shared with `rollback`.
pub(super) fn put_in_force(
    paths: &Paths,
    request: &Request<'_>,
    out: &mut Output,
) -> Result<Outcome, Failure> {
    let outcome = kernel::apply(paths, request, || out.note("waiting for another smc-policy to finish"))?;
    for warning in &outcome.warnings {
        out.warn(warning);
    }
    let before = outcome.before.as_ref().and_then(Record::policy).map(|(policy, _)| policy);
    let changes = diff(&before.unwrap_or_default(), request.policy);
    let live = match live::denied(request.policy) {
        Ok(live) => Some(live),
        Err(e) => {
            out.note(&format!("note: live SMC connections were not compared with the policy: {e}"));
            None
        }
    };
    report(request, &outcome, &changes, live.as_deref(), out);
    out.json(&ApplyDocument {
        hook: "hs_ctrl",
        mode: mode_name(request.observe),
        generation: outcome.generation,
        change: match outcome.change {
            kernel::Change::None => "none",
            kernel::Change::First => "first",
            kernel::Change::Switched => "switched",
            kernel::Change::Replaced => "replaced",
        },
        rules: request.policy.rules.len(),
        changes: &changes,
        live_denied: live,
        warnings: &outcome.warnings,
    });
    Ok(outcome)
}

fn report(
    request: &Request<'_>,
    outcome: &Outcome,
    changes: &[Change],
    live: Option<&[live::Denied]>,
    out: &mut Output,
) {
    let (n, mode) = (outcome.generation, mode_name(request.observe));
    if outcome.change == kernel::Change::None {
        out.text(&format!("Already in force: generation {n} ({mode})."));
    } else {
        let rules = count(request.policy.rules.len(), "rule");
        let word = out.paint(Style::Good, "In force");
        out.text(&format!("{word}: generation {n}, {rules}, hook hs_ctrl, {mode}."));
        let lines: Vec<String> = changes.iter().map(|c| format!("  {c}")).collect();
        out.text(&if lines.is_empty() { "  no rule changed".to_owned() } else { lines.join("\n") });
    }
    if let Some(live) = live.filter(|l| !l.is_empty()) {
        let verb = if request.observe { "would deny" } else { "denies" };
        out.text(&format!(
            "{} that this policy {verb}: they live on until they close.",
            count(live.len(), "live SMC connection")
        ));
        out.text(&live::table(live));
    }
}

/// Waits for Enter; a second process, which outlives this one and its terminal, returns to what was in force.
fn confirm(paths: &Paths, outcome: &Outcome, time: Duration, out: &mut Output) -> Done {
    let mut guard = rollback::spawn_guard(outcome, time)?;
    out.note(&format!(
        "Keep this policy? Press Enter within {}; otherwise what was in force before returns.",
        duration(time.as_secs())
    ));
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        // The end of input is no confirmation.
        if std::io::stdin().read_line(&mut line).is_ok_and(|n| n > 0) {
            let _ = send.send(());
        }
        // Without input, hold the channel open until the time is over.
        std::thread::sleep(time + Duration::from_secs(1));
    });
    let confirmed = receive.recv_timeout(time).is_ok();
    if confirmed {
        // Under the lock, so that the guard is not in the middle of its work.
        let _lock = lock::take(&paths.lock(), || {})?;
        // It may have ended just now: then the check below tells.
        let _ = guard.kill();
        let _ = guard.wait();
        if in_force(paths)? == Some(outcome.generation) {
            out.note("Confirmed.");
            return Ok(Exit::Ok);
        }
        out.note("Too late: what was in force before has returned.");
        return Ok(Exit::No);
    }
    let _ = guard.wait();
    out.note("Not confirmed: what was in force before has returned.");
    Ok(Exit::No)
}

/// The generation in force.
fn in_force(paths: &Paths) -> Result<Option<u64>, Failure> {
    let state = crate::kernel::state::State::read(paths)?;
    let ours = matches!(state.selected, hs_ctrl::Selected::Ours(_));
    Ok(state.instance.filter(|_| ours).map(|i| i.generation()))
}

/// The policy of a record, for `rollback`.
pub(super) fn policy_of(record: &Record, out: &mut Output) -> Result<(Vec<SourceFile>, Policy), Failure> {
    let files = record.source_files();
    let policy = check::usable(&files, out)?;
    Ok((files, policy))
}
