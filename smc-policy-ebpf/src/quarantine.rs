//! The quarantine: looks peers up, and learns them. Its maps are shared by all instances and generations.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    helpers::bpf_ktime_get_boot_ns,
    macros::map,
    maps::{Array, HashMap, LruHashMap, PerCpuArray},
};
use smc_policy_common::{
    quarantine::{
        COMMANDED_ENTRIES, Entry, FLAG_COMMANDED, FLAG_LEARNED, FLAGS, Key, LEARNED_ENTRIES, Learned,
    },
    query::{Addr, Direction, Query},
};

/// What programs learned.
#[map(name = "smcpol_learned")]
static LEARNED: LruHashMap<Key, Entry> = LruHashMap::with_max_entries(LEARNED_ENTRIES, 0);

/// What was decided by command. Takes memory for what is in it only.
#[map(name = "smcpol_entries")]
static COMMANDED: HashMap<Key, Entry> = HashMap::with_max_entries(COMMANDED_ENTRIES, BPF_F_NO_PREALLOC);

/// What may be in the two: while they are empty, a decision does not look into them.
#[map(name = "smcpol_qflags")]
static FLAG: Array<u64> = Array::with_max_entries(FLAGS, 0);

/// How much was learned.
#[map(name = "smcpol_qcount")]
static COUNT: PerCpuArray<Learned> = PerCpuArray::with_max_entries(1, 0);

/// Whether the peer of a connection is in quarantine.
#[inline(always)]
pub fn holds(query: &Query) -> bool {
    let (learned, commanded) = (is_used(FLAG_LEARNED), is_used(FLAG_COMMANDED));
    if !learned && !commanded {
        return false;
    }
    let how = u64::from(query.port)
        | (query.direction as u64) << 16
        | u64::from(learned) << 17
        | u64::from(commanded) << 18;
    smcpol_holds(query.peer.hi, query.peer.lo, how) != 0
}

#[inline(always)]
fn is_used(element: u32) -> bool {
    match FLAG.get_ptr(element) {
        // SAFETY: an element of the map, 8 bytes and aligned; others may store to it at any time.
        Some(flag) => unsafe { flag.read_volatile() != 0 },
        None => false,
    }
}

/// The look-up as a global function, as `smcpol_judge` is one. `how`: the port, the direction in bit 16, then which of the
/// two maps may have something.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn smcpol_holds(peer_hi: u64, peer_lo: u64, how: u64) -> u64 {
    let direction = if how >> 16 & 1 == 0 { Direction::Outbound } else { Direction::Inbound };
    // SAFETY: takes no argument.
    let now = unsafe { bpf_ktime_get_boot_ns() };
    let mut key = Key::new(Addr { hi: peer_hi, lo: peer_lo }, how as u16);
    // Only whole addresses are in quarantine both ways: the service port of an inbound connection is ours.
    if matches!(direction, Direction::Inbound) {
        key.port = 0;
    }
    for _ in 0..2 {
        // SAFETY: the entry is read at once; an entry that is written meanwhile is the old or the new one, or for a
        // moment parts of both, which differ in times only.
        let found = unsafe {
            how >> 17 & 1 != 0 && LEARNED.get(&key).is_some_and(|entry| entry.holds(direction, now))
                || how >> 18 & 1 != 0 && COMMANDED.get(&key).is_some_and(|entry| entry.holds(direction, now))
        };
        if found {
            return 1;
        }
        if key.port == 0 {
            break;
        }
        key.port = 0;
    }
    0
}
