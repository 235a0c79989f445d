//! Addresses in texts: single ones, networks, ranges, endpoints; and sets of them.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use smc_policy_common::query::Addr;

use super::ranges::RangeSet;

/// First and last of `::ffff:0:0/96`, whose addresses are IPv4 addresses.
pub const MAPPED: (u128, u128) = (0xffff_0000_0000, 0xffff_ffff_ffff);

/// An inclusive range of addresses of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AddrRange {
    /// IPv4, host order.
    V4(u32, u32),
    /// IPv6, host order; IPv4-mapped addresses within do not belong to it.
    V6(u128, u128),
}

impl AddrRange {
    /// The one address `addr`.
    pub fn single(addr: Addr) -> Self {
        match addr.as_v4() {
            Some(v4) => Self::V4(v4, v4),
            None => Self::V6(to_u128(addr), to_u128(addr)),
        }
    }
}

/// The number of an address.
pub fn to_u128(addr: Addr) -> u128 {
    u128::from(addr.hi) << 64 | u128::from(addr.lo)
}

/// The standard library's form of an address; `::ffff:a.b.c.d` comes back as IPv4.
pub fn to_ip(addr: Addr) -> IpAddr {
    match addr.as_v4() {
        Some(v4) => IpAddr::V4(Ipv4Addr::from_bits(v4)),
        None => IpAddr::V6(Ipv6Addr::from_bits(to_u128(addr))),
    }
}

/// The address as the tables hold it.
pub fn from_ip(ip: IpAddr) -> Addr {
    match ip {
        IpAddr::V4(v4) => Addr::v4(v4.to_bits()),
        IpAddr::V6(v6) => Addr::v6(v6.to_bits()),
    }
}

/// `a.b.c.d/n` when the range is a network, a single address when it is one, else `first-last`.
impl fmt::Display for AddrRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last, width, lo, hi): (IpAddr, IpAddr, u32, u128, u128) = match *self {
            Self::V4(lo, hi) => {
                (Ipv4Addr::from_bits(lo).into(), Ipv4Addr::from_bits(hi).into(), 32, lo.into(), hi.into())
            }
            Self::V6(lo, hi) => (Ipv6Addr::from_bits(lo).into(), Ipv6Addr::from_bits(hi).into(), 128, lo, hi),
        };
        let differing = lo ^ hi;
        let host_bits = 128 - differing.leading_zeros();
        if lo == hi {
            write!(f, "{first}")
        } else if differing & differing.wrapping_add(1) == 0 && lo & differing == 0 {
            write!(f, "{first}/{}", width - host_bits)
        } else {
            write!(f, "{first}-{last}")
        }
    }
}

/// A set of addresses of both families. The IPv6 half never holds an IPv4-mapped address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct AddrSet {
    v4: RangeSet<u32>,
    v6: RangeSet<u128>,
}

impl AddrSet {
    /// The addresses in any of these ranges.
    pub fn new(v4: Vec<(u32, u32)>, v6: Vec<(u128, u128)>) -> Self {
        let v6 = RangeSet::new(v6);
        let mapped = RangeSet::new(vec![MAPPED]);
        let holds_mapped = v6.ranges().iter().any(|(lo, hi)| *lo <= MAPPED.1 && MAPPED.0 <= *hi);
        Self { v4: RangeSet::new(v4), v6: if holds_mapped { v6.minus(&mapped) } else { v6 } }
    }

    /// Every address.
    pub fn full() -> Self {
        Self::new(vec![(0, u32::MAX)], vec![(0, u128::MAX)])
    }

    /// The IPv4 half.
    pub fn v4(&self) -> &RangeSet<u32> {
        &self.v4
    }

    /// The IPv6 half; never holds an IPv4-mapped address.
    pub fn v6(&self) -> &RangeSet<u128> {
        &self.v6
    }

    /// Holds `addr`.
    pub fn contains(&self, addr: Addr) -> bool {
        match addr.as_v4() {
            Some(v4) => self.v4.contains(v4),
            None => self.v6.contains(to_u128(addr)),
        }
    }

    /// Holds no address.
    pub fn is_empty(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty()
    }

    /// Addresses of either.
    pub fn plus(&self, other: &Self) -> Self {
        Self::new(
            [self.v4.ranges(), other.v4.ranges()].concat(),
            [self.v6.ranges(), other.v6.ranges()].concat(),
        )
    }

    /// Addresses of `self` that are not in `other`.
    pub fn minus(&self, other: &Self) -> Self {
        Self { v4: self.v4.minus(&other.v4), v6: self.v6.minus(&other.v6) }
    }

    /// The ranges, IPv4 first, each family ascending.
    pub fn ranges(&self) -> impl Iterator<Item = AddrRange> + '_ {
        let v4 = self.v4.ranges().iter().map(|(lo, hi)| AddrRange::V4(*lo, *hi));
        v4.chain(self.v6.ranges().iter().map(|(lo, hi)| AddrRange::V6(*lo, *hi)))
    }

    /// Number of ranges.
    pub fn len(&self) -> usize {
        self.v4.ranges().len() + self.v6.ranges().len()
    }
}
