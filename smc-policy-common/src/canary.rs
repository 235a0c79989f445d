//! The canary: a TCP option that this host adds to its SYNs and that nobody knows. Who returns it echoes options.

use crate::{query::Addr, siphash::siphash24};

/// How long a key that was replaced still holds, ns: far longer than a SYN-ACK may take.
pub const PREVIOUS_HOLDS: u64 = 300 * 1_000_000_000;

/// The keys, the only element of the map `smcpol_keys`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keys {
    /// SYNs are marked under this one.
    pub current: [u64; 2],
    /// SYN-ACKs may be to SYNs that were marked under this one.
    pub previous: [u64; 2],
    /// Until then, ns since boot (`CLOCK_BOOTTIME`).
    pub previous_until: u64,
    /// Since when `current` is in use, likewise.
    pub since: u64,
}

/// A connection that is being opened, as both its SYN and the answer show it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The other host.
    pub peer: Addr,
    /// This host's address.
    pub local: Addr,
    /// The peer's port, host order.
    pub peer_port: u16,
    /// Ours.
    pub local_port: u16,
    /// The SYN's sequence number; the answer acknowledges the next one.
    pub sequence: u32,
}

impl Opening {
    /// Ports and sequence number in one word.
    #[inline(always)]
    pub const fn word(&self) -> u64 {
        (self.local_port as u64) << 48 | (self.peer_port as u64) << 32 | self.sequence as u64
    }
}

/// What proves that a canary is ours: `word` is [`Opening::word`].
#[inline(always)]
pub fn nonce(key: [u64; 2], peer: Addr, local: Addr, word: u64) -> u32 {
    siphash24(key, [peer.hi, peer.lo, local.hi, local.lo, word]) as u32
}

const _: () = assert!(size_of::<Keys>() == 48 && size_of::<Opening>() == 40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_of_a_connection_is_in_its_nonce() {
        let opening = Opening {
            peer: Addr::v4(0x0a00_0001),
            local: Addr::v4(0x0a00_0002),
            peer_port: 443,
            local_port: 40_000,
            sequence: 7,
        };
        let of = |o: Opening| nonce([1, 2], o.peer, o.local, o.word());
        let others = [
            Opening { peer: Addr::v4(0x0a00_0003), ..opening },
            Opening { local: Addr::v4(0x0a00_0003), ..opening },
            Opening { peer: opening.local, local: opening.peer, ..opening },
            Opening { peer_port: 444, ..opening },
            Opening { local_port: 443, peer_port: 40_000, ..opening },
            Opening { sequence: 8, ..opening },
        ];
        for other in others {
            assert_ne!(of(other), of(opening), "{other:?}");
        }
        assert_ne!(nonce([1, 3], opening.peer, opening.local, opening.word()), of(opening));
    }
}
