//! The quarantine as a table for people.

use crate::{
    cli::{
        output::{Output, Style, columns},
        words::{duration, many},
    },
    guard::quarantine::{Record, Store, cause_name},
};

/// `192.0.2.1`, `192.0.2.1:443`, `[2001:db8::1]:443`.
pub(in crate::cli) fn peer(record: &Record) -> String {
    match record.port {
        0 => record.peer.to_string(),
        port => std::net::SocketAddr::new(record.peer, port).to_string(),
    }
}

/// A line for each, after a heading.
pub(super) fn table(records: &[Record], now: u64, out: &Output) -> String {
    let headings = ["peer", "port", "cause", "count", "first seen", "last seen", "expires in", "evidence"];
    let mut rows = vec![headings.map(|h| out.paint(Style::Bold, h)).to_vec()];
    let ago = |seen: u64| format!("{} ago", duration(now.saturating_sub(seen)));
    rows.extend(records.iter().map(|r| {
        let evidence: Vec<String> = r.evidence.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut words = vec![evidence.join(" ")];
        if r.resets > 0 {
            words.push(many(r.resets.into(), "reset", "resets"));
        }
        if r.store == Store::Commanded {
            words.push(match &r.comment {
                Some(comment) => format!("by command: {comment}"),
                None => "by command".into(),
            });
        }
        words.retain(|word| !word.is_empty());
        vec![
            r.peer.to_string(),
            if r.port == 0 { "all".into() } else { r.port.to_string() },
            cause_name(r.cause).into(),
            r.count.to_string(),
            ago(r.first_seen),
            ago(r.last_seen),
            if r.holds(now) { duration(r.until - now) } else { out.paint(Style::Dim, "expired") },
            words.join(", "),
        ]
    }));
    columns(&rows, &[1, 3])
}

/// How many, and how full it is.
pub(super) fn summary(records: &[Record], now: u64) -> String {
    let held = records.iter().filter(|record| record.holds(now)).count();
    let commanded = records.iter().filter(|r| r.store == Store::Commanded).count();
    let (expired, learned) = (records.len() - held, records.len() - commanded);
    let mut text = format!(
        "{} in quarantine ({learned} learned, {commanded} by command)",
        many(records.len(), "entry", "entries")
    );
    if expired > 0 {
        text.push_str(&format!(
            "; {expired} expired, which {}",
            if expired == 1 { "stops nobody" } else { "stop nobody" }
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use smc_policy_common::quarantine::Cause;

    use super::*;

    #[test]
    fn a_table() {
        let at = |peer: &str, port, cause, now| {
            Record::commanded(peer.parse().unwrap(), port, cause, None, None, now)
        };
        let records = [
            Record {
                store: Store::Learned,
                count: 12,
                evidence: vec![0xfe, 0x08, 0x53],
                resets: 1,
                ..at("192.0.2.1", 443, Cause::Echo, 10_000)
            },
            Record { comment: Some("ticket 7".into()), ..at("198.51.100.20", 0, Cause::Operator, 5_000) },
            at("2001:db8::1", 0, Cause::RdmaPath, 10_050),
        ];
        let out = Output::new(false);
        insta::assert_snapshot!(table(&records, 10_060, &out), @r"
        peer           port  cause      count  first seen      last seen       expires in   evidence
        192.0.2.1       443  echo          12  1 min ago       1 min ago       59 min       fe 08 53, 1 reset
        198.51.100.20   all  operator       1  1 h 24 min ago  1 h 24 min ago  expired      by command: ticket 7
        2001:db8::1     all  rdma-path      1  10 s ago        10 s ago        59 min 50 s  by command
        ");
        insta::assert_snapshot!(summary(&records, 10_060), @"3 entries in quarantine (1 learned, 2 by command); 1 expired, which stops nobody");
        assert_eq!(peer(&records[0]), "192.0.2.1:443");
    }
}
