//! The maps of one instance. Names are at most 15 characters; user space pins each under its name.

use aya_ebpf::{
    bindings::BPF_F_MMAPABLE,
    macros::map,
    maps::{Array, PerCpuArray},
};
use smc_policy_common::{
    counters::{InstanceCounters, RuleCounters},
    table::Cells,
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

/// The even generations' cells.
pub struct Even;
/// The odd generations' cells.
pub struct Odd;

// Two types, not one with the map as a value: the kernel inlines an array look-up only where the instruction always
// meets the same map (`map_gen_lookup`, kernel/bpf/verifier.c: a poisoned `map_ptr_state` falls back to the call).
impl Cells for Even {
    #[inline(always)]
    fn cell(&self, index: u32) -> Option<u64> {
        TABLE0.get(index).copied()
    }
}

impl Cells for Odd {
    #[inline(always)]
    fn cell(&self, index: u32) -> Option<u64> {
        TABLE1.get(index).copied()
    }
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
