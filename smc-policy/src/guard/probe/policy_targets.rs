//! The peers that a policy lets this host offer SMC to, as far as they can be named one by one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use smc_policy_common::query::Direction;

use super::target::{DEFAULT_PORTS, Host, Wanted};
use crate::policy::{
    Action, Policy, Question, Rule,
    address::{AddrRange, from_ip},
    explain::{Overall, explain},
    ranges::RangeSet,
};

/// Networks and ranges of at most so many addresses are probed.
pub const MOST_ADDRESSES: u128 = 256;
/// Of a rule with more ports than this only the default ones are tried, if it holds them.
pub const MOST_PORTS: usize = 16;
/// Most targets of one policy.
pub const MOST_TARGETS: usize = 65_536;

/// What a policy allows outbound.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// What can be probed.
    pub wanted: Vec<Wanted>,
    /// What cannot be, and why.
    pub skipped: Vec<String>,
}

/// Collects the peers of the rules that allow outbound connections, without those that an earlier rule denies.
pub fn allowed(policy: &Policy) -> Allowed {
    let mut found = Allowed::default();
    let rules = policy.rules.iter();
    let allowing = |rule: &&Rule| {
        rule.is_active() && rule.action == Action::Allow && rule.direction.contains(Direction::Outbound)
    };
    for rule in rules.filter(allowing) {
        let Some(peers) = &rule.peers else {
            found.skipped.push(format!("rule {}: every peer", rule.name));
            continue;
        };
        for range in peers.ranges() {
            let (first, count): (IpAddr, u128) = match range {
                AddrRange::V4(lo, hi) => (Ipv4Addr::from_bits(lo).into(), u128::from(hi - lo) + 1),
                AddrRange::V6(lo, hi) => (Ipv6Addr::from_bits(lo).into(), (hi - lo).saturating_add(1)),
            };
            if count > MOST_ADDRESSES {
                found
                    .skipped
                    .push(format!("rule {}: {range} has more than {MOST_ADDRESSES} addresses", rule.name));
                continue;
            }
            for step in 0..count as u32 {
                let ip = after(first, step);
                for port in ports(rule) {
                    if found.wanted.len() >= MOST_TARGETS {
                        found
                            .skipped
                            .push(format!("rule {}: the rest; {MOST_TARGETS} targets are enough", rule.name));
                        return found;
                    }
                    if is_allowed(policy, ip, port) {
                        found.wanted.push(Wanted { host: Host::Address(ip, 0), port: Some(port) });
                    }
                }
            }
        }
        if ports(rule).is_empty() {
            let what = format!("rule {}: none of its many ports is one of those tried by default", rule.name);
            found.skipped.push(what);
        }
    }
    if policy.defaults.of(Direction::Outbound) == Action::Allow {
        found.skipped.push("[default]: every peer that no rule names".to_owned());
    }
    found
}

/// The ports to try for a rule.
fn ports(rule: &Rule) -> Vec<u16> {
    let held =
        |ports: &RangeSet<u16>| DEFAULT_PORTS.into_iter().filter(|port| ports.contains(*port)).collect();
    match &rule.ports {
        None => DEFAULT_PORTS.to_vec(),
        Some(ports) => {
            let count: usize = ports.ranges().iter().map(|(lo, hi)| usize::from(hi - lo) + 1).sum();
            if count > MOST_PORTS {
                held(ports)
            } else {
                ports.ranges().iter().flat_map(|(lo, hi)| *lo..=*hi).collect()
            }
        }
    }
}

fn after(first: IpAddr, step: u32) -> IpAddr {
    match first {
        IpAddr::V4(v4) => Ipv4Addr::from_bits(v4.to_bits().wrapping_add(step)).into(),
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits().wrapping_add(step.into())).into(),
    }
}

/// Whether some connection of this host to there may negotiate: rules may depend on the local address.
fn is_allowed(policy: &Policy, ip: IpAddr, port: u16) -> bool {
    let question =
        Question { peer: from_ip(ip), port: Some(port), local: None, direction: Some(Direction::Outbound) };
    explain(policy, &question, &[]).action != Overall::Deny
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{SourceFile, arbitrary, load};

    fn of(text: &str) -> (Vec<String>, Vec<String>) {
        let file = SourceFile::policy("p.toml", format!("version = 1\n{text}"));
        let found = allowed(&load(&[file], arbitrary::NOW).unwrap().policy);
        let shown = found.wanted.iter().map(|wanted| match &wanted.host {
            Host::Address(ip, 0) => format!("{ip} {}", wanted.port.unwrap()),
            other => panic!("{other:?}"),
        });
        (shown.collect(), found.skipped)
    }

    #[test]
    fn addresses_and_small_networks_are_named() {
        let (wanted, skipped) = of(r#"
            default = { outbound = "deny" }
            [[rule]]
            name = "storage"
            action = "allow"
            peers = ["10.0.0.0/30", "fd00::7"]
            except = ["10.0.0.0", "10.0.0.3"]
            ports = [6379, "8000-8001"]
            [[rule]]
            name = "big"
            action = "allow"
            peers = ["10.1.0.0/16", "10.3.0.0-10.3.0.255", "fd00:1::/64"]
            ports = ["1-1024"]
            direction = "outbound"
        "#);
        assert_eq!(
            wanted[..9],
            [
                "10.0.0.1 6379",
                "10.0.0.1 8000",
                "10.0.0.1 8001",
                "10.0.0.2 6379",
                "10.0.0.2 8000",
                "10.0.0.2 8001",
                "fd00::7 6379",
                "fd00::7 8000",
                "fd00::7 8001",
            ]
        );
        assert_eq!(wanted.len(), 9 + 256 * 3, "a range of 256 addresses, three default ports");
        assert_eq!(
            skipped,
            [
                "rule big: 10.1.0.0/16 has more than 256 addresses",
                "rule big: fd00:1::/64 has more than 256 addresses",
            ]
        );
    }

    #[test]
    fn what_is_denied_before_is_not_probed() {
        let (wanted, skipped) = of(r#"
            [[rule]]
            name = "not-this-port"
            action = "deny"
            peers = ["192.0.2.0/24"]
            ports = [80]
            [[rule]]
            name = "off"
            action = "allow"
            peers = ["198.51.100.1"]
            enabled = false
            [[rule]]
            name = "in"
            action = "allow"
            peers = ["198.51.100.2"]
            direction = "inbound"
            [[rule]]
            name = "web"
            action = "allow"
            peers = ["192.0.2.7"]
            [[rule]]
            name = "odd-ports"
            action = "allow"
            peers = ["192.0.2.7"]
            ports = ["50000-60000"]
            [[rule]]
            name = "all"
            action = "allow"
            ports = [443]
        "#);
        assert_eq!(wanted, ["192.0.2.7 443", "192.0.2.7 22"]);
        assert_eq!(
            skipped,
            [
                "rule odd-ports: none of its many ports is one of those tried by default",
                "rule all: every peer",
                "[default]: every peer that no rule names",
            ]
        );
    }
}
