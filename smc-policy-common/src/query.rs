//! A connection to judge, and its form in a test run's packet.

/// Who connects, seen from this host.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// This host connects (it sends the SYN); the service port is the peer's.
    Outbound = 0,
    /// This host accepts (it sends the SYN-ACK); the service port is ours.
    Inbound = 1,
}

/// A 16-byte address as two host-order halves. IPv4 is held v4-mapped (`::ffff:a.b.c.d`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Addr {
    /// The first eight bytes on the wire.
    pub hi: u64,
    /// The last eight bytes on the wire.
    pub lo: u64,
}

impl Addr {
    /// An IPv4 address given as its host-order number.
    #[inline(always)]
    pub const fn v4(addr: u32) -> Self {
        Self { hi: 0, lo: 0xffff_0000_0000 | addr as u64 }
    }

    /// An IPv6 address given as its host-order number; `::ffff:a.b.c.d` is the IPv4 address.
    pub const fn v6(addr: u128) -> Self {
        Self { hi: (addr >> 64) as u64, lo: addr as u64 }
    }

    /// The IPv4 address in host order, if this is one.
    #[inline(always)]
    pub const fn as_v4(self) -> Option<u32> {
        if self.hi == 0 && self.lo >> 32 == 0xffff { Some(self.lo as u32) } else { None }
    }
}

/// One connection to judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    /// The other host.
    pub peer: Addr,
    /// This host's address of the connection.
    pub local: Addr,
    /// The service port in host order: the peer's when outbound, ours when inbound.
    pub port: u16,
    /// Who connects.
    pub direction: Direction,
}

/// A [`Query`] as it stands in the packet of a test run of the program `smcpol_query`, native byte order. The packet
/// is [`PACKET_HEADER`] zero bytes followed by these; the program overwrites `meta` with a [`WireAnswer`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireQuery {
    /// The other host.
    pub peer: Addr,
    /// This host's address.
    pub local: Addr,
    /// In: the port in bits 0..16, the direction in bit 16. Out: [`WireAnswer`].
    pub meta: u64,
}

/// Bytes before the first [`WireQuery`] in the packet: an Ethernet header, which every test run of a tc program must
/// have (`bpf_prog_test_run_skb`, net/bpf/test_run.c), padded to eight.
pub const PACKET_HEADER: usize = 16;

/// Most queries in one packet: a test run's linear data must fit a page with its headroom
/// (`bpf_test_init`, net/bpf/test_run.c).
pub const PACKET_QUERIES: usize = 64;

impl WireQuery {
    /// The wire form of `query`.
    pub const fn new(query: &Query) -> Self {
        Self {
            peer: query.peer,
            local: query.local,
            meta: query.port as u64 | (query.direction as u64) << 16,
        }
    }

    /// Reads `meta` back. Any bit pattern is a query.
    #[inline(always)]
    pub const fn query(&self) -> Query {
        let direction = if self.meta >> 16 & 1 == 0 { Direction::Outbound } else { Direction::Inbound };
        Query { peer: self.peer, local: self.local, port: self.meta as u16, direction }
    }
}

/// What the program `smcpol_query` answers in [`WireQuery::meta`]: the rule's counter slot in bits 0..32, then flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireAnswer(pub u64);

impl WireAnswer {
    const ANSWERED: u64 = 1 << 63;
    const DECIDED: u64 = 1 << 62;
    const ALLOW: u64 = 1 << 32;

    /// The answer for `verdict`; `None`: no table was in force.
    #[inline(always)]
    pub const fn new(verdict: Option<crate::table::Verdict>) -> Self {
        match verdict {
            None => Self(Self::ANSWERED),
            Some(v) => {
                Self(Self::ANSWERED | Self::DECIDED | v.slot as u64 | if v.allow { Self::ALLOW } else { 0 })
            }
        }
    }

    /// `None`: the program did not answer this query. `Some(None)`: no table was in force.
    pub const fn verdict(self) -> Option<Option<(bool, u32)>> {
        if self.0 & Self::ANSWERED == 0 {
            None
        } else if self.0 & Self::DECIDED == 0 {
            Some(None)
        } else {
            Some(Some((self.0 & Self::ALLOW != 0, self.0 as u32)))
        }
    }
}

const _: () = assert!(size_of::<WireQuery>() == 40);
