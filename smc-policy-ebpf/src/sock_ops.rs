//! Marks the SYNs of allowed SMC connections with our canary (sock_ops, attached to cgroups).
//!
//! Other users of sock_ops may be attached to the same sockets: of a socket's callback flags only the one that asks for
//! header options is touched, and only if nobody else has set it. What a socket was given is kept in its own storage.

use core::{cell::UnsafeCell, ffi::c_void, ptr};

use aya_ebpf::{
    bindings::{
        BPF_F_NO_PREALLOC, BPF_SK_STORAGE_GET_F_CREATE, BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB,
        BPF_SOCK_OPS_HDR_OPT_LEN_CB, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG,
        BPF_SOCK_OPS_TCP_CONNECT_CB, BPF_SOCK_OPS_WRITE_HDR_OPT_CB, BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG,
        bpf_map_type::BPF_MAP_TYPE_SK_STORAGE, bpf_sock, bpf_sock_ops,
    },
    helpers::{
        bpf_get_netns_cookie, bpf_load_hdr_opt, bpf_reserve_hdr_opt, bpf_sk_storage_delete,
        bpf_sk_storage_get, bpf_skc_to_tcp_sock, bpf_sock_ops_cb_flags_set, bpf_store_hdr_opt,
    },
    macros::{map, sock_ops},
    maps::HashMap,
    programs::SockOpsContext,
};
use smc_policy_common::{
    canary::Opening,
    query::{Direction, Query},
    table::{FLAG_CANARY, FLAG_OBSERVE},
    tcp_option::{CANARY_EXID, CANARY_LENGTH, CANARY_SHORT, EXPERIMENTAL, SMC_LENGTH, SMC_MAGIC},
};

use crate::{
    canary,
    decision::InForce,
    maps, quarantine,
    sock::{MASK_SYN_SMC, OFF_AO_INFO, OFF_SK_ERR, OFF_SYN_SMC, Sock},
};

/// As the maps of aya, which has none of this type (`bpf_map_def`).
#[repr(C)]
struct Definition {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    id: u32,
    pinning: u32,
}

#[repr(transparent)]
struct SocketStorage(UnsafeCell<Definition>);

// SAFETY: only its address is used, which the loader replaces by the map's.
unsafe impl Sync for SocketStorage {}

/// What a socket that is marked was given: [`OURS`], and the length of the canary that its SYN has room for.
#[unsafe(link_section = "maps")]
#[unsafe(export_name = "smcpol_socks")]
static SOCKETS: SocketStorage = SocketStorage(UnsafeCell::new(Definition {
    kind: BPF_MAP_TYPE_SK_STORAGE,
    key_size: 4,
    value_size: 4,
    max_entries: 0,
    flags: BPF_F_NO_PREALLOC,
    id: 0,
    pinning: 0,
}));

/// The network namespaces in which SYNs are marked and negotiations are learned from, by cookie; 0: all.
#[map(name = "smcpol_netns")]
static NAMESPACES: HashMap<u64, u32> = HashMap::with_max_entries(4096, BPF_F_NO_PREALLOC);

/// In a socket's storage: we have set the callback flag.
const OURS: u32 = 1 << 8;
/// In a socket's storage: the answer to its SYN has lost the SMC option.
const BLANKED: u32 = 1 << 9;
/// In a socket's storage: the length.
const LENGTH: u32 = 0xff;

const WRITE: u32 = BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
/// Transmissions of a SYN that carry the mark. What drops it must not keep a connection from coming up that would without
/// this tool (with `retransmit = "plain"` the second one has no SMC option and no mark already).
const MARKED: u32 = 2;
const STATE: u32 = BPF_SOCK_OPS_STATE_CB_FLAG;
/// A socket's states (include/net/tcp_states.h).
const TCP_ESTABLISHED: u32 = 1;
const TCP_CLOSE: u32 = 7;
/// As a socket has it that its peer has reset.
const ECONNRESET: i32 = 104;
/// SYN and ACK among a TCP header's flags.
const FLAGS: u32 = 0x12;
const SYN: u32 = 0x02;

macro_rules! field {
    ($ops:expr, $field:ident) => {
        // SAFETY: the context; the verifier turns accesses of this struct's fields, of exactly their width (hence
        // volatile), into the kernel's.
        unsafe { (&raw const (*$ops).$field).read_volatile() }
    };
}

/// Called at many moments of a TCP socket's life.
#[sock_ops]
pub fn smcpol_mark(ctx: SockOpsContext) -> u32 {
    let ops = ctx.ops;
    match field!(ops, op) {
        BPF_SOCK_OPS_TCP_CONNECT_CB => connect(ops),
        BPF_SOCK_OPS_HDR_OPT_LEN_CB => reserve(ops),
        BPF_SOCK_OPS_WRITE_HDR_OPT_CB => write(ops),
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB => end(ops),
        BPF_SOCK_OPS_STATE_CB => closed(ops),
        _ => {}
    }
    1
}

/// The socket, or null.
#[inline(always)]
fn socket(ops: *mut bpf_sock_ops) -> *mut bpf_sock {
    // SAFETY: the context's field.
    unsafe { (&raw const (*ops).__bindgen_anon_2.sk).read_volatile() }
}

/// Its `tcp_sock`, if it is a TCP socket.
#[inline(always)]
fn tcp(sock: *mut bpf_sock) -> Option<Sock> {
    // SAFETY: a socket pointer that is not null.
    let tcp = unsafe { bpf_skc_to_tcp_sock(sock.cast()) };
    // SAFETY: the helper's result, checked for null.
    if tcp.is_null() { None } else { Some(unsafe { Sock::from_tcp(tcp.cast::<u8>().cast_const()) }) }
}

/// Whether it asks for SMC (`syn_smc`), as smc_hs_ctrl has left it.
#[inline(always)]
fn asks_for_smc(tcp: Sock) -> bool {
    tcp.read_if_present::<u8>(&OFF_SYN_SMC).is_some_and(|byte| u32::from(byte) & MASK_SYN_SMC.load() != 0)
}

#[inline(always)]
fn query(tcp: Sock) -> Query {
    let (peer, local) = tcp.addresses();
    Query { peer, local, port: tcp.peer_port(), direction: Direction::Outbound }
}

/// A socket's storage, or null.
#[inline(always)]
fn storage(sock: *mut bpf_sock, flags: u32) -> *mut u32 {
    let map = SOCKETS.0.get().cast::<c_void>();
    // SAFETY: a socket pointer that is not null, and a map of socket storage with values of 4 bytes.
    unsafe { bpf_sk_storage_get(map, sock.cast(), ptr::null_mut(), flags.into()).cast() }
}

/// Before the SYN is made.
#[inline(always)]
fn connect(ops: *mut bpf_sock_ops) {
    let sock = socket(ops);
    if sock.is_null() {
        return;
    }
    let Some(tcp) = tcp(sock) else { return };
    // TCP-AO signs the options that a middlebox, or we at ingress, would change.
    if !asks_for_smc(tcp) || tcp.read_if_present::<u64>(&OFF_AO_INFO).unwrap_or(0) != 0 {
        return;
    }
    let table = InForce::now();
    if !table.flags().is_some_and(|flags| flags & (FLAG_CANARY | FLAG_OBSERVE) == FLAG_CANARY) {
        return;
    }
    if !is_covered(ops) {
        return;
    }
    let query = query(tcp);
    let marks = match table.judge(&query) {
        Some(verdict) => verdict.allow && !verdict.trust && !quarantine::holds(&query),
        None => false,
    };
    if !marks {
        return;
    }
    let storage = storage(sock, BPF_SK_STORAGE_GET_F_CREATE);
    if storage.is_null() {
        return;
    }
    let flags = field!(ops, bpf_sock_ops_cb_flags);
    if flags & WRITE == 0 {
        // SAFETY: the context; the storage is not null and 4 bytes.
        unsafe {
            bpf_sock_ops_cb_flags_set(ops, (flags | WRITE) as i32);
            *storage = OURS;
        }
    }
}

/// Whether it is in a namespace in which SYNs are marked.
#[inline(always)]
fn is_covered(ops: *mut bpf_sock_ops) -> bool {
    // SAFETY: the context.
    is_covered_cookie(unsafe { bpf_get_netns_cookie(ops.cast()) })
}

/// Whether the guard works in the network namespace with this cookie.
#[inline(always)]
pub fn is_covered_cookie(cookie: u64) -> bool {
    // SAFETY: the values are not used.
    unsafe { NAMESPACES.get(&0).is_some() || NAMESPACES.get(&cookie).is_some() }
}

/// Whether it is about a SYN of a socket that is marked: its storage.
#[inline(always)]
fn marked(ops: *mut bpf_sock_ops) -> Option<(*mut bpf_sock, *mut u32)> {
    if field!(ops, skb_tcp_flags) & FLAGS != SYN {
        return None;
    }
    let sock = socket(ops);
    if sock.is_null() {
        return None;
    }
    let storage = storage(sock, 0);
    if storage.is_null() { None } else { Some((sock, storage)) }
}

/// Asks for room in the SYN. The SMC option has its own already, if smc_hs_ctrl lets it be sent.
#[inline(always)]
fn reserve(ops: *mut bpf_sock_ops) {
    let Some((sock, storage)) = marked(ops) else { return };
    // SAFETY: the context.
    let has_room = |length: u8| unsafe { bpf_reserve_hdr_opt(ops, length.into(), 0) == 0 };
    // Raised before a segment is sent again (`__tcp_retransmit_skb`, net/ipv4/tcp_output.c).
    let is_tried = field!(ops, total_retrans) >= MARKED;
    let length = if is_tried || !tcp(sock).is_some_and(asks_for_smc) {
        0
    } else if has_room(CANARY_LENGTH) {
        CANARY_LENGTH
    } else if has_room(CANARY_SHORT) {
        CANARY_SHORT
    } else {
        maps::count(|stat| &mut stat.unmarked, true);
        0
    };
    // SAFETY: the storage is not null and 4 bytes.
    unsafe { *storage = *storage & !LENGTH | u32::from(length) };
}

/// Writes the canary into the SYN.
#[inline(always)]
fn write(ops: *mut bpf_sock_ops) {
    let Some((sock, storage)) = marked(ops) else { return };
    // SAFETY: the storage is not null and 4 bytes.
    let length = unsafe { *storage } & LENGTH;
    if length == 0 {
        return;
    }
    let [a, b, c, d] = SMC_MAGIC.to_be_bytes();
    let mut smc = [EXPERIMENTAL, SMC_LENGTH, a, b, c, d, 0, 0];
    // SAFETY: the context, and a place of the length given.
    if unsafe { bpf_load_hdr_opt(ops, smc.as_mut_ptr().cast(), smc.len() as u32, 0) } < 0 {
        return;
    }
    let Some(tcp) = tcp(sock) else { return };
    let (peer, local) = tcp.addresses();
    let opening = Opening {
        peer,
        local,
        peer_port: tcp.peer_port(),
        local_port: tcp.local_port(),
        // The SYN's own number, also when it is sent again.
        sequence: field!(ops, snd_una),
    };
    let long = length == u32::from(CANARY_LENGTH);
    let nonce = if long { canary::of(&opening) } else { 0 };
    let ([e, f], [g, h, i, j]) = (CANARY_EXID.to_be_bytes(), nonce.to_be_bytes());
    let option = [EXPERIMENTAL, length as u8, e, f, g, h, i, j];
    // Lengths that the verifier knows.
    let size = if long { u32::from(CANARY_LENGTH) } else { u32::from(CANARY_SHORT) };
    // SAFETY: the context, and an option at least as long as said.
    if unsafe { bpf_store_hdr_opt(ops, option.as_ptr().cast(), size, 0) } == 0 {
        maps::count(|stat| if long { &mut stat.marked } else { &mut stat.marked_short }, true);
    }
}

/// The connection stands: its packets need no header options of ours any more. One whose SYN-ACK was blanked is looked at
/// until it ends.
#[inline(always)]
fn end(ops: *mut bpf_sock_ops) {
    let sock = socket(ops);
    if sock.is_null() {
        return;
    }
    let storage = storage(sock, 0);
    if storage.is_null() {
        return;
    }
    let flags = field!(ops, bpf_sock_ops_cb_flags);
    // SAFETY: the storage is not null and 4 bytes.
    let had = unsafe { *storage };
    let kept = if had & OURS != 0 { flags & !WRITE } else { flags };
    // Who has asked for the states of this socket, too, asks until it ends, as we do: nothing needs to be taken back.
    let wanted = if had & BLANKED != 0 { kept | STATE } else { kept };
    // SAFETY: the context; the map is of socket storage.
    unsafe {
        if wanted != flags {
            bpf_sock_ops_cb_flags_set(ops, wanted as i32);
        }
        if had & BLANKED == 0 {
            bpf_sk_storage_delete(SOCKETS.0.get().cast(), sock.cast());
        }
    }
}

/// A socket's state changed. One whose SYN-ACK was blanked and that the peer resets before it has sent anything is counted.
#[inline(always)]
fn closed(ops: *mut bpf_sock_ops) {
    // SAFETY: the context's fields.
    let [old, new] = unsafe {
        let arguments = &raw const (*ops).__bindgen_anon_1.args;
        [(&raw const (*arguments)[0]).read_volatile(), (&raw const (*arguments)[1]).read_volatile()]
    };
    // One that this host has closed is reset by itself when data come (TCPAbortOnData), with the same error.
    if old != TCP_ESTABLISHED || new != TCP_CLOSE {
        return;
    }
    let sock = socket(ops);
    if sock.is_null() {
        return;
    }
    let storage = storage(sock, 0);
    // SAFETY: the storage is not null then, and 4 bytes.
    if storage.is_null() || unsafe { *storage } & BLANKED == 0 {
        return;
    }
    if field!(ops, bytes_received) != 0 {
        return;
    }
    let Some(tcp) = tcp(sock) else { return };
    if tcp.read_if_present::<i32>(&OFF_SK_ERR) != Some(ECONNRESET) {
        return;
    }
    let (peer, local) = tcp.addresses();
    let ports = u64::from(tcp.peer_port()) | u64::from(tcp.local_port()) << 16;
    quarantine::smcpol_reset(peer.hi, peer.lo, local.hi, local.lo, ports);
}

/// Notes in the storage of a connecting socket, if it is marked, that the answer to its SYN was blanked.
#[inline(always)]
pub fn note_blanked(sock: *mut bpf_sock) {
    let storage = storage(sock, 0);
    if !storage.is_null() {
        // SAFETY: the storage is not null and 4 bytes. What is lost to the same socket's SYN that is sent again in this
        // moment costs a count.
        unsafe { *storage |= BLANKED };
    }
}
