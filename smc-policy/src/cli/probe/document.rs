//! What `probe --json` prints.

use std::net::IpAddr;

use serde::Serialize;

use super::milliseconds;
use crate::{
    cli::quarantine::Recorded,
    guard::{
        probe::{Answer, Class, Remedy, Report, negotiation::Outcome, options::Kind, remedy::remedy},
        quarantine::Record,
    },
};

#[derive(Serialize)]
pub(super) struct Document<'a> {
    /// How many targets echo.
    echoes: usize,
    targets: Vec<TargetDocument<'a>>,
    /// What the policy allows and is not probed.
    skipped: &'a [String],
}

#[derive(Serialize)]
struct TargetDocument<'a> {
    address: IpAddr,
    port: u16,
    /// The name that it was found by.
    name: Option<&'a str>,
    class: Class,
    meaning: &'static str,
    notes: &'a [String],
    /// Time to the answer to an ICMP echo request; `null`: none came.
    ping_milliseconds: Option<f64>,
    syns: Vec<SynDocument<'a>>,
    negotiations: &'a [Outcome],
    remedy: Option<Remedy>,
    /// What `--quarantine` did; `null`: it was not asked for.
    quarantine: Option<QuarantineDocument<'a>>,
}

#[derive(Serialize)]
struct QuarantineDocument<'a> {
    /// It was recorded: it echoes.
    recorded: bool,
    /// "kernel", or "file" when no policy is in force.
    source: &'static str,
    entry: Option<&'a Record>,
    /// Seconds.
    expires_in: Option<u64>,
}

#[derive(Serialize)]
struct SynDocument<'a> {
    /// What it carried besides ordinary options.
    options: Kind,
    /// "syn-ack", "reset", "unreachable", "none", "not-sent".
    answer: &'static str,
    /// What came back besides ordinary options.
    returned: Vec<&'static str>,
    milliseconds: Option<f64>,
    why: Option<&'a str>,
}

impl<'a> Document<'a> {
    pub(super) fn new(reports: &'a [Report], skipped: &'a [String], recorded: Option<&'a Recorded>) -> Self {
        let target = |(at, report)| TargetDocument {
            quarantine: recorded.map(|recorded| QuarantineDocument::new(recorded, at)),
            ..TargetDocument::new(report)
        };
        Self {
            echoes: reports.iter().filter(|report| report.finding.class == Class::Echoes).count(),
            targets: reports.iter().enumerate().map(target).collect(),
            skipped,
        }
    }
}

impl<'a> TargetDocument<'a> {
    fn new(report: &'a Report) -> Self {
        let Report { target, seen, finding } = report;
        Self {
            address: target.address.ip(),
            port: target.address.port(),
            name: target.name.as_deref(),
            class: finding.class,
            meaning: finding.class.meaning(),
            notes: &finding.notes,
            ping_milliseconds: seen.ping.map(milliseconds),
            syns: Kind::ALL
                .into_iter()
                .filter_map(|kind| Some(SynDocument::new(kind, seen.answer(kind)?)))
                .collect(),
            negotiations: &seen.negotiations,
            remedy: remedy(target.address, finding),
            quarantine: None,
        }
    }
}

impl<'a> QuarantineDocument<'a> {
    fn new(recorded: &'a Recorded, at: usize) -> Self {
        let entry = recorded.entries.get(at).and_then(Option::as_ref);
        Self {
            recorded: entry.is_some(),
            source: recorded.source,
            entry,
            expires_in: entry.map(|entry| entry.until.saturating_sub(recorded.now)),
        }
    }
}

impl<'a> SynDocument<'a> {
    fn new(options: Kind, answer: &'a Answer) -> Self {
        let (answer, returned, after, why) = match answer {
            Answer::SynAck { returned, after } => ("syn-ack", returned.names(), Some(*after), None),
            Answer::Reset { after } => ("reset", vec![], Some(*after), None),
            Answer::Unreachable { why } => ("unreachable", vec![], None, Some(*why)),
            Answer::Silence => ("none", vec![], None, None),
            Answer::NotSent { error } => ("not-sent", vec![], None, Some(error.as_str())),
        };
        Self { options, answer, returned, milliseconds: after.map(milliseconds), why }
    }
}
