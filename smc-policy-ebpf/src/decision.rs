//! The decision every hook shares: look it up, count it, turn it into the hook's answer.

use smc_policy_common::{
    query::Query,
    table::{self, Verdict},
};

use crate::maps::{self, Even, Odd};

/// Judges `query` by the generation in force. `None`: no usable table.
#[inline(always)]
pub fn judge(query: &Query) -> Option<Verdict> {
    // One read: everything else of this decision belongs to that generation.
    if maps::generation() & 1 == 0 { table::decide(&Even, query) } else { table::decide(&Odd, query) }
}

/// Judges, counts, and says whether this transmission may carry the SMC option.
#[inline(always)]
pub fn may_offer(query: &Query, first_transmission: bool) -> bool {
    let verdict = judge(query);
    let Some(stat) = maps::instance_counters() else { return true };
    // SAFETY: both counters are this CPU's own elements of a per-CPU array, checked for null by the map look-up. A
    // program of the same CPU that interrupts this one may cost a count, never more.
    unsafe {
        let Some(verdict) = verdict else {
            // Fail open, as without the tool.
            (*stat).undecided += u64::from(first_transmission);
            return true;
        };
        if let Some(rule) = maps::rule_counters(verdict.slot) {
            if first_transmission {
                (*rule).hits += 1;
            } else {
                (*rule).retransmissions += 1;
            }
        }
        if first_transmission {
            (*stat).decisions += 1;
        }
        if verdict.allow {
            return true;
        }
        if verdict.observe {
            (*stat).observed_denies += u64::from(first_transmission);
            return true;
        }
        false
    }
}
