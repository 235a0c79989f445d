use insta::assert_snapshot;
use proptest::prelude::*;

use super::*;
use crate::policy::{SourceFile, arbitrary, load, parse};

fn policy(text: &str) -> Policy {
    let file = SourceFile::policy("p.toml", format!("version = 1\n{text}"));
    load(&[file], arbitrary::NOW).unwrap().policy
}

const POLICY: &str = r#"
[default]
inbound = "deny"

[[rule]]
name = "off"
action = "deny"
enabled = false

[[rule]]
name = "web"
action = "deny"
direction = "outbound"
peers = ["203.0.113.0/24", "2001:db8::/32"]
except = ["203.0.113.128/25"]
local = ["10.1.0.0/16"]
ports = [443, "8000-8099"]

[[rule]]
name = "replies"
action = "allow"
direction = "inbound"
ports = [22]
"#;

fn ask(peer: &str, port: Option<u16>, local: Option<&str>, direction: Option<Direction>) -> Explanation {
    let peer = parse::endpoint(peer).unwrap().0;
    let local = local.map(|local| parse::endpoint(local).unwrap().0);
    explain(&policy(POLICY), &Question { peer, port, local, direction }, &[])
}

fn json(explanation: &Explanation) -> String {
    serde_json::to_string_pretty(explanation).unwrap()
}

#[test]
fn one_region_says_why_earlier_rules_were_passed_over() {
    let answer = ask("203.0.113.7", Some(80), Some("10.1.0.5"), Some(Direction::Outbound));
    assert_snapshot!(json(&answer), @r#"
    {
      "action": "allow",
      "by": "default",
      "rule": null,
      "file": null,
      "line": null,
      "regions": [
        {
          "direction": "outbound",
          "local": [
            "10.1.0.5"
          ],
          "ports": [
            "80"
          ],
          "action": "allow",
          "by": "default",
          "rule": null,
          "file": null,
          "line": null
        }
      ],
      "passed": [
        {
          "rule": "off",
          "file": "p.toml",
          "line": 6,
          "reason": "not enabled"
        },
        {
          "rule": "web",
          "file": "p.toml",
          "line": 11,
          "reason": "port 80 not in 443, 8000-8099"
        },
        {
          "rule": "replies",
          "file": "p.toml",
          "line": 20,
          "reason": "direction is inbound"
        }
      ]
    }
    "#);
}

#[test]
fn reasons() {
    let reason = |peer, port, local, direction| {
        let answer = ask(peer, port, local, direction);
        answer
            .passed
            .into_iter()
            .map(|passed| format!("{}: {}", passed.rule, passed.reason))
            .collect::<Vec<_>>()
            .join("; ")
    };
    let out = Some(Direction::Outbound);
    assert_snapshot!(reason("198.51.100.1", None, None, out), @"off: not enabled; web: peer not in peers; replies: direction is inbound");
    assert_snapshot!(reason("203.0.113.200", None, None, out), @"off: not enabled; web: carved out by except; replies: direction is inbound");
    assert_snapshot!(reason("203.0.113.7", None, Some("10.2.0.1"), out), @"off: not enabled; web: local 10.2.0.1 not in 10.1.0.0/16; replies: direction is inbound");
    assert_snapshot!(reason("2001:db8::1", None, None, out), @"off: not enabled; web: no local address of the peer's family; replies: direction is inbound");
    assert_snapshot!(reason("203.0.113.7", Some(23), None, Some(Direction::Inbound)), @"off: not enabled; web: direction is outbound; replies: port 23 not in 22");
}

#[test]
fn regions_of_what_is_left_open() {
    let answer = ask("203.0.113.7", None, None, None);
    let lines: Vec<String> =
        answer.regions.iter().map(|region| serde_json::to_string(region).unwrap()).collect();
    assert_snapshot!(lines.join("\n"), @r#"
    {"direction":"outbound","local":["0.0.0.0-10.0.255.255","10.2.0.0-255.255.255.255"],"ports":[],"action":"allow","by":"default","rule":null,"file":null,"line":null}
    {"direction":"outbound","local":["10.1.0.0/16"],"ports":["1-442","444-7999","8100-65535"],"action":"allow","by":"default","rule":null,"file":null,"line":null}
    {"direction":"outbound","local":["10.1.0.0/16"],"ports":["443","8000-8099"],"action":"deny","by":"rule","rule":"web","file":"p.toml","line":11}
    {"direction":"inbound","local":[],"ports":["1-21","23-65535"],"action":"deny","by":"default","rule":null,"file":null,"line":null}
    {"direction":"inbound","local":[],"ports":["22"],"action":"allow","by":"rule","rule":"replies","file":"p.toml","line":20}
    "#);
    assert_eq!((answer.action, answer.by), (Overall::Mixed, "mixed"));
}

#[test]
fn a_policy_without_rules() {
    let question =
        Question { peer: Addr::v4(1), port: None, local: None, direction: Some(Direction::Outbound) };
    let answer = explain(&Policy::default(), &question, &[]);
    assert_eq!((answer.action, answer.by, answer.rule), (Overall::Allow, "default", None));
    assert_eq!(answer.regions.len(), 1);
}

#[test]
fn a_local_ipv6_range_does_not_begin_among_ipv4_addresses() {
    // The addresses after the first rule's begin with IPv4-mapped ones, which are the second rule's.
    let policy = policy(
        "[[rule]]\nname = \"low\"\naction = \"deny\"\nlocal = [\"::-::fffe:ffff:ffff\"]\n\
         [[rule]]\nname = \"v4\"\naction = \"deny\"\nlocal = [\"0.0.0.0/0\"]\n",
    );
    let question =
        Question { peer: Addr::v6(1 << 64), port: None, local: None, direction: Some(Direction::Outbound) };
    let regions = explain(&policy, &question, &[]).regions;
    let regions: Vec<_> =
        regions.iter().map(|region| (region.local.join(" "), region.rule.as_deref())).collect();
    let max = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff";
    assert_eq!(
        regions,
        [("::-::fffe:ffff:ffff".to_owned(), Some("low")), (format!("::1:0:0:0-{max}"), None)]
    );
}

/// Is `query` in the region?
fn within(region: &Region, query: &Query) -> bool {
    let local = region.local.iter().any(|text| match parse::addresses(text).unwrap() {
        crate::policy::address::AddrRange::V4(lo, hi) => {
            query.local.as_v4().is_some_and(|local| (lo..=hi).contains(&local))
        }
        crate::policy::address::AddrRange::V6(lo, hi) => {
            query.local.as_v4().is_none() && (lo..=hi).contains(&to_u128(query.local))
        }
    });
    let port = region.ports.iter().any(|text| match text.parse::<u16>() {
        Ok(port) => port == query.port,
        Err(_) => {
            let (lo, hi) = parse::port_range(text).unwrap();
            (lo..=hi).contains(&query.port)
        }
    });
    region.direction == query.direction
        && (local || region.local.is_empty())
        && (port || region.ports.is_empty())
}

proptest! {
    #[test]
    fn every_connection_is_in_exactly_one_region_and_decided_as_it_says(seed in any::<u64>()) {
        let text = arbitrary::policy(seed);
        let policy = load(&[SourceFile::policy("p.toml", text)], arbitrary::NOW).unwrap().policy;
        for (at, query) in arbitrary::connections(&policy, seed, 40).into_iter().filter(|query| query.port != 0).enumerate() {
            let question = Question {
                peer: query.peer,
                port: (at % 2 == 1).then_some(query.port),
                local: (at / 2 % 2 == 1).then_some(query.local),
                direction: (at / 4 % 2 == 1).then_some(query.direction),
            };
            let answer = explain(&policy, &question, &[]);
            let regions: Vec<&Region> = answer.regions.iter().filter(|region| within(region, &query)).collect();
            prop_assert_eq!(regions.len(), 1, "{:?} {:?}", query, answer);
            let decision = decide(&policy, &query);
            let name = match decision.by {
                By::Rule(index) => Some(policy.rules[index].name.clone()),
                By::Default(_) => None,
            };
            prop_assert_eq!(regions[0].action, decision.action);
            prop_assert_eq!(&regions[0].rule, &name);
            if answer.regions.len() == 1 {
                // Every rule before the deciding one has a reason.
                let before = match decision.by { By::Rule(index) => index, By::Default(_) => policy.rules.len() };
                prop_assert_eq!(answer.passed.len(), before, "{:?}", answer);
            }
        }
    }
}

const TRUST: &str = r#"
[[rule]]
name = "trusted"
action = "allow"
trust = true
ports = [22]

[[rule]]
name = "denied"
action = "deny"
ports = [23]
"#;

/// Regions as "ports action by".
fn held(direction: Direction, held: &[Held]) -> Vec<String> {
    let peer = parse::endpoint("192.0.2.1").unwrap().0;
    let question = Question { peer, port: None, local: None, direction: Some(direction) };
    let answer = explain(&policy(TRUST), &question, held);
    let region = |r: &Region| format!("{} {} {}", r.ports.join(","), r.action, r.by);
    answer.regions.iter().map(region).collect()
}

#[test]
fn the_quarantine_denies_what_rules_allow_without_trust() {
    let all = Held { port: None, outbound: true, inbound: false };
    let service = Held { port: Some(443), ..all };
    assert_eq!(
        held(Direction::Outbound, &[all]),
        ["1-21,24-65535 deny quarantine", "22 allow rule", "23 deny rule"]
    );
    assert_eq!(
        held(Direction::Outbound, &[service, Held { port: Some(22), ..all }]),
        ["1-21,24-442,444-65535 allow default", "22 allow rule", "23 deny rule", "443 deny quarantine"]
    );
    assert_eq!(
        held(Direction::Inbound, &[all, service]),
        ["1-21,24-65535 allow default", "22 allow rule", "23 deny rule"]
    );
    let both = Held { inbound: true, ..all };
    assert_eq!(held(Direction::Inbound, &[both])[0], "1-21,24-65535 deny quarantine");
}

#[test]
fn what_would_decide_without_the_quarantine_is_named_if_it_is_one() {
    let policy = policy(&format!("{TRUST}[[rule]]\nname = \"web\"\naction = \"allow\"\nports = [80, 443]\n"));
    let peer = parse::endpoint("192.0.2.1").unwrap().0;
    let all = Held { port: None, outbound: true, inbound: false };
    let otherwise = |port| {
        let question = Question { peer, port, local: None, direction: Some(Direction::Outbound) };
        let answer = explain(&policy, &question, &[all]);
        let region = answer.regions.into_iter().find(|region| region.by == "quarantine");
        region.expect("the quarantine's").otherwise.map(|o| (o.by, o.rule))
    };
    assert_eq!(otherwise(Some(443)), Some(("rule", Some("web".into()))));
    assert_eq!(otherwise(Some(444)), Some(("default", None)));
    assert_eq!(otherwise(None), None, "some by a rule, some by default");
}
