//! What the end of a negotiation says of the peer, and for how long the peer is kept from SMC: the learner's decisions.
//!
//! A *proof* (bytes that no SMC server sends, RDMA that did not work twice) is about that peer and holds for an hour at once.
//! A *suspicion* (silence, a reset) may as well be a server that restarts: it holds for a minute, longer only for peers
//! that keep giving it, and of the peers that are known to speak SMC a share at most is held at a time.

use crate::quarantine::{ECHO_SPAN, Entry, next_span};

const SECOND: u64 = 1_000_000_000;

/// Peers that are remembered; the least recently used go.
pub const PEERS: u32 = 16_384;
/// Seconds that a suspicion holds the first time.
pub const SUSPICION_SPAN: u32 = 60;
/// So long, ns, suspicions count towards the third one, and one RDMA failure towards the second.
pub const WINDOW: u64 = 600 * SECOND;
/// So long, ns, a peer is known to speak SMC after it has.
pub const KNOWN_FOR: u64 = 24 * 3600 * SECOND;
/// So long, ns, after it ended a suspicion's span still counts for the next one.
pub const FORGOTTEN_AFTER: u64 = 24 * 3600 * SECOND;
/// Of the known peers one in so many may be held by suspicion at a time.
pub const KNOWN_PER_HELD: u32 = 4;
/// So many known peers may be held by suspicion, however few are known.
pub const HELD_ALWAYS: u32 = 4;
/// The fallback's reason when RDMA does not work (`SMC_CLC_DECL_TIMEOUT_CL`, net/smc/smc_clc.h: no CONFIRM LINK came over
/// the new link).
pub const RDMA_FAILED: u32 = 0x0201_0000;
/// The fallback's reason when the peer declined (`SMC_CLC_DECL_PEERDECL`, net/smc/smc_clc.h).
pub const PEER_DECLINED: u32 = 0x0500_0000;

/// Whether a fallback means that RDMA does not work, by its reason and the reason that the peer gave: whoever waits less
/// patiently tells the other, and the other has that for its own reason.
#[inline(always)]
pub const fn is_rdma_failure(reason: u32, peers: u32) -> bool {
    reason == RDMA_FAILED || reason == PEER_DECLINED && peers == RDMA_FAILED
}

/// What a client waits for (`SMC_CLC_ACCEPT`, net/smc/smc_clc.h).
pub const CLC_ACCEPT: u8 = 2;

/// How a client's wait for the CLC accept ended (`smc_clc_wait_msg`, net/smc/smc_clc.c).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// A CLC accept or a decline came: the peer speaks SMC.
    Clc,
    /// Something else came.
    NoClc,
    /// Nothing came for as long as the kernel waits.
    Silence,
    /// The peer reset or closed the connection.
    Reset,
    /// Something that says nothing of the peer: a signal, no memory, a CLC message that this kernel does not take.
    Other,
}

const EPIPE: i32 = 32;
const EAGAIN: i32 = 11;
const EPROTO: i32 = 71;
const ECONNRESET: i32 = 104;
const ETIMEDOUT: i32 = 110;

/// Begins CLC messages about RDMA and about shared memory: "SMCR" and "SMCD" in EBCDIC (net/smc/smc_clc.h).
const EYECATCHERS: [u32; 2] = [0xe2d4_c3d9, 0xe2d4_c3c4];
/// Accept, confirm, decline. A proposal, type 1, is what we have sent ourselves: no server sends one.
const TYPES: core::ops::RangeInclusive<u8> = 2..=4;

impl Ending {
    /// By the function's result and the first eight bytes that came, big-endian; 0: none came or they cannot be read.
    #[inline(always)]
    pub fn of(result: i32, bytes: u64) -> Self {
        if result >= 0 {
            // A decline is a positive reason code.
            return Self::Clc;
        }
        match result.wrapping_neg() {
            EPROTO if is_clc(bytes) => Self::Other,
            EPROTO => Self::NoClc,
            EAGAIN | ETIMEDOUT => Self::Silence,
            ECONNRESET | EPIPE => Self::Reset,
            _ => Self::Other,
        }
    }
}

/// Whether a message that begins so is a server's.
#[inline(always)]
fn is_clc(bytes: u64) -> bool {
    let eyecatcher = (bytes >> 32) as u32;
    (eyecatcher == EYECATCHERS[0] || eyecatcher == EYECATCHERS[1]) && TYPES.contains(&((bytes >> 24) as u8))
}

/// How many of these bytes, big-endian, are evidence: zeros at the end cannot be told from bytes that did not come.
#[inline(always)]
pub const fn evidence_length(bytes: u64) -> u8 {
    8 - (bytes.trailing_zeros() / 8) as u8
}

/// What is remembered of a peer: a value of the map `smcpol_peers`. Its key is that of the quarantine: a service, and for
/// `path` the whole address. Times are ns since boot; 0: never.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// When it spoke SMC last.
    pub spoke: u64,
    /// The last two suspicions, the later one first.
    pub suspected: [u64; 2],
    /// When RDMA to it failed last.
    pub path: u64,
}

#[inline(always)]
const fn is_within(at: u64, now: u64, time: u64) -> bool {
    at != 0 && now.saturating_sub(at) < time
}

impl Peer {
    /// Whether it is known to speak SMC.
    #[inline(always)]
    pub const fn is_known(&self, now: u64) -> bool {
        is_within(self.spoke, now, KNOWN_FOR)
    }

    /// Notes that it spoke SMC. Whether that is its first time in this window of [`Storm::known`].
    #[inline(always)]
    pub const fn speaks(&mut self, now: u64) -> bool {
        let is_first = self.spoke == 0 || self.spoke / KNOWN_FOR != now / KNOWN_FOR;
        self.spoke = now;
        is_first
    }

    /// Notes a suspicion of a peer that is not in quarantine. For how long it is from now on, in seconds. `before`: its
    /// entry, which has ended.
    #[inline(always)]
    pub const fn suspect(&mut self, before: Option<&Entry>, now: u64) -> u32 {
        let [last, last_but_one] = self.suspected;
        self.suspected = [now, last];
        if self.is_known(now) {
            return SUSPICION_SPAN;
        }
        let is_third = is_within(last, now, WINDOW) && is_within(last_but_one, now, WINDOW);
        let first = if is_third { ECHO_SPAN } else { SUSPICION_SPAN };
        match before {
            Some(before) if is_within(before.until, now, FORGOTTEN_AFTER) => next_span(before, now, first),
            _ => first,
        }
    }

    /// Notes that RDMA failed. Whether it is the second time within [`WINDOW`].
    #[inline(always)]
    pub const fn path_failed(&mut self, now: u64) -> bool {
        let is_second = is_within(self.path, now, WINDOW);
        self.path = now;
        is_second
    }
}

/// Counts what happened in a window of time and in the one before it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recent {
    window: u64,
    here: u32,
    before: u32,
}

impl Recent {
    /// In the window of this time and in the one before; windows are `length` ns.
    #[inline(always)]
    pub const fn at(&self, now: u64, length: u64) -> (u32, u32) {
        let window = now / length;
        if window == self.window {
            (self.here, self.before)
        } else if window == self.window.wrapping_add(1) {
            (0, self.here)
        } else {
            (0, 0)
        }
    }

    #[inline(always)]
    const fn add(&mut self, now: u64, length: u64) {
        let (here, before) = self.at(now, length);
        *self = Self { window: now / length, here: here.saturating_add(1), before };
    }
}

/// How many peers are known, and how many of them are held by suspicion: the only element of the map `smcpol_storm`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Storm {
    known: Recent,
    held: Recent,
}

/// The window of `held`: whoever is held now began to be in this window or in the one before.
const HELD_WINDOW: u64 = SUSPICION_SPAN as u64 * SECOND;

impl Storm {
    /// From its bytes in the map.
    pub fn from_bytes(bytes: [u8; size_of::<Self>()]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[at..at + 4]);
            u32::from_ne_bytes(word)
        };
        let long = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_ne_bytes(word)
        };
        let recent = |at: usize| Recent { window: long(at), here: word(at + 8), before: word(at + 12) };
        Self { known: recent(0), held: recent(16) }
    }

    /// Counts a peer that spoke SMC, once in a window ([`Peer::speaks`]).
    #[inline(always)]
    pub const fn count_known(&mut self, now: u64) {
        self.known.add(now, KNOWN_FOR);
    }

    /// About how many peers are known: those that spoke SMC since the day began (of the kernel's clock), or the day before
    /// if they were more.
    #[inline(always)]
    pub const fn known(&self, now: u64) -> u32 {
        let (here, before) = self.known.at(now, KNOWN_FOR);
        let known = if here > before { here } else { before };
        if known < PEERS { known } else { PEERS }
    }

    /// How many known peers are held by suspicion; those that were within the last minute may still be among them.
    #[inline(always)]
    pub const fn held(&self, now: u64) -> u32 {
        let (here, before) = self.held.at(now, HELD_WINDOW);
        here.saturating_add(before)
    }

    /// How many may be.
    #[inline(always)]
    pub const fn at_most(&self, now: u64) -> u32 {
        let share = self.known(now) / KNOWN_PER_HELD;
        if share > HELD_ALWAYS { share } else { HELD_ALWAYS }
    }

    /// Whether one more known peer may be held; then it is counted.
    #[inline(always)]
    pub const fn hold_one_more(&mut self, now: u64) -> bool {
        if self.held(now) >= self.at_most(now) {
            return false;
        }
        self.held.add(now, HELD_WINDOW);
        true
    }
}

const _: () = {
    assert!(size_of::<Peer>() == 32);
    assert!(size_of::<Storm>() == 32 && core::mem::offset_of!(Storm, held) == 16);
    assert!(core::mem::offset_of!(Recent, here) == 8 && core::mem::offset_of!(Recent, before) == 12);
};

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;
    use crate::quarantine::LONGEST_SPAN;

    const MINUTE: u64 = 60 * SECOND;
    const HOUR: u64 = 60 * MINUTE;
    /// Some time after boot.
    const START: u64 = 1000 * HOUR;

    #[test]
    fn endings() {
        let accept = 0xe2d4_c3d9_0200_4410;
        let own_proposal = 0xe2d4_c3d9_0100_ce21;
        let http = u64::from_be_bytes(*b"HTTP/1.1");
        for (result, bytes, ending) in [
            (0, accept, Ending::Clc),
            (0x0500_0000, 0xe2d4_c3d9_0400_1c10, Ending::Clc),
            (-EPROTO, http, Ending::NoClc),
            (-EPROTO, own_proposal, Ending::NoClc),
            (-EPROTO, 0, Ending::NoClc),
            (-EPROTO, accept, Ending::Other),
            (-EPROTO, 0xe2d4_c3c4_0400_1c10, Ending::Other),
            (-EPROTO, 0xe2d4_c3c5_0400_1c10, Ending::NoClc),
            (-EAGAIN, 0, Ending::Silence),
            (-ETIMEDOUT, 0, Ending::Silence),
            (-ECONNRESET, 0, Ending::Reset),
            (-EPIPE, 0, Ending::Reset),
            (-4, 0, Ending::Other),
            (-12, 0, Ending::Other),
            (i32::MIN, 0, Ending::Other),
        ] {
            assert_eq!(Ending::of(result, bytes), ending, "{result} {bytes:#x}");
        }
    }

    #[test]
    fn rdma_failures_here_and_there() {
        assert!(is_rdma_failure(RDMA_FAILED, 0) && is_rdma_failure(PEER_DECLINED, RDMA_FAILED));
        assert!(!is_rdma_failure(PEER_DECLINED, 0x0301_0000) && !is_rdma_failure(0x0301_0000, RDMA_FAILED));
    }

    #[test]
    fn evidence_ends_with_its_last_byte_that_is_not_zero() {
        assert_eq!(evidence_length(u64::from_be_bytes(*b"HTTP/1.1")), 8);
        assert_eq!(evidence_length(u64::from_be_bytes(*b"x\r\n\0\0\0\0\0")), 3);
        assert_eq!(evidence_length(0x0100_0000_0000_0001), 8);
        assert_eq!(evidence_length(0), 0);
    }

    /// Suspicions of one peer, each when the one before has ended and `pauses` have gone by: their spans.
    fn spans(peer: &mut Peer, pauses: &[u64]) -> Vec<u32> {
        let (mut now, mut entry, mut spans) = (START, None::<Entry>, Vec::new());
        for pause in pauses {
            now += pause;
            let span = peer.suspect(entry.as_ref(), now);
            spans.push(span);
            let until = now + u64::from(span) * SECOND;
            entry = Some(Entry { until, span, ..Entry::default() });
            now = until;
        }
        spans
    }

    #[test]
    fn the_third_suspicion_within_ten_minutes_is_an_hour() {
        assert_eq!(spans(&mut Peer::default(), &[0, 0, 0, 0, 0]), [60, 120, 3600, 7200, 14400]);
        // At minutes 0, 6, 11 and 15: the first is too long ago for the third one.
        let pauses = [0, 5 * MINUTE, 3 * MINUTE, 0];
        assert_eq!(spans(&mut Peer::default(), &pauses), [60, 120, 240, 3600]);
    }

    #[test]
    fn rare_suspicions_double_and_are_forgotten() {
        assert_eq!(spans(&mut Peer::default(), &[0, HOUR, HOUR, HOUR, 25 * HOUR]), [60, 120, 240, 480, 60]);
        let many = spans(&mut Peer::default(), &[HOUR; 20]);
        assert_eq!(many[19], LONGEST_SPAN);
    }

    #[test]
    fn who_spoke_smc_within_a_day_is_held_for_a_minute_only() {
        let mut peer = Peer { spoke: START - HOUR, ..Peer::default() };
        assert_eq!(spans(&mut peer, &[0; 20]), [60; 20]);
        let mut peer = Peer { spoke: START - 25 * HOUR, ..Peer::default() };
        assert_eq!(spans(&mut peer, &[0; 3]), [60, 120, 3600]);
    }

    #[test]
    fn two_rdma_failures_within_ten_minutes() {
        let mut peer = Peer::default();
        assert!(!peer.path_failed(START));
        assert!(!peer.path_failed(START + 11 * MINUTE));
        assert!(peer.path_failed(START + 20 * MINUTE));
        assert!(!Peer::default().path_failed(5), "soon after boot");
    }

    #[test]
    fn known_peers_are_counted_once_a_day() {
        let (mut storm, mut peer) = (Storm::default(), Peer::default());
        for at in [START, START + 1, START + HOUR] {
            if peer.speaks(at) {
                storm.count_known(at);
            }
        }
        assert_eq!(storm.known(START + HOUR), 1);
        assert_eq!(storm.known(START + 49 * HOUR), 0);
    }

    #[test]
    fn a_storm_is_read_as_it_is_written() {
        let recent = |window: u64, here: u32, before: u32| Recent { window, here, before };
        let storm = Storm { known: recent(1, 2, 3), held: recent(4, 5, 6) };
        let mut bytes = [0; size_of::<Storm>()];
        for (at, long) in [(0, 1u64), (16, 4)] {
            bytes[at..at + 8].copy_from_slice(&long.to_ne_bytes());
        }
        for (at, word) in [(8, 2u32), (12, 3), (24, 5), (28, 6)] {
            bytes[at..at + 4].copy_from_slice(&word.to_ne_bytes());
        }
        assert_eq!(Storm::from_bytes(bytes), storm);
    }

    #[test]
    fn a_quarter_of_a_fleet_at_most() {
        let mut storm = Storm::default();
        for _ in 0..100 {
            storm.count_known(START);
        }
        assert_eq!((storm.known(START), storm.at_most(START)), (100, 25));
        let held = (0..100).filter(|i| storm.hold_one_more(START + i)).count();
        assert_eq!((held, storm.held(START + 100)), (25, 25));
        assert!(!storm.hold_one_more(START + 59 * SECOND));
        assert!(storm.hold_one_more(START + 121 * SECOND), "all of them have ended");
        let mut few = Storm::default();
        few.count_known(START);
        assert_eq!(few.at_most(START), HELD_ALWAYS);
    }

    proptest! {
        /// Whatever happens when: no peer that is known is held longer than a minute, and never more of them at once than
        /// the share.
        #[test]
        fn no_storm_quarantines_a_fleet(
            fleet in 1u32..200,
            steps in prop::collection::vec((0u32..200, 0u64..20 * SECOND, any::<bool>()), 1..400),
        ) {
            let mut now = START;
            let mut storm = Storm::default();
            let mut peers: HashMap<u32, (Peer, Option<Entry>)> = HashMap::new();
            for number in 0..fleet {
                let (peer, _) = peers.entry(number).or_default();
                if peer.speaks(now) {
                    storm.count_known(now);
                }
            }
            for (number, pause, speaks) in steps {
                now += pause;
                let holding = |entry: &Option<Entry>, now| entry.is_some_and(|e| now < e.until);
                let (peer, entry) = peers.entry(number % fleet).or_default();
                if holding(entry, now) {
                    continue;
                }
                if speaks {
                    if peer.speaks(now) {
                        storm.count_known(now);
                    }
                } else if storm.hold_one_more(now) {
                    let span = peer.suspect(entry.as_ref(), now);
                    prop_assert_eq!(span, SUSPICION_SPAN);
                    *entry = Some(Entry { until: now + u64::from(span) * SECOND, span, ..Entry::default() });
                }
                let held = peers.values().filter(|(_, entry)| holding(entry, now)).count() as u32;
                prop_assert!(held <= HELD_ALWAYS.max(fleet / KNOWN_PER_HELD), "{} of {}", held, fleet);
                prop_assert!(held <= storm.held(now));
            }
        }

        /// A peer that is not known: spans never shrink while it repeats, and end at a week.
        #[test]
        fn spans_grow_while_it_repeats(pauses in prop::collection::vec(0u64..23 * HOUR, 1..30)) {
            let spans = spans(&mut Peer::default(), &pauses);
            prop_assert_eq!(spans[0], SUSPICION_SPAN);
            prop_assert!(spans.windows(2).all(|w| w[1] > w[0] || w[1] == LONGEST_SPAN), "{:?}", spans);
            prop_assert!(spans.iter().all(|span| *span <= LONGEST_SPAN));
        }

        /// Nothing of what programs are handed makes these functions panic.
        #[test]
        fn any_input(result: i32, bytes: u64, spoke: u64, suspected: [u64; 2], path: u64, until: u64, span: u32, now: u64) {
            let _ = (Ending::of(result, bytes), evidence_length(bytes));
            let mut peer = Peer { spoke, suspected, path };
            peer.suspect(Some(&Entry { until, span, ..Entry::default() }), now);
            let mut storm = Storm::default();
            if peer.speaks(now) {
                storm.count_known(now);
            }
            storm.hold_one_more(now);
            peer.path_failed(now);
        }
    }
}
