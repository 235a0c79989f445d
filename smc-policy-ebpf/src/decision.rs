//! The decision every hook shares: look it up, count it, turn it into the hook's answer.

use smc_policy_common::{
    event::{WANTS_ALLOWS, WANTS_DENIES},
    query::{Addr, Query, WireQuery},
    table::{self, Verdict},
};

use crate::{
    events,
    maps::{self, Even, Odd},
    quarantine,
};

/// Of `how`: the table of the odd generations.
const ODD: u64 = 1 << 32;
/// Of `smcpol_may`'s `how`: a SYN of this host.
const SYN: u64 = 1 << 33;
/// Of `smcpol_may`'s `how`: where the transmission begins.
const TRANSMISSION_AT: u32 = 34;
/// Of `smcpol_may`'s result, which is otherwise a `word` of [`events::smcpol_decided`]: it may carry the option.
const MAY: u64 = 1 << 22;
/// Of `smcpol_judge`'s result: there is a verdict.
const DECIDED: u64 = 1 << 63;
/// Of its result: where the table's flags begin.
const FLAGS_AT: u32 = 40;

/// The decision as a global function: the verifier follows it once for any arguments, and what it keeps at hand takes no
/// room in the frames of the callers, which are large enough without. `how`: [`WireQuery::meta`] and [`ODD`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn smcpol_judge(peer_hi: u64, peer_lo: u64, local_hi: u64, local_lo: u64, how: u64) -> u64 {
    let peer = Addr { hi: peer_hi, lo: peer_lo };
    let local = Addr { hi: local_hi, lo: local_lo };
    let query = WireQuery { peer, local, meta: how }.query();
    match (InForce { odd: how & ODD != 0 }).look_up(&query) {
        Some(verdict) => DECIDED | u64::from(verdict.table_flags()) << FLAGS_AT | verdict.to_cell(),
        None => 0,
    }
}

#[inline(always)]
fn decode(result: u64) -> Option<Verdict> {
    if result & DECIDED == 0 { None } else { Some(Verdict::from_cell(result, (result >> FLAGS_AT) as u16)) }
}

/// How a SYN or SYN-ACK is counted.
#[repr(u64)]
#[derive(Clone, Copy, PartialEq)]
pub enum Transmission {
    /// The connection's first.
    First = 0,
    /// Sent again.
    Again = 1,
    /// Counted before, at another device that it passed.
    Counted = 2,
}

impl Transmission {
    /// The first one or a later one.
    #[inline(always)]
    pub fn new(first: bool) -> Self {
        if first { Self::First } else { Self::Again }
    }
}

/// The table in force at one moment. All of a decision is taken from one.
#[derive(Clone, Copy)]
pub struct InForce {
    odd: bool,
}

impl InForce {
    /// One read: everything else of this decision belongs to that generation.
    #[inline(always)]
    pub fn now() -> Self {
        Self { odd: maps::generation() & 1 != 0 }
    }

    /// Judges `query`. `None`: no usable table.
    #[inline(always)]
    pub fn judge(self, query: &Query) -> Option<Verdict> {
        let Query { peer, local, .. } = *query;
        let how = WireQuery::new(query).meta | if self.odd { ODD } else { 0 };
        decode(smcpol_judge(peer.hi, peer.lo, local.hi, local.lo, how))
    }

    #[inline(always)]
    fn look_up(self, query: &Query) -> Option<Verdict> {
        if self.odd { table::decide(&Odd, query) } else { table::decide(&Even, query) }
    }

    /// The table's flags. `None`: no usable table.
    #[inline(always)]
    pub fn flags(self) -> Option<u16> {
        if self.odd { table::flags(&Odd) } else { table::flags(&Even) }
    }

    /// A cell of its header.
    #[inline(always)]
    pub fn cell(self, index: u32) -> Option<u64> {
        if self.odd { table::Cells::cell(&Odd, index) } else { table::Cells::cell(&Even, index) }
    }

    /// Judges and counts.
    #[inline(always)]
    fn judge_and_count(self, query: &Query, transmission: Transmission) -> Option<Answer> {
        // Not by `smcpol_judge`: a frame less on the way down to the search.
        let verdict = self.look_up(query);
        // What the rules deny needs no second reason.
        let quarantined = match verdict {
            Some(verdict) => verdict.allow && !verdict.trust && quarantine::holds(query),
            None => false,
        };
        let first = transmission == Transmission::First;
        let stat = maps::instance_counters()?;
        // SAFETY: both counters are this CPU's own elements of a per-CPU array, checked for null by the map look-up. A
        // program of the same CPU that interrupts this one may cost a count, never more.
        unsafe {
            let Some(verdict) = verdict else {
                (*stat).undecided += u64::from(first);
                return None;
            };
            if quarantined {
                (*stat).quarantined += u64::from(first && !verdict.observe);
                (*stat).observed_quarantined += u64::from(first && verdict.observe);
            } else if let Some(rule) = maps::rule_counters(verdict.slot) {
                match transmission {
                    Transmission::First => (*rule).hits += 1,
                    Transmission::Again => (*rule).retransmissions += 1,
                    Transmission::Counted => {}
                }
            }
            if first {
                (*stat).decisions += 1;
                (*stat).observed_denies += u64::from(verdict.observe && !verdict.allow);
            }
            Some(Answer {
                allow: verdict.allow && !quarantined,
                quarantined,
                slot: verdict.slot,
                observe: verdict.observe,
                plain_retransmissions: verdict.plain_retransmissions,
            })
        }
    }

    /// Judges, counts, and says whether this transmission may carry the SMC option. Without a table it may, as without
    /// the tool.
    #[inline(always)]
    pub fn may_offer(self, query: &Query, transmission: Transmission) -> bool {
        self.may(query, transmission, 0)
    }

    /// As [`Self::may_offer`] for a SYN of this host, which may have to go without the option when it is sent again.
    #[inline(always)]
    pub fn may_offer_syn(self, query: &Query, transmission: Transmission) -> bool {
        self.may(query, transmission, SYN)
    }

    #[inline(always)]
    fn may(self, query: &Query, transmission: Transmission, syn: u64) -> bool {
        let Query { peer, local, .. } = *query;
        let how = WireQuery::new(query).meta
            | if self.odd { ODD } else { 0 }
            | syn
            | (transmission as u64) << TRANSMISSION_AT;
        let result = smcpol_may(peer.hi, peer.lo, local.hi, local.lo, how);
        // Here, not there: what that function keeps at hand takes room on a stack that has little.
        if result & events::TELLS != 0 {
            events::smcpol_decided(peer.hi, peer.lo, local.hi, local.lo, result);
        }
        result & MAY != 0
    }
}

/// Judgement, quarantine and counting as a global function: as `smcpol_judge` is one, and called where the verifier comes by
/// many ways, from the many forms that a packet's headers may have.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn smcpol_may(peer_hi: u64, peer_lo: u64, local_hi: u64, local_lo: u64, how: u64) -> u64 {
    let peer = Addr { hi: peer_hi, lo: peer_lo };
    let local = Addr { hi: local_hi, lo: local_lo };
    let query = WireQuery { peer, local, meta: how }.query();
    let transmission = match how >> TRANSMISSION_AT & 3 {
        0 => Transmission::First,
        1 => Transmission::Again,
        _ => Transmission::Counted,
    };
    let odd = how & ODD != 0;
    let Some(answer) = (InForce { odd }).judge_and_count(&query, transmission) else {
        return MAY;
    };
    let mut result = 0;
    let wanted = if answer.allow { WANTS_ALLOWS } else { WANTS_DENIES };
    if transmission == Transmission::First && events::are_wanted(wanted) {
        result = events::TELLS
            | how & events::QUERY
            | u64::from(odd) << events::ODD_AT
            | u64::from(answer.allow) << events::ALLOWED_AT
            | u64::from(answer.observe) << events::OBSERVED_AT
            | u64::from(answer.quarantined) << events::QUARANTINED_AT
            | u64::from(answer.slot) << events::SLOT_AT;
    }
    if answer.observe {
        return result | MAY;
    }
    if !answer.allow {
        return result;
    }
    // Counted: had it been sent again, it would have lost the option at the first device.
    let goes_plain = how & SYN != 0 && transmission == Transmission::Again && answer.plain_retransmissions;
    maps::count(|stat| &mut stat.plain_retransmissions, goes_plain);
    if goes_plain { result } else { result | MAY }
}

/// What rules and quarantine say together.
struct Answer {
    allow: bool,
    quarantined: bool,
    slot: u32,
    observe: bool,
    plain_retransmissions: bool,
}
