//! The echo guard's side in the kernel: the maps that all instances share, and the quarantine in them.

mod quarantine;
mod shared;

pub use quarantine::{Counted, Quarantine, Store, now};
pub use shared::Shared;
