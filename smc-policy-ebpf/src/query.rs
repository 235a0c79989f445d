//! Judges the connections in a test run's packet. Never attached: user space runs it with BPF_PROG_TEST_RUN to ask the
//! tables in force (`explain`, the tests that compare kernel and evaluator, the benchmarks). Counts nothing.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::__sk_buff,
    helpers::{bpf_loop, bpf_skb_load_bytes, bpf_skb_store_bytes},
    macros::classifier,
    programs::TcContext,
};
use smc_policy_common::query::{PACKET_HEADER, PACKET_QUERIES, WireAnswer, WireQuery};

use crate::decision::InForce;

const QUERY: usize = size_of::<WireQuery>();
/// Offset of `meta`, which the answer overwrites.
const META: usize = core::mem::offset_of!(WireQuery, meta);

struct Batch {
    skb: *mut __sk_buff,
}

/// Judges every query in the packet.
#[classifier]
pub fn smcpol_query(ctx: TcContext) -> i32 {
    let queries = (ctx.len() as usize).saturating_sub(PACKET_HEADER) / QUERY;
    let mut batch = Batch { skb: ctx.skb.skb };
    // bpf_loop (Linux 5.17): the verifier follows the callback once, not once a turn.
    // SAFETY: the callback has the helper's signature and gets `batch`, which outlives the call.
    let turns = unsafe {
        bpf_loop(
            queries.min(PACKET_QUERIES) as u32,
            answer as *const () as *mut c_void,
            (&raw mut batch).cast(),
            0,
        )
    };
    turns as i32
}

/// One turn: 0 goes on, 1 stops.
#[inline(never)]
extern "C" fn answer(index: u64, batch: *mut c_void) -> i64 {
    // SAFETY: bpf_loop hands over the pointer it was given, a Batch.
    let skb = unsafe { (*batch.cast::<Batch>()).skb };
    let at = PACKET_HEADER as u32 + index as u32 * QUERY as u32;
    let mut wire = WireQuery::default();
    // SAFETY: `wire` is as large as said and any bytes are a WireQuery; the helper checks the packet's bounds.
    if unsafe { bpf_skb_load_bytes(skb.cast(), at, (&raw mut wire).cast(), QUERY as u32) } != 0 {
        return 1;
    }
    let verdict = InForce::now().judge(&wire.query());
    let reply = WireAnswer::new(verdict).0;
    // SAFETY: as above, for the 8 bytes of `reply`.
    let stored = unsafe {
        bpf_skb_store_bytes(skb, at + META as u32, (&raw const reply).cast(), size_of_val(&reply) as u32, 0)
    };
    i64::from(stored != 0)
}
