//! The maps of one instance. Names are at most 15 characters; user space pins each under its name.

use aya_ebpf::{
    bindings::BPF_F_MMAPABLE,
    helpers::bpf_ktime_get_ns,
    macros::map,
    maps::{Array, PerCpuArray},
};
use smc_policy_common::{
    counters::{InstanceCounters, RuleCounters},
    query::Addr,
    table::{Cells, search32, search128},
};

/// Generation in force; bit 0 selects the table. User space maps it into memory: an apply is one store.
#[map(name = "smcpol_gen")]
static GENERATION: Array<u64> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Cells of the even generations. The loader sets the number of entries.
#[map(name = "smcpol_tab0")]
static TABLE0: Array<u64> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Cells of the odd generations.
#[map(name = "smcpol_tab1")]
static TABLE1: Array<u64> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Counters by rule slot. The loader sets the number of entries.
#[map(name = "smcpol_hits")]
static HITS: PerCpuArray<RuleCounters> = PerCpuArray::with_max_entries(1, 0);

/// Counters of the instance.
#[map(name = "smcpol_stat")]
static STAT: PerCpuArray<InstanceCounters> = PerCpuArray::with_max_entries(1, 0);

/// The SYN that was counted last, by way: egress, ingress.
#[map(name = "smcpol_last")]
static LAST: PerCpuArray<CountedSyn> = PerCpuArray::with_max_entries(2, 0);

/// A SYN that was counted.
#[repr(C)]
struct CountedSyn {
    /// Sequence number and ports.
    key: u64,
    /// When, ns since boot.
    at: u64,
}

/// The even generations' cells.
pub struct Even;
/// The odd generations' cells.
pub struct Odd;

// Two types, not one with the map as a value: the kernel inlines an array look-up only where the instruction always
// meets the same map (`map_gen_lookup`, kernel/bpf/verifier.c: a poisoned `map_ptr_state` falls back to the call).
macro_rules! table {
    ($type:ident, $map:ident, $find32:ident, $find128:ident) => {
        impl Cells for $type {
            #[inline(always)]
            fn cell(&self, index: u32) -> Option<u64> {
                $map.get(index).copied()
            }

            #[inline(always)]
            fn find32(&self, descriptor: u32, key: u32) -> Option<u32> {
                found($find32(descriptor, key))
            }

            #[inline(always)]
            fn find128(&self, descriptor: u32, key: Addr) -> Option<u32> {
                found($find128(descriptor, key.hi, key.lo))
            }
        }

        /// A global function: the verifier follows it once for any arguments. Inlined, the two searches of a decision
        /// in both tables cost 200,000 instructions on Linux 7.3, as functions a few thousand.
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub extern "C" fn $find32(descriptor: u32, key: u32) -> u64 {
            encode(search32(&$type, descriptor, key))
        }

        /// As above, for IPv6.
        #[unsafe(no_mangle)]
        #[inline(never)]
        pub extern "C" fn $find128(descriptor: u32, hi: u64, lo: u64) -> u64 {
            encode(search128(&$type, descriptor, Addr { hi, lo }))
        }
    };
}

table!(Even, TABLE0, smcpol_even32, smcpol_even128);
table!(Odd, TABLE1, smcpol_odd32, smcpol_odd128);

const FOUND: u64 = 1 << 32;

#[inline(always)]
fn encode(value: Option<u32>) -> u64 {
    match value {
        Some(value) => FOUND | value as u64,
        None => 0,
    }
}

#[inline(always)]
fn found(encoded: u64) -> Option<u32> {
    if encoded & FOUND == 0 { None } else { Some(encoded as u32) }
}

/// The generation in force, read once a decision.
#[inline(always)]
pub fn generation() -> u64 {
    match GENERATION.get_ptr(0) {
        // SAFETY: the pointer is to the map's only element, 8 bytes and aligned; user space may store to it at any
        // time, so the load must be a single volatile one.
        Some(p) => unsafe { p.read_volatile() },
        None => 0,
    }
}

/// This CPU's counters of a rule.
#[inline(always)]
pub fn rule_counters(slot: u32) -> Option<*mut RuleCounters> {
    HITS.get_ptr_mut(slot)
}

/// This CPU's counters of the instance.
#[inline(always)]
pub fn instance_counters() -> Option<*mut InstanceCounters> {
    STAT.get_ptr_mut(0)
}

/// A packet passes stacked devices (a VLAN and the device below it) without a pause on one CPU. Sent again, it comes no
/// sooner than 200 ms later.
const ONE_PASSAGE: u64 = 10_000_000;

/// Whether the SYN with this key (sequence number and ports) was counted a moment ago at another device, going the same
/// way (0: out, 1: in). From now on it was. A SYN that interrupts another's passage may have that counted twice, never more.
#[inline(always)]
pub fn was_counted(way: u32, key: u64) -> bool {
    let Some(last) = LAST.get_ptr_mut(way) else { return false };
    // SAFETY: takes no argument.
    let now = unsafe { bpf_ktime_get_ns() };
    // SAFETY: this CPU's own element of a per-CPU array, checked for null.
    unsafe {
        let counted = (*last).key == key && now.wrapping_sub((*last).at) < ONE_PASSAGE;
        *last = CountedSyn { key, at: now };
        counted
    }
}

/// Adds one, if `really`, to a counter of the instance.
#[inline(always)]
pub fn count(counter: impl FnOnce(&mut InstanceCounters) -> &mut u64, really: bool) {
    if let Some(stat) = instance_counters() {
        // SAFETY: this CPU's own element of a per-CPU array, checked for null. A program of the same CPU that
        // interrupts this one may cost a count, never more.
        *counter(unsafe { &mut *stat }) += u64::from(really);
    }
}
