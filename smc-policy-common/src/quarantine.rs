//! The quarantine: peers that this host does not negotiate SMC with for a while, and why.
//!
//! Two maps have the same keys and values: what programs learned (the least recently used go when it is full), and what
//! somebody decided by command (never evicted). Both are shared by all instances.

use crate::query::{Addr, Direction};

/// Version of [`Key`], [`Entry`], [`Learned`] and of the set of shared maps.
pub const LAYOUT: u32 = 3;

/// Entries that programs may learn.
pub const LEARNED_ENTRIES: u32 = 65_536;
/// Entries by command.
pub const COMMANDED_ENTRIES: u32 = 65_536;

/// Element of `smcpol_qflags`: not 0 if something may be among the learned entries.
pub const FLAG_LEARNED: u32 = 0;
/// Element of `smcpol_qflags`: not 0 if something may be among the entries by command.
pub const FLAG_COMMANDED: u32 = 1;
/// Element of `smcpol_qflags`: learned entries that user space removed.
pub const REMOVED: u32 = 2;
/// Elements of `smcpol_qflags`.
pub const FLAGS: u32 = 4;

/// Whom an entry is about.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The peer's address.
    pub peer: Addr,
    /// Its service port in host order; 0: all of them.
    pub port: u32,
    /// Zero.
    pub reserved: u32,
}

impl Key {
    /// A service of a peer; port 0: all.
    #[inline(always)]
    pub const fn new(peer: Addr, port: u16) -> Self {
        Self { peer, port: port as u32, reserved: 0 }
    }
}

/// Why a peer is in quarantine.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Its SYN-ACK returned our canary with the right nonce: it echoes TCP options.
    Echo = 1,
    /// It returned the short canary, which has no nonce, to a connection that waited for it.
    ShortEcho = 2,
    /// It answered with something that is no CLC message.
    NoClc = 3,
    /// It did not answer.
    Silence = 4,
    /// It reset or closed the connection.
    Reset = 5,
    /// RDMA to it does not work.
    RdmaPath = 6,
    /// An operator said so.
    Operator = 7,
    /// A probe found that it echoes.
    Probe = 8,
    /// A link check found that RDMA does not work.
    LinkCheck = 9,
}

impl Cause {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Echo,
        Self::ShortEcho,
        Self::NoClc,
        Self::Silence,
        Self::Reset,
        Self::RdmaPath,
        Self::Operator,
        Self::Probe,
        Self::LinkCheck,
    ];

    /// From [`Entry::cause`].
    pub fn from_u8(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|cause| *cause as u8 == number)
    }
}

/// Bytes of evidence in an entry.
pub const EVIDENCE: usize = 16;

/// An entry. Times are nanoseconds since boot, time spent suspended included (`CLOCK_BOOTTIME`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// From then on it is none.
    pub until: u64,
    /// When the cause was met first.
    pub first_seen: u64,
    /// When it was met last.
    pub last_seen: u64,
    /// How often.
    pub count: u32,
    /// How long it holds each time, seconds; grows while it repeats.
    pub span: u32,
    /// A [`Cause`].
    pub cause: u8,
    /// [`Self::OUTBOUND`], [`Self::INBOUND`].
    pub directions: u8,
    /// How many bytes of `evidence` there are.
    pub evidence_length: u8,
    /// How often the peer reset a connection whose SYN-ACK was blanked, before it had sent anything; at most 255.
    pub resets: u8,
    /// Zero.
    pub reserved: [u8; 4],
    /// What the peer sent that gave it away.
    pub evidence: [u8; EVIDENCE],
}

impl Entry {
    /// In [`Self::directions`]: connections to the peer.
    pub const OUTBOUND: u8 = 1;
    /// In [`Self::directions`]: connections from the peer.
    pub const INBOUND: u8 = 2;

    /// Whether it stops a connection of this direction at this time.
    #[inline(always)]
    pub const fn holds(&self, direction: Direction, now: u64) -> bool {
        let bit = match direction {
            Direction::Outbound => Self::OUTBOUND,
            Direction::Inbound => Self::INBOUND,
        };
        self.directions & bit != 0 && now < self.until
    }
}

/// Seconds that an entry of a proven echo holds the first time.
pub const ECHO_SPAN: u32 = 3600;
/// Seconds that an entry holds at most.
pub const LONGEST_SPAN: u32 = 7 * 24 * 3600;

/// How long an entry holds that is met again: unchanged while it holds (the same storm), else twice as long.
#[inline(always)]
pub const fn next_span(before: &Entry, now: u64, first: u32) -> u32 {
    if now < before.until {
        before.span
    } else if before.span < first {
        first
    } else if before.span >= LONGEST_SPAN / 2 {
        LONGEST_SPAN
    } else {
        before.span * 2
    }
}

/// What the programs learned, counted per CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Learned {
    /// Entries made. Less those that are there and those that user space removed: evicted.
    pub inserted: u64,
    /// Entries met again.
    pub renewed: u64,
    /// Entries that the map refused (out of memory).
    pub refused: u64,
}

const _: () = {
    assert!(size_of::<Key>() == 24 && core::mem::offset_of!(Key, port) == 16);
    assert!(size_of::<Entry>() == 56);
    assert!(core::mem::offset_of!(Entry, count) == 24 && core::mem::offset_of!(Entry, cause) == 32);
    assert!(core::mem::offset_of!(Entry, resets) == 35 && core::mem::offset_of!(Entry, evidence) == 40);
    assert!(size_of::<Learned>() == 24);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_holds_until_it_ends_and_in_its_directions() {
        let entry = Entry { until: 100, directions: Entry::OUTBOUND, ..Entry::default() };
        assert!(entry.holds(Direction::Outbound, 99));
        assert!(!entry.holds(Direction::Outbound, 100));
        assert!(!entry.holds(Direction::Inbound, 99));
        let both = Entry { directions: Entry::OUTBOUND | Entry::INBOUND, ..entry };
        assert!(both.holds(Direction::Inbound, 99));
    }

    #[test]
    fn spans_double_up_to_a_week() {
        let mut entry = Entry { until: 10, span: ECHO_SPAN, ..Entry::default() };
        assert_eq!(next_span(&entry, 9, ECHO_SPAN), ECHO_SPAN, "the same storm");
        let mut spans = [0; 10];
        for span in &mut spans {
            entry.span = next_span(&entry, 10, ECHO_SPAN);
            *span = entry.span / 3600;
        }
        assert_eq!(spans, [2, 4, 8, 16, 32, 64, 128, 168, 168, 168]);
        entry.span = 60;
        assert_eq!(next_span(&entry, 10, ECHO_SPAN), ECHO_SPAN, "a proven echo after a suspicion");
    }

    #[test]
    fn causes_are_told_apart() {
        for cause in Cause::ALL {
            assert_eq!(Cause::from_u8(cause as u8), Some(cause));
        }
        assert_eq!(Cause::from_u8(0), None);
    }
}
