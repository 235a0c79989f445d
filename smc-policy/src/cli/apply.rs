//! `apply`: puts a policy in force and says what that changes.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::{
    check, config, confirm, live,
    outcome::{Done, Exit, Failure},
    output::{Output, Style},
    sources,
    words::{count, many, parse_patience},
};
use crate::{
    kernel::{
        apply::{self as kernel, Outcome, Request},
        hook::Hook,
        random,
        record::{Overrides, Record, unix_now},
    },
    paths::Paths,
    policy::{Change, Policy, config::HookChoice, diff},
};

#[derive(Debug, Args)]
pub(super) struct ApplyArguments {
    /// Files, or folders of *.toml; without any: the vendor's and the administrator's policy.d.
    paths: Vec<PathBuf>,
    /// enforce the policy, or only observe: decide and count, and let every connection negotiate. Without: as config.toml
    /// says, else enforce.
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// How to enforce it: the kernel's smc_hs_ctrl, tc programs, or the one of them that fits. Without: as config.toml says,
    /// else auto.
    #[arg(long, value_enum)]
    hook: Option<HookArgument>,
    /// Read this file instead of /etc/smc-policy/config.toml.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Take over from another program that net.smc.hs_ctrl names; `detach` restores it.
    #[arg(long)]
    replace: bool,
    /// Return to what was in force unless Enter is pressed within this time (60s, 5m).
    #[arg(long, value_name = "DURATION", value_parser = parse_patience)]
    confirm: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    Enforce,
    Observe,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum HookArgument {
    Auto,
    #[value(name = "hs_ctrl")]
    HsCtrl,
    Tc,
}

impl From<HookArgument> for HookChoice {
    fn from(argument: HookArgument) -> Self {
        match argument {
            HookArgument::Auto => Self::Auto,
            HookArgument::HsCtrl => Self::HsCtrl,
            HookArgument::Tc => Self::Tc,
        }
    }
}

#[derive(Serialize)]
struct ApplyDocument<'a> {
    hook: Hook,
    /// Why it is tc, where the choice was left to the tool.
    why_tc: Option<&'a str>,
    /// Devices that have programs now and had none.
    attached: &'a [String],
    /// The foreign smc_hs_ctrl that is selected again.
    restored: Option<&'a str>,
    /// Entries of the saved quarantine that hold again.
    quarantine_restored: usize,
    mode: &'static str,
    generation: u64,
    /// "none", "confirmed", "first", "switched" or "replaced".
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
    let overrides = Overrides {
        hook: arguments.hook.map(HookChoice::from),
        observe: arguments.mode.map(|mode| mode == Mode::Observe),
    };
    let config_file = arguments.config.as_deref().map(sources::absolute).transpose()?;
    let config = overrides.over(config::read(paths, config_file.as_deref(), out)?);
    let token = random::hex(8)?;
    let mut request = Request {
        sources: &files,
        policy: &policy,
        origin: &origin,
        config: &config,
        overrides,
        config_file: config_file.as_deref(),
        replace_foreign: arguments.replace,
        token: &token,
        unconfirmed_until: None,
    };
    let Some(time) = arguments.confirm else {
        let outcome = put_in_force(paths, &request, out)?;
        report(&policy, config.observe, &outcome, out);
        return Ok(Exit::Ok);
    };
    request.unconfirmed_until = Some(unix_now() + time.as_secs());
    // First the guard, then the policy: it must not be in force without one.
    let guard = confirm::Guard::spawn(&token, time)?;
    let outcome = put_in_force(paths, &request, out)?;
    report(&policy, config.observe, &outcome, out);
    if outcome.change == kernel::Change::None {
        Ok(Exit::Ok)
    } else {
        confirm::wait(paths, &token, time, guard, out)
    }
}

/// Rules end by an apply only.
fn expiring(policy: &Policy) -> Option<String> {
    let ends = policy.rules.iter().filter(|rule| rule.is_active());
    let (expires, rule) = ends.filter_map(|rule| Some((rule.expires?, rule))).min_by_key(|(end, _)| *end)?;
    Some(format!(
        "rule `{}` expires at {expires}: it ends with the first `smc-policy apply` after that",
        rule.name
    ))
}

fn put_in_force(paths: &Paths, request: &Request<'_>, out: &Output) -> Result<Outcome, Failure> {
    Ok(kernel::apply(paths, request, || out.note("waiting for another smc-policy to finish"))?)
}

/// Says what changed. Shared with `rollback`.
pub(super) fn report(policy: &Policy, observe: bool, outcome: &Outcome, out: &mut Output) {
    let mut warnings = outcome.warnings.clone();
    warnings.extend(expiring(policy));
    for warning in &warnings {
        out.warn(warning);
    }
    let before = outcome.before.as_ref().and_then(Record::policy).map(|(policy, _)| policy);
    let changes = diff(&before.unwrap_or_default(), policy);
    let live = match live::denied(policy) {
        Ok(live) => Some(live),
        Err(e) => {
            out.note(&format!("note: live SMC connections were not compared with the policy: {e}"));
            None
        }
    };
    let (n, mode) = (outcome.generation, mode_name(observe));
    match outcome.change {
        kernel::Change::None => out.text(&format!("Already in force: generation {n}, {mode}.")),
        kernel::Change::Confirmed => {
            out.text(&format!("Already in force: generation {n}, {mode}; it is confirmed now."));
        }
        _ => {
            let rules = count(policy.rules.len(), "rule");
            let word = out.paint(Style::Good, "In force");
            let hook = outcome.hook;
            out.text(&format!("{word}: generation {n}, {rules}, hook {hook}, {mode}."));
            let lines: Vec<String> = changes.iter().map(|c| format!("  {c}")).collect();
            out.text(&if lines.is_empty() { "  no rule changed".to_owned() } else { lines.join("\n") });
        }
    }
    if let Some(why) = &outcome.why_tc
        && outcome.change != kernel::Change::None
    {
        out.text(&format!("  tc, because {why}"));
    }
    if !outcome.attached.is_empty() {
        out.text(&format!("  programs attached to {}", outcome.attached.join(", ")));
    }
    if let Some(name) = &outcome.restored {
        out.text(&format!("  net.smc.hs_ctrl is '{name}' again"));
    }
    if outcome.quarantine_restored > 0 {
        out.text(&format!(
            "  quarantine: {} restored",
            many(outcome.quarantine_restored, "entry", "entries")
        ));
    }
    if let Some(live) = live.as_ref().filter(|l| !l.is_empty()) {
        let (number, verb) =
            (count(live.len(), "live SMC connection"), if observe { "would deny" } else { "denies" });
        let live_on =
            if live.len() == 1 { "it lives on until it closes" } else { "they live on until they close" };
        out.text(&format!("{number} that this policy {verb}: {live_on}."));
        out.text(&live::table(live));
    }
    out.json(&ApplyDocument {
        hook: outcome.hook,
        why_tc: outcome.why_tc.as_deref(),
        attached: &outcome.attached,
        restored: outcome.restored.as_deref(),
        quarantine_restored: outcome.quarantine_restored,
        mode,
        generation: n,
        change: match outcome.change {
            kernel::Change::None => "none",
            kernel::Change::Confirmed => "confirmed",
            kernel::Change::First => "first",
            kernel::Change::Switched => "switched",
            kernel::Change::Replaced => "replaced",
        },
        rules: policy.rules.len(),
        changes: &changes,
        live_denied: live,
        warnings: &warnings,
    });
}
