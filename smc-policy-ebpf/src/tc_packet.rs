//! Finds the SYN in a packet.
//!
//! [`look`] is for every packet of the device: a few loads from the packet's linear part and no helper.
//! [`Syn::find`] looks again, at what may be one, by a helper that reaches all of the packet.

use aya_ebpf::{bindings::__sk_buff, helpers::bpf_skb_load_bytes};
use smc_policy_common::query::Addr;

/// Bytes before the IP header on devices with Ethernet headers.
pub const ETHERNET: u32 = 14;
/// On devices without.
pub const NONE: u32 = 0;

const ETHERTYPE_AT: u32 = 12;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const VLAN: [u16; 2] = [0x8100, 0x88a8];
/// Tags in the packet itself; the kernel keeps one more beside it.
const VLAN_TAGS: usize = 2;
const VLAN_TAG: u32 = 4;

const IPV4_HEADER: u32 = 20;
const IPV6_HEADER: u32 = 40;
const TCP_HEADER: u32 = 20;
const TCP_FLAGS_AT: u32 = 13;

const PROTOCOL_TCP: u8 = 6;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;
/// Extension headers that are gone through. A real SYN has none to two.
const EXTENSION_HEADERS: usize = 8;

/// FIN, SYN, RST and ACK.
const FLAGS: u8 = 0x17;
/// Of these, a SYN has this one,
pub const SYN: u8 = 0x02;
/// and a SYN-ACK these two.
pub const SYN_ACK: u8 = 0x12;

/// Whether IPv6's next header `number` is one that another may follow. AH and ESP are not: what they protect must not be
/// changed.
#[inline(always)]
fn is_extension(number: u8) -> bool {
    matches!(number, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION_OPTIONS)
}

#[inline(always)]
fn is_vlan(ethertype: u16) -> bool {
    ethertype == VLAN[0] || ethertype == VLAN[1]
}

/// The packet's linear part.
#[derive(Clone, Copy)]
struct Linear {
    at: usize,
    end: usize,
}

impl Linear {
    #[inline(always)]
    fn of(skb: *mut __sk_buff) -> Self {
        // SAFETY: the context; the verifier turns these two fields into packet pointers.
        unsafe { Self { at: (*skb).data as usize, end: (*skb).data_end as usize } }
    }

    /// Whether it holds `n` bytes from here.
    #[inline(always)]
    fn has(self, n: u32) -> bool {
        self.at + n as usize <= self.end
    }

    #[inline(always)]
    fn skip(self, n: u32) -> Self {
        Self { at: self.at + n as usize, ..self }
    }

    /// Byte `n`, after [`Self::has`] of more than `n`.
    #[inline(always)]
    fn byte(self, n: u32) -> u8 {
        // SAFETY: the verifier refuses the program if the check is missing.
        unsafe { *((self.at + n as usize) as *const u8) }
    }

    #[inline(always)]
    fn be16(self, n: u32) -> u16 {
        u16::from_be_bytes([self.byte(n), self.byte(n + 1)])
    }
}

/// What a packet may be.
#[derive(Clone, Copy, PartialEq)]
pub enum Look {
    /// Certainly nothing that [`Syn::find`] would find.
    Other,
    /// Only a SYN.
    Syn,
    /// Only a SYN-ACK.
    SynAck,
    /// That must be looked at with a helper.
    Unknown,
}

impl Look {
    /// It may be a SYN.
    #[inline(always)]
    pub fn may_be_syn(self) -> bool {
        matches!(self, Self::Syn | Self::Unknown)
    }

    /// It may be a SYN-ACK.
    #[inline(always)]
    pub fn may_be_syn_ack(self) -> bool {
        matches!(self, Self::SynAck | Self::Unknown)
    }
}

/// A first look at a packet behind `link` bytes of link header.
#[inline(always)]
pub fn look(skb: *mut __sk_buff, link: u32) -> Look {
    let mut ip = Linear::of(skb);
    // What is not in the linear part must be looked at with a helper.
    if !ip.has(link + IPV4_HEADER) {
        return Look::Unknown;
    }
    let v4 = if link == NONE {
        match ip.byte(0) >> 4 {
            4 => true,
            6 => false,
            _ => return Look::Other,
        }
    } else {
        let mut ethertype = ip.be16(ETHERTYPE_AT);
        ip = ip.skip(link);
        if is_vlan(ethertype) {
            ethertype = ip.be16(2);
            ip = ip.skip(VLAN_TAG);
            if is_vlan(ethertype) {
                ethertype = ip.be16(2);
                ip = ip.skip(VLAN_TAG);
            }
        }
        match ethertype {
            ETHERTYPE_IPV4 => true,
            ETHERTYPE_IPV6 => false,
            _ => return Look::Other,
        }
    };
    let tcp = if v4 {
        if !ip.has(IPV4_HEADER) {
            return Look::Unknown;
        }
        if ip.byte(9) != PROTOCOL_TCP {
            return Look::Other;
        }
        ip.skip(u32::from(ip.byte(0) & 15) * 4)
    } else {
        if !ip.has(IPV6_HEADER) {
            return Look::Unknown;
        }
        let next = ip.byte(6);
        // Of extension headers only this one comes in great numbers.
        if next == FRAGMENT && ip.has(IPV6_HEADER + 8) {
            let following = ip.byte(IPV6_HEADER);
            let is_rest = ip.be16(IPV6_HEADER + 2) & 0xfff8 != 0;
            let may_be = !is_rest && (following == PROTOCOL_TCP || is_extension(following));
            return if may_be { Look::Unknown } else { Look::Other };
        }
        if next != PROTOCOL_TCP {
            return if is_extension(next) { Look::Unknown } else { Look::Other };
        }
        ip.skip(IPV6_HEADER)
    };
    if !tcp.has(TCP_FLAGS_AT + 1) {
        return Look::Unknown;
    }
    match tcp.byte(TCP_FLAGS_AT) & FLAGS {
        SYN => Look::Syn,
        SYN_ACK => Look::SynAck,
        _ => Look::Other,
    }
}

/// A SYN or SYN-ACK that has TCP options.
pub struct Syn {
    /// Sender.
    pub source: Addr,
    /// Receiver.
    pub destination: Addr,
    /// Host order.
    pub source_port: u16,
    /// Host order.
    pub destination_port: u16,
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledged sequence number.
    pub acknowledged: u32,
    /// Where the TCP header begins in the packet.
    pub tcp: u32,
    /// Bytes of its options: a multiple of 4, 4 to 40. All of them are in this packet.
    pub options: u32,
}

impl Syn {
    /// Where the options begin.
    #[inline(always)]
    pub fn options_at(&self) -> u32 {
        self.tcp + TCP_HEADER
    }

    /// Where the checksum is.
    #[inline(always)]
    pub fn checksum_at(&self) -> u32 {
        self.tcp + 16
    }

    /// What tells it from other SYNs of its time.
    #[inline(always)]
    pub fn key(&self) -> u64 {
        u64::from(self.sequence) << 32 | u64::from(self.source_port) << 16 | u64::from(self.destination_port)
    }

    /// Finds one with these flags behind `link` bytes of link header. `None`: there is none, or its headers do not hold
    /// together.
    #[inline(always)]
    pub fn find(skb: *mut __sk_buff, link: u32, flags: u8) -> Option<Self> {
        let found = smcpol_tcp(skb, link);
        if found == 0 {
            return None;
        }
        let (ip, tcp, end) =
            ((found >> IP_AT) as u32 & 0xff, found as u32 & OFFSET, (found >> END_AT) as u32);
        let (source, destination) = if found & V6 == 0 {
            let [source, destination] = load::<[u32; 2]>(skb, ip + 12)?.map(u32::from_be);
            (Addr::v4(source), Addr::v4(destination))
        } else {
            let [source_hi, source_lo, hi, lo] = load::<[u64; 4]>(skb, ip + 8)?.map(u64::from_be);
            (Addr { hi: source_hi, lo: source_lo }, Addr { hi, lo })
        };
        let [ports, sequence, acknowledged, fourth, _] = load::<[u32; 5]>(skb, tcp)?.map(u32::from_be);
        let header = (fourth >> 28) * 4;
        if (fourth >> 16) as u8 & FLAGS != flags || header <= TCP_HEADER || tcp + header > end & OFFSET {
            return None;
        }
        Some(Self {
            source,
            destination,
            source_port: (ports >> 16) as u16,
            destination_port: ports as u16,
            sequence,
            acknowledged,
            tcp,
            options: header - TCP_HEADER,
        })
    }
}

/// Of `smcpol_tcp`'s result: an offset.
const OFFSET: u32 = (1 << 24) - 1;
/// Of its result: where the end of the IP packet begins.
const END_AT: u32 = 24;
/// Of its result: where the IP header's offset begins.
const IP_AT: u32 = 48;
/// Of its result: it is IPv6.
const V6: u64 = 1 << 56;

/// Where the TCP header and the end of the IP packet are, behind `link` bytes of link header; 0: it is no TCP packet, or not
/// the first fragment. A global function: headers have many forms, and the verifier would follow all that comes
/// after once for each.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn smcpol_tcp(skb: *mut __sk_buff, link: u32) -> u64 {
    find_tcp(skb, link).unwrap_or(0)
}

#[inline(always)]
fn find_tcp(skb: *mut __sk_buff, link: u32) -> Option<u64> {
    let mut ip = NONE;
    let version = if link == NONE {
        load::<u8>(skb, 0)? >> 4
    } else {
        ip = ETHERNET;
        let mut ethertype = u16::from_be(load(skb, ETHERTYPE_AT)?);
        for _ in 0..VLAN_TAGS {
            if is_vlan(ethertype) {
                ethertype = u16::from_be(load(skb, ip + 2)?);
                ip += VLAN_TAG;
            }
        }
        match ethertype {
            ETHERTYPE_IPV4 => 4,
            ETHERTYPE_IPV6 => 6,
            _ => return None,
        }
    };
    let (tcp, end, v6) = match version {
        4 => {
            let [first, second, third] = load::<[u32; 3]>(skb, ip)?.map(u32::from_be);
            let header = (first >> 24 & 15) * 4;
            // The rest of a datagram is in other packets: what follows the header here is no TCP header.
            let is_rest = second & 0x1fff != 0;
            let protocol = (third >> 16) as u8;
            if first >> 28 != 4 || header < IPV4_HEADER || protocol != PROTOCOL_TCP || is_rest {
                return None;
            }
            (ip + header, ip + (first & 0xffff), 0)
        }
        6 => {
            let first = u64::from_be(load(skb, ip)?);
            if first >> 60 != 6 {
                return None;
            }
            let payload = ip + IPV6_HEADER;
            let tcp = skip_extensions(skb, payload, (first >> 8) as u8)?;
            (tcp, payload + (first >> 16 & 0xffff) as u32, V6)
        }
        _ => return None,
    };
    Some(u64::from(tcp & OFFSET) | u64::from(end) << END_AT | u64::from(ip) << IP_AT | v6)
}

/// Where the TCP header begins behind IPv6's extension headers, the first of which, at `at`, is a `next`.
#[inline(always)]
fn skip_extensions(skb: *mut __sk_buff, mut at: u32, mut next: u8) -> Option<u32> {
    for _ in 0..EXTENSION_HEADERS {
        if next == PROTOCOL_TCP {
            return Some(at);
        }
        if !is_extension(next) {
            return None;
        }
        let start = u32::from_be(load(skb, at)?);
        if next == FRAGMENT {
            if start & 0xfff8 != 0 {
                return None;
            }
            at += 8;
        } else {
            at += ((start >> 16 & 0xff) + 1) * 8;
        }
        next = (start >> 24) as u8;
    }
    if next == PROTOCOL_TCP { Some(at) } else { None }
}

/// What may be read from a packet.
///
/// # Safety
/// Any bytes are such a value.
unsafe trait Plain: Default {}
// SAFETY: integers and arrays of them.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for [u32; 2] {}
// SAFETY: as above.
unsafe impl Plain for [u32; 3] {}
// SAFETY: as above.
unsafe impl Plain for [u32; 5] {}
// SAFETY: as above.
unsafe impl Plain for [u64; 4] {}

/// A value in the packet, in network byte order. `None`: the packet is shorter.
#[inline(always)]
fn load<T: Plain>(skb: *mut __sk_buff, at: u32) -> Option<T> {
    let mut value = T::default();
    // SAFETY: the value is as large as said, and any bytes are one; the helper checks the packet's bounds.
    let result =
        unsafe { bpf_skb_load_bytes(skb.cast(), at, (&raw mut value).cast(), size_of::<T>() as u32) };
    if result == 0 { Some(value) } else { None }
}
