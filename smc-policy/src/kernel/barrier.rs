//! Waits until no program is still at work with what it read before.

use std::os::fd::AsFd;

use aya_obj::generated::bpf_map_type;

use super::{
    cpus,
    error::{Doing, KernelError},
    sys::{self, MapSpec},
};

/// Programs run under RCU: after this, every decision that began before has ended, and what was stored before is
/// visible to every one that begins.
///
/// membarrier is such a wait in a fraction of a millisecond, but does nothing on a machine with one CPU and is refused
/// where CPUs run without a tick (nohz_full). An update of an array of maps waits everywhere.
///
/// # Errors
/// [`KernelError::Io`].
pub fn wait_for_programs() -> Result<(), KernelError> {
    if cpus::online().is_ok_and(|n| n > 1) && sys::membarrier_global().is_ok() {
        return Ok(());
    }
    let inner = sys::map_create(&MapSpec {
        name: "smcpol_barrier",
        kind: bpf_map_type::BPF_MAP_TYPE_ARRAY as u32,
        key_size: 4,
        value_size: 8,
        max_entries: 1,
        flags: 0,
    })
    .and_then(|inner| {
        let outer = sys::map_create_outer("smcpol_barrier", inner.as_fd())?;
        sys::map_update_outer(outer.as_fd(), inner.as_fd())
    });
    inner.doing(|| "wait for running programs".into())
}
