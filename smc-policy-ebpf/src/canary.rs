//! The canary's nonces: made when a SYN leaves, made again from the answer. Nothing is remembered in between, so that
//! nothing can be filled up.

use aya_ebpf::{helpers::bpf_ktime_get_boot_ns, macros::map, maps::Array};
use smc_policy_common::{
    canary::{Keys, Opening, nonce},
    query::Addr,
};

/// The keys; shared by all instances.
#[map(name = "smcpol_keys")]
static KEYS: Array<Keys> = Array::with_max_entries(1, 0);

/// The nonce of a SYN.
#[inline(always)]
pub fn of(opening: &Opening) -> u32 {
    both(opening) as u32
}

/// Whether this nonce is that of the SYN of this connection.
#[inline(always)]
pub fn is_ours(opening: &Opening, nonce: u32) -> bool {
    let both = both(opening);
    nonce == both as u32 || nonce == (both >> 32) as u32
}

#[inline(always)]
fn both(opening: &Opening) -> u64 {
    let Opening { peer, local, .. } = *opening;
    smcpol_nonce(peer.hi, peer.lo, local.hi, local.lo, opening.word())
}

/// The nonces under the current key and, in the upper half, under the previous one, or again under the current one when
/// that no longer holds. A global function: the verifier follows it once.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn smcpol_nonce(peer_hi: u64, peer_lo: u64, local_hi: u64, local_lo: u64, word: u64) -> u64 {
    let Some(keys) = KEYS.get(0) else { return 0 };
    let peer = Addr { hi: peer_hi, lo: peer_lo };
    let local = Addr { hi: local_hi, lo: local_lo };
    let current = nonce(keys.current, peer, local, word);
    // SAFETY: takes no argument.
    let previous = if unsafe { bpf_ktime_get_boot_ns() } < keys.previous_until {
        nonce(keys.previous, peer, local, word)
    } else {
        current
    };
    u64::from(current) | u64::from(previous) << 32
}
