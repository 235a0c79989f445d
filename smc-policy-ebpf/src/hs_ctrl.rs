//! The callbacks of `struct smc_hs_ctrl` (include/net/smc.h, Linux 6.19 and later with CONFIG_SMC_HS_CTRL_BPF). The
//! kernel calls them only for sockets that are already SMC; 0 leaves the SMC option out.

use core::ffi::c_void;

use aya_ebpf::helpers::bpf_jiffies64;
use smc_policy_common::query::{Direction, Query};

use crate::{
    decision::{InForce, Transmission},
    sock::{OFF_REQ_EXPIRES, OFF_REQ_RETRANS, OFF_REQ_TIMEOUT, OFF_RETRANSMITS, Sock},
};

/// `int syn_option(struct tcp_sock *tp)`: called for every transmission of a SYN; 0 clears the socket's `syn_smc` for
/// good.
#[unsafe(no_mangle)]
#[unsafe(link_section = "fentry/smcpol_syn")]
pub extern "C" fn smcpol_syn(ctx: *mut c_void) -> i32 {
    // SAFETY: argument 0 of syn_option is a tcp_sock.
    let sock = unsafe { Sock::from_argument(ctx, 0) };
    let (peer, local) = sock.addresses();
    let query = Query { peer, local, port: sock.peer_port(), direction: Direction::Outbound };
    // Raised before the SYN is sent again (tcp_retransmit_timer, net/ipv4/tcp_timer.c).
    let first = sock.read_if_present::<u8>(&OFF_RETRANSMITS).unwrap_or(0) == 0;
    InForce::now().may_offer_syn(&query, Transmission::new(first)) as i32
}

/// `int synack_option(const struct tcp_sock *tp, struct inet_request_sock *ireq)`: called for every transmission of a
/// SYN-ACK.
#[unsafe(no_mangle)]
#[unsafe(link_section = "fentry/smcpol_synack")]
pub extern "C" fn smcpol_synack(ctx: *mut c_void) -> i32 {
    // SAFETY: argument 1 of synack_option is an inet_request_sock.
    let request = unsafe { Sock::from_argument(ctx, 1) };
    let (peer, local) = request.addresses();
    let query = Query { peer, local, port: request.local_port(), direction: Direction::Inbound };
    InForce::now().may_offer(&query, Transmission::new(is_first_synack(request))) as i32
}

/// `num_retrans` is raised only after a SYN-ACK was sent again (inet_rtx_syn_ack, net/ipv4/inet_connection_sock.c), so
/// the first repetition looks like the first transmission there. The request's timer tells them apart: it is started
/// just before the first transmission, and a repetition comes when it has run out, or when the client repeats its SYN
/// after a similar time. Requests answered by a SYN cookie have no timer (timeout 0): each counts as a first.
#[inline(always)]
fn is_first_synack(request: Sock) -> bool {
    let (Some(retrans), Some(timeout), Some(expires)) = (
        request.read_if_present::<u8>(&OFF_REQ_RETRANS),
        request.read_if_present::<u32>(&OFF_REQ_TIMEOUT),
        request.read_if_present::<u64>(&OFF_REQ_EXPIRES),
    ) else {
        return true;
    };
    if retrans > 0 {
        return false;
    }
    // SAFETY: takes no argument.
    let now = unsafe { bpf_jiffies64() };
    timeout == 0 || expires.wrapping_sub(now) as i64 > i64::from(timeout / 2)
}
