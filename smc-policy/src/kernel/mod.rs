//! Everything that talks to the kernel's BPF side.
//!
//! `sys` (system calls) < `object` (maps and programs), `hs_ctrl` (struct_ops), `tc` (devices), `guard` (quarantine) <
//! `instance` (pins, tables) <
//! `state`, `apply`, `detach`, `rollback` (what is in force and how it changes). `btf` and `offsets` are pure.

pub mod apply;
pub mod barrier;
pub mod btf;
pub mod capabilities;
pub mod capability;
pub mod cpus;
pub mod current;
pub mod detach;
pub mod enforce;
pub mod error;
pub mod events;
pub mod guard;
pub mod hook;
pub mod hs_ctrl;
pub mod instance;
pub mod lock;
pub mod namespace;
pub mod object;
pub mod offsets;
pub mod pinned;
pub mod query;
pub mod random;
pub mod record;
pub mod replaced;
pub mod ring;
pub mod rollback;
pub mod state;
pub mod store;
pub mod sys;
pub mod tc;
pub mod unconfirmed;
mod unsettled;

use std::fs;

/// The running kernel's release, as `uname -r` prints it.
pub fn release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease")
        .map_or_else(|_| "unknown".into(), |r| r.trim().to_owned())
}
