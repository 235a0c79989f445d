//! What follows for the quarantine from what a probe found. Pure.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use smc_policy_common::quarantine::{Cause, ECHO_SPAN, EVIDENCE};

use super::{
    probe::{
        Answer, Class, Observations, Report, clc::Reply, negotiation::Outcome, options::Kind,
        options::Returned,
    },
    quarantine::{Record, Store},
};

/// Which entries are to be probed again.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Peers that were named, with a port or without; none: all entries.
    pub named: Vec<(IpAddr, Option<u16>)>,
    /// An operator's entries too, though they are not named.
    pub operators: bool,
}

impl Wanted {
    /// Whether an entry is meant. A peer that is named with a port means the entry of that service, and that of all its
    /// services: while one of the two holds, there is no SMC with it.
    pub fn means(&self, record: &Record) -> bool {
        self.named.is_empty() || self.names(record)
    }

    fn names(&self, record: &Record) -> bool {
        let is_it = |port: &Option<u16>| port.is_none_or(|port| record.port == port || record.port == 0);
        self.named.iter().any(|(peer, port)| *peer == record.peer && is_it(port))
    }

    /// The services to probe for an entry. `all`: every entry, expired ones too, whose ports are known to be in use.
    ///
    /// # Errors
    /// Why it cannot or shall not be probed.
    pub fn services(&self, record: &Record, all: &[Record]) -> Result<Vec<SocketAddr>, String> {
        if matches!(record.cause, Cause::RdmaPath | Cause::LinkCheck) {
            return Err(
                "is about RDMA, which a probe does not test: `smc-policy quarantine remove` lifts it".into(),
            );
        }
        if is_operators(record) && !self.operators && !self.names(record) {
            return Err("an operator's: name it, or say --all".into());
        }
        let mut ports = BTreeSet::from([record.port]);
        if record.port == 0 {
            let others = all.iter().filter(|other| other.peer == record.peer).map(|other| other.port);
            let named = self.named.iter().filter(|(peer, _)| *peer == record.peer);
            ports = others.chain(named.filter_map(|(_, port)| *port)).filter(|port| *port != 0).collect();
        }
        if ports.is_empty() {
            let example = SocketAddr::new(record.peer, 443);
            return Err(format!(
                "about all services, and none is known: name one (`smc-policy quarantine recheck {example}`)"
            ));
        }
        Ok(ports.into_iter().map(|port| SocketAddr::new(record.peer, port)).collect())
    }
}

/// Whether a person put it there. What a probe found, or programs learned, a probe may lift.
pub fn is_operators(record: &Record) -> bool {
    record.store == Store::Commanded && record.cause != Cause::Probe
}

/// What becomes of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Follows {
    /// It goes: the peer speaks SMC, or takes no part in it.
    Lift,
    /// It holds on, for at least [`ECHO_SPAN`]: the peer echoes.
    Confirm,
    /// It stays as it is, for this reason.
    Keep(String),
}

/// What follows for an entry from what was found about its services, at least one.
pub fn follows(record: &Record, found: &[&Report]) -> Follows {
    let echoes = found.iter().any(|report| report.finding.class == Class::Echoes);
    if echoes && is_operators(record) {
        return Follows::Keep("still echoes options; an operator's entry ends when its operator said".into());
    }
    if echoes {
        return Follows::Confirm;
    }
    let Some(doubtful) = found.iter().find(|report| !is_clean(report.finding.class)) else {
        return if found.is_empty() { Follows::Keep("was not probed".into()) } else { Follows::Lift };
    };
    let what = match doubtful.finding.class {
        Class::Closed => "nobody listens there now",
        Class::NoAnswer => "does not answer",
        Class::NotSent => "cannot be reached from here",
        Class::Unclear => "answers with the SMC option, but did not say whether it speaks SMC; try again",
        Class::Drops => "drops SYNs with the SMC option: those without get through at once",
        Class::Strips => "gives up ordinary options when a SYN has the SMC option",
        // Not doubtful.
        Class::Echoes | Class::Smc | Class::Ignores => "",
    };
    let port =
        if record.port == 0 { format!("port {}: ", doubtful.target.address.port()) } else { String::new() };
    Follows::Keep(format!("{port}{what}"))
}

/// The same when the probe is over. `before`: the entry as it was when the probe began; `now`: as it is.
pub fn reconsidered(follows: Follows, before: &Record, now: Option<&Record>) -> Follows {
    match (follows, now) {
        (Follows::Lift | Follows::Confirm, None) => Follows::Keep("was taken out meanwhile".into()),
        // A connection has seen what the probe has not.
        (Follows::Lift, Some(now)) if (now.count, now.cause) != (before.count, before.cause) => {
            Follows::Keep("was met again meanwhile".into())
        }
        (follows, _) => follows,
    }
}

/// Whether SMC can be offered to such a peer without harm.
fn is_clean(class: Class) -> bool {
    matches!(class, Class::Smc | Class::Ignores)
}

/// An entry whose peer was found to echo at `now` (seconds since 1970): a suspicion becomes a certainty, and holds for an hour
/// at least.
pub fn confirmed(record: &Record, found: &[&Report], now: u64) -> Record {
    let span = record.span.max(ECHO_SPAN);
    let is_suspicion = matches!(record.cause, Cause::Silence | Cause::Reset);
    let evidence = found.iter().map(|report| evidence(&report.seen)).find(|bytes| !bytes.is_empty());
    Record {
        cause: if is_suspicion { Cause::Probe } else { record.cause },
        span,
        until: record.until.max(now.saturating_add(span.into())),
        last_seen: now,
        count: record.count.saturating_add(1),
        evidence: evidence
            .filter(|_| is_suspicion || record.evidence.is_empty())
            .unwrap_or_else(|| record.evidence.clone()),
        ..record.clone()
    }
}

/// The entry by command about a peer that was found to echo at `now` (seconds since 1970). `before`: the one in its place.
/// `None`: it does not echo.
pub fn recorded(report: &Report, before: Option<&Record>, now: u64) -> Option<Record> {
    if report.finding.class != Class::Echoes {
        return None;
    }
    let (peer, port) = (report.target.address.ip(), report.target.address.port());
    // An operator's stays one: no probe may lift it by itself.
    let cause = before.filter(|b| is_operators(b) && b.holds(now)).map_or(Cause::Probe, |b| b.cause);
    let record = Record::commanded(peer, port, cause, None, before, now);
    let span = record.span.max(ECHO_SPAN);
    let until = record.until.max(now.saturating_add(span.into()));
    Some(Record { span, until, evidence: evidence(&report.seen), ..record })
}

/// What gave an echoing peer away: the options that it returned and cannot know, with the SMC option beside them; else the
/// first bytes that are no CLC message; else the SMC option that it does not mean.
fn evidence(seen: &Observations) -> Vec<u8> {
    let answers = || {
        // The canary's first: the SMC option is in its answer too.
        Kind::ALL.into_iter().rev().filter_map(|kind| match seen.answer(kind) {
            Some(Answer::SynAck { returned, .. }) => Some(returned),
            _ => None,
        })
    };
    let foreign = seen.negotiations.iter().find_map(|outcome| match outcome {
        Outcome::Replied { reply: Reply::Foreign { bytes } } => Some(bytes.clone()),
        _ => None,
    });
    let echoed = answers().find(|returned| returned.is_echo()).map(|returned| returned.bytes.clone());
    let smc = || answers().find(|returned: &&Returned| returned.smc).map(|returned| returned.bytes.clone());
    let mut bytes = echoed.or(foreign).or_else(smc).unwrap_or_default();
    bytes.truncate(EVIDENCE);
    bytes
}

#[cfg(test)]
mod tests;
