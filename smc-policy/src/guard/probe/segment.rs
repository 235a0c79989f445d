//! TCP segments as bytes, and the IPv4 header that raw sockets hand out with them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// FIN, SYN, RST, PSH and ACK in [`Segment::flags`].
pub mod flags {
    #![allow(missing_docs, reason = "the names say it")]
    pub const FIN: u8 = 1;
    pub const SYN: u8 = 2;
    pub const RST: u8 = 4;
    pub const PSH: u8 = 8;
    pub const ACK: u8 = 16;
}

/// A TCP segment without its addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Sender's port.
    pub source_port: u16,
    /// Receiver's port.
    pub destination_port: u16,
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledgement number; without meaning unless [`flags::ACK`] is set.
    pub acknowledgement: u32,
    /// [`flags`] and ECN's.
    pub flags: u8,
    /// Receive window in bytes.
    pub window: u16,
    /// Option block, a multiple of 4 bytes, at most 40.
    pub options: Vec<u8>,
    /// Data.
    pub payload: Vec<u8>,
}

impl Segment {
    /// The bytes, with the checksum for these addresses (of one family).
    pub fn bytes(&self, source: IpAddr, destination: IpAddr) -> Vec<u8> {
        let mut options = self.options.clone();
        options.truncate(40);
        options.resize(options.len().next_multiple_of(4), 0);
        let mut bytes = Vec::with_capacity(20 + options.len() + self.payload.len());
        bytes.extend(self.source_port.to_be_bytes());
        bytes.extend(self.destination_port.to_be_bytes());
        bytes.extend(self.sequence.to_be_bytes());
        bytes.extend(self.acknowledgement.to_be_bytes());
        bytes.extend([((5 + options.len() / 4) << 4) as u8, self.flags]);
        bytes.extend(self.window.to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend(options);
        bytes.extend(&self.payload);
        let sum = checksum(&[&pseudo_header(source, destination, bytes.len()), &bytes]);
        bytes[16..18].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    /// Takes a segment apart. The checksum is not looked at: between the host's own devices the kernel leaves it to be
    /// filled in, and who answers for somebody else is found by the sequence numbers.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let head: &[u8; 20] = bytes.first_chunk()?;
        let be16 = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let be32 = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let length = usize::from(head[12] >> 4) * 4;
        Some(Self {
            source_port: be16(0),
            destination_port: be16(2),
            sequence: be32(4),
            acknowledgement: be32(8),
            flags: head[13],
            window: be16(14),
            options: bytes.get(20..length)?.to_vec(),
            payload: bytes.get(length..)?.to_vec(),
        })
    }

    /// Whether all of `wanted` are set and none of the other named flags but PSH is.
    pub const fn is(&self, wanted: u8) -> bool {
        self.flags & (flags::FIN | flags::SYN | flags::RST | flags::ACK) == wanted
    }

    /// The reset that ends the connection that `self` belongs to, from the receiver of `self`: where the sender expects
    /// the next byte, so that it takes it (RFC 5961).
    pub fn reset(&self) -> Self {
        Self {
            source_port: self.destination_port,
            destination_port: self.source_port,
            sequence: self.acknowledgement,
            flags: flags::RST,
            ..Self::default()
        }
    }
}

/// Largest segment for a path of 1500 bytes.
pub const fn mss(peer: SocketAddr) -> u16 {
    if peer.is_ipv4() { 1460 } else { 1440 }
}

/// What is in an IPv4 packet: sender, receiver and the bytes after the header, without what a device has appended.
pub fn parse_v4(packet: &[u8]) -> Option<(Ipv4Addr, Ipv4Addr, &[u8])> {
    let head: &[u8; 20] = packet.first_chunk()?;
    let address = |at: usize| Ipv4Addr::new(head[at], head[at + 1], head[at + 2], head[at + 3]);
    let length = usize::from(head[0] & 0xf) * 4;
    if head[0] >> 4 != 4 || length < 20 {
        return None;
    }
    let total = usize::from(u16::from_be_bytes([head[2], head[3]]));
    Some((address(12), address(16), packet.get(length..total.min(packet.len()))?))
}

fn pseudo_header(source: IpAddr, destination: IpAddr, length: usize) -> Vec<u8> {
    let octets = |address| match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let mut bytes = octets(source);
    bytes.extend(octets(destination));
    // IPv6 has the length before the protocol and four bytes for it; the sum is the same.
    bytes.extend((length as u32).to_be_bytes());
    bytes.extend([0, 0, 0, 6]);
    bytes
}

/// The Internet checksum over parts, each but the last one of an even length (RFC 1071).
pub fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0_u64;
    for pair in parts.iter().flat_map(|part| part.chunks(2)) {
        sum += u64::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u64::from(*low));
    }
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn segment() -> impl Strategy<Value = Segment> {
        let ports = any::<(u16, u16, u16)>();
        let numbers = any::<(u32, u32, u8)>();
        let options = prop::collection::vec(any::<u8>(), 0..=10)
            .prop_map(|words| words.into_iter().flat_map(|byte| [byte; 4]).collect::<Vec<u8>>());
        (ports, numbers, options, prop::collection::vec(any::<u8>(), 0..60)).prop_map(
            |(
                (source_port, destination_port, window),
                (sequence, acknowledgement, flags),
                options,
                payload,
            )| Segment {
                source_port,
                destination_port,
                sequence,
                acknowledgement,
                flags,
                window,
                options,
                payload,
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_built_is_parsed_and_sums_up(segment in segment(), v6 in any::<bool>()) {
            let (source, destination): (IpAddr, IpAddr) = if v6 {
                ("fd00::1".parse().unwrap(), "2001:db8::ffff".parse().unwrap())
            } else {
                ("10.0.0.1".parse().unwrap(), "203.0.113.255".parse().unwrap())
            };
            let bytes = segment.bytes(source, destination);
            prop_assert_eq!(checksum(&[&pseudo_header(source, destination, bytes.len()), &bytes]), 0);
            prop_assert_eq!(Segment::parse(&bytes), Some(segment));
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..90)) {
            let _ = Segment::parse(&bytes);
            if let Some((_, _, rest)) = parse_v4(&bytes) {
                let _ = Segment::parse(rest);
            }
        }
    }

    /// The segment of a SYN as another implementation writes it.
    #[test]
    fn a_known_checksum() {
        let syn = Segment {
            source_port: 0x9c40,
            destination_port: 443,
            sequence: 0x1122_3344,
            flags: flags::SYN,
            window: 0xfaf0,
            ..Segment::default()
        };
        let bytes = syn.bytes("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        // 0a00+0001+0a00+0002+0006+0014 + 9c40+01bb+1122+3344+0000+0000+5002+faf0 = 24170 -> 4172 -> be8d
        assert_eq!(bytes[16..18], [0xbe, 0x8d]);
    }

    #[test]
    fn a_reset_is_where_the_peer_expects_it() {
        let syn_ack = Segment {
            source_port: 443,
            destination_port: 40_000,
            sequence: 7,
            acknowledgement: 9,
            flags: flags::SYN | flags::ACK,
            ..Segment::default()
        };
        let reset = syn_ack.reset();
        assert_eq!((reset.source_port, reset.destination_port), (40_000, 443));
        assert_eq!((reset.sequence, reset.flags), (9, flags::RST));
        assert!(syn_ack.is(flags::SYN | flags::ACK) && !syn_ack.is(flags::SYN));
    }

    #[test]
    fn trailing_bytes_of_a_device_are_none_of_the_segment() {
        let mut packet = vec![0x45, 0, 0, 22, 0, 0, 0, 0, 64, 6, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 0, 0, 0];
        let (from, to, rest) = parse_v4(&packet).unwrap();
        assert_eq!((from, to, rest), ([1, 2, 3, 4].into(), [5, 6, 7, 8].into(), &[9, 9][..]));
        packet[0] = 0x44;
        assert_eq!(parse_v4(&packet), None);
    }
}
