//! The echo guard's side in the kernel: the maps that all instances share, the quarantine in them, who marks SYNs, and who
//! learns.

pub mod keep;
pub mod learner;
pub mod mark;
mod quarantine;
mod shared;

pub use crate::guard::quarantine::Store;
pub use quarantine::{Counted, Quarantine, now};
pub use shared::Shared;
