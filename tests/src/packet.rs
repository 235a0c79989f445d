//! TCP SYNs as bytes: a builder that can also make them strange, and a parser that knows nothing of the eBPF programs.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::Rng;

/// The SMC option as Linux sends it: two NOPs before it.
pub const SMC: [u8; 8] = [1, 1, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9];
/// Magic of the SMC option.
pub const MAGIC: u32 = 0xe2d4_c3d9;

/// FIN, SYN, RST, PSH, ACK as bits of a TCP header's flags.
pub mod flags {
    #![allow(missing_docs, reason = "the names say it")]
    pub const FIN: u8 = 1;
    pub const SYN: u8 = 2;
    pub const RST: u8 = 4;
    pub const PSH: u8 = 8;
    pub const ACK: u8 = 16;
}

/// What stands before the IP header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Link {
    /// An Ethernet header with these tags (tag protocol, tag).
    Ethernet(Vec<(u16, u16)>),
    /// Nothing: tun, ipip, wireguard.
    Ip,
}

/// A TCP packet to build.
#[derive(Debug, Clone)]
pub struct Packet {
    /// Before the IP header.
    pub link: Link,
    /// Sender; the receiver is of the same family.
    pub source: IpAddr,
    /// Receiver.
    pub destination: IpAddr,
    /// IPv4 options, a multiple of 4 bytes.
    pub ip_options: Vec<u8>,
    /// IPv4's fragment field: flags and offset. IPv6 has a header of its own for that.
    pub fragment: u16,
    /// IPv6 extension headers: number and whole bytes but for the first one, the next header.
    pub extensions: Vec<(u8, Vec<u8>)>,
    /// The header that follows: 6 is TCP.
    pub protocol: u8,
    /// Sender's port.
    pub source_port: u16,
    /// Receiver's port.
    pub destination_port: u16,
    /// TCP sequence number; [`Packet::syn`] gives another to each.
    pub sequence: u32,
    /// Acknowledged sequence number.
    pub acknowledged: u32,
    /// TCP flags.
    pub flags: u8,
    /// TCP options; padded with zeros to a multiple of 4, at most 40 bytes.
    pub options: Vec<u8>,
    /// After the TCP header.
    pub payload: Vec<u8>,
    /// Behind the IP packet: Ethernet padding.
    pub trailer: Vec<u8>,
}

impl Packet {
    /// A SYN over Ethernet.
    ///
    /// # Panics
    /// When an address is none.
    #[must_use]
    pub fn syn(source: &str, destination: &str, port: u16, options: &[u8]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0x1122_3344);
        Self {
            sequence: NEXT.fetch_add(1, Ordering::Relaxed),
            link: Link::Ethernet(vec![]),
            source: source.parse().expect("an address"),
            destination: destination.parse().expect("an address"),
            ip_options: vec![],
            fragment: 0x4000,
            extensions: vec![],
            protocol: 6,
            source_port: 40_000,
            destination_port: port,
            acknowledged: 0,
            flags: flags::SYN,
            options: options.to_vec(),
            payload: vec![],
            trailer: vec![],
        }
    }

    /// The bytes, with right lengths and checksums.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut tcp = Vec::new();
        tcp.extend(self.source_port.to_be_bytes());
        tcp.extend(self.destination_port.to_be_bytes());
        tcp.extend(self.sequence.to_be_bytes());
        tcp.extend(self.acknowledged.to_be_bytes());
        let mut options = self.options.clone();
        options.resize(options.len().next_multiple_of(4), 0);
        tcp.extend([((5 + options.len() / 4) << 4) as u8, self.flags, 0xfa, 0xf0, 0, 0, 0, 0]);
        tcp.extend(options);
        tcp.extend(&self.payload);
        let sum = checksum(self.source, self.destination, &tcp);
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());

        let mut out = Vec::new();
        if let Link::Ethernet(tags) = &self.link {
            out.extend([2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
            for (protocol, tag) in tags {
                out.extend(protocol.to_be_bytes());
                out.extend(tag.to_be_bytes());
            }
            out.extend(if self.source.is_ipv4() { [0x08, 0x00] } else { [0x86, 0xdd] });
        }
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let words = 5 + self.ip_options.len() / 4;
                let total = (words * 4 + tcp.len()) as u16;
                let mut ip = vec![0x40 | words as u8, 0];
                ip.extend(total.to_be_bytes());
                ip.extend([0x12, 0x34]);
                ip.extend(self.fragment.to_be_bytes());
                ip.extend([64, self.protocol, 0, 0]);
                ip.extend(source.octets());
                ip.extend(destination.octets());
                ip.extend(&self.ip_options);
                let sum = !fold(sum_of(&ip));
                ip[10..12].copy_from_slice(&sum.to_be_bytes());
                out.extend(ip);
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let length: usize =
                    self.extensions.iter().map(|(_, rest)| rest.len() + 1).sum::<usize>() + tcp.len();
                let numbers: Vec<u8> =
                    self.extensions.iter().map(|(number, _)| *number).chain([self.protocol]).collect();
                out.extend([0x60, 0, 0, 0]);
                out.extend((length as u16).to_be_bytes());
                out.extend([numbers[0], 64]);
                out.extend(source.octets());
                out.extend(destination.octets());
                for ((_, rest), next) in self.extensions.iter().zip(&numbers[1..]) {
                    out.push(*next);
                    out.extend(rest);
                }
            }
            _ => panic!("addresses of two families"),
        }
        out.extend(tcp);
        out.extend(&self.trailer);
        out
    }

    /// Some packet, most often a SYN with the SMC option; everything a program could stumble over comes in a part of
    /// them. Peers are in 10.0.0.0/8 and `fd00::/8`.
    #[must_use]
    pub fn random(rng: &mut Rng, link: Link, extra_magic: u32) -> Self {
        let v4 = rng.below(2) == 0;
        let address = |rng: &mut Rng| -> IpAddr {
            if v4 {
                Ipv4Addr::from_bits(10 << 24 | rng.number() as u32 & 0xff_ffff).into()
            } else {
                Ipv6Addr::from_bits(
                    0xfd << 120 | u128::from(rng.number()) << 56 | u128::from(rng.number() >> 8),
                )
                .into()
            }
        };
        let (source, destination) = (address(rng), address(rng));
        let syn = match rng.below(20) {
            0 => rng.number() as u8,
            1 => flags::SYN | flags::ACK,
            2 => flags::SYN | 0xc0,
            3 => flags::SYN | flags::PSH | 0x20,
            _ => flags::SYN,
        };
        let one_in = |rng: &mut Rng, n: u64| rng.below(n) == 0;
        let fragment = match rng.below(20) {
            0 => rng.number() as u16,
            1 => 0x2000,
            2 => rng.below(8) as u16,
            _ => 0x4000,
        };
        let ip_options = if one_in(rng, 5) {
            let words = 1 + rng.below(10) as usize;
            rng.bytes(words * 4)
        } else {
            vec![]
        };
        let extensions =
            if one_in(rng, 3) { (0..rng.below(10)).map(|_| extension(rng)).collect() } else { vec![] };
        let length = rng.below(64) as usize;
        Self {
            link,
            source,
            destination,
            ip_options,
            fragment,
            extensions,
            protocol: if one_in(rng, 20) { rng.number() as u8 } else { 6 },
            source_port: 1 + rng.below(65_535) as u16,
            destination_port: 1 + rng.below(8) as u16,
            sequence: rng.number() as u32,
            acknowledged: 0,
            flags: syn,
            options: options(rng, extra_magic),
            payload: if one_in(rng, 4) { rng.bytes(length) } else { vec![] },
            trailer: if one_in(rng, 8) { rng.bytes(length) } else { vec![] },
        }
    }
}

fn extension(rng: &mut Rng) -> (u8, Vec<u8>) {
    let units = rng.below(4) as usize;
    let mut rest = rng.bytes(units * 8 + 7);
    rest[0] = units as u8;
    match rng.below(16) {
        // Fragment: one in two is a first one.
        0..=3 => {
            rest.truncate(7);
            if rng.below(2) == 0 {
                rest[1] = 0;
                rest[2] &= 7;
            }
            (44, rest)
        }
        4..=7 => (0, rest),
        8..=11 => (43, rest),
        12..=14 => (60, rest),
        // AH, ESP and what may come.
        _ => ([50, 51, 59, 135, rng.number() as u8][rng.below(5) as usize], rest),
    }
}

/// Options of up to 40 bytes in any order and alignment.
fn options(rng: &mut Rng, extra_magic: u32) -> Vec<u8> {
    if rng.below(5) == 0 {
        // As Linux sends them.
        let mut usual = match rng.below(3) {
            0 => vec![2, 4, 5, 0xb4, 4, 2, 8, 10, 1, 2, 254, 254, 0, 0, 0, 0, 1, 3, 3, 8],
            1 => vec![2, 4, 5, 0xb4, 1, 1, 4, 2, 1, 3, 3, 8],
            _ => vec![2, 4, 5, 0xb4],
        };
        usual.extend(SMC);
        return usual;
    }
    let mut out = Vec::new();
    let smc = |magic: u32, length: u8, rng: &mut Rng| {
        let mut option = vec![254, length];
        option.extend(magic.to_be_bytes());
        option.extend(rng.bytes(usize::from(length).saturating_sub(6)));
        option
    };
    for _ in 0..rng.below(9) {
        let piece = match rng.below(24) {
            0..=4 => vec![1],
            5 => vec![2, 4, 5, 0xb4],
            6 => vec![3, 3, 8],
            7 => vec![4, 2],
            8 => [&[8, 10][..], &rng.bytes(8)].concat(),
            9..=15 => smc(MAGIC, 6, rng),
            16 => smc(extra_magic, 6, rng),
            17 => smc(MAGIC, 6 + rng.below(10) as u8, rng),
            18 => smc(MAGIC ^ 1 << rng.below(32), 6, rng),
            19 => [&[254, 4, 0xf9, 0x89][..], &rng.bytes(2)].concat(),
            20 if rng.below(3) == 0 => vec![29, 4, 1, 2],
            21 if rng.below(3) == 0 => vec![rng.number() as u8, rng.number() as u8],
            22 if rng.below(4) == 0 => vec![0],
            _ => [&[253, 5][..], &rng.bytes(3)].concat(),
        };
        out.extend(piece);
    }
    out.truncate(40);
    out
}

/// Damages the bytes here and there, or cuts them.
pub fn damage(bytes: &mut Vec<u8>, rng: &mut Rng, least: usize) {
    match rng.below(3) {
        0 => {
            for _ in 0..=rng.below(3) {
                let at = rng.below(bytes.len() as u64) as usize;
                bytes[at] = rng.number() as u8;
            }
        }
        1 => bytes.truncate((rng.below(bytes.len() as u64) as usize).max(least)),
        _ => {
            let length = least + rng.below(120) as usize;
            *bytes = rng.bytes(length);
        }
    }
}

/// What a SYN without ACK, RST and FIN says, and where its SMC options are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Syn {
    /// Sender.
    pub source: IpAddr,
    /// Receiver.
    pub destination: IpAddr,
    /// Sender's port.
    pub source_port: u16,
    /// Receiver's port.
    pub destination_port: u16,
    /// Where the TCP header begins.
    pub tcp: usize,
    /// Every SMC option that the kernel would take for one.
    pub smc: Vec<Range<usize>>,
    /// There is a TCP-AO option.
    pub signed: bool,
    /// All of the TCP segment, if the packet holds it: no fragment, not cut.
    pub segment: Option<Range<usize>>,
}

/// Takes a packet apart. `magics`: of SMC options. `None`: it is no such SYN, or its headers do not hold together.
#[must_use]
pub fn parse(bytes: &[u8], link: &Link, magics: &[u32]) -> Option<Syn> {
    parse_with(bytes, link, magics, flags::SYN)
}

/// As [`parse`], of a packet that has just these of the flags SYN, ACK, RST and FIN.
#[must_use]
pub fn parse_with(bytes: &[u8], link: &Link, magics: &[u32], wanted: u8) -> Option<Syn> {
    let mut rest = Cursor { bytes, at: 0 };
    let version = if *link == Link::Ip {
        bytes.first()? >> 4
    } else {
        rest.take(12)?;
        let mut tags = 0;
        loop {
            match rest.be16()? {
                0x8100 | 0x88a8 if tags < 2 => {
                    rest.take(2)?;
                    tags += 1;
                }
                0x0800 => break 4,
                0x86dd => break 6,
                _ => return None,
            }
        }
    };
    let start = rest.at;
    let mut is_fragment = false;
    let (source, destination, end): (IpAddr, IpAddr, usize) = match version {
        4 => {
            let header = rest.take(20)?;
            let length = usize::from(header[0] & 0xf) * 4;
            let flags_and_offset = u16::from_be_bytes([header[6], header[7]]);
            if header[0] >> 4 != 4 || header[9] != 6 || flags_and_offset & 0x1fff != 0 {
                return None;
            }
            is_fragment |= flags_and_offset & 0x2000 != 0;
            rest.take(length.checked_sub(20)?)?;
            let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
            let address = |at: usize| <[u8; 4]>::try_from(&header[at..at + 4]).map(IpAddr::from);
            (address(12).ok()?, address(16).ok()?, start + total)
        }
        6 => {
            let header = rest.take(40)?;
            if header[0] >> 4 != 6 {
                return None;
            }
            let mut next = header[6];
            let mut count = 0;
            while next != 6 {
                count += 1;
                if count > 8 {
                    return None;
                }
                let fixed = rest.take(8)?;
                match next {
                    44 => {
                        let field = u16::from_be_bytes([fixed[2], fixed[3]]);
                        if field >> 3 != 0 {
                            return None;
                        }
                        is_fragment |= field & 1 != 0;
                    }
                    0 | 43 | 60 => {
                        rest.take(usize::from(fixed[1]) * 8)?;
                    }
                    _ => return None,
                }
                next = fixed[0];
            }
            let payload = usize::from(u16::from_be_bytes([header[4], header[5]]));
            let address = |at: usize| <[u8; 16]>::try_from(&header[at..at + 16]).map(IpAddr::from);
            (address(8).ok()?, address(24).ok()?, start + 40 + payload)
        }
        _ => return None,
    };
    let tcp = rest.at;
    let header = rest.take(20)?;
    let options = rest.take((usize::from(header[12] >> 4) * 4).checked_sub(20)?)?;
    if rest.at > end || header[13] & (flags::SYN | flags::ACK | flags::RST | flags::FIN) != wanted {
        return None;
    }
    let (smc, signed) = walk(options, magics);
    Some(Syn {
        source,
        destination,
        source_port: u16::from_be_bytes([header[0], header[1]]),
        destination_port: u16::from_be_bytes([header[2], header[3]]),
        tcp,
        smc: smc.into_iter().map(|range| tcp + 20 + range.start..tcp + 20 + range.end).collect(),
        signed,
        segment: (end <= bytes.len() && !is_fragment).then_some(tcp..end),
    })
}

/// SMC options, and whether there is a TCP-AO option, up to the first malformed one.
fn walk(options: &[u8], magics: &[u32]) -> (Vec<Range<usize>>, bool) {
    let (mut found, mut signed) = (Vec::new(), false);
    let mut at = 0;
    while let Some(kind) = options.get(at) {
        let length = match kind {
            0 => break,
            1 => 1,
            _ => match options.get(at + 1) {
                Some(length) if *length >= 2 && at + usize::from(*length) <= options.len() => {
                    usize::from(*length)
                }
                _ => break,
            },
        };
        let option = &options[at..at + length];
        signed |= *kind == 29;
        if *kind == 254 && length.is_multiple_of(2) && length >= 6 {
            let magic = option[2..6].iter().fold(0u32, |number, byte| number << 8 | u32::from(*byte));
            if magics.contains(&magic) {
                found.push(at..at + length);
            }
        }
        at += length;
    }
    (found, signed)
}

/// Compares what a program made of `before` with what it should have made of it: nothing, or (`remove`) every SMC option
/// turned into NOPs and a checksum that is exactly as right or wrong as it was.
///
/// # Errors
/// What is not as it should be.
pub fn check(before: &[u8], after: &[u8], syn: Option<&Syn>, remove: bool) -> Result<(), String> {
    let Some(syn) = syn.filter(|syn| remove && !syn.smc.is_empty()) else {
        return if before == after { Ok(()) } else { Err("changed, and must not be".into()) };
    };
    let mut expected = before.to_vec();
    for range in &syn.smc {
        expected[range.clone()].fill(1);
    }
    let field = syn.tcp + 16..syn.tcp + 18;
    expected[field.clone()].copy_from_slice(&after[field]);
    if expected != after {
        return Err("the options are not blanked, or something else is changed".into());
    }
    // The header is all that changed: its sum, the field included, must be the same as before.
    let header = |bytes: &[u8]| fold(sum_of(&bytes[syn.tcp..])) % 0xffff;
    if header(before) != header(after) {
        return Err("the checksum does not fit the change".into());
    }
    if let Some(segment) = &syn.segment {
        let is_right = |bytes: &[u8]| is_right(syn.source, syn.destination, &bytes[segment.clone()]);
        if is_right(before) != is_right(after) {
            return Err(format!("the checksum was right: {}, is: {}", is_right(before), is_right(after)));
        }
    }
    Ok(())
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let taken = self.bytes.get(self.at..self.at + count)?;
        self.at += count;
        Some(taken)
    }

    fn be16(&mut self) -> Option<u16> {
        self.take(2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    }
}

fn sum_of(bytes: &[u8]) -> u64 {
    bytes.chunks(2).map(|pair| u64::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u64::from(*low))).sum()
}

fn fold(sum: u64) -> u16 {
    // Ones' complement: the carries are added back; the sum of a packet is far below 2^48.
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// Sum over the pseudo header and the segment.
fn tcp_sum(source: IpAddr, destination: IpAddr, segment: &[u8]) -> u16 {
    let addresses: u64 = [source, destination]
        .iter()
        .map(|address| match address {
            IpAddr::V4(v4) => sum_of(&v4.octets()),
            IpAddr::V6(v6) => sum_of(&v6.octets()),
        })
        .sum();
    fold(addresses + 6 + segment.len() as u64 + sum_of(segment))
}

/// Checksum of a segment whose field is zero.
fn checksum(source: IpAddr, destination: IpAddr, segment: &[u8]) -> u16 {
    !tcp_sum(source, destination, segment)
}

/// Whether the checksum in the segment is right.
#[must_use]
pub fn is_right(source: IpAddr, destination: IpAddr, segment: &[u8]) -> bool {
    tcp_sum(source, destination, segment) == 0xffff
}

/// Whether the checksum field holds the sum of the pseudo header, for the device to complete.
#[must_use]
pub fn is_partial(source: IpAddr, destination: IpAddr, segment: &[u8]) -> bool {
    let field = u16::from_be_bytes([segment[16], segment[17]]);
    let pseudo_header =
        fold(u64::from(tcp_sum(source, destination, segment)) + u64::from(!fold(sum_of(segment))));
    field % 0xffff == pseudo_header % 0xffff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_is_found() {
        let packet = Packet::syn("10.0.0.1", "10.0.0.2", 443, &[&[2, 4, 5, 0xb4][..], &SMC].concat());
        let bytes = packet.bytes();
        let syn = parse(&bytes, &packet.link, &[MAGIC]).unwrap();
        assert_eq!(syn.smc, std::slice::from_ref(&(60..66)), "{bytes:02x?}");
        assert_eq!((syn.source_port, syn.destination_port, syn.tcp), (40_000, 443, 34));
        assert_eq!(syn.segment, Some(34..66));
        assert!(is_right(packet.source, packet.destination, &bytes[34..]));
        assert!(!is_right(packet.source, packet.destination, &bytes[34..65]));
    }

    /// The judge itself: it must see every kind of wrong.
    #[test]
    fn what_is_wrong_is_seen() {
        let packet = Packet::syn("fd00::1", "fd00::2", 443, &SMC);
        let before = packet.bytes();
        let syn = parse(&before, &packet.link, &[MAGIC]);
        let mut right = before.clone();
        let options = right.len() - 8;
        right[options + 2..].fill(1);
        // Recomputed from nothing, not updated.
        let (tcp, sum) = (right.len() - 28, right.len() - 12);
        right[sum..sum + 2].fill(0);
        let recomputed = checksum(packet.source, packet.destination, &right[tcp..]);
        right[sum..sum + 2].copy_from_slice(&recomputed.to_be_bytes());
        assert_eq!(check(&before, &right, syn.as_ref(), true), Ok(()));
        assert_eq!(check(&before, &before, syn.as_ref(), false), Ok(()));
        assert!(check(&before, &right, syn.as_ref(), false).is_err(), "must stay");
        assert!(check(&before, &before, syn.as_ref(), true).is_err(), "must go");
        for at in 0..right.len() {
            let mut wrong = right.clone();
            wrong[at] ^= 0x10;
            assert!(check(&before, &wrong, syn.as_ref(), true).is_err(), "byte {at} changed");
        }
    }
}
