//! Learns from how negotiations end: an fexit program on the function in which a client waits for the server's CLC accept,
//! and one on the tracepoint that says why a connection fell back to TCP. What follows from it is decided by
//! `smc_policy_common::learner`.

use core::ffi::c_void;

use aya_ebpf::{
    EbpfContext, Global,
    helpers::bpf_ktime_get_boot_ns,
    helpers::generated::bpf_probe_read_kernel,
    macros::{btf_tracepoint, fexit, map},
    maps::{Array, LruHashMap},
    programs::{BtfTracePointContext, FExitContext},
};
use smc_policy_common::{
    counters::InstanceCounters,
    learner::{CLC_ACCEPT, Ending, PEERS, Peer, Storm, evidence_length, is_rdma_failure},
    quarantine::{Cause, Entry, Key},
    query::{Direction, Query},
};

use crate::{
    decision::InForce,
    maps,
    quarantine::{self, Held, PROOF},
    sock::{OFF_CLCSOCK, OFF_LISTEN_SMC, Smc},
    sock_ops,
};

/// What is known of peers; shared by all instances.
#[map(name = "smcpol_peers")]
static REMEMBERED: LruHashMap<Key, Peer> = LruHashMap::with_max_entries(PEERS, 0);

/// How many peers are known and held; shared by all instances.
#[map(name = "smcpol_storm")]
static STORM: Array<Storm> = Array::with_max_entries(1, 0);

/// Not 0: the kernel lets programs read its memory (it does not under `lockdown=confidentiality`).
#[unsafe(no_mangle)]
pub static MAY_READ_MEMORY: Global<u32> = Global::new(0);

/// Arguments of `smc_clc_wait_msg(smc, buf, buflen, expected_type, timeout)`, and its result (the loader has compared them
/// with the kernel's).
mod waited {
    pub const SMC: usize = 0;
    pub const BUFFER: usize = 1;
    pub const EXPECTED: usize = 3;
    pub const RESULT: usize = 5;
}

/// Arguments of the tracepoint `smc_switch_to_fallback(smc, fallback_rsn)`.
mod fallback {
    pub const SMC: usize = 0;
    pub const REASON: usize = 1;
}

/// Word `n` of the context, a number.
#[inline(always)]
fn number(ctx: *mut c_void, n: usize) -> u64 {
    // SAFETY: the context is an array of 8-byte words, one an argument, the result behind the last; the verifier refuses
    // others.
    unsafe { ctx.cast::<u64>().add(n).read_volatile() }
}

/// A server's answer has come, or will not.
#[fexit(function = "smc_clc_wait_msg")]
pub fn smcpol_clc(ctx: FExitContext) -> i32 {
    let ctx = ctx.as_ptr();
    // A server waits for confirms with the same function, and whoever sends it garbage must not be recorded.
    if number(ctx, waited::EXPECTED) as u8 != CLC_ACCEPT {
        return 0;
    }
    let result = number(ctx, waited::RESULT) as i32;
    let mut bytes = [0u8; 8];
    if result < 0 && MAY_READ_MEMORY.load() != 0 {
        // SAFETY: eight bytes of this program's; the kernel checks the address that it reads from.
        let failed = unsafe {
            bpf_probe_read_kernel(bytes.as_mut_ptr().cast(), 8, number(ctx, waited::BUFFER) as *const c_void)
        };
        if failed != 0 {
            bytes = [0; 8];
        }
    }
    let bytes = u64::from_be_bytes(bytes);
    let ending = Ending::of(result, bytes);
    if ending == Ending::Other {
        return 0;
    }
    // SAFETY: that argument is a pointer to a `smc_sock`.
    let Some(smc) = (unsafe { Smc::from_argument(ctx, waited::SMC) }) else { return 0 };
    let Some(sock) = smc.tcp(&OFF_CLCSOCK) else { return 0 };
    if !sock_ops::is_covered_cookie(sock.network_cookie()) {
        return 0;
    }
    let (peer, local) = sock.addresses();
    let query = Query { peer, local, port: sock.peer_port(), direction: Direction::Outbound };
    ended(&query, ending, bytes);
    0
}

/// A connection goes on as TCP.
#[btf_tracepoint(function = "smc_switch_to_fallback")]
pub fn smcpol_fallback(ctx: BtfTracePointContext) -> i32 {
    let ctx = ctx.as_ptr();
    // SAFETY: that argument is a pointer to a `smc_sock`.
    let Some(smc) = (unsafe { Smc::from_argument(ctx, fallback::SMC) }) else { return 0 };
    if !is_rdma_failure(number(ctx, fallback::REASON) as u32, smc.peer_diagnosis()) {
        return 0;
    }
    let Some(sock) = smc.tcp(&OFF_CLCSOCK) else { return 0 };
    if !sock_ops::is_covered_cookie(sock.network_cookie()) {
        return 0;
    }
    let (peer, local) = sock.addresses();
    // One that this host accepted knows the listening socket that it came by.
    let query = if smc.is_set(&OFF_LISTEN_SMC) {
        Query { peer, local, port: sock.local_port(), direction: Direction::Inbound }
    } else {
        Query { peer, local, port: sock.peer_port(), direction: Direction::Outbound }
    };
    rdma_failed(&query);
    0
}

/// What the policy says of learning from this connection.
#[derive(Clone, Copy, PartialEq)]
enum Lesson {
    /// It is denied, or nothing is in force: it is none of the guard's business.
    None,
    /// It is counted only: the peer is trusted.
    Trusted,
    /// It is counted only: the policy observes.
    Observed,
    /// It is learned from.
    Learned,
}

#[inline(always)]
fn lesson(query: &Query) -> Lesson {
    match InForce::now().judge(query) {
        Some(verdict) if !verdict.allow => Lesson::None,
        Some(verdict) if verdict.trust => Lesson::Trusted,
        Some(verdict) if verdict.observe => Lesson::Observed,
        Some(_) => Lesson::Learned,
        None => Lesson::None,
    }
}

/// Counts a failure. Whether it is learned from.
#[inline(always)]
fn counts(query: &Query, counter: impl FnOnce(&mut InstanceCounters) -> &mut u64) -> bool {
    let lesson = lesson(query);
    maps::count(counter, lesson != Lesson::None);
    maps::count(|stat| &mut stat.observed_failures, lesson == Lesson::Observed);
    lesson == Lesson::Learned
}

#[inline(always)]
fn now() -> u64 {
    // SAFETY: takes no argument.
    unsafe { bpf_ktime_get_boot_ns() }
}

/// What is remembered of a peer, made if there is nothing. `None`: no memory.
#[inline(always)]
fn remembered(key: &Key) -> Option<&'static mut Peer> {
    if REMEMBERED.get_ptr(key).is_none() {
        let _ = REMEMBERED.insert(key, Peer::default(), 0);
    }
    // SAFETY: an element of the map, not null. Two CPUs that learn of the same peer at once may cost one of two notes; what
    // another peer's element is given to in this moment may get this note, which costs a wrong count.
    REMEMBERED.get_ptr_mut(key).map(|peer| unsafe { &mut *peer })
}

#[inline(always)]
fn storm() -> Option<&'static mut Storm> {
    // SAFETY: the only element of the map. CPUs that count at once may cost a count.
    STORM.get_ptr_mut(0).map(|storm| unsafe { &mut *storm })
}

#[inline(always)]
fn ended(query: &Query, ending: Ending, bytes: u64) {
    let key = Key::new(query.peer, query.port);
    let now = now();
    match ending {
        Ending::Clc => {
            if let Some(peer) = remembered(&key)
                && peer.speaks(now)
                && let Some(storm) = storm()
            {
                storm.count_known(now);
            }
        }
        Ending::NoClc => {
            if counts(query, |stat| &mut stat.no_clc) {
                let proof = Held {
                    cause: Cause::NoClc,
                    directions: Entry::OUTBOUND,
                    span: PROOF,
                    evidence: bytes,
                    evidence_length: evidence_length(bytes),
                };
                proof.hold(&key);
            }
        }
        Ending::Silence => {
            if counts(query, |stat| &mut stat.silences) {
                suspect(&key, Cause::Silence, now);
            }
        }
        Ending::Reset => {
            if counts(query, |stat| &mut stat.resets) {
                suspect(&key, Cause::Reset, now);
            }
        }
        Ending::Other => {}
    }
}

#[inline(always)]
fn suspect(key: &Key, cause: Cause, now: u64) {
    let before = quarantine::learned(key);
    if let Some(entry) = &before
        && now < entry.until
    {
        // It began before the peer was in quarantine.
        quarantine::met_again(key, now);
        return;
    }
    let (Some(peer), Some(storm)) = (remembered(key), storm()) else { return };
    if peer.is_known(now) && !storm.hold_one_more(now) {
        maps::count(|stat| &mut stat.storm_reports, true);
        return;
    }
    let span = peer.suspect(before.map(|entry| &*entry), now);
    Held { cause, directions: Entry::OUTBOUND, span, evidence: 0, evidence_length: 0 }.hold(key);
}

#[inline(always)]
fn rdma_failed(query: &Query) {
    if !counts(query, |stat| &mut stat.rdma_failures) {
        return;
    }
    let key = Key::new(query.peer, 0);
    let now = now();
    let Some(peer) = remembered(&key) else { return };
    if !peer.path_failed(now) {
        return;
    }
    let directions = Entry::OUTBOUND | Entry::INBOUND;
    Held { cause: Cause::RdmaPath, directions, span: PROOF, evidence: 0, evidence_length: 0 }.hold(&key);
}
