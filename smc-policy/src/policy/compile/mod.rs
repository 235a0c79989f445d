//! Compiles a policy to the tables that the kernel searches (layout: `smc_policy_common::table`).

use smc_policy_common::{
    query::{Direction, Query},
    table::{self, Verdict},
};

use super::{
    decide::{By, Decision},
    model::Policy,
};

/// Where the hits of every rule and of the two defaults are counted: indices into the kernel's counter array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots {
    /// One for each of [`Policy::rules`], in their order (also of rules that are not enabled: they count nothing).
    pub rules: Vec<u32>,
    /// Of `[default] outbound`.
    pub default_outbound: u32,
    /// Of `[default] inbound`.
    pub default_inbound: u32,
}

impl Slots {
    /// 0 and 1 for the defaults (outbound, inbound), then the rules in their order.
    pub fn in_order(policy: &Policy) -> Self {
        Self { rules: (2..).take(policy.rules.len()).collect(), default_outbound: 0, default_inbound: 1 }
    }

    /// The slot of who decided; `None`: no such rule.
    pub fn of(&self, by: By) -> Option<u32> {
        match by {
            By::Rule(index) => self.rules.get(index).copied(),
            By::Default(Direction::Outbound) => Some(self.default_outbound),
            By::Default(Direction::Inbound) => Some(self.default_inbound),
        }
    }

    /// Who decided when the tables name this slot for a connection of this direction.
    pub fn by(&self, slot: u32, direction: Direction) -> Option<By> {
        if self.of(By::Default(direction)) == Some(slot) {
            return Some(By::Default(direction));
        }
        self.rules.iter().position(|rule| *rule == slot).map(By::Rule)
    }
}

/// Compiled tables: one generation's cells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tables {
    /// The cells, as `smc_policy_common::table` lays them out; native byte order.
    pub cells: Vec<u64>,
}

impl Tables {
    /// Judges a connection by the code that runs in the kernel. `None` only if the cells are damaged.
    pub fn decide(&self, query: &Query) -> Option<Verdict> {
        table::decide(self.cells.as_slice(), query)
    }
}

/// Why a policy cannot be compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// The slots are not those of this policy.
    #[error("{rules} rules but {slots} counter slots")]
    Slots {
        /// Rules of the policy.
        rules: usize,
        /// Slots given.
        slots: usize,
    },
}

/// Compiles `policy`. `observe`: the tables decide and count, and let every connection negotiate.
///
/// # Errors
/// The policy needs larger tables than the kernel side takes; the error says what explodes and what to change.
#[allow(clippy::todo, reason = "skeleton")]
pub fn compile(policy: &Policy, slots: &Slots, observe: bool) -> Result<Tables, CompileError> {
    let _ = (policy, slots, observe, Decision::clone);
    todo!()
}
