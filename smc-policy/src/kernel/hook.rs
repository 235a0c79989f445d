//! Which of the two hooks enforces the policy.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{
    capabilities::{OLDEST, Version},
    error::KernelError,
    hs_ctrl,
};
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
    let (hook, why_tc) = match choice {
        HookChoice::Tc => (Hook::Tc, None),
        HookChoice::HsCtrl => {
            hs_ctrl::selected()?;
            (Hook::HsCtrl, None)
        }
        HookChoice::Auto => match hs_ctrl::selected().and_then(|_| hs_ctrl::check_types()) {
            Ok(()) => (Hook::HsCtrl, None),
            Err(e) => (Hook::Tc, Some(why(&e))),
        },
    };
    if hook == Hook::Tc {
        check_version(&super::release())?;
    }
    Ok((hook, why_tc))
}

/// The first version with what the tc programs need.
const BPF_LOOP: Version = Version { major: 5, minor: 17 };

/// The verifier of an older kernel would say less.
fn check_version(release: &str) -> Result<(), KernelError> {
    match Version::parse(release) {
        Some(version) if version < BPF_LOOP => Err(KernelError::Missing {
            feature: format!("this kernel ({release}) lacks bpf_loop, which the tc programs need"),
            next: format!("it comes with Linux {BPF_LOOP}; {OLDEST} and later are supported"),
        }),
        _ => Ok(()),
    }
}

/// The reason alone: nobody is to do anything about it.
fn why(error: &KernelError) -> String {
    match error {
        KernelError::Missing { feature, .. } => feature.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_before_bpf_loop_are_told() {
        insta::assert_snapshot!(
            check_version("5.10.134-18.al8.x86_64").unwrap_err(),
            @"this kernel (5.10.134-18.al8.x86_64) lacks bpf_loop, which the tc programs need; it comes with Linux 5.17; 6.1 and later are supported"
        );
        for release in ["5.17.0", "6.1.0-57-amd64", "7.3.4", "unknown"] {
            assert!(check_version(release).is_ok(), "{release}");
        }
    }
}
