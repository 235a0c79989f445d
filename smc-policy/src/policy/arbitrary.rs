//! Random policies and connections from a seed, for tests: the same seed gives the same ones. Both lean to where mistakes
//! hide: overlapping, nested and adjacent networks, first and last addresses, IPv4-mapped ones, many lists of ports.

use std::{
    fmt::Write,
    net::{Ipv4Addr, Ipv6Addr},
};

use smc_policy_common::query::{Addr, Direction, Query};

use super::{
    address::{AddrRange, AddrSet, MAPPED, to_u128},
    model::Policy,
    moment::Moment,
};

/// A small generator of pseudo-random numbers (splitmix64): enough for tests, and the same everywhere.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 bits.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// 0 to `end - 1`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.number() % end.max(1) as u64) as usize
    }

    /// True `percent` times in a hundred.
    pub fn percent(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> Option<T> {
        choices.get(self.below(choices.len())).copied()
    }

    fn bits(&mut self) -> u128 {
        u128::from(self.number()) << 64 | u128::from(self.number())
    }
}

const V4: [u32; 8] =
    [0, 0x0a00_0000, 0x0a00_0080, 0x0a01_0000, 0x7f00_0001, 0xc0a8_0001, 0xffff_fff0, 0xffff_ffff];
const V6: [u128; 9] = [
    0,
    1,
    MAPPED.0 - 1,
    MAPPED.1 + 1,
    0x2001_0db8 << 96,
    0x2001_0db8_0000_0001 << 64,
    (0x2001_0db8 << 96) | 0xff,
    0xfe80 << 112,
    u128::MAX,
];

/// How many bits at the end of an address are random: mostly few, so that ranges meet.
fn low_bits(random: &mut Random, width: u32) -> u32 {
    match random.below(10) {
        0 => random.below(width as usize + 1) as u32,
        1..4 => 16,
        4..6 => 8,
        _ => 4,
    }
}

fn v4(random: &mut Random) -> u32 {
    let mask = u32::MAX.checked_shr(32 - low_bits(random, 32)).unwrap_or(0);
    random.of(&V4).unwrap_or(0) ^ random.number() as u32 & mask
}

fn v6(random: &mut Random) -> u128 {
    let base = random.of(&V6).unwrap_or(0);
    // Where networks differ is in the first half mostly.
    let shift = if random.percent(50) { 64 } else { 0 };
    let mask = u128::MAX.checked_shr(128 - low_bits(random, 128)).unwrap_or(0);
    base ^ (random.bits() & mask) << shift
}

/// A moment that some rules of [`policy`] have outlived, and some have not: in 2026.
pub const NOW: Moment = Moment::from_unix(1_780_000_000);

/// An address of any kind.
pub fn addr(random: &mut Random) -> Addr {
    if random.percent(60) { Addr::v4(v4(random)) } else { Addr::v6(v6(random)) }
}

pub(super) fn element(random: &mut Random) -> String {
    let is_v4 = random.percent(60);
    match random.below(10) {
        0 => (if is_v4 { "0.0.0.0/0" } else { "::/0" }).to_owned(),
        1..4 => {
            AddrRange::single(if is_v4 { Addr::v4(v4(random)) } else { Addr::v6(v6(random)) }).to_string()
        }
        4..7 if is_v4 => {
            let bits = 32 - low_bits(random, 32);
            let mask = u32::MAX.checked_shr(bits).unwrap_or(0);
            let base = v4(random) & !mask;
            if random.percent(10) {
                let mapped = Ipv4Addr::from_bits(base).to_ipv6_mapped();
                return format!("{mapped}/{}", bits + 96);
            }
            format!("{}/{bits}", Ipv4Addr::from_bits(base))
        }
        4..7 => {
            let bits = 128 - low_bits(random, 128);
            let bits = if random.percent(50) { bits } else { bits.saturating_sub(64) };
            let base = v6(random) & !u128::MAX.checked_shr(bits).unwrap_or(0);
            format!("{}/{bits}", Ipv6Addr::from_bits(base))
        }
        _ if is_v4 => {
            let (a, b) = (v4(random), v4(random));
            format!("{}-{}", Ipv4Addr::from_bits(a.min(b)), Ipv4Addr::from_bits(a.max(b)))
        }
        _ => {
            let mut real = || loop {
                let address = v6(random);
                if Addr::v6(address).as_v4().is_none() {
                    return address;
                }
            };
            let (a, b) = (real(), real());
            format!("{}-{}", Ipv6Addr::from_bits(a.min(b)), Ipv6Addr::from_bits(a.max(b)))
        }
    }
}

fn list(random: &mut Random, sets: usize) -> String {
    let count = match random.below(12) {
        // Long enough that indexes have a second level.
        0 => 200 + random.below(400),
        1..4 => 4 + random.below(12),
        _ => 1 + random.below(3),
    };
    let elements = (0..count).map(|_| {
        let element = if sets > 0 && random.percent(15) {
            format!("@s{}", random.below(sets))
        } else {
            element(random)
        };
        format!("\"{element}\"")
    });
    let elements: Vec<String> = elements.collect();
    format!("[{}]", elements.join(", "))
}

fn port(random: &mut Random) -> u16 {
    const PORTS: [u16; 8] = [1, 2, 80, 443, 8000, 8099, 65534, 65535];
    if random.percent(60) { random.of(&PORTS).unwrap_or(1) } else { (random.number() as u16).max(1) }
}

fn ports(random: &mut Random) -> String {
    let ports = (0..1 + random.below(4)).map(|_| {
        let (a, b) = (port(random), port(random));
        if random.percent(50) { format!("{a}") } else { format!("\"{}-{}\"", a.min(b), a.max(b)) }
    });
    let ports: Vec<String> = ports.collect();
    format!("[{}]", ports.join(", "))
}

/// The text of a policy without mistakes.
pub fn policy(seed: u64) -> String {
    let mut random = Random::new(seed);
    let random = &mut random;
    let mut text = String::from("version = 1\n");
    let action = |random: &mut Random| if random.percent(50) { "allow" } else { "deny" };
    if random.percent(70) {
        let _ = writeln!(text, "[default]");
        for direction in ["outbound", "inbound"] {
            if random.percent(70) {
                let _ = writeln!(text, "{direction} = \"{}\"", action(random));
            }
        }
    }
    let sets = random.below(4);
    if sets > 0 {
        let _ = writeln!(text, "[sets]");
        for set in 0..sets {
            // A set may name those before it.
            let list = if random.percent(10) { "[]".to_owned() } else { list(random, set) };
            let _ = writeln!(text, "s{set} = {list}");
        }
    }
    let rules = if random.percent(10) { random.below(60) } else { random.below(9) };
    let uses_local = random.percent(40);
    for rule in 0..rules {
        let action = action(random);
        let _ = writeln!(text, "[[rule]]\nname = \"r{rule}\"\naction = \"{action}\"");
        if random.percent(60) {
            let direction = random.of(&["outbound", "inbound", "both"]).unwrap_or("both");
            let _ = writeln!(text, "direction = \"{direction}\"");
        }
        if random.percent(80) {
            let _ = writeln!(text, "peers = {}", list(random, sets));
        }
        if random.percent(30) {
            let _ = writeln!(text, "except = {}", list(random, sets));
        }
        if uses_local && random.percent(40) {
            let _ = writeln!(text, "local = {}", list(random, sets));
        }
        if random.percent(50) {
            let _ = writeln!(text, "ports = {}", ports(random));
        }
        if action == "allow" && random.percent(20) {
            let _ = writeln!(text, "trust = true");
        }
        if random.percent(10) {
            let year = if random.percent(50) { 2001 } else { 2999 };
            let _ = writeln!(text, "expires = {year}-01-01T00:00:00Z");
        }
        if random.percent(10) {
            let _ = writeln!(text, "enabled = false");
        }
    }
    text
}

/// Connections, most of them at an edge of one of the policy's ranges or right beside it.
pub fn connections(policy: &Policy, seed: u64, count: usize) -> Vec<Query> {
    let mut random = Random::new(seed ^ 0x005e_ed0f_c0ec);
    (0..count).map(|_| connection(policy, &mut random)).collect()
}

fn connection(policy: &Policy, random: &mut Random) -> Query {
    let rule = policy.rules.get(random.below(policy.rules.len()));
    let peer = rule.and_then(|rule| {
        let sets = [&rule.peers, &rule.listed, &rule.except];
        let set = sets[random.below(sets.len())].as_deref()?;
        edge(random, set)
    });
    let peer = peer.filter(|_| random.percent(85)).unwrap_or_else(|| addr(random));
    let same_family = |addr: &Addr| addr.as_v4().is_some() == peer.as_v4().is_some();
    let local = rule.and_then(|rule| edge(random, rule.local.as_deref()?)).filter(same_family);
    let local = local.unwrap_or_else(|| {
        loop {
            let local = addr(random);
            if same_family(&local) {
                return local;
            }
        }
    });
    let ports = rule.and_then(|rule| rule.ports.as_ref()).map(|ports| ports.ranges()).unwrap_or_default();
    let port = match random.of(ports).filter(|_| random.percent(80)) {
        Some((lo, hi)) => random.of(&[lo.saturating_sub(1), lo, hi, hi.saturating_add(1)]).unwrap_or(lo),
        None => port(random),
    };
    let direction = if random.percent(50) { Direction::Outbound } else { Direction::Inbound };
    Query { peer, local, port, direction }
}

/// An address at or beside an edge of one of the set's ranges.
fn edge(random: &mut Random, set: &AddrSet) -> Option<Addr> {
    let count = set.len();
    let range = set.ranges().nth(random.below(count))?;
    Some(match range {
        AddrRange::V4(lo, hi) => {
            Addr::v4(random.of(&[lo.saturating_sub(1), lo, lo + (hi - lo) / 2, hi, hi.saturating_add(1)])?)
        }
        AddrRange::V6(lo, hi) => {
            let next = [lo.saturating_sub(1), lo, lo + (hi - lo) / 2, hi, hi.saturating_add(1)];
            Addr::v6(random.of(&next)?)
        }
    })
}

/// A change of one stretch of a text, for tests of what reads it.
pub fn mutate(text: &str, random: &mut Random) -> String {
    const PIECES: [&str; 24] = [
        "\"",
        "[",
        "]",
        "[[",
        "]]",
        "=",
        ",",
        "\n",
        "@",
        "-",
        "/",
        ".",
        ":",
        "{",
        "}",
        "#",
        "'",
        "\\",
        "\"\"\"",
        "1",
        "::ffff:",
        "é",
        "[[rule]]\n",
        "\r",
    ];
    let mut text = text.to_owned();
    for _ in 0..1 + random.below(3) {
        let start = text.floor_char_boundary(random.below(text.len() + 1));
        let length = if random.percent(50) { 0 } else { random.below(12) };
        let end = text.ceil_char_boundary((start + length).min(text.len()));
        let piece = if random.percent(70) { random.of(&PIECES).unwrap_or("") } else { "" };
        text.replace_range(start..end, piece);
    }
    text
}

/// Neighbours of all edges of the policy's address sets, and both ends of everything.
pub fn edges(policy: &Policy) -> Vec<Addr> {
    let mut edges = vec![Addr::v4(0), Addr::v4(u32::MAX), Addr::v6(0), Addr::v6(u128::MAX)];
    let sets = policy.rules.iter().flat_map(|rule| [&rule.peers, &rule.local]).flatten();
    for range in sets.flat_map(|set| set.ranges()) {
        match range {
            AddrRange::V4(lo, hi) => {
                edges.extend([lo.saturating_sub(1), lo, hi, hi.saturating_add(1)].map(Addr::v4));
            }
            AddrRange::V6(lo, hi) => {
                edges.extend([lo.saturating_sub(1), lo, hi, hi.saturating_add(1)].map(Addr::v6));
            }
        }
    }
    edges.sort_unstable_by_key(|addr| to_u128(*addr));
    edges.dedup();
    edges
}
