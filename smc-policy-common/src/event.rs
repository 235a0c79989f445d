//! Events: what programs tell whoever reads, through a ring buffer that all instances share (`smcpol_events`).
//!
//! Nothing is written while nobody reads: a reader holds a lease, the end of which it moves on while it lives. Two elements
//! of 8 bytes in the map `smcpol_reader` say so: [`UNTIL`] and [`WANTS`].

use crate::query::Addr;

/// Version of [`Event`], in each of them.
pub const VERSION: u16 = 1;

/// Bytes of the ring buffer: a power of two, and a multiple of every page size (up to 64 KiB).
pub const RING_BYTES: u32 = 256 * 1024;

/// What an event is about.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A connection was judged.
    Decision = 0,
    /// A SYN-ACK returned our canary: it lost the SMC option, or would have ([`Event::KEPT`]).
    Echo = 1,
    /// A peer entered the quarantine, or was met again.
    Quarantine = 2,
    /// The peer reset a connection whose SYN-ACK was blanked, before it had sent anything.
    Reset = 3,
}

/// How many kinds there are.
pub const KINDS: usize = 4;

impl Kind {
    /// All of them, by their numbers.
    pub const ALL: [Self; KINDS] = [Self::Decision, Self::Echo, Self::Quarantine, Self::Reset];

    /// From [`Event::kind`].
    pub fn from_u8(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == number)
    }
}

/// Bytes of evidence in an event.
pub const EVIDENCE: usize = crate::quarantine::EVIDENCE;

/// One event. What a kind does not have is zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// [`VERSION`].
    pub version: u16,
    /// A [`Kind`].
    pub kind: u8,
    /// `Event::*`.
    pub flags: u8,
    /// Decision: counter slot of who decided; the record of `generation` names it.
    pub slot: u32,
    /// When, ns since boot (`CLOCK_BOOTTIME`).
    pub at: u64,
    /// Decision: the generation that it was judged by.
    pub generation: u64,
    /// The other host.
    pub peer: Addr,
    /// This host's address.
    pub local: Addr,
    /// Service port, host order; a quarantine entry's: 0 for all of them.
    pub port: u16,
    /// This host's port of the connection; 0: not known.
    pub local_port: u16,
    /// A [`Cause`](crate::quarantine::Cause).
    pub cause: u8,
    /// How many bytes of `evidence` there are.
    pub evidence_length: u8,
    /// Zero.
    pub reserved: u16,
    /// Quarantine: until when, ns since boot.
    pub until: u64,
    /// Quarantine: how often the cause was met.
    pub count: u32,
    /// Quarantine: how long it holds, seconds.
    pub span: u32,
    /// What the peer sent that gave it away.
    pub evidence: [u8; EVIDENCE],
}

impl Event {
    /// In [`Self::flags`]: this host accepts.
    pub const INBOUND: u8 = 1;
    /// Decision: the connection may negotiate SMC.
    pub const ALLOWED: u8 = 2;
    /// The table only observes: whatever was decided, it may.
    pub const OBSERVED: u8 = 4;
    /// Decision: the quarantine denies, not the rule.
    pub const QUARANTINED: u8 = 8;
    /// Quarantine: the peer was in it before.
    pub const RENEWED: u8 = 16;
    /// Echo: the answer was left as it is.
    pub const KEPT: u8 = 32;

    /// Bytes of an event.
    pub const BYTES: usize = size_of::<Self>();
}

/// Element of `smcpol_reader`: until when somebody reads, ns since boot; 0: nobody does.
pub const UNTIL: u32 = 0;
/// Element of `smcpol_reader`: what the reader wants, `WANTS_*`, and from bit 32 on, of how many decisions it wants one.
pub const WANTS: u32 = 1;
/// Elements of `smcpol_reader`.
pub const READER: u32 = 2;

/// Connections that are denied.
pub const WANTS_DENIES: u64 = 1;
/// Connections that are allowed.
pub const WANTS_ALLOWS: u64 = 2;
/// Echoes, the quarantine, resets.
pub const WANTS_GUARD: u64 = 4;

/// How long after its lease a reader that does not give it back is believed to be only slow, ns: so long what it misses is
/// counted as lost.
pub const SLOW: u64 = 60 * 1_000_000_000;

/// Whether somebody reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// Nobody.
    None,
    /// Somebody who has not been heard of for a while: what happens is counted as lost.
    Slow,
    /// Somebody.
    Here,
}

impl Reader {
    /// By element [`UNTIL`], at this time.
    #[inline(always)]
    pub const fn at(until: u64, now: u64) -> Self {
        if now < until {
            Self::Here
        } else if until != 0 && now - until < SLOW {
            Self::Slow
        } else {
            Self::None
        }
    }
}

/// Events written and lost since the ring was made, by kind; counted per CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Written.
    pub written: [u64; KINDS],
    /// Lost: the ring was full, or the reader too slow to keep its lease.
    pub lost: [u64; KINDS],
}

const _: () = {
    use core::mem::offset_of;
    assert!(Event::BYTES == 96);
    assert!(
        offset_of!(Event, slot) == 4 && offset_of!(Event, at) == 8 && offset_of!(Event, generation) == 16
    );
    assert!(offset_of!(Event, peer) == 24 && offset_of!(Event, local) == 40 && offset_of!(Event, port) == 56);
    assert!(offset_of!(Event, cause) == 60 && offset_of!(Event, until) == 64);
    assert!(offset_of!(Event, count) == 72 && offset_of!(Event, evidence) == 80);
    assert!(size_of::<Told>() == 16 * KINDS);
    assert!(RING_BYTES.is_power_of_two() && RING_BYTES.is_multiple_of(65_536));
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_ends_and_a_reader_is_given_up() {
        assert_eq!(Reader::at(0, 5), Reader::None);
        assert_eq!(
            [99, 100, 100 + SLOW - 1].map(|now| Reader::at(100, now)),
            [Reader::Here, Reader::Slow, Reader::Slow]
        );
        assert_eq!(Reader::at(100, 100 + SLOW), Reader::None);
    }

    #[test]
    fn kinds_are_told_apart_and_number_the_counters() {
        for (number, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(Kind::from_u8(number as u8), Some(kind));
            assert_eq!(kind as usize, number);
        }
        assert_eq!(Kind::from_u8(KINDS as u8), None);
    }
}
