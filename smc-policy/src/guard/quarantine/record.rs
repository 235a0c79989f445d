//! One entry of the quarantine, and the names of its causes.

use std::net::IpAddr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use smc_policy_common::quarantine::{Cause, ECHO_SPAN, EVIDENCE, Entry, Key, LONGEST_SPAN, next_span};
use smc_policy_common::query::Direction;

use crate::policy::address;

/// Which of the two maps has an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Store {
    /// What programs learned: the least recently used go when it is full.
    Learned,
    /// What was decided by command: full is an error.
    Commanded,
}

/// An entry as files have it: times are seconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The peer; never a v4-mapped address.
    #[serde(deserialize_with = "canonical")]
    pub peer: IpAddr,
    /// Its service port; 0: all.
    pub port: u16,
    /// The map it is in.
    pub store: Store,
    /// Why.
    #[serde(serialize_with = "write_cause", deserialize_with = "read_cause")]
    pub cause: Cause,
    /// [`Entry::OUTBOUND`], [`Entry::INBOUND`]; inbound only for whole addresses.
    #[serde(rename = "direction", serialize_with = "write_directions", deserialize_with = "read_directions")]
    pub directions: u8,
    /// How often the cause was met; at least 1.
    pub count: u32,
    /// When it was met first.
    pub first_seen: u64,
    /// When it was met last.
    pub last_seen: u64,
    /// From then on it is none.
    pub until: u64,
    /// How long it holds each time, seconds; at most [`longest`]; grows while it repeats.
    pub span: u32,
    /// What the peer sent that gave it away, hexadecimal in files; at most [`EVIDENCE`] bytes.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        serialize_with = "write_hex",
        deserialize_with = "read_hex"
    )]
    pub evidence: Vec<u8>,
    /// How often the peer reset a connection whose SYN-ACK had lost the SMC option, before it had sent anything; at most
    /// 255. Then it may be a genuine SMC server behind something that echoes options.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub resets: u8,
    /// What an operator noted. The kernel has no room for it: it is in files only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comment: Option<String>,
}

/// The longest time that an entry holds, seconds: 7 d.
pub const fn longest() -> u64 {
    LONGEST_SPAN as u64
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn is_zero(number: &u8) -> bool {
    *number == 0
}

/// The order of lists: by peer (IPv4 first), port and map.
pub fn sort(records: &mut [Record]) {
    records.sort_by_key(key);
}

/// What there is one entry of.
pub fn key(record: &Record) -> (IpAddr, u16, Store) {
    (record.peer, record.port, record.store)
}

impl Record {
    /// An entry that is made by command, or made again. `before`: the one in its place. `span`: how long, seconds; none:
    /// an hour, the same again while it holds, and twice as long each time it is made again after that. Evidence and
    /// comment stay unless there are new ones.
    pub fn commanded(
        peer: IpAddr,
        port: u16,
        cause: Cause,
        span: Option<u32>,
        before: Option<&Self>,
        now: u64,
    ) -> Self {
        let known = before.map(|b| Entry { until: b.until, span: b.span, ..Entry::default() });
        let chosen = match (span, &known) {
            (Some(span), _) => span,
            (None, Some(known)) => next_span(known, now, ECHO_SPAN),
            (None, None) => ECHO_SPAN,
        };
        let until = now.saturating_add(chosen.into());
        let kept = before.filter(|_| span.is_none()).map_or(0, |b| b.until);
        Self {
            peer,
            port,
            store: Store::Commanded,
            cause,
            directions: directions_of(cause),
            count: before.map_or(0, |b| b.count).saturating_add(1),
            first_seen: before.map_or(now, |b| b.first_seen.min(now)),
            last_seen: now,
            until: until.max(kept),
            span: chosen,
            evidence: before.map(|b| b.evidence.clone()).unwrap_or_default(),
            resets: before.map_or(0, |b| b.resets),
            comment: before.and_then(|b| b.comment.clone()),
        }
    }

    /// The key in the kernel.
    pub fn kernel_key(&self) -> Key {
        Key::new(address::from_ip(self.peer), self.port)
    }

    /// Whether it holds at this time, seconds since 1970.
    pub fn holds(&self, now: u64) -> bool {
        now < self.until
    }

    /// Whether it is about connections of this direction.
    pub fn is_about(&self, direction: Direction) -> bool {
        // At a time when every entry holds.
        self.entry(u64::MAX, 0, 0).holds(direction, 0)
    }

    /// As the kernel has it, with these times (nanoseconds since boot).
    pub(super) fn entry(&self, until: u64, first_seen: u64, last_seen: u64) -> Entry {
        let mut evidence = [0; EVIDENCE];
        let length = self.evidence.len().min(EVIDENCE);
        evidence[..length].copy_from_slice(&self.evidence[..length]);
        Entry {
            until,
            first_seen,
            last_seen,
            count: self.count,
            span: self.span,
            cause: self.cause as u8,
            directions: self.directions,
            evidence_length: length as u8,
            resets: self.resets,
            reserved: [0; 4],
            evidence,
        }
    }

    /// What is wrong with it, if anything.
    pub(super) fn defect(&self) -> Option<String> {
        if self.directions & Entry::INBOUND != 0 && self.port != 0 {
            return Some("an entry for connections from the peer is for all ports: port must be 0".into());
        }
        if self.count == 0 {
            return Some("count must be at least 1".into());
        }
        if u64::from(self.span) > longest() {
            return Some(format!("span must be at most {} (7 d)", longest()));
        }
        if self.evidence.len() > EVIDENCE {
            return Some(format!("evidence has at most {EVIDENCE} bytes"));
        }
        None
    }
}

/// The directions that a cause keeps from SMC. A path that does not carry RDMA does so whoever connects.
pub fn directions_of(cause: Cause) -> u8 {
    match cause {
        Cause::RdmaPath | Cause::LinkCheck => Entry::OUTBOUND | Entry::INBOUND,
        _ => Entry::OUTBOUND,
    }
}

/// The name of a cause in files and on the command line.
pub fn cause_name(cause: Cause) -> &'static str {
    match cause {
        Cause::Echo => "echo",
        Cause::ShortEcho => "short-echo",
        Cause::NoClc => "no-clc",
        Cause::Silence => "silence",
        Cause::Reset => "reset",
        Cause::RdmaPath => "rdma-path",
        Cause::Operator => "operator",
        Cause::Probe => "probe",
        Cause::LinkCheck => "link-check",
    }
}

/// The cause of this name.
///
/// # Errors
/// The names that there are.
pub fn cause_named(name: &str) -> Result<Cause, String> {
    Cause::ALL.into_iter().find(|cause| cause_name(*cause) == name).ok_or_else(|| {
        let names: Vec<&str> = Cause::ALL.into_iter().map(cause_name).collect();
        format!("'{name}' is no cause; there are {}", names.join(", "))
    })
}

/// A cause in words, of the peer.
pub fn in_words(cause: Cause) -> &'static str {
    match cause {
        Cause::Echo => "it echoes TCP options: its SYN-ACK returned this host's marker",
        Cause::ShortEcho => "it echoes TCP options: its SYN-ACK returned this host's short marker",
        Cause::NoClc => "it accepted SMC and then sent something that is no SMC message",
        Cause::Silence => "it accepted SMC and then did not answer",
        Cause::Reset => "it accepted SMC and then closed the connection",
        Cause::RdmaPath => "RDMA between it and this host does not work",
        Cause::Operator => "an operator said so",
        Cause::Probe => "a probe found that it echoes TCP options",
        Cause::LinkCheck => "a link check found that RDMA between it and this host does not work",
    }
}

fn canonical<'de, D: Deserializer<'de>>(from: D) -> Result<IpAddr, D::Error> {
    IpAddr::deserialize(from).map(|ip| ip.to_canonical())
}

fn write_cause<S: Serializer>(cause: &Cause, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(cause_name(*cause))
}

fn read_cause<'de, D: Deserializer<'de>>(from: D) -> Result<Cause, D::Error> {
    cause_named(&String::deserialize(from)?).map_err(D::Error::custom)
}

fn write_directions<S: Serializer>(directions: &u8, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(match (directions & Entry::OUTBOUND != 0, directions & Entry::INBOUND != 0) {
        (true, true) => "both",
        (false, true) => "inbound",
        _ => "outbound",
    })
}

fn read_directions<'de, D: Deserializer<'de>>(from: D) -> Result<u8, D::Error> {
    match String::deserialize(from)?.as_str() {
        "outbound" => Ok(Entry::OUTBOUND),
        "inbound" => Ok(Entry::INBOUND),
        "both" => Ok(Entry::OUTBOUND | Entry::INBOUND),
        other => Err(D::Error::custom(format!("'{other}' is no direction; write outbound, inbound or both"))),
    }
}

fn write_hex<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

fn read_hex<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(from)?;
    let digit = |c: u8| char::from(c).to_digit(16).map(|digit| digit as u8);
    let pair = |pair: &[u8]| match pair {
        [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
        _ => None,
    };
    let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(pair).collect();
    bytes.ok_or_else(|| D::Error::custom(format!("'{text}' is not hexadecimal")))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const HOUR: u64 = 3600;

    pub(in crate::guard::quarantine) fn record(peer: &str, port: u16, cause: Cause, now: u64) -> Record {
        Record::commanded(peer.parse().unwrap(), port, cause, None, None, now)
    }

    #[test]
    fn an_entry_made_again_holds_twice_as_long() {
        let mut last = record("192.0.2.1", 443, Cause::Operator, 1000);
        assert_eq!((last.count, last.span, last.until), (1, 3600, 1000 + HOUR));
        last.comment = Some("why".into());
        let mut hours = Vec::new();
        for _ in 0..9 {
            let now = last.until;
            last = Record::commanded(last.peer, 443, Cause::Operator, None, Some(&last), now);
            assert_eq!(last.until, now + u64::from(last.span));
            hours.push(last.span / 3600);
        }
        assert_eq!(hours, [2, 4, 8, 16, 32, 64, 128, 168, 168]);
        assert_eq!((last.count, last.first_seen, last.comment.as_deref()), (10, 1000, Some("why")));
    }

    #[test]
    fn while_it_holds_its_span_stays_and_a_time_that_is_given_counts() {
        let first = record("192.0.2.1", 0, Cause::Operator, 1000);
        let again = Record::commanded(first.peer, 0, Cause::Probe, None, Some(&first), 1500);
        assert_eq!((again.span, again.until, again.cause, again.last_seen), (3600, 5100, Cause::Probe, 1500));
        let shorter = Record::commanded(first.peer, 0, Cause::Operator, Some(60), Some(&again), 1500);
        assert_eq!((shorter.span, shorter.until), (60, 1560));
    }

    #[test]
    fn causes_have_names_and_directions() {
        for cause in Cause::ALL {
            assert_eq!(cause_named(cause_name(cause)), Ok(cause));
            let both = matches!(cause, Cause::RdmaPath | Cause::LinkCheck);
            let entry = record("192.0.2.1", 0, cause, 0);
            assert!(entry.is_about(Direction::Outbound));
            assert_eq!(entry.is_about(Direction::Inbound), both, "{cause:?}");
        }
        insta::assert_snapshot!(
            cause_named("ecko").unwrap_err(),
            @"'ecko' is no cause; there are echo, short-echo, no-clc, silence, reset, rdma-path, operator, probe, link-check"
        );
    }

    #[test]
    fn lists_are_sorted_by_number() {
        let mut all: Vec<Record> =
            [("2001:db8::1", 0), ("192.0.2.10", 1), ("192.0.2.9", 443), ("192.0.2.9", 0)]
                .map(|(peer, port)| record(peer, port, Cause::Operator, 0))
                .into();
        sort(&mut all);
        let order: Vec<String> = all.iter().map(|r| format!("{} {}", r.peer, r.port)).collect();
        assert_eq!(order, ["192.0.2.9 0", "192.0.2.9 443", "192.0.2.10 1", "2001:db8::1 0"]);
    }
}
