//! `explain`: what is decided for a peer, by which rule, and why; or what a fallback reason code means.

use std::{net::IpAddr, path::PathBuf};

use clap::Args;
use serde::Serialize;
use smc_policy_common::query::{Addr, Direction, Query};

use super::{
    check, live,
    outcome::{Done, Exit, Failure},
    output::{Output, Style, columns},
    question::{self, Subject},
    sources,
};
use crate::{
    kernel::{instance::Instance, state::State},
    paths::Paths,
    policy::{
        Explanation, Policy, Question, Slots,
        explain::{Overall, Region, explain},
        model::direction_name,
    },
    smc::reasons,
};

#[derive(Debug, Args)]
pub(super) struct ExplainArguments {
    /// A peer (192.0.2.1, 192.0.2.1:443, [2001:db8::1]:443), or a fallback reason code (0x03010000).
    subject: String,
    /// The peer connects to this host; the port is ours.
    #[arg(long, conflicts_with = "outbound")]
    inbound: bool,
    /// This host connects to the peer (the default).
    #[arg(long)]
    outbound: bool,
    /// This host's address.
    #[arg(long, value_name = "ADDRESS")]
    local: Option<IpAddr>,
    /// Judge by this file or folder instead of what is in force (may be given several times); needs no privilege.
    #[arg(long, value_name = "PATH")]
    policy: Vec<PathBuf>,
}

#[derive(Serialize)]
struct ExplainDocument<'a> {
    peer: IpAddr,
    port: Option<u16>,
    local: Option<IpAddr>,
    direction: &'static str,
    /// "in force" or "files".
    judged_by: &'static str,
    generation: Option<u64>,
    /// "enforce" or "observe".
    mode: &'static str,
    /// Observe mode: it may negotiate although `action` says deny.
    only_observed: bool,
    /// The files say something else than what is in force.
    files_differ: bool,
    #[serde(flatten)]
    explanation: &'a Explanation,
}

#[derive(Serialize)]
struct ReasonDocument {
    code: String,
    name: Option<&'static str>,
    meaning: Option<&'static str>,
}

pub(super) fn run(paths: &Paths, arguments: &ExplainArguments, out: &mut Output) -> Done {
    match question::parse(&arguments.subject).map_err(Failure::usage)? {
        Subject::Reason(code) => Ok(explain_reason(code, out)),
        Subject::Peer { ip, port } => explain_peer(paths, arguments, ip, port, out),
    }
}

fn explain_reason(code: u32, out: &mut Output) -> Exit {
    let known = reasons::lookup(code);
    out.json(&ReasonDocument {
        code: format!("{code:#010x}"),
        name: known.map(|r| r.name),
        meaning: known.map(|r| r.meaning),
    });
    match known {
        Some(r) => {
            out.text(&format!("{code:#010x}  {}: {}", out.paint(Style::Bold, r.name), r.meaning));
            if code == reasons::PEER_NO_SMC {
                out.text("A policy that denies a connection shows as this reason: `smc-policy explain PEER` says whether one does.");
            }
            Exit::Ok
        }
        None => {
            out.text(&format!("{code:#010x} is no fallback reason this version knows."));
            Exit::No
        }
    }
}

/// What the answer is judged by.
struct Judge {
    policy: Policy,
    observe: bool,
    /// Of what is in force: its generation, whether the files differ, and the kernel's side to ask.
    in_force: Option<(u64, bool, Instance, Slots)>,
}

fn explain_peer(
    paths: &Paths,
    arguments: &ExplainArguments,
    ip: IpAddr,
    port: Option<u16>,
    out: &mut Output,
) -> Done {
    let local = arguments.local.map(|l| l.to_canonical());
    if local.is_some_and(|l| l.is_ipv4() != ip.is_ipv4()) {
        return Err(Failure::usage("the peer and --local are of different address families"));
    }
    let judge = if arguments.policy.is_empty() {
        match in_force(paths)? {
            Some(judge) => judge,
            None => return Ok(nothing_in_force(ip, out)),
        }
    } else {
        let files = sources::read(paths, &arguments.policy)?;
        Judge { policy: check::usable(&files, out)?, observe: false, in_force: None }
    };
    let direction = if arguments.inbound { Direction::Inbound } else { Direction::Outbound };
    let question = Question {
        peer: live::address(ip),
        port,
        local: local.map(live::address),
        direction: Some(direction),
    };
    let answer = explain(&judge.policy, &question);
    if let Some((_, _, instance, slots)) = &judge.in_force {
        ask_kernel(instance, slots, &judge.policy, &question, &answer, &arguments.subject)?;
    }
    let only_observed = judge.observe && answer.action != Overall::Allow;
    out.json(&ExplainDocument {
        peer: ip,
        port,
        local,
        direction: direction_name(direction),
        judged_by: if judge.in_force.is_some() { "in force" } else { "files" },
        generation: judge.in_force.as_ref().map(|f| f.0),
        mode: super::apply::mode_name(judge.observe),
        only_observed,
        files_differ: judge.in_force.as_ref().is_some_and(|f| f.1),
        explanation: &answer,
    });
    out.text(&text(&arguments.subject, direction, &answer, out));
    if only_observed {
        out.text("Observe mode: the connection may negotiate SMC nevertheless.");
    }
    if judge.in_force.as_ref().is_some_and(|f| f.1) {
        out.text("Note: the policy files have changed since; this is what is in force. `smc-policy apply` applies them.");
    }
    Ok(if answer.action == Overall::Allow { Exit::Ok } else { Exit::No })
}

/// The policy in force, from its record.
fn in_force(paths: &Paths) -> Result<Option<Judge>, Failure> {
    let state = State::read(paths)?;
    let Some(instance) = state.instance else { return Ok(None) };
    let unrecorded = || Failure {
        exit: Exit::Host,
        message: format!(
            "a policy is in force (generation {}), but {} has no usable record of it: `smc-policy apply` writes it anew",
            instance.generation(),
            paths.run.display()
        ),
    };
    let record = state.record.ok_or_else(unrecorded)?;
    let (policy, slots) = record.policy().ok_or_else(unrecorded)?;
    let differ = super::status::files_differ(paths, &record);
    Ok(Some(Judge {
        policy,
        observe: record.observe,
        in_force: Some((record.generation, differ, instance, slots)),
    }))
}

fn nothing_in_force(ip: IpAddr, out: &mut Output) -> Exit {
    #[derive(Serialize)]
    struct Nothing {
        peer: IpAddr,
        action: &'static str,
        by: &'static str,
        rule: Option<String>,
    }
    out.json(&Nothing { peer: ip, action: "allow", by: "nothing", rule: None });
    out.text(&format!(
        "{}: no policy is in force, every connection may negotiate SMC.",
        out.paint(Style::Good, "allow")
    ));
    Exit::Ok
}

/// The tables in force must say the same as the recorded rules, region by region.
fn ask_kernel(
    instance: &Instance,
    slots: &Slots,
    policy: &Policy,
    question: &Question,
    answer: &Explanation,
    subject: &str,
) -> Result<(), Failure> {
    let queries: Vec<_> = answer.regions.iter().filter_map(|r| sample(r, question)).collect();
    let before = instance.generation();
    let answers = instance.query().ask(&queries)?;
    if instance.generation() != before {
        // An apply came in between: the answers are of another policy than the record.
        return Err(Failure { exit: Exit::Host, message: "the policy changed just now; ask again".into() });
    }
    for (query, kernel) in queries.iter().zip(answers) {
        let decision = crate::policy::decide(policy, query);
        let expected = (decision.action == crate::policy::Action::Allow, slots.of(decision.by));
        if kernel.map(|(allow, slot)| (allow, Some(slot))) != Some(expected) {
            return Err(Failure {
                exit: Exit::Host,
                message: format!(
                    "the kernel's tables and the record of the policy in force disagree about {} ({kernel:?} against \
                     {expected:?}); this is a defect: `smc-policy apply` loads them anew, please report it",
                    subject
                ),
            });
        }
    }
    Ok(())
}

/// A connection of a region.
fn sample(region: &Region, question: &Question) -> Option<Query> {
    let port = match region.ports.first() {
        Some(text) => text.split('-').next()?.parse().ok()?,
        None => question.port.unwrap_or(1),
    };
    let local = match region.local.first() {
        Some(text) => live::address(text.split(['-', '/']).next()?.parse().ok()?),
        None => {
            question.local.unwrap_or(if question.peer.as_v4().is_some() { Addr::v4(0) } else { Addr::v6(0) })
        }
    };
    Some(Query { peer: question.peer, local, port, direction: region.direction })
}

fn text(subject: &str, direction: Direction, answer: &Explanation, out: &Output) -> String {
    let (style, word) = match answer.action {
        Overall::Allow => (Style::Good, "allow"),
        Overall::Deny => (Style::Bad, "deny"),
        Overall::Mixed => (Style::Note, "mixed"),
    };
    let mut lines = format!("{}: {} {subject}", out.paint(style, word), direction_name(direction));
    match answer.action {
        Overall::Allow => lines.push_str(" may negotiate SMC\n"),
        Overall::Deny => lines.push_str(" stays plain TCP\n"),
        Overall::Mixed => lines.push_str(": it depends\n"),
    }
    if answer.regions.len() == 1 {
        lines.push_str(&format!(
            "  by {}\n",
            by(answer.by, answer.rule.as_deref(), answer.file.as_deref(), answer.line)
        ));
    } else {
        let rows: Vec<Vec<String>> = answer
            .regions
            .iter()
            .map(|r| {
                let all = |values: &[String], word: &str| {
                    if values.is_empty() {
                        format!("any {word}")
                    } else {
                        format!("{word} {}", values.join(", "))
                    }
                };
                vec![
                    format!("  {}", r.action),
                    all(&r.ports, "port"),
                    all(&r.local, "local address"),
                    format!("by {}", by(r.by, r.rule.as_deref(), r.file.as_deref(), r.line)),
                ]
            })
            .collect();
        lines.push_str(&columns(&rows, &[]));
    }
    if !answer.passed.is_empty() {
        lines.push_str("  passed over:\n");
        let rows: Vec<Vec<String>> =
            answer.passed.iter().map(|p| vec![format!("    {}", p.rule), p.reason.clone()]).collect();
        lines.push_str(&columns(&rows, &[]));
    }
    lines
}

fn by(kind: &str, rule: Option<&str>, file: Option<&str>, line: Option<usize>) -> String {
    match (rule, file, line) {
        (Some(rule), Some(file), Some(line)) => format!("rule {rule} ({file}:{line})"),
        (Some(rule), _, _) => format!("rule {rule}"),
        _ if kind == "default" => "[default]: no rule matches".to_owned(),
        _ => kind.to_owned(),
    }
}
