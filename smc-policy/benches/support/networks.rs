//! Random networks from a seed: a mix of prefix lengths like a routing table's, or single hosts.

use std::{
    collections::HashSet,
    net::{Ipv4Addr, Ipv6Addr},
};

use smc_policy_common::query::Addr;

/// Pseudo-random numbers (splitmix64).
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// One of `items`, of which there is one at least.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    fn bits(&mut self) -> u128 {
        u128::from(self.next()) << 64 | u128::from(self.next())
    }
}

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    /// Bits of an address.
    pub fn width(self) -> u32 {
        if self == Self::V4 { 32 } else { 128 }
    }
}

/// What kind of networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Prefix lengths in about the shares they have in the Internet's routing tables, four of ten within another one.
    Routes,
    /// Single addresses.
    Hosts,
}

/// What the tables of results call them.
pub fn name(family: Family, mix: Mix) -> &'static str {
    match (family, mix) {
        (Family::V4, Mix::Routes) => "IPv4 routes",
        (Family::V4, Mix::Hosts) => "IPv4 hosts",
        (Family::V6, Mix::Routes) => "IPv6 routes",
        (Family::V6, Mix::Hosts) => "IPv6 hosts",
    }
}

/// A network. Numbers of IPv4 stand in the low 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Network {
    pub family: Family,
    pub first: u128,
    pub bits: u32,
}

impl Network {
    fn new(family: Family, within: u128, bits: u32) -> Self {
        let host = host_mask(family, bits);
        Self { family, first: within & !host, bits }
    }

    /// Its last address.
    pub fn last(&self) -> u128 {
        self.first | host_mask(self.family, self.bits)
    }

    /// A random address that shares its first `bits` bits.
    pub fn random_address(&self, bits: u32, rng: &mut Rng) -> Addr {
        let mask = host_mask(self.family, bits);
        address(self.family, self.first & !mask | rng.bits() & mask)
    }

    /// As it is written in lists.
    pub fn text(&self) -> String {
        let Self { family, first, bits } = *self;
        match family {
            Family::V4 if bits == 32 => Ipv4Addr::from_bits(first as u32).to_string(),
            Family::V4 => format!("{}/{bits}", Ipv4Addr::from_bits(first as u32)),
            Family::V6 if bits == 128 => Ipv6Addr::from_bits(first).to_string(),
            Family::V6 => format!("{}/{bits}", Ipv6Addr::from_bits(first)),
        }
    }
}

fn host_mask(family: Family, bits: u32) -> u128 {
    u128::MAX.checked_shr(128 - family.width() + bits).unwrap_or(0)
}

/// The address of this number.
pub fn address(family: Family, number: u128) -> Addr {
    match family {
        Family::V4 => Addr::v4(number as u32),
        Family::V6 => Addr::v6(number),
    }
}

/// (bits, share in a million).
const ROUTES_V4: [(u32, u32); 17] = [
    (8, 16),
    (9, 14),
    (10, 40),
    (11, 100),
    (12, 300),
    (13, 600),
    (14, 1200),
    (15, 2100),
    (16, 13_500),
    (17, 8400),
    (18, 14_000),
    (19, 25_000),
    (20, 43_000),
    (21, 51_000),
    (22, 110_000),
    (23, 100_000),
    (24, 630_730),
];
const ROUTES_V6: [(u32, u32); 16] = [
    (24, 300),
    (28, 1500),
    (29, 22_000),
    (30, 2500),
    (31, 1200),
    (32, 125_000),
    (33, 16_000),
    (34, 10_000),
    (36, 40_000),
    (38, 12_000),
    (40, 70_000),
    (42, 15_000),
    (44, 85_000),
    (46, 30_000),
    (47, 30_000),
    (48, 539_500),
];
/// Blocks that the regional registries allocate from.
const BLOCKS_V6: [(u128, u32); 6] = [
    (0x2001 << 112, 16),
    (0x2400 << 112, 12),
    (0x2600 << 112, 12),
    (0x2800 << 112, 12),
    (0x2a00 << 112, 12),
    (0x2c00 << 112, 12),
];

fn random_number(family: Family, rng: &mut Rng) -> u128 {
    match family {
        // 1.0.0.0 to 223.255.255.255.
        Family::V4 => u128::from(0x0100_0000 + (rng.next() % 0xdf00_0000) as u32),
        Family::V6 => {
            let (first, bits) = *rng.pick(&BLOCKS_V6);
            first | rng.bits() & host_mask(family, bits)
        }
    }
}

fn bits(shares: &[(u32, u32)], rng: &mut Rng) -> u32 {
    let mut at = rng.below(1_000_000) as u32;
    for (bits, share) in shares {
        if at < *share {
            return *bits;
        }
        at -= share;
    }
    shares.last().map_or(0, |(bits, _)| *bits)
}

/// `count` distinct networks.
pub fn generate(family: Family, mix: Mix, count: usize, seed: u64) -> Vec<Network> {
    let mut rng = Rng(seed ^ u64::from(family.width()) << 32 ^ (mix as u64) << 48);
    let shares: &[(u32, u32)] = if family == Family::V4 { &ROUTES_V4 } else { &ROUTES_V6 };
    // Sixteen hosts or so share an IPv6 network of 64 bits.
    let sites: Vec<u128> =
        (0..count / 16 + 1).map(|_| random_number(Family::V6, &mut rng) >> 64 << 64).collect();
    let mut known = HashSet::with_capacity(count);
    let mut networks: Vec<Network> = Vec::with_capacity(count);
    while networks.len() < count {
        let network = match (mix, family) {
            (Mix::Hosts, Family::V4) => Network::new(family, random_number(family, &mut rng), 32),
            (Mix::Hosts, Family::V6) => {
                let site = *rng.pick(&sites);
                // Half of them numbered by hand, half of them by themselves.
                let interface =
                    if rng.below(2) == 0 { u128::from(rng.next() as u16) } else { u128::from(rng.next()) };
                Network::new(family, site | interface, 128)
            }
            (Mix::Routes, _) => {
                let bits = bits(shares, &mut rng);
                let within = (rng.below(10) < 4 && !networks.is_empty())
                    .then(|| *rng.pick(&networks))
                    .filter(|outer| outer.bits < bits);
                let number = match within {
                    Some(outer) => outer.first | rng.bits() & host_mask(family, outer.bits),
                    None => random_number(family, &mut rng),
                };
                Network::new(family, number, bits)
            }
        };
        if known.insert(network) {
            networks.push(network);
        }
    }
    networks
}
