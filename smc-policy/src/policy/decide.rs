//! The reference evaluator: the language's meaning in the plainest code there is. The tables must agree with it.

use smc_policy_common::query::{Direction, Query};

use super::model::{Action, Policy};

/// Who decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum By {
    /// The rule of this index in [`Policy::rules`].
    Rule(usize),
    /// No rule matched: `[default]` of this direction.
    Default(Direction),
}

/// A decision and who made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Decision {
    /// What was decided.
    pub action: Action,
    /// By whom.
    pub by: By,
}

/// Judges one connection: the first rule that matches, else the default.
pub fn decide(policy: &Policy, query: &Query) -> Decision {
    for (index, rule) in policy.rules.iter().enumerate() {
        if rule.matches(query) {
            return Decision { action: rule.action, by: By::Rule(index) };
        }
    }
    Decision { action: policy.defaults.of(query.direction), by: By::Default(query.direction) }
}
