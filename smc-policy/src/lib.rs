//! smc-policy: decides by a TOML policy which connections may negotiate SMC (RFC 7609).
//!
//! The modules follow one way of arrows: `cli` uses everything, `kernel` uses `policy`'s tables, `policy` makes no
//! system call.

pub mod cli;
pub mod guard;
pub mod kernel;
pub mod netlink;
pub mod paths;
pub mod policy;
pub mod smc;
