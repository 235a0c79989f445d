//! Puts a policy in force by one hook or the other, for one network namespace.

use std::fmt;
use std::fs::File;

use crate::world::run_in;
use crate::{Lab, Need};

/// The two ways of enforcing a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Hook {
    /// `smc_hs_ctrl`.
    HsCtrl,
    /// tc programs at every device with an address.
    Tc,
}

impl Hook {
    /// Those that this kernel has.
    #[must_use]
    pub fn all() -> Vec<Self> {
        if Need::HsCtrl.is_met() { vec![Self::Tc, Self::HsCtrl] } else { vec![Self::Tc] }
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HsCtrl => "hs_ctrl",
            Self::Tc => "tc",
        })
    }
}

/// A policy in force, until this goes.
#[derive(Debug)]
#[must_use]
pub struct Enforced<'a> {
    lab: &'a Lab,
    namespace: File,
}

impl<'a> Enforced<'a> {
    /// No policy yet; [`Self::change`] puts one in force, for the calling thread's network namespace unless `namespaces`
    /// in config.toml says another.
    ///
    /// # Panics
    /// Without /proc.
    pub fn nothing(lab: &'a Lab) -> Self {
        let namespace = File::open("/proc/thread-self/ns/net").expect("this namespace");
        Self { lab, namespace }
    }

    /// Puts the policy (without its first line, the version) in force by this hook, in the place of what is in force.
    /// `config`: text of config.toml, without the hook.
    ///
    /// # Panics
    /// When that is not possible.
    #[track_caller]
    pub fn change(&self, policy: &str, config: &str, hook: Hook) {
        self.lab.home.write("etc/config.toml", config);
        let path = self.lab.home.write("policy.toml", &format!("version = 1\n{policy}"));
        let hook = hook.to_string();
        let arguments = ["apply".as_ref(), "--hook".as_ref(), hook.as_ref(), path.as_os_str()];
        run_in(&self.namespace, || self.lab.home.run(arguments)).ok();
    }
}

impl Drop for Enforced<'_> {
    fn drop(&mut self) {
        run_in(&self.namespace, || self.lab.home.run(["detach"]));
    }
}
