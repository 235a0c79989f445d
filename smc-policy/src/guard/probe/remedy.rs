//! What to do about a finding.

use std::net::SocketAddr;

use serde::Serialize;

use super::classify::{Class, Finding};

/// What keeps SMC away from a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Remedy {
    /// A rule for a policy file, before those that allow the peer.
    Rule {
        /// The rule.
        toml: String,
    },
}

/// What to do about this finding; `None`: nothing.
pub fn remedy(address: SocketAddr, finding: &Finding) -> Option<Remedy> {
    finding.class.is_to_be_denied().then(|| Remedy::Rule { toml: rule(address, finding.class) })
}

fn rule(address: SocketAddr, class: Class) -> String {
    let (ip, port) = (address.ip(), address.port());
    let name: String = format!("probe-{ip}-{port}").replace(['.', ':'], "-");
    format!(
        "[[rule]]\nname = \"{name}\"\naction = \"deny\"\ndirection = \"outbound\"\npeers = [\"{ip}\"]\nports = [{port}]\n\
         comment = \"{class}: found by smc-policy probe\"\n"
    )
}

#[cfg(test)]
mod tests {
    use smc_policy_common::query::{Addr, Direction, Query};

    use super::*;
    use crate::policy::{Action, SourceFile, arbitrary, decide, load};

    #[test]
    fn the_rule_is_one_and_denies_the_peer() {
        for (text, peer) in [
            ("203.0.113.7:443", Addr::v4(0xcb00_7107)),
            ("[fd00::1]:443", Addr::v6(0xfd00_u128 << 112 | 1)),
            ("[::1]:443", Addr::v6(1)),
        ] {
            let finding = Finding { class: Class::Echoes, notes: vec![] };
            let Some(Remedy::Rule { toml }) = remedy(text.parse().unwrap(), &finding) else {
                panic!("no remedy")
            };
            let file = SourceFile::policy("p.toml", format!("version = 1\n{toml}"));
            let policy =
                load(&[file], arbitrary::NOW).unwrap_or_else(|errors| panic!("{errors:?}\n{toml}")).policy;
            let query = |port| Query { peer, local: peer, port, direction: Direction::Outbound };
            assert_eq!(decide(&policy, &query(443)).action, Action::Deny);
            assert_eq!(decide(&policy, &query(444)).action, Action::Allow);
        }
    }

    #[test]
    fn what_is_harmless_needs_none() {
        for class in
            [Class::Smc, Class::Unclear, Class::Ignores, Class::Closed, Class::NoAnswer, Class::NotSent]
        {
            let address = "203.0.113.7:443".parse().unwrap();
            assert_eq!(remedy(address, &Finding { class, notes: vec![] }), None);
        }
    }
}
