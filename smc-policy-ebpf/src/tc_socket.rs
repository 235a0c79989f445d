//! Whose SYN is it? Finds this namespace's socket and reads what the policy judges by.

use core::mem::size_of;

use aya_ebpf::{
    bindings::{__sk_buff, bpf_sock},
    helpers::{bpf_sk_fullsock, bpf_sk_release, bpf_skc_lookup_tcp, bpf_tcp_sock},
};
use smc_policy_common::query::{Addr, Direction, Query};

use crate::{sock_ops, tc_packet::Syn};

const AF_INET: u32 = 2;
const IPPROTO_TCP: u32 = 6;
/// The kernel's socket states (include/net/tcp_states.h).
const TCP_SYN_SENT: u32 = 2;
const TCP_TIME_WAIT: u32 = 6;
const TCP_LISTEN: u32 = 10;
const TCP_NEW_SYN_RECV: u32 = 12;
/// `BPF_F_CURRENT_NETNS`: the device's namespace.
const CURRENT_NETNS: u64 = -1i64 as u64;

/// A SYN of a socket of this namespace.
pub struct Owned {
    /// To judge it by.
    pub query: Query,
    /// It was not sent before.
    pub first: bool,
}

macro_rules! field {
    ($sock:expr, $field:ident) => {
        // SAFETY: a socket pointer that is not null; the verifier turns accesses of this struct's fields, of exactly
        // their width (hence volatile), into the kernel's.
        unsafe { (&raw const (*$sock).$field).read_volatile() }
    };
}

/// The connecting socket that sends the packet. Its own addresses are what the application asked for, whatever NAT has
/// made of the packet's.
#[inline(always)]
pub fn sender(skb: *mut __sk_buff) -> Option<Owned> {
    // SAFETY: the context's field; null is checked below.
    let sock: *mut bpf_sock = unsafe { (*skb).__bindgen_anon_2.sk };
    if sock.is_null() {
        return None;
    }
    // SAFETY: a socket pointer that is not null.
    let sock = unsafe { bpf_sk_fullsock(sock) };
    if sock.is_null() || field!(sock, protocol) != IPPROTO_TCP || field!(sock, state) != TCP_SYN_SENT {
        return None;
    }
    // SAFETY: as above.
    let tcp = unsafe { bpf_tcp_sock(sock) };
    if tcp.is_null() {
        return None;
    }
    // Raised before the SYN is sent again (tcp_retransmit_timer, net/ipv4/tcp_timer.c).
    let first = field!(tcp, icsk_retransmits) == 0;
    let (peer, local) = if field!(sock, family) == AF_INET {
        (v4(field!(sock, dst_ip4)), v4(field!(sock, src_ip4)))
    } else {
        // An IPv4 peer of an AF_INET6 socket stands here v4-mapped.
        (
            v6(|i| {
                // SAFETY: as in `field`.
                unsafe { (&raw const (*sock).dst_ip6[i]).read_volatile() }
            }),
            v6(|i| {
                // SAFETY: as in `field`.
                unsafe { (&raw const (*sock).src_ip6[i]).read_volatile() }
            }),
        )
    };
    let port = u16::from_be(field!(sock, dst_port));
    Some(Owned { query: Query { peer, local, port, direction: Direction::Outbound }, first })
}

/// The socket of this namespace that the packet is for: a listener, or one that is connecting to the sender at the same
/// time.
#[inline(always)]
pub fn receiver(skb: *mut __sk_buff, syn: &Syn) -> Option<Owned> {
    let mut state = look_up(skb, syn, syn.source_port)?;
    // A SYN may follow a connection of the same addresses and ports that is over: it goes to the listener
    // (TCP_TW_SYN, net/ipv4/tcp_minisocks.c), which alone is found for a source port that nobody has.
    if state == TCP_TIME_WAIT {
        state = look_up(skb, syn, 0)?;
    }
    let (peer, local) = (syn.source, syn.destination);
    let inbound = Query { peer, local, port: syn.destination_port, direction: Direction::Inbound };
    match state {
        TCP_LISTEN => Some(Owned { query: inbound, first: true }),
        // Came before, and was answered.
        TCP_NEW_SYN_RECV => Some(Owned { query: inbound, first: false }),
        // Both ends connect: ours sent a SYN too, which was counted.
        TCP_SYN_SENT => Some(Owned {
            query: Query { port: syn.source_port, direction: Direction::Outbound, ..inbound },
            first: false,
        }),
        _ => None,
    }
}

/// Whether a connection of this namespace waits for this SYN-ACK. `is_blanked`: it has lost the SMC option, which its socket
/// is to know.
#[inline(always)]
pub fn is_awaited(skb: *mut __sk_buff, answer: &Syn, is_blanked: bool) -> bool {
    let sock = find(skb, answer, answer.source_port);
    if sock.is_null() {
        return false;
    }
    // SAFETY: a socket pointer that is not null.
    let tcp = unsafe { bpf_tcp_sock(sock) };
    let awaited = field!(sock, state) == TCP_SYN_SENT
        && !tcp.is_null()
        && field!(tcp, snd_una).wrapping_add(1) == answer.acknowledged;
    if awaited && is_blanked {
        sock_ops::note_blanked(sock);
    }
    // SAFETY: found above, not null, and not used after this.
    unsafe { bpf_sk_release(sock.cast()) };
    awaited
}

/// State of the socket that a packet like `syn` from `source_port` is for.
#[inline(always)]
fn look_up(skb: *mut __sk_buff, syn: &Syn, source_port: u16) -> Option<u32> {
    let sock = find(skb, syn, source_port);
    if sock.is_null() {
        return None;
    }
    let state = field!(sock, state);
    // SAFETY: found above, not null, and not used after this.
    unsafe { bpf_sk_release(sock.cast()) };
    Some(state)
}

/// The socket that a packet like `syn` from `source_port` is for, or null; it must be released.
#[inline(always)]
fn find(skb: *mut __sk_buff, syn: &Syn, source_port: u16) -> *mut bpf_sock {
    // As `struct bpf_sock_tuple`: addresses, then ports, all as on the wire.
    let ports = u32::from_ne_bytes({
        let ([a, b], [c, d]) = (source_port.to_be_bytes(), syn.destination_port.to_be_bytes());
        [a, b, c, d]
    });
    match (syn.source.as_v4(), syn.destination.as_v4()) {
        (Some(source), Some(destination)) => {
            let mut tuple = [source.to_be(), destination.to_be(), ports];
            let size = size_of_val(&tuple) as u32;
            // SAFETY: the tuple is as large as said, which tells its family.
            unsafe { bpf_skc_lookup_tcp(skb.cast(), tuple.as_mut_ptr().cast(), size, CURRENT_NETNS, 0) }
        }
        _ => {
            let words = |a: Addr| {
                [(a.hi >> 32) as u32, a.hi as u32, (a.lo >> 32) as u32, a.lo as u32].map(u32::to_be)
            };
            let ([a, b, c, d], [e, f, g, h]) = (words(syn.source), words(syn.destination));
            let mut tuple = [a, b, c, d, e, f, g, h, ports];
            // SAFETY: as above.
            unsafe {
                bpf_skc_lookup_tcp(
                    skb.cast(),
                    tuple.as_mut_ptr().cast(),
                    size_of::<[u32; 9]>() as u32,
                    CURRENT_NETNS,
                    0,
                )
            }
        }
    }
}

#[inline(always)]
fn v4(address: u32) -> Addr {
    Addr::v4(u32::from_be(address))
}

#[inline(always)]
fn v6(word: impl Fn(usize) -> u32) -> Addr {
    let half = |i: usize| u64::from(u32::from_be(word(i))) << 32 | u64::from(u32::from_be(word(i + 1)));
    Addr { hi: half(0), lo: half(2) }
}
