//! `explain`: what is decided for a peer, by which rule, and why; or what a fallback reason code means.

use std::{net::IpAddr, path::PathBuf};

use clap::Args;
use serde::Serialize;
use smc_policy_common::query::{Addr, Direction, Query};

use super::{
    check, live,
    outcome::{Done, Exit, Failure},
    output::{Output, Style, columns},
    quarantine::text,
    question::{self, Subject},
    sources,
    words::{count, duration, many},
};
use crate::{
    guard::quarantine::{Record, cause_name, in_words},
    kernel::{
        guard::{Quarantine, keep},
        hs_ctrl::Selected,
        instance::Instance,
    },
    paths::Paths,
    policy::{
        Action, Explanation, Policy, Question, Slots, decide,
        explain::{Held, Overall, Region, explain},
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
    /// Somebody else's smc_hs_ctrl, which decides as well.
    beside: Option<&'a str>,
    /// Quarantine entries in force about the peer and direction, whether or not they decide.
    quarantine: &'a [Record],
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
    in_force: Option<InForce>,
    /// Quarantine entries in force about the peer and direction.
    quarantine: Vec<Record>,
}

/// Of what is in force: what is needed to ask the kernel as well.
struct InForce {
    generation: u64,
    files_differ: bool,
    beside: Option<String>,
    instance: Instance,
    slots: Slots,
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
    let direction = if arguments.inbound { Direction::Inbound } else { Direction::Outbound };
    let question = Question {
        peer: live::address(ip),
        port,
        local: local.map(live::address),
        direction: Some(direction),
    };
    let (judge, answer) = if arguments.policy.is_empty() {
        by_what_is_in_force(paths, &question, &arguments.subject)?
    } else {
        let files = sources::read(paths, &arguments.policy)?;
        let judge = Judge {
            policy: check::usable(&files, out)?,
            observe: false,
            in_force: None,
            quarantine: Vec::new(),
        };
        let answer = explain(&judge.policy, &question, &[]);
        (judge, answer)
    };
    let only_observed = judge.observe && answer.action != Overall::Allow;
    let files_differ = judge.in_force.as_ref().is_some_and(|f| f.files_differ);
    let beside = judge.in_force.as_ref().and_then(|f| f.beside.as_deref());
    out.json(&ExplainDocument {
        peer: ip,
        port,
        local,
        direction: direction_name(direction),
        judged_by: if arguments.policy.is_empty() { "in force" } else { "files" },
        generation: judge.in_force.as_ref().map(|f| f.generation),
        mode: super::apply::mode_name(judge.observe),
        only_observed,
        files_differ,
        beside,
        quarantine: &judge.quarantine,
        explanation: &answer,
    });
    out.text(&answer_text(&arguments.subject, direction, &answer, out));
    out.text(&quarantine_text(&judge.quarantine, &answer, keep::clock().now()));
    if only_observed {
        out.text("Observe mode: the connection may negotiate SMC nevertheless.");
    }
    if let Some(name) = beside {
        out.text(&format!("Note: {}.", super::status::beside(name)));
    }
    if files_differ {
        out.text("Note: the policy files have changed since; this is what is in force. `smc-policy status` says more.");
    }
    Ok(if answer.action == Overall::Allow { Exit::Ok } else { Exit::No })
}

/// How often an apply may come between reading the record and asking the kernel.
const TRIES: u32 = 20;

/// Judges by the record of what is in force, and asks the tables in force whether they say the same.
fn by_what_is_in_force(
    paths: &Paths,
    question: &Question,
    subject: &str,
) -> Result<(Judge, Explanation), Failure> {
    for _ in 0..TRIES {
        let Some(mut judge) = in_force(paths)? else {
            let (policy, quarantine) = (Policy::default(), Vec::new());
            let judge = Judge { policy, observe: false, in_force: None, quarantine };
            let answer = Explanation { by: "nothing", ..explain(&judge.policy, question, &[]) };
            return Ok((judge, answer));
        };
        judge.quarantine = quarantine(paths, question)?;
        let held: Vec<Held> = judge.quarantine.iter().map(held).collect();
        let answer = explain(&judge.policy, question, &held);
        if let Some(in_force) = &judge.in_force
            && !ask_kernel(in_force, &judge.policy, question, &answer, subject)?
        {
            continue;
        }
        return Ok((judge, answer));
    }
    Err(Failure::new(Exit::Host, "the policy keeps changing; ask again when the applies are over"))
}

/// The policy in force, from its record. `None`: there is none.
fn in_force(paths: &Paths) -> Result<Option<Judge>, Failure> {
    let Some(super::in_force::Recorded { instance, record, policy, slots, selected }) =
        super::in_force::read(paths)?
    else {
        return Ok(None);
    };
    let files_differ = super::status::files_differ(paths, &record);
    let beside = match selected {
        Selected::Foreign(name) => Some(name),
        _ => None,
    };
    let in_force = InForce { generation: record.generation, files_differ, beside, instance, slots };
    let observe = record.config.observe;
    Ok(Some(Judge { policy, observe, in_force: Some(in_force), quarantine: Vec::new() }))
}

/// The quarantine entries in force that may decide what is asked.
fn quarantine(paths: &Paths, question: &Question) -> Result<Vec<Record>, Failure> {
    let Some(quarantine) = Quarantine::open(&paths.pins())? else { return Ok(Vec::new()) };
    let direction = question.direction.unwrap_or(Direction::Outbound);
    // The port of an inbound connection is ours: nobody's entry has it.
    let port = if direction == Direction::Inbound { Some(0) } else { question.port };
    let mut records = keep::about(paths, &quarantine, question.peer, port, &keep::clock())?;
    records.retain(|record| record.is_about(direction));
    Ok(records)
}

fn held(record: &Record) -> Held {
    Held {
        port: (record.port != 0).then_some(record.port),
        outbound: record.is_about(Direction::Outbound),
        inbound: record.is_about(Direction::Inbound),
    }
}

/// Why the peer is in quarantine, what that means here, and how to change it.
fn quarantine_text(records: &[Record], answer: &Explanation, now: u64) -> String {
    let mut lines = String::new();
    for record in records {
        let (seen, left) = (now.saturating_sub(record.last_seen), record.until.saturating_sub(now));
        let peer = text::peer(record);
        lines.push_str(&format!(
            "  quarantine {peer}: {} ({})\n    seen {}, last {} ago; expires in {}\n",
            in_words(record.cause),
            cause_name(record.cause),
            many(record.count as usize, "time", "times"),
            duration(seen),
            duration(left)
        ));
        if !record.evidence.is_empty() {
            let bytes: Vec<String> = record.evidence.iter().map(|byte| format!("{byte:02x}")).collect();
            lines.push_str(&format!("    evidence: {}\n", bytes.join(" ")));
        }
        if record.resets > 0 {
            lines.push_str(&format!(
                "    after its answer lost the SMC option, it reset {} before it had sent anything: perhaps it is a genuine\n    \
                 SMC server behind something that echoes options. If SMC works there, an allow rule with trust = true lets it;\n    \
                 a deny rule makes the first connection plain TCP at both ends, too\n",
                count(record.resets.into(), "connection")
            ));
        }
        if let Some(comment) = &record.comment {
            lines.push_str(&format!("    comment: {comment}\n"));
        }
    }
    if answer.regions.iter().any(|region| region.by == "quarantine") {
        lines.push_str(
            "  `smc-policy quarantine remove` lifts it; an allow rule with trust = true exempts a peer for good\n",
        );
    } else if !records.is_empty() {
        // What the kernel does as well: it looks into the quarantine after the rules, if these allow without trust.
        lines.push_str(match answer.action {
            Overall::Deny => "  the quarantine does not decide: the policy denies it in any case\n",
            Overall::Allow => "  the quarantine does not decide: the rule has trust = true\n",
            Overall::Mixed => {
                "  the quarantine does not decide: rules with trust = true are exempt, and a deny needs no second reason\n"
            }
        });
    }
    lines
}

/// The tables in force must say the same as the recorded rules, region by region. False: another generation is in force
/// now, and says nothing about this one.
fn ask_kernel(
    in_force: &InForce,
    policy: &Policy,
    question: &Question,
    answer: &Explanation,
    subject: &str,
) -> Result<bool, Failure> {
    let InForce { generation, instance, slots, .. } = in_force;
    let queries: Vec<_> = answer.regions.iter().filter_map(|r| sample(r, question)).collect();
    let answers = instance.query().ask(&queries)?;
    if instance.generation() != *generation {
        return Ok(false);
    }
    for (query, kernel) in queries.iter().zip(answers) {
        let decision = decide(policy, query);
        let expected = (decision.action == Action::Allow, slots.of(decision.by));
        if kernel.map(|(allow, slot)| (allow, Some(slot))) != Some(expected) {
            return Err(Failure::new(
                Exit::Host,
                format!(
                    "the kernel's tables and the record of the policy in force disagree about {subject} \
                     ({kernel:?} against {expected:?}); this is a defect: `smc-policy detach` and `apply` load them \
                     anew, please report it"
                ),
            ));
        }
    }
    Ok(true)
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

fn answer_text(subject: &str, direction: Direction, answer: &Explanation, out: &Output) -> String {
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
    if answer.by == "nothing" {
        lines.push_str("  no policy is in force\n");
    } else if answer.regions.len() == 1 {
        lines.push_str(&format!("  by {}\n", by(&answer.regions[0])));
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
                    format!("by {}", by(r)),
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

/// Who decides, and over whose head.
fn by(region: &Region) -> String {
    let named = |kind: &str, rule: &Option<String>, file: &Option<String>, line: Option<usize>| match (
        rule, file, line,
    ) {
        (Some(rule), Some(file), Some(line)) => format!("rule {rule} ({file}:{line})"),
        (Some(rule), _, _) => format!("rule {rule}"),
        _ if kind == "default" => "[default]: no rule matches".to_owned(),
        _ if kind == "quarantine" => "the quarantine".to_owned(),
        _ => kind.to_owned(),
    };
    let Region { by, rule, file, line, otherwise, .. } = region;
    let over = otherwise.as_ref().map(|o| format!(", over {}", named(o.by, &o.rule, &o.file, o.line)));
    named(by, rule, file, *line) + &over.unwrap_or_default()
}

#[cfg(test)]
mod tests;
