//! Compiles a policy to the tables that the kernel searches (layout: `smc_policy_common::table`).

mod classes;
mod flips;
mod layout;
mod matrix;
mod sweep;

use smc_policy_common::{
    query::{Direction, Query},
    table::{self, MAX_CELLS, Verdict},
};

pub use self::flips::{Flip, FlipsError, flips};
use self::{classes::Classifier, layout::Cells};
use super::{
    decide::By,
    model::{Action, Policy},
    settings::Settings,
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

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = u32> + '_ {
        self.rules.iter().copied().chain([self.default_outbound, self.default_inbound])
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

/// Most verdicts of a policy: 16 MiB. 1,000 rules, each with peers and a port of its own, need 2,004,002.
pub const MAX_VERDICTS: usize = 1 << 21;

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
    /// The combinations of peers, local addresses and ports that must be told apart are too many.
    #[error("{}", too_many_verdicts(*peers, *locals, *ports))]
    TooManyVerdicts {
        /// Kinds of peers (so many were counted when the limit was reached).
        peers: usize,
        /// Kinds of local addresses.
        locals: usize,
        /// Kinds of ports.
        ports: usize,
    },
    /// The tables as a whole are too large.
    #[error(
        "the policy's addresses need {cells} table cells, the kernel's tables hold {MAX_CELLS}: use fewer addresses, or \
         networks in their place"
    )]
    TooManyCells {
        /// Cells of 8 bytes.
        cells: usize,
    },
    /// Addresses that only differ in their last bits are too many to be searched.
    #[error(
        "{stretches} separate address ranges lie within one network, more than the kernel's search takes: use networks \
         in the place of single addresses"
    )]
    TooDense {
        /// Ranges in the network.
        stretches: usize,
    },
}

fn too_many_verdicts(peers: usize, locals: usize, ports: usize) -> String {
    let (most, advice) = if ports >= peers && ports >= locals {
        ("ports", "use the same list of ports in more rules, or leave `ports` out of some")
    } else if locals > peers {
        ("local addresses", "use the same `local` in more rules, or leave it out of some")
    } else {
        ("peers", "join rules that differ in `peers` only, or leave `ports` and `local` out of some")
    };
    let local = if locals > 1 { format!(" x {locals} kinds of local addresses") } else { String::new() };
    format!(
        "the rules tell too much apart: {peers} kinds of peers{local} x {ports} kinds of ports x 2 directions, the \
         limit is {MAX_VERDICTS} in all. Most come from {most}: {advice}"
    )
}

/// Compiles `policy`, to be enforced as `settings` say.
///
/// # Errors
/// The policy needs larger tables than the kernel side takes; the error says what explodes and what to change.
pub fn compile(policy: &Policy, slots: &Slots, settings: &Settings) -> Result<Tables, CompileError> {
    if slots.rules.len() != policy.rules.len() {
        return Err(CompileError::Slots { rules: policy.rules.len(), slots: slots.rules.len() });
    }
    let classifier = Classifier::new(policy)?;
    let classes = classifier.classify()?;
    let (classifier, classes) = classifier.living(policy, classes)?;
    let matrix = classifier.matrix(&classes)?;
    let stretches = classes.peer4.len() * 2 + classes.peer6.len() * 5;
    let mut cells = Cells::new(settings, matrix.uses_local, stretches + matrix.verdicts.len() + 64);
    cells.ports(&matrix.ports)?;
    cells.peers(&classes.peer4, &classes.peer6, matrix.port_classes as u32)?;
    if matrix.uses_local {
        cells.locals(&matrix.local4, &matrix.local6, (matrix.port_classes * matrix.peers) as u32)?;
    }
    let half = matrix.verdicts.len() / 2;
    cells.verdicts(matrix.verdicts.iter().enumerate().map(|(at, rule)| {
        let (default, default_slot) = if at < half {
            (policy.defaults.outbound, slots.default_outbound)
        } else {
            (policy.defaults.inbound, slots.default_inbound)
        };
        let verdict = match policy.rules.get(*rule as usize) {
            Some(deciding) => Verdict {
                allow: deciding.action == Action::Allow,
                trust: deciding.trust,
                observe: false,
                plain_retransmissions: false,
                slot: slots.rules[*rule as usize],
            },
            None => {
                let allow = default == Action::Allow;
                Verdict {
                    allow,
                    trust: false,
                    observe: false,
                    plain_retransmissions: false,
                    slot: default_slot,
                }
            }
        };
        verdict.to_cell()
    }));
    Ok(Tables { cells: cells.finish()? })
}

/// A rule that decides nothing, and up to `limit` of the earlier rules that decide in its place; one more if there are
/// others. Empty: nothing it speaks of can be a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Dead {
    pub(super) rule: usize,
    pub(super) deciders: Vec<usize>,
}

/// The enabled rules that can never decide, exactly: no connection reaches them.
///
/// # Errors
/// As [`compile`].
pub(super) fn dead_rules(policy: &Policy, limit: usize) -> Result<Vec<Dead>, CompileError> {
    let classifier = Classifier::new(policy)?;
    let dead = classifier.dead(&classifier.classify()?);
    let deciders = classifier.deciders(&dead, limit);
    Ok(dead.into_iter().zip(deciders).map(|(rule, deciders)| Dead { rule, deciders }).collect())
}

#[cfg(test)]
mod tests;
