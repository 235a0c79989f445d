//! Policy core: pure, no system calls and no files.
//!
//! ```text
//! texts --load--> Policy --compile--> Tables          (what the kernel searches)
//!                   |------decide                     (the same meaning in plain code; tests hold both together)
//!                   |------explain, run_tests, diff
//! ```

pub mod address;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod arbitrary;
pub mod compile;
pub mod config;
pub mod decide;
pub mod diagnostic;
pub mod diff;
pub mod explain;
pub mod folder;
mod lint;
mod list;
pub mod load;
pub mod model;
pub mod moment;
pub mod parse;
pub mod ranges;
mod reader;
pub mod settings;
mod source;
pub mod test_blocks;

pub use compile::{CompileError, Slots, Tables, compile};
pub use config::Config;
pub use decide::{By, Decision, decide};
pub use diagnostic::{Code, Diagnostic, Record, Severity, SourceFile, SourceKind, render};
pub use diff::{Change, diff};
pub use explain::{Explanation, Question, explain};
pub use load::{Loaded, load};
pub use model::{Action, Defaults, Directions, Place, Policy, Rule, Test};
pub use moment::Moment;
pub use settings::Settings;
pub use test_blocks::run_tests;
