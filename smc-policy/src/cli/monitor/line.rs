//! An event as a line of text or JSON.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
};

use serde::Serialize;
use smc_policy_common::{
    event::{Event, Kind},
    quarantine::Cause,
};

use crate::{
    cli::{
        output::{Output, Style},
        words::duration,
    },
    guard::quarantine::{Clock, cause_name},
    policy::address,
};

/// Who decided.
#[derive(Clone, Copy, Debug)]
pub(super) enum By<'a> {
    /// A rule, and its file.
    Rule(&'a str, &'a Path),
    /// A line of `[default]`.
    Default,
    /// The quarantine.
    Quarantine,
    /// The record of that generation is gone.
    Unknown,
    /// It is no decision.
    Nobody,
}

/// A line. What a kind does not have is left out.
#[derive(Debug, Serialize)]
pub(super) struct Line<'a> {
    /// RFC 3339, UTC.
    time: String,
    kind: &'static str,
    direction: &'static str,
    peer: IpAddr,
    /// The service port; `null`: all of them.
    port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    local: Option<IpAddr>,
    /// This host's port of the connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    local_port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decision: Option<Decision<'a>>,
    /// The SYN-ACK was left as it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    left: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<&'static str>,
    /// Hexadecimal.
    #[serde(skip_serializing_if = "String::is_empty")]
    evidence: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    entry: Option<Entry>,
}

#[derive(Debug, Serialize)]
struct Decision<'a> {
    action: &'static str,
    /// The table only observes: whatever was decided, the connection may negotiate SMC.
    observed: bool,
    /// "rule", "default", "quarantine".
    by: Option<&'static str>,
    rule: Option<&'a str>,
    file: Option<&'a Path>,
    generation: u64,
    slot: u32,
}

#[derive(Debug, Serialize)]
struct Entry {
    /// It was there before.
    renewed: bool,
    count: u32,
    /// How long it holds, seconds.
    span: u32,
    /// RFC 3339, UTC.
    until: String,
}

const NANOSECOND: u64 = 1_000_000_000;

impl<'a> Line<'a> {
    /// `None`: of a kind that this version does not know.
    pub(super) fn of(event: &Event, clock: &Clock, by: By<'a>) -> Option<Self> {
        let kind = Kind::from_u8(event.kind)?;
        let is = |flag: u8| event.flags & flag != 0;
        let (word, rule, file) = match by {
            By::Rule(name, file) => (Some("rule"), Some(name), Some(file)),
            By::Default => (Some("default"), None, None),
            By::Quarantine => (Some("quarantine"), None, None),
            By::Unknown | By::Nobody => (None, None, None),
        };
        let length = usize::from(event.evidence_length).min(event.evidence.len());
        let has_local = kind != Kind::Quarantine;
        Some(Self {
            time: rfc3339(clock.wall_of(event.at)),
            kind: match kind {
                Kind::Decision => "decision",
                Kind::Echo => "echo",
                Kind::Quarantine => "quarantine",
                Kind::Reset => "reset",
            },
            direction: if is(Event::INBOUND) { "inbound" } else { "outbound" },
            peer: address::to_ip(event.peer),
            port: (event.port != 0 || kind != Kind::Quarantine).then_some(event.port),
            local: has_local.then(|| address::to_ip(event.local)),
            local_port: (event.local_port != 0).then_some(event.local_port),
            decision: (kind == Kind::Decision).then(|| Decision {
                action: if is(Event::ALLOWED) { "allow" } else { "deny" },
                observed: is(Event::OBSERVED),
                by: word,
                rule,
                file,
                generation: event.generation,
                slot: event.slot,
            }),
            left: (kind == Kind::Echo).then(|| is(Event::KEPT)),
            cause: Cause::from_u8(event.cause).map(cause_name),
            evidence: event.evidence[..length].iter().map(|byte| format!("{byte:02x}")).collect(),
            entry: (kind == Kind::Quarantine).then(|| Entry {
                renewed: is(Event::RENEWED),
                count: event.count,
                span: event.span,
                until: rfc3339(clock.wall_of(event.until)),
            }),
        })
    }

    /// For people.
    pub(super) fn text(&self, out: &Output) -> String {
        let Self { time, kind, direction, .. } = self;
        let peer = match self.port {
            // Inbound it is this host's.
            Some(port) if *direction == "outbound" => SocketAddr::new(self.peer, port).to_string(),
            _ => self.peer.to_string(),
        };
        let local = match (self.local, self.port, self.local_port) {
            (Some(local), Some(port), _) if *direction == "inbound" => {
                SocketAddr::new(local, port).to_string()
            }
            (Some(local), _, Some(port)) => SocketAddr::new(local, port).to_string(),
            (Some(local), ..) => local.to_string(),
            (None, ..) => String::new(),
        };
        let (head, what) = match (&self.decision, &self.entry) {
            (Some(decision), _) => {
                let (word, style) = match decision.action {
                    "allow" => ("allow", Style::Good),
                    _ => ("deny", Style::Bad),
                };
                let observed = if decision.observed { " (only observed)" } else { "" };
                let by = match (decision.by, decision.rule) {
                    (_, Some(rule)) => format!("rule {rule}"),
                    (Some("default"), _) => "[default]".to_owned(),
                    (Some(by), _) => by.to_owned(),
                    (None, None) => format!("slot {} of generation {}", decision.slot, decision.generation),
                };
                ((word, style), format!("{by}{observed}"))
            }
            (None, Some(entry)) => {
                let met = if entry.renewed { format!("met {} times", entry.count) } else { "new".to_owned() };
                let cause = self.cause.unwrap_or("?");
                (
                    ("quarantine", Style::Note),
                    format!("{cause}, {met}, for {}", duration(u64::from(entry.span))),
                )
            }
            (None, None) if self.left == Some(true) => {
                ((*kind, Style::Note), format!("left as it is ({})", self.evidence))
            }
            (None, None) if self.left == Some(false) => {
                ((*kind, Style::Note), format!("blanked ({})", self.evidence))
            }
            (None, None) => ((*kind, Style::Bad), "by the peer, after its echo was blanked".to_owned()),
        };
        let between = match (local.is_empty(), *direction) {
            (true, _) => format!("to {peer}"),
            (_, "outbound") => format!("{local} to {peer}"),
            _ => format!("{peer} to {local}"),
        };
        format!("{time}  {}  {between}  {what}", out.paint(head.1, &format!("{:<10}", head.0)))
    }
}

/// A moment, nanoseconds since 1970, in UTC to the millisecond.
fn rfc3339(ns: u64) -> String {
    let seconds = ns / NANOSECOND;
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March, so that a leap day is a year's last; eras of 400 years.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let (year, month) = (era * 400 + year, if month < 10 { month + 3 } else { month - 9 });
    let year = if month <= 2 { year + 1 } else { year };
    let (hour, minute, second) = (rest / 3_600, rest / 60 % 60, rest % 60);
    let ms = ns % NANOSECOND / 1_000_000;
    format!("{year:04}-{month:02}-{of_month:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

#[cfg(test)]
mod tests {
    use smc_policy_common::query::Addr;

    use super::*;

    const CLOCK: Clock = Clock { boot: 5 * NANOSECOND, wall: 1_800_000_000 * NANOSECOND };

    fn event(kind: Kind) -> Event {
        Event {
            version: 1,
            kind: kind as u8,
            at: CLOCK.boot - 250_000_000,
            peer: Addr::v4(0xc000_0201),
            local: Addr::v4(0x0a00_0005),
            port: 443,
            ..Event::default()
        }
    }

    fn shown(event: &Event, by: By<'_>) -> String {
        Line::of(event, &CLOCK, by).unwrap().text(&Output::new(false))
    }

    fn json(event: &Event, by: By<'_>) -> String {
        serde_json::to_string(&Line::of(event, &CLOCK, by).unwrap()).unwrap()
    }

    #[test]
    fn times() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(951_827_696 * NANOSECOND + 7_999_999), "2000-02-29T12:34:56.007Z");
        assert_eq!(rfc3339(4_102_444_799 * NANOSECOND), "2099-12-31T23:59:59.000Z");
        assert_eq!(rfc3339(u64::MAX), "2554-07-21T23:34:33.709Z");
    }

    #[test]
    fn decisions() {
        let event = Event { slot: 7, generation: 3, ..event(Kind::Decision) };
        let rule = By::Rule("no-smc", Path::new("/etc/smc-policy/policy.d/a.toml"));
        insta::assert_snapshot!(shown(&event, rule), @"2027-01-15T07:59:59.750Z  deny        10.0.0.5 to 192.0.2.1:443  rule no-smc");
        insta::assert_snapshot!(json(&event, rule), @r#"{"time":"2027-01-15T07:59:59.750Z","kind":"decision","direction":"outbound","peer":"192.0.2.1","port":443,"local":"10.0.0.5","decision":{"action":"deny","observed":false,"by":"rule","rule":"no-smc","file":"/etc/smc-policy/policy.d/a.toml","generation":3,"slot":7}}"#);
        insta::assert_snapshot!(shown(&event, By::Unknown), @"2027-01-15T07:59:59.750Z  deny        10.0.0.5 to 192.0.2.1:443  slot 7 of generation 3");
        let inbound = Event { flags: Event::INBOUND | Event::ALLOWED, ..event };
        insta::assert_snapshot!(shown(&inbound, By::Default), @"2027-01-15T07:59:59.750Z  allow       192.0.2.1 to 10.0.0.5:443  [default]");
        let observed = Event { flags: Event::OBSERVED, ..event };
        insta::assert_snapshot!(shown(&observed, By::Quarantine), @"2027-01-15T07:59:59.750Z  deny        10.0.0.5 to 192.0.2.1:443  quarantine (only observed)");
    }

    #[test]
    fn the_guards_events() {
        let mut echo = Event { local_port: 40_000, evidence_length: 4, ..event(Kind::Echo) };
        echo.evidence[..4].copy_from_slice(&[254, 4, 83, 80]);
        insta::assert_snapshot!(shown(&echo, By::Nobody), @"2027-01-15T07:59:59.750Z  echo        10.0.0.5:40000 to 192.0.2.1:443  blanked (fe045350)");
        insta::assert_snapshot!(json(&echo, By::Nobody), @r#"{"time":"2027-01-15T07:59:59.750Z","kind":"echo","direction":"outbound","peer":"192.0.2.1","port":443,"local":"10.0.0.5","local_port":40000,"left":false,"evidence":"fe045350"}"#);
        let left = Event { flags: Event::KEPT, ..echo };
        insta::assert_snapshot!(shown(&left, By::Nobody), @"2027-01-15T07:59:59.750Z  echo        10.0.0.5:40000 to 192.0.2.1:443  left as it is (fe045350)");
        let entered = Event {
            cause: Cause::Echo as u8,
            count: 2,
            span: 7200,
            until: CLOCK.boot + 3600 * NANOSECOND,
            flags: Event::RENEWED,
            peer: Addr::v6(0x2001_0db8 << 96 | 1),
            local: Addr::default(),
            ..event(Kind::Quarantine)
        };
        insta::assert_snapshot!(shown(&entered, By::Nobody), @"2027-01-15T07:59:59.750Z  quarantine  to [2001:db8::1]:443  echo, met 2 times, for 2 h");
        insta::assert_snapshot!(json(&entered, By::Nobody), @r#"{"time":"2027-01-15T07:59:59.750Z","kind":"quarantine","direction":"outbound","peer":"2001:db8::1","port":443,"cause":"echo","entry":{"renewed":true,"count":2,"span":7200,"until":"2027-01-15T09:00:00.000Z"}}"#);
        let whole = Event { port: 0, flags: 0, ..entered };
        insta::assert_snapshot!(shown(&whole, By::Nobody), @"2027-01-15T07:59:59.750Z  quarantine  to 2001:db8::1  echo, new, for 2 h");
        let reset = Event { local_port: 40_000, ..event(Kind::Reset) };
        insta::assert_snapshot!(shown(&reset, By::Nobody), @"2027-01-15T07:59:59.750Z  reset       10.0.0.5:40000 to 192.0.2.1:443  by the peer, after its echo was blanked");
        assert!(Line::of(&Event { kind: 9, ..reset }, &CLOCK, By::Nobody).is_none());
    }
}
