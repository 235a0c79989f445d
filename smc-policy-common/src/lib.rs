//! Types and table look-ups shared by smc-policy's user space and its eBPF programs.
//!
//! Both sides compile the same [`table::decide`]: what the unit and property tests check in user space is, line for
//! line, what runs in the kernel.
#![no_std]

#[cfg(test)]
extern crate std;

pub mod canary;
pub mod counters;
pub mod echoed;
pub mod event;
pub mod learner;
pub mod quarantine;
pub mod query;
pub mod siphash;
pub mod table;
pub mod tcp_option;
