use smc_policy_common::quarantine::Cause;

use super::*;
use crate::{
    guard::quarantine::Store,
    policy::{SourceFile, arbitrary, load},
};

const POLICY: &str = r#"
version = 1
[[rule]]
name = "trusted"
action = "allow"
trust = true
ports = [22]
[[rule]]
name = "denied"
action = "deny"
ports = [23]
[[rule]]
name = "web"
action = "allow"
ports = [80, 443]
"#;

/// What is printed about connections to a peer whose services are all in quarantine.
fn told(port: Option<u16>, records: &[Record]) -> String {
    let file = SourceFile::policy("p.toml", POLICY);
    let policy = load(&[file], arbitrary::NOW).unwrap().policy;
    let question =
        Question { peer: Addr::v4(0xc000_0201), port, local: None, direction: Some(Direction::Outbound) };
    let answer = explain(&policy, &question, &records.iter().map(held).collect::<Vec<_>>());
    let out = Output::new(false);
    let subject = port.map_or("192.0.2.1".to_owned(), |port| format!("192.0.2.1:{port}"));
    answer_text(&subject, Direction::Outbound, &answer, &out) + &quarantine_text(records, &answer, 10_060)
}

fn echo() -> Record {
    let record = Record::commanded("192.0.2.1".parse().unwrap(), 0, Cause::Echo, None, None, 10_000);
    Record { store: Store::Learned, count: 12, evidence: vec![0xfe, 8, 0x53, 0x50, 1, 2, 3, 4], ..record }
}

#[test]
fn the_quarantine_decides_and_the_rule_beneath_is_named() {
    insta::assert_snapshot!(told(Some(443), &[echo()]), @r"
    deny: outbound 192.0.2.1:443 stays plain TCP
      by the quarantine, over rule web (p.toml:12)
      quarantine 192.0.2.1: it echoes TCP options: its SYN-ACK returned this host's marker (echo)
        seen 12 times, last 1 min ago; expires in 59 min
        evidence: fe 08 53 50 01 02 03 04
      `smc-policy quarantine remove` lifts it; an allow rule with trust = true exempts a peer for good
    ");
    let noted = Record { comment: Some("the load balancer".into()), store: Store::Commanded, ..echo() };
    insta::assert_snapshot!(told(None, &[noted]), @r"
    mixed: outbound 192.0.2.1: it depends
      deny   port 1-21, 24-65535  any local address  by the quarantine
      allow  port 22              any local address  by rule trusted (p.toml:3)
      deny   port 23              any local address  by rule denied (p.toml:8)
      quarantine 192.0.2.1: it echoes TCP options: its SYN-ACK returned this host's marker (echo)
        seen 12 times, last 1 min ago; expires in 59 min
        evidence: fe 08 53 50 01 02 03 04
        comment: the load balancer
      `smc-policy quarantine remove` lifts it; an allow rule with trust = true exempts a peer for good
    ");
}

#[test]
fn the_policy_decides_and_the_quarantine_is_named() {
    insta::assert_snapshot!(told(Some(23), &[echo()]), @r"
    deny: outbound 192.0.2.1:23 stays plain TCP
      by rule denied (p.toml:8)
      passed over:
        trusted  port 23 not in 22
      quarantine 192.0.2.1: it echoes TCP options: its SYN-ACK returned this host's marker (echo)
        seen 12 times, last 1 min ago; expires in 59 min
        evidence: fe 08 53 50 01 02 03 04
      the quarantine does not decide: the policy denies it in any case
    ");
    insta::assert_snapshot!(told(Some(22), &[echo()]), @r"
    allow: outbound 192.0.2.1:22 may negotiate SMC
      by rule trusted (p.toml:3)
      quarantine 192.0.2.1: it echoes TCP options: its SYN-ACK returned this host's marker (echo)
        seen 12 times, last 1 min ago; expires in 59 min
        evidence: fe 08 53 50 01 02 03 04
      the quarantine does not decide: the rule has trust = true
    ");
}
