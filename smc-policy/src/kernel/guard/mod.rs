//! The echo guard's side in the kernel: the maps that all instances share, and the quarantine in them.

pub mod keep;
mod quarantine;
mod shared;

pub use crate::guard::quarantine::Store;
pub use quarantine::{Counted, Quarantine, now};
pub use shared::Shared;
