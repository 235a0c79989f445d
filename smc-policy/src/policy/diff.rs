//! What changes from one policy to the next.

use std::fmt;

use serde::Serialize;

use super::model::Policy;

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "change", rename_all = "lowercase")]
pub enum Change {
    /// A rule that did not exist.
    Added {
        /// Its name.
        rule: String,
    },
    /// A rule that is gone.
    Removed {
        /// Its name.
        rule: String,
    },
    /// A rule that says something else.
    Changed {
        /// Its name.
        rule: String,
        /// The keys that differ; "file" if it stands in another file.
        keys: Vec<&'static str>,
    },
    /// A rule that is tried earlier or later than before, relative to the others.
    Moved {
        /// Its name.
        rule: String,
    },
    /// Another default.
    Default {
        /// "outbound" or "inbound".
        direction: &'static str,
        /// Before.
        old: super::model::Action,
        /// Now.
        new: super::model::Action,
    },
}

/// One line.
impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Added { rule } => write!(f, "+ rule {rule}"),
            Self::Removed { rule } => write!(f, "- rule {rule}"),
            Self::Changed { rule, keys } => write!(f, "~ rule {rule}: {} changed", keys.join(", ")),
            Self::Moved { rule } => write!(f, "~ rule {rule}: moved"),
            Self::Default { direction, old, new } => write!(f, "~ default {direction}: {old} -> {new}"),
        }
    }
}

/// What changes from `old` to `new`: defaults, removed, added, changed and moved rules. Empty if both decide alike
/// by the same rules.
#[allow(clippy::todo, reason = "skeleton")]
pub fn diff(old: &Policy, new: &Policy) -> Vec<Change> {
    let _ = (old, new);
    todo!()
}
