//! The guard against peers that echo TCP options: an echoed SMC option looks like an SMC peer's acceptance.

pub mod probe;
pub mod quarantine;
pub mod recheck;
