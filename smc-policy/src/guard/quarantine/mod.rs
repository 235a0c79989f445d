//! The quarantine as files have it and people see it. Pure: `kernel::guard` reads and writes the kernel's maps.
//!
//! The kernel counts time since boot, which no reboot and no step of the clock disturbs; files have seconds since 1970.

mod clock;
mod file;
mod merge;
mod record;

pub use clock::Clock;
pub use file::{File, FileError, VERSION};
pub use merge::{Counts, merge, merged};
pub use record::{Record, Store, cause_name, cause_named, directions_of, in_words, key, longest, sort};
