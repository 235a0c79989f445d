//! Answers what a policy says about a connection, and why.

use serde::Serialize;
use smc_policy_common::query::{Addr, Direction};

use super::model::{Action, Policy};

/// A question. What is left out is answered for all values, region by region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// The other host.
    pub peer: Addr,
    /// The service port: the peer's when outbound, ours when inbound.
    pub port: Option<u16>,
    /// This host's address; of the peer's family.
    pub local: Option<Addr>,
    /// Who connects.
    pub direction: Option<Direction>,
}

/// The answer over all regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Overall {
    /// Every connection asked about may negotiate SMC.
    Allow,
    /// None may.
    Deny,
    /// It depends on what the question leaves out.
    Mixed,
}

/// An earlier rule that does not match, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Passed {
    /// The rule.
    pub rule: String,
    /// Its file.
    pub file: String,
    /// Its line, from 1.
    pub line: usize,
    /// Why it does not match, e.g. "port 80 not in 443".
    pub reason: String,
}

/// Connections that are decided alike by the same rule or default: any of `local` with any of `ports`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Region {
    /// Who connects.
    #[serde(serialize_with = "super::model::serialize_direction")]
    pub direction: Direction,
    /// This host's addresses: addresses, networks or `first-last`; empty: all.
    pub local: Vec<String>,
    /// Service ports: ports or `first-last`; empty: all.
    pub ports: Vec<String>,
    /// What is decided.
    pub action: Action,
    /// "rule" or "default".
    pub by: &'static str,
    /// The deciding rule's name.
    pub rule: Option<String>,
    /// Its file.
    pub file: Option<String>,
    /// Its line, from 1.
    pub line: Option<usize>,
}

/// The answer to a [`Question`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The answer over all regions.
    pub action: Overall,
    /// "rule" or "default" if all regions agree on who decides, else "mixed".
    pub by: &'static str,
    /// The deciding rule if all regions agree.
    pub rule: Option<String>,
    /// Its file.
    pub file: Option<String>,
    /// Its line, from 1.
    pub line: Option<usize>,
    /// The regions.
    pub regions: Vec<Region>,
    /// If there is one region: the rules before the deciding one, and why each does not match.
    pub passed: Vec<Passed>,
}

/// Answers a question.
#[allow(clippy::todo, reason = "skeleton")]
pub fn explain(policy: &Policy, question: &Question) -> Explanation {
    let _ = (policy, question);
    todo!()
}
