//! `check`: are the files a policy, do their tests hold, and is config.toml right?

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::{
    config,
    outcome::{Done, Exit, Failure},
    output::{Output, Style},
    sources,
    words::count,
};
use crate::{
    kernel::record,
    paths::Paths,
    policy::{
        Diagnostic, Loaded, Policy, Record, SourceFile,
        config::{Parsed, parse},
        load, render, run_tests,
    },
};

#[derive(Debug, Args)]
pub(super) struct CheckArguments {
    /// Files, or folders of *.toml; without any: the vendor's and the administrator's policy.d, and config.toml.
    paths: Vec<PathBuf>,
    /// The config.toml to check, in the place of the administrator's.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
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
    /// `null`: none was checked, or it has errors.
    config: Option<config::Summary>,
    findings: Vec<Record>,
}

pub(super) fn run(paths: &Paths, arguments: &CheckArguments, out: &mut Output) -> Done {
    // Files that are named are checked as they are, wherever they are going to be used.
    let with_config = arguments.paths.is_empty() || arguments.config.is_some();
    let config_file = if with_config { config::source(paths, arguments.config.as_deref())? } else { None };
    let policy_files = sources::read(paths, &arguments.paths);
    let number = policy_files.as_ref().map_or(0, Vec::len);
    let parsed = config_file.as_ref().map(|file| parse(number, &file.text));
    let mut files = Vec::with_capacity(number + 1);
    let missing = policy_files.map(|read| files.extend(read)).err();
    let checked = check(&files);
    files.extend(config_file);

    let mut exit = Exit::Ok;
    let mut findings = Vec::new();
    let mut policy = Policy::default();
    match checked {
        Ok(Checked { policy: read, warnings, failures }) => {
            if !failures.is_empty() || (arguments.strict && !warnings.is_empty()) {
                exit = Exit::No;
            }
            policy = read;
            findings.extend(warnings.into_iter().chain(failures));
        }
        Err(errors) => {
            exit = Exit::Usage;
            findings.extend(errors);
        }
    }
    let mut summary = None;
    match parsed {
        None => {}
        Some(Ok(Parsed { config, warnings })) => {
            if arguments.strict && !warnings.is_empty() && exit == Exit::Ok {
                exit = Exit::No;
            }
            summary = files.last().map(|file| config::Summary::new(&file.path, &config));
            findings.extend(warnings);
        }
        Some(Err(errors)) => {
            exit = Exit::Usage;
            findings.extend(errors);
        }
    }
    report(&findings, &files, out);
    let findings: Vec<Record> = findings.iter().map(|finding| finding.record(&files)).collect();
    if let Some(missing) = missing {
        return Err(Failure { findings, ..missing });
    }
    let (rules, tests) = (policy.rules.len(), policy.tests.len());
    if exit == Exit::Ok {
        let (rules, tests, files) = (count(rules, "rule"), count(tests, "test"), count(number, "file"));
        let config = summary.as_ref().map(|summary| format!("; {}", summary.line())).unwrap_or_default();
        let ok = out.paint(Style::Good, "ok");
        out.text(&format!("{ok}: {rules} in {files}, {tests} passed{config}"));
    }
    out.json(&CheckDocument { ok: exit == Exit::Ok, files: number, rules, tests, config: summary, findings });
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
    let Loaded { policy, warnings } = load(files, record::now())?;
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
pub(super) fn report(findings: &[Diagnostic], files: &[SourceFile], out: &Output) {
    if !findings.is_empty() {
        out.note(render(findings, files, out.colour_err()).trim_end_matches('\n'));
    }
}
