//! Talks to the kernel's SMC: sockets (`SMC_DIAG`) and what their fallback codes mean.
//!
//! [`parse`], [`join`] and [`reasons`] are pure and tested without privileges; [`diag`] asks the kernel.

pub mod diag;
pub mod join;
pub mod parse;
pub mod reasons;
