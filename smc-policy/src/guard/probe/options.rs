//! Options of the SYNs that are sent, and what of them an answer returns.

use std::{collections::BTreeSet, fmt};

use serde::Serialize;
use smc_policy_common::tcp_option::{
    CANARY_EXID, CANARY_LENGTH, END, EXPERIMENTAL, EXPERIMENTAL_253, NOP, SMC_LENGTH, SMC_MAGIC,
};

/// ExIDs of kind 254 that somebody may know: host id, TCP ACK rate request, tcpcrypt, accurate ECN, SMC, the kernel's
/// own BPF tests, Fast Open, and ours.
const KNOWN_EXIDS: [u16; 10] =
    [0x0348, 0x0a0d, 0x454e, 0xacc0, 0xacc1, 0xacce, 0xe2d4, 0xeb9f, 0xf989, CANARY_EXID];

/// What a SYN carries besides ordinary options.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Nothing: the SYN of an ordinary TCP connection.
    Plain,
    /// The SMC option, as Linux sends it.
    Smc,
    /// An option of kind 253, which is for experiments, with random bytes.
    #[serde(rename = "kind-253")]
    Unknown253,
    /// An option of kind 254 with an ExID that nobody uses.
    #[serde(rename = "kind-254")]
    Unknown254,
    /// The SMC option and the guard's canary.
    Canary,
}

impl Kind {
    /// All of them, in the order in which they are sent.
    pub const ALL: [Self; 5] = [Self::Plain, Self::Smc, Self::Unknown253, Self::Unknown254, Self::Canary];

    /// Its place in [`Self::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "ordinary options",
            Self::Smc => "the SMC option",
            Self::Unknown253 => "an unknown option (kind 253)",
            Self::Unknown254 => "an unknown option (kind 254)",
            Self::Canary => "the SMC option and the canary",
        })
    }
}

/// What is random in the options of one target's SYNs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    unknown_253: [u8; 4],
    exid: u16,
    unknown_254: [u8; 2],
    nonce: [u8; 4],
    timestamp: [u8; 4],
}

impl Marks {
    /// Random bytes that each have a use.
    pub const RANDOM_BYTES: usize = 16;

    /// Made of random bytes.
    pub fn new(random: [u8; Self::RANDOM_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h, n0, n1, n2, n3, t0, t1, t2, t3] = random;
        let mut exid = u16::from_be_bytes([e, f]);
        while KNOWN_EXIDS.contains(&exid) {
            exid = exid.wrapping_add(1);
        }
        Self {
            unknown_253: [a, b, c, d],
            exid,
            unknown_254: [g, h],
            nonce: [n0, n1, n2, n3],
            timestamp: [t0, t1, t2, t3],
        }
    }

    /// The option block of a SYN: at most 40 bytes, a multiple of 4. `mss`: largest segment that this host takes.
    pub fn options(&self, kind: Kind, mss: u16) -> Vec<u8> {
        // The order is that of Linux: MSS, SACK permitted and timestamps, window scaling, then the others.
        let mut block = vec![2, 4];
        block.extend(mss.to_be_bytes());
        block.extend([4, 2, 8, 10]);
        block.extend(self.timestamp);
        block.extend([0, 0, 0, 0, NOP, 3, 3, 7]);
        match kind {
            Kind::Plain => {}
            Kind::Smc => block.extend(SMC),
            Kind::Unknown253 => {
                block.extend([NOP, NOP, EXPERIMENTAL_253, 6]);
                block.extend(self.unknown_253);
            }
            Kind::Unknown254 => {
                block.extend([NOP, NOP, EXPERIMENTAL, 6]);
                block.extend(self.exid.to_be_bytes());
                block.extend(self.unknown_254);
            }
            Kind::Canary => {
                block.extend([EXPERIMENTAL, CANARY_LENGTH]);
                block.extend(CANARY_EXID.to_be_bytes());
                block.extend(self.nonce);
                block.extend(SMC);
            }
        }
        block
    }

    /// What the option block of a SYN-ACK holds, up to its end or the first malformed option: as far as the kernel reads
    /// it too (`tcp_parse_options`, net/ipv4/tcp_input.c).
    pub fn returned(&self, block: &[u8]) -> Returned {
        let mut returned = Returned::default();
        for (kind, data) in walk(block) {
            let exid = data.first_chunk().map(|bytes| u16::from_be_bytes(*bytes));
            let flag = match kind {
                EXPERIMENTAL if is_smc(data) => &mut returned.smc,
                // The ExID is enough: whoever shortens or alters what follows has not understood it either.
                EXPERIMENTAL if exid == Some(CANARY_EXID) => &mut returned.canary,
                EXPERIMENTAL if exid == Some(self.exid) => &mut returned.unknown_254,
                EXPERIMENTAL_253 => &mut returned.unknown_253,
                2 | 3 | 4 | 8 => {
                    returned.ordinary.insert(kind);
                    continue;
                }
                _ => continue,
            };
            *flag = true;
            // As long as the length that was read from a byte.
            returned.bytes.extend([kind, data.len() as u8 + 2]);
            returned.bytes.extend(data);
        }
        returned
    }
}

/// The SMC option as Linux sends it, two NOPs before it.
const SMC: [u8; 8] = {
    let [a, b, c, d] = SMC_MAGIC.to_be_bytes();
    [NOP, NOP, EXPERIMENTAL, SMC_LENGTH, a, b, c, d]
};

/// The options of a SYN whose connection is going to be used: the SMC option, and nothing that later segments would have
/// to know of (timestamps, window scaling).
pub fn for_negotiating(mss: u16) -> Vec<u8> {
    let mut block = vec![2, 4];
    block.extend(mss.to_be_bytes());
    block.extend(SMC);
    block
}

/// Whether a SYN-ACK's option block holds an SMC option.
pub fn has_smc(block: &[u8]) -> bool {
    walk(block).any(|(kind, data)| kind == EXPERIMENTAL && is_smc(data))
}

/// The data of an option of kind 254 that the kernel takes for an SMC option.
fn is_smc(data: &[u8]) -> bool {
    data.len().is_multiple_of(2) && data.starts_with(&SMC_MAGIC.to_be_bytes())
}

/// Kinds and data of the options.
fn walk(mut block: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    std::iter::from_fn(move || {
        loop {
            match *block {
                [] | [END, ..] => return None,
                [NOP, ref rest @ ..] => block = rest,
                [kind, length, ..] => {
                    let option = block.get(2..usize::from(length))?;
                    block = block.get(usize::from(length)..)?;
                    return Some((kind, option));
                }
                [_] => return None,
            }
        }
    })
}

/// What a SYN-ACK returns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Returned {
    /// The SMC option.
    pub smc: bool,
    /// An option of kind 253.
    pub unknown_253: bool,
    /// The option of kind 254 with the ExID that nobody uses.
    pub unknown_254: bool,
    /// The canary.
    pub canary: bool,
    /// Kinds of ordinary options: 2 MSS, 3 window scaling, 4 SACK permitted, 8 timestamps.
    pub ordinary: BTreeSet<u8>,
    /// The others, whole and in their order; at most the 40 bytes of an option block.
    pub bytes: Vec<u8>,
}

impl Returned {
    /// Whether something came back that its sender cannot have understood.
    pub const fn is_echo(&self) -> bool {
        self.unknown_253 || self.unknown_254 || self.canary
    }

    /// The names of what came back, without the ordinary options.
    pub fn names(&self) -> Vec<&'static str> {
        let all = [
            (self.smc, "smc"),
            (self.unknown_253, "kind-253"),
            (self.unknown_254, "kind-254"),
            (self.canary, "canary"),
        ];
        all.iter().filter(|(is_there, _)| *is_there).map(|(_, name)| *name).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn marks() -> Marks {
        Marks::new(std::array::from_fn(|i| i as u8 + 0x40))
    }

    #[test]
    fn the_smc_syn_is_that_of_linux() {
        let block = marks().options(Kind::Smc, 1460);
        assert_eq!(block[..8], [2, 4, 5, 0xb4, 4, 2, 8, 10]);
        assert_eq!(block[16..], [1, 3, 3, 7, 1, 1, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9]);
    }

    #[test]
    fn what_is_sent_is_found_when_it_returns() {
        let marks = marks();
        let returned = |kind| marks.returned(&marks.options(kind, 1460)).names();
        assert_eq!(returned(Kind::Plain), [""; 0]);
        assert_eq!(returned(Kind::Smc), ["smc"]);
        assert_eq!(returned(Kind::Unknown253), ["kind-253"]);
        assert_eq!(returned(Kind::Unknown254), ["kind-254"]);
        assert_eq!(returned(Kind::Canary), ["smc", "canary"]);
        for kind in Kind::ALL {
            let block = marks.options(kind, 1440);
            assert!(block.len() <= 40 && block.len().is_multiple_of(4), "{kind}");
            assert_eq!(marks.returned(&block).ordinary, BTreeSet::from([2, 3, 4, 8]));
            assert_eq!(kind, Kind::ALL[kind.index()]);
        }
        assert!(has_smc(&for_negotiating(1460)) && for_negotiating(1460).len() == 12);
    }

    #[test]
    fn the_unknown_exid_is_one_that_nobody_knows() {
        let mut random = [0; 16];
        random[4..6].copy_from_slice(&0xacc0_u16.to_be_bytes());
        assert_eq!(Marks::new(random).exid, 0xacc2);
    }

    #[test]
    fn others_options_are_no_echo() {
        // Fast Open's cookie, somebody's ExID, an SMC option of an odd length, what stands behind a malformed option.
        let block = [254, 4, 0xf9, 0x89, 254, 4, 0x12, 0x34, 254, 7, 0xe2, 0xd4, 0xc3, 0xd9, 0, 5, 1];
        assert_eq!(marks().returned(&block), Returned::default());
        let mut behind = vec![9, 0];
        behind.extend(SMC);
        assert!(!has_smc(&behind));
        assert!(has_smc(&[254, 8, 0xe2, 0xd4, 0xc3, 0xd9, 0, 0]));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(block in prop::collection::vec(any::<u8>(), 0..50), random in any::<[u8; 16]>()) {
            let marks = Marks::new(random);
            let _ = marks.returned(&block);
            prop_assert_eq!(marks.returned(&block).smc, has_smc(&block));
        }
    }
}
