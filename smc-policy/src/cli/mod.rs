//! The command line: one file a verb; text for people, `--json` for machines.

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::paths::Paths;

mod apply;
mod capabilities;
mod check;
mod config;
mod confirm;
mod detach;
mod explain;
mod in_force;
mod live;
mod monitor;
mod outcome;
mod output;
mod plan;
mod probe;
mod quarantine;
mod question;
mod rollback;
mod sources;
mod status;
mod words;

use outcome::Failure;
use output::Output;

/// Decide by a TOML policy which connections may negotiate SMC (Shared Memory Communications).
#[derive(Debug, Parser)]
#[command(
    name = "smc-policy",
    version,
    after_help = "Exit codes: 0 ok; 1 the answer is no (deny, mixed, a failed test, drift, a peer that echoes); 2 usage, policy or \
                  configuration error; 3 the kernel or host lacks what is needed; 4 not permitted."
)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    verb: Verb,
}

/// Arguments every verb takes.
#[derive(Clone, Copy, Debug, Args)]
struct Common {
    /// Print one JSON document instead of text.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Check policy files and run their [[test]] blocks. Needs no privilege.
    Check(check::CheckArguments),
    /// Show what `apply` would change: rules, and the connections whose verdict turns over.
    Plan(plan::PlanArguments),
    /// Put a policy in force.
    Apply(apply::ApplyArguments),
    /// Return to the policy that was in force before.
    Rollback(rollback::RollbackArguments),
    /// Show what is in force, with hit counters, and whether the files still say the same.
    Status(status::StatusArguments),
    /// Say what is decided for a peer, by which rule, and why.
    Explain(explain::ExplainArguments),
    /// Show or change which peers are kept off SMC for a while, because they echo TCP options or RDMA to them fails.
    Quarantine(quarantine::QuarantineArguments),
    /// Show what happens: connections that are denied, peers that echo TCP options, who enters the quarantine.
    Monitor(monitor::MonitorArguments),
    /// Find out which hosts echo TCP options, which speak SMC, and which do neither.
    Probe(probe::ProbeArguments),
    /// Take the policy away: every connection negotiates as without the tool.
    Detach(detach::DetachArguments),
}

/// Calls the verb, prints what it has to say, and returns its exit code.
pub fn run(arguments: Arguments) -> ExitCode {
    let Arguments { common, verb } = arguments;
    let paths = Paths::from_env();
    let mut out = Output::new(common.json);
    let result = match verb {
        Verb::Check(a) => check::run(&paths, &a, &mut out),
        Verb::Plan(a) => plan::run(&paths, &a, &mut out),
        Verb::Apply(a) => apply::run(&paths, &a, &mut out),
        Verb::Rollback(a) => rollback::run(&paths, &a, &mut out),
        Verb::Status(a) => status::run(&paths, &a, &mut out),
        Verb::Explain(a) => explain::run(&paths, &a, &mut out),
        Verb::Monitor(a) => monitor::run(&paths, &a, &mut out),
        Verb::Probe(a) => probe::run(&paths, &a, &mut out),
        Verb::Quarantine(a) => quarantine::run(&paths, &a, &mut out),
        Verb::Detach(a) => detach::run(&paths, &a, &mut out),
    };
    let exit = match result {
        Ok(exit) => exit,
        Err(failure) => {
            out.fail(&failure);
            failure.exit
        }
    };
    exit.into()
}
