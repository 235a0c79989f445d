//! ICMP and ICMPv6: echo, and why a SYN was not delivered.

use std::net::{IpAddr, Ipv6Addr};

use super::segment::{checksum, parse_v4};

/// An ICMP message that matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The answer to an echo request.
    EchoReply {
        /// Identifier of the request.
        id: u16,
    },
    /// A TCP segment was not delivered.
    Unreachable {
        /// Whom the segment was for.
        destination: IpAddr,
        /// The port that it came from, on this host.
        source_port: u16,
        /// The port that it was for.
        destination_port: u16,
        /// Why.
        why: &'static str,
    },
}

/// An echo request. ICMPv6 checksums are filled in by the kernel (RFC 3542).
pub fn echo_request(v4: bool, id: u16, sequence: u16) -> Vec<u8> {
    let mut bytes = vec![if v4 { 8 } else { 128 }, 0, 0, 0];
    bytes.extend(id.to_be_bytes());
    bytes.extend(sequence.to_be_bytes());
    bytes.extend(*b"smc-policy probe");
    if v4 {
        let sum = checksum(&[&bytes]);
        bytes[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    bytes
}

/// Takes an ICMP message apart.
pub fn parse(v4: bool, bytes: &[u8]) -> Option<Message> {
    let head: &[u8; 8] = bytes.first_chunk()?;
    let id = u16::from_be_bytes([head[4], head[5]]);
    let undelivered = bytes.get(8..)?;
    let (destination, segment, why): (IpAddr, &[u8], _) = match (v4, head[0]) {
        (true, 0) | (false, 129) => return Some(Message::EchoReply { id }),
        (true, 3) => {
            let (_, destination, segment) = parse_v4(undelivered)?;
            if undelivered.get(9) != Some(&6) {
                return None;
            }
            (destination.into(), segment, reason_v4(head[1]))
        }
        (false, 1) => {
            // No SYN of ours has extension headers.
            if undelivered.get(6) != Some(&6) {
                return None;
            }
            let octets: &[u8; 16] = undelivered.get(24..)?.first_chunk()?;
            (Ipv6Addr::from(*octets).into(), undelivered.get(40..)?, reason_v6(head[1]))
        }
        _ => return None,
    };
    let ports: &[u8; 4] = segment.first_chunk()?;
    Some(Message::Unreachable {
        destination,
        source_port: u16::from_be_bytes([ports[0], ports[1]]),
        destination_port: u16::from_be_bytes([ports[2], ports[3]]),
        why,
    })
}

fn reason_v4(code: u8) -> &'static str {
    match code {
        0 | 6 | 11 => "network unreachable",
        1 | 7 | 12 => "host unreachable",
        3 => "port unreachable",
        9 | 10 | 13 => "prohibited by a firewall",
        _ => "unreachable",
    }
}

fn reason_v6(code: u8) -> &'static str {
    match code {
        0 => "network unreachable",
        1 | 5 | 6 => "prohibited by a firewall",
        3 => "host unreachable",
        4 => "port unreachable",
        _ => "unreachable",
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn echo() {
        let request = echo_request(true, 0x1234, 1);
        assert_eq!(checksum(&[&request]), 0);
        assert_eq!(parse(true, &request), None, "a request is no reply");
        for (v4, kind) in [(true, 0), (false, 129)] {
            let mut reply = echo_request(v4, 0x1234, 1);
            reply[0] = kind;
            assert_eq!(parse(v4, &reply), Some(Message::EchoReply { id: 0x1234 }));
            assert_eq!(parse(!v4, &reply), None);
        }
    }

    #[test]
    fn an_undelivered_syn() {
        let mut v4 = vec![3, 13, 0, 0, 0, 0, 0, 0];
        v4.extend([0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 203, 0, 113, 7]);
        v4.extend([0x9c, 0x40, 0x01, 0xbb, 0, 0, 0, 0]);
        let expected = |address: &str| Message::Unreachable {
            destination: address.parse().unwrap(),
            source_port: 40_000,
            destination_port: 443,
            why: "prohibited by a firewall",
        };
        assert_eq!(parse(true, &v4), Some(expected("203.0.113.7")));
        v4[8 + 9] = 17;
        assert_eq!(parse(true, &v4), None, "UDP");

        let mut v6 = vec![1, 1, 0, 0, 0, 0, 0, 0, 0x60, 0, 0, 0, 0, 20, 6, 64];
        v6.extend([0; 16]);
        v6.extend("2001:db8::7".parse::<Ipv6Addr>().unwrap().octets());
        v6.extend([0x9c, 0x40, 0x01, 0xbb]);
        assert_eq!(parse(false, &v6), Some(expected("2001:db8::7")));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(v4 in any::<bool>(), bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = parse(v4, &bytes);
        }
    }
}
