//! Which of the two hooks enforces the policy.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{error::KernelError, hs_ctrl};
use crate::policy::config::HookChoice;

/// A way to enforce a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hook {
    /// The kernel's smc_hs_ctrl asks before the SMC option is sent.
    HsCtrl,
    /// tc programs take it out of the packets.
    Tc,
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HsCtrl => "hs_ctrl",
            Self::Tc => "tc",
        })
    }
}

/// The hook that a choice comes to on this kernel now, and why it is tc where nobody asked for that.
///
/// # Errors
/// [`KernelError::Missing`] when hs_ctrl is asked for and not there.
pub fn choose(choice: HookChoice) -> Result<(Hook, Option<String>), KernelError> {
    match choice {
        HookChoice::Tc => Ok((Hook::Tc, None)),
        HookChoice::HsCtrl => hs_ctrl::selected().map(|_| (Hook::HsCtrl, None)),
        HookChoice::Auto => Ok(match hs_ctrl::selected().and_then(|_| hs_ctrl::check_types()) {
            Ok(()) => (Hook::HsCtrl, None),
            Err(e) => (Hook::Tc, Some(why(&e))),
        }),
    }
}

/// The reason alone: nobody is to do anything about it.
fn why(error: &KernelError) -> String {
    match error {
        KernelError::Missing { feature, .. } => feature.clone(),
        other => other.to_string(),
    }
}
