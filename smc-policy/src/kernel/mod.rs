//! Everything that talks to the kernel's BPF side.
//!
//! `sys` (system calls) < `object` (maps and programs), `hs_ctrl` (struct_ops) < `instance` (pins, tables) <
//! `apply` (what is in force and how it changes).

pub mod btf;
pub mod cpus;
pub mod error;
pub mod object;
pub mod offsets;
pub mod sys;
pub mod hs_ctrl;
pub mod instance;
pub mod query;
pub mod barrier;

use std::fs;

/// The running kernel's release, as `uname -r` prints it.
pub fn release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").map_or_else(|_| "unknown".into(), |r| r.trim().to_owned())
}
