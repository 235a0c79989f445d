//! What `probe` prints for people.

use super::milliseconds;
use crate::{
    cli::{
        output::{Output, Style, columns},
        words::count,
    },
    guard::probe::{
        Answer, Class, Remedy, Report, Target, clc::Reply, negotiation::Outcome, options::Kind,
        remedy::remedy,
    },
};

/// A row for each target; then what is to be said and done about those that need it, or all (`details`).
pub(super) fn text(reports: &[Report], skipped: &[String], details: bool, out: &Output) -> String {
    let rows: Vec<Vec<String>> = reports.iter().map(|report| row(report, out)).collect();
    let mut text = columns(&rows, &[]);
    for report in reports {
        let block = block(report, details);
        if !block.is_empty() {
            text.push_str(&format!("\n{}\n{block}", out.paint(Style::Bold, &shown(&report.target))));
        }
    }
    if !skipped.is_empty() {
        text.push_str("\nAllowed by the policy and not probed:\n");
        skipped.iter().for_each(|what| text.push_str(&format!("  {what}\n")));
    }
    if reports.len() > 1 {
        let echoes = reports.iter().filter(|report| report.finding.class == Class::Echoes).count();
        let verb = if echoes == 1 { "echoes" } else { "echo" };
        text.push_str(&format!("\n{} probed, {echoes} {verb}.\n", count(reports.len(), "target")));
    }
    text
}

fn row(report: &Report, out: &Output) -> Vec<String> {
    let Report { target, seen, finding } = report;
    let style = match finding.class {
        Class::Echoes => Style::Bad,
        Class::Drops | Class::Strips | Class::Unclear => Style::Note,
        Class::Smc | Class::Ignores => Style::Good,
        Class::Closed | Class::NoAnswer | Class::NotSent => Style::Dim,
    };
    let ping = seen.ping.map_or("no ping".to_owned(), |time| format!("ping {:.1} ms", milliseconds(time)));
    vec![shown(target), ping, out.paint(style, finding.class.words())]
}

fn shown(target: &Target) -> String {
    match &target.name {
        Some(name) => format!("{name} {}", target.address),
        None => target.address.to_string(),
    }
}

/// What stands below the table about one target.
fn block(report: &Report, details: bool) -> String {
    let Report { target, seen, finding } = report;
    let class = finding.class;
    let mut text = String::new();
    let remedy = remedy(target.address, finding);
    if !details && remedy.is_none() && finding.notes.is_empty() && class != Class::Unclear {
        return text;
    }
    let mut line = |words: &str| text.push_str(&format!("  {words}\n"));
    line(&format!("{}: {}", class.words(), class.meaning()));
    finding.notes.iter().for_each(|note| line(note));
    if details {
        let asked = Kind::ALL.into_iter().filter_map(|kind| Some((kind, seen.answer(kind)?)));
        asked.for_each(|(kind, answer)| line(&format!("SYN with {kind}: {}", answered(answer))));
        seen.negotiations.iter().for_each(|outcome| line(&format!("CLC proposal: {}", ended(outcome))));
    }
    if let Some(Remedy::Rule { toml }) = remedy {
        line("to keep SMC away from it, put this rule before those that allow it, and `smc-policy apply`:");
        toml.lines().for_each(|rule| line(&format!("  {rule}")));
    }
    text
}

fn answered(answer: &Answer) -> String {
    match answer {
        Answer::SynAck { returned, after } => {
            let names = returned.names();
            let with = if names.is_empty() { String::new() } else { format!(" with {}", names.join(", ")) };
            format!("SYN-ACK{with}, {:.1} ms", milliseconds(*after))
        }
        Answer::Reset { after } => format!("reset, {:.1} ms", milliseconds(*after)),
        Answer::Unreachable { why } => (*why).to_owned(),
        Answer::Silence => "no answer".to_owned(),
        Answer::NotSent { error } => error.clone(),
    }
}

fn ended(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Replied { reply: Reply::Accept } => "CLC accept".to_owned(),
        Outcome::Replied { reply: Reply::Decline { diagnosis: Some(code) } } => {
            format!("CLC decline {code:#010x}")
        }
        Outcome::Replied { reply: Reply::Decline { diagnosis: None } } => "CLC decline".to_owned(),
        Outcome::Replied { reply: Reply::Foreign { bytes } } => {
            format!("{} that are no CLC message", count(bytes.len(), "byte"))
        }
        Outcome::Silent => "no answer".to_owned(),
        Outcome::Reset => "reset".to_owned(),
        Outcome::Closed => "closed".to_owned(),
        Outcome::NoHandshake => "no handshake with the SMC option".to_owned(),
    }
}
