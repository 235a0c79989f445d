//! Finds out what a peer makes of the SMC option, without SMC on this host.
//!
//! ```text
//! texts --target--> Target --conversation--> Observations --classify--> Finding
//!                              |   ^
//!                              v   |  segments, ICMP messages
//!                            run + wire      (the only modules that make system calls)
//! ```
//! A conversation sends SYNs that differ in their options only: ordinary ones, the SMC option, options that nobody can
//! know, and the guard's canary. A genuine SMC peer returns the SMC option and never one that it does not know; whoever
//! echoes returns what was sent. Where only the SMC option returns, the handshake is completed and a CLC proposal sent:
//! only SMC answers that with a CLC message. Every SYN-ACK gets a reset.

pub mod classify;
pub mod clc;
pub mod conversation;
pub mod icmp;
pub mod negotiation;
pub mod options;
pub mod policy_targets;
pub mod remedy;
pub mod run;
pub mod segment;
pub mod target;
mod wire;

pub use classify::{Class, Finding, classify};
pub use conversation::{Answer, Observations, Settings};
pub use remedy::Remedy;
pub use run::{Pace, ProbeError, Progress, Report, run};
pub use target::Target;
