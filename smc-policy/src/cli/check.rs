//! `check`: are the files a policy, and do their tests hold?

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::{
    outcome::{Done, Exit, Failure},
    output::{Output, Style},
    sources,
    words::count,
};
use crate::{
    paths::Paths,
    policy::{Diagnostic, Loaded, Policy, Record, SourceFile, load, render, run_tests},
};

#[derive(Debug, Args)]
pub(super) struct CheckArguments {
    /// Files, or folders of *.toml; without any: the vendor's and the administrator's policy.d.
    paths: Vec<PathBuf>,
    /// Warnings are failures too (exit code 1).
    #[arg(long)]
    strict: bool,
}

#[derive(Serialize)]
struct CheckDocument {
    ok: bool,
    files: usize,
    rules: usize,
    tests: usize,
    findings: Vec<Record>,
}

pub(super) fn run(paths: &Paths, arguments: &CheckArguments, out: &mut Output) -> Done {
    let files = sources::read(paths, &arguments.paths)?;
    let (policy, findings, exit) = match check(&files) {
        Ok(Checked { policy, warnings, failures }) => {
            let strict_fails = arguments.strict && !warnings.is_empty();
            let exit = if strict_fails || !failures.is_empty() { Exit::No } else { Exit::Ok };
            (policy, [warnings, failures].concat(), exit)
        }
        Err(errors) => (Policy::default(), errors, Exit::Usage),
    };
    out.json(&CheckDocument {
        ok: exit == Exit::Ok,
        files: files.len(),
        rules: policy.rules.len(),
        tests: policy.tests.len(),
        findings: findings.iter().map(|f| f.record(&files)).collect(),
    });
    report(&findings, &files, out);
    if exit == Exit::Ok {
        let (rules, tests) = (count(policy.rules.len(), "rule"), count(policy.tests.len(), "test"));
        let files = count(files.len(), "file");
        out.text(&format!("{}: {rules} in {files}, {tests} passed", out.paint(Style::Good, "ok")));
    }
    Ok(exit)
}

/// A policy that can be used, with what is to be said about it.
pub(super) struct Checked {
    pub(super) policy: Policy,
    pub(super) warnings: Vec<Diagnostic>,
    /// Tests that do not hold.
    pub(super) failures: Vec<Diagnostic>,
}

/// Everything `check` does with the texts.
pub(super) fn check(files: &[SourceFile]) -> Result<Checked, Vec<Diagnostic>> {
    let Loaded { policy, warnings } = load(files)?;
    let failures = run_tests(&policy);
    Ok(Checked { policy, warnings, failures })
}

/// As `check`, for verbs that need a usable policy whose tests hold; findings are printed.
pub(super) fn usable(files: &[SourceFile], out: &mut Output) -> Result<Policy, Failure> {
    let failed = |exit, message: String, findings: &[Diagnostic]| {
        report(findings, files, out);
        let findings = findings.iter().map(|f| f.record(files)).collect();
        Failure { exit, message, findings }
    };
    match check(files) {
        Ok(Checked { policy, warnings, failures }) if failures.is_empty() => {
            report(&warnings, files, out);
            Ok(policy)
        }
        Ok(Checked { warnings, failures, .. }) => {
            let n = count(failures.len(), "test");
            let message = format!("{n} of the policy failed; nothing was changed");
            Err(failed(Exit::No, message, &[warnings, failures].concat()))
        }
        Err(errors) => Err(failed(Exit::Usage, "the policy has errors; nothing was changed".into(), &errors)),
    }
}

/// Prints findings as a compiler does, on standard error.
fn report(findings: &[Diagnostic], files: &[SourceFile], out: &Output) {
    if !findings.is_empty() {
        out.note(render(findings, files, out.colour_err()).trim_end_matches('\n'));
    }
}
