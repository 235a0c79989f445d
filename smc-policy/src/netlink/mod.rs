//! Netlink: what the kernel's SMC, devices and tc are asked and told by.
//!
//! [`message`] is pure and tested without privileges; [`socket`] makes the system calls.

pub mod message;
pub mod socket;
