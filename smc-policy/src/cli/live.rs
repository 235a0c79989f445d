//! Live SMC connections beside a policy.

use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use serde::Serialize;
use smc_policy_common::query::{Addr, Direction, Query};

use super::output::columns;
use crate::{
    kernel::hs_ctrl::SMC_SYSCTLS,
    policy::{Action, By, Policy, decide, model::direction_name},
    smc::{
        diag::{self, DiagError},
        parse::{Mode, SmcSocket, State},
    },
};

/// A live SMC connection that a policy denies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Denied {
    direction: &'static str,
    local: SocketAddr,
    peer: SocketAddr,
    /// The rule that denies it; none: `[default]`.
    rule: Option<String>,
}

/// The connections that speak SMC now and that `policy` would deny.
pub(super) fn denied(policy: &Policy) -> Result<Vec<Denied>, DiagError> {
    // Without SMC there are none, and nobody is to load a module for that answer.
    if !Path::new(SMC_SYSCTLS).exists() {
        return Ok(Vec::new());
    }
    Ok(judge(policy, &diag::sockets()?))
}

fn judge(policy: &Policy, sockets: &[SmcSocket]) -> Vec<Denied> {
    // SMC_DIAG does not say who connected: a connection on a port that somebody listens on was accepted.
    let listening: HashSet<u16> =
        sockets.iter().filter(|s| s.state == State::Listen).map(|s| s.local_port).collect();
    sockets
        .iter()
        .filter(|s| matches!(s.carried_by(), Some(Mode::SmcR | Mode::SmcD)))
        .filter_map(|s| {
            let (local, peer) = (s.local?, s.peer?);
            let inbound = listening.contains(&local.port());
            let (direction, port) =
                if inbound { (Direction::Inbound, local.port()) } else { (Direction::Outbound, peer.port()) };
            let query = Query { peer: address(peer.ip()), local: address(local.ip()), port, direction };
            let decision = decide(policy, &query);
            let rule = match decision.by {
                By::Rule(i) => policy.rules.get(i).map(|r| r.name.clone()),
                By::Default(_) => None,
            };
            (decision.action == Action::Deny).then(|| Denied {
                direction: direction_name(direction),
                local,
                peer,
                rule,
            })
        })
        .collect()
}

/// An address as the tables know it.
pub(super) fn address(ip: IpAddr) -> Addr {
    match ip {
        IpAddr::V4(v4) => Addr::v4(v4.to_bits()),
        IpAddr::V6(v6) => Addr::v6(v6.to_bits()),
    }
}

/// At most twenty of them, for people.
pub(super) fn table(live: &[Denied]) -> String {
    const SHOWN: usize = 20;
    let rows: Vec<Vec<String>> = live
        .iter()
        .take(SHOWN)
        .map(|d| {
            let by = d.rule.as_ref().map_or_else(|| "by [default]".to_owned(), |r| format!("by rule {r}"));
            vec![format!("  {}", d.direction), d.local.to_string(), d.peer.to_string(), by]
        })
        .collect();
    let mut text = columns(&rows, &[]);
    if live.len() > SHOWN {
        text.push_str(&format!("  and {} more\n", live.len() - SHOWN));
    }
    text
}
