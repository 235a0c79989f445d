//! The echo guard's side in the kernel: the maps that all instances share, the quarantine in them, and who marks SYNs.

pub mod keep;
pub mod mark;
mod quarantine;
mod shared;

pub use crate::guard::quarantine::Store;
pub use quarantine::{Counted, Quarantine, now};
pub use shared::Shared;
