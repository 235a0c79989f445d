//! Talks to the kernel's SMC: sockets (`SMC_DIAG`) and what their fallback codes mean.
//!
//! [`netlink`], [`parse`], [`join`] and [`reasons`] are pure and tested without privileges; [`socket`] is the only file
//! with system calls, [`diag`] puts them together.

pub mod diag;
pub mod join;
pub mod netlink;
pub mod parse;
pub mod reasons;
pub mod socket;
