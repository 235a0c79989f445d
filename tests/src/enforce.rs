//! Puts a policy in force by one hook or the other, for the network namespace of the calling thread.

use std::fmt;

use smc_policy::policy::Settings;

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
}

/// Puts the policy in force by this hook, with these settings.
///
/// # Panics
/// When that is not possible.
#[track_caller]
pub fn enforce<'a>(lab: &'a Lab, policy: &str, settings: Settings, hook: Hook) -> Enforced<'a> {
    configure(lab, &settings);
    let path = lab.home.write("policy.toml", &format!("version = 1\n{policy}"));
    let hook = hook.to_string();
    lab.home.run(["apply".as_ref(), "--hook".as_ref(), hook.as_ref(), path.as_os_str()]).ok();
    Enforced { lab }
}

/// Writes config.toml.
fn configure(lab: &Lab, settings: &Settings) {
    let Settings { observe, plain_retransmissions, forwarded, magics } = settings;
    let (mode, retransmit) =
        (if *observe { "observe" } else { "enforce" }, if *plain_retransmissions { "plain" } else { "keep" });
    let mut text = format!("mode = \"{mode}\"\nretransmit = \"{retransmit}\"\nforwarded = {forwarded}\n");
    for magic in magics.iter().flatten() {
        text += &format!("[[magic]]\nsyn = \"{:08x}\"\nsyn_ack = \"{:08x}\"\n", magic.syn, magic.syn_ack);
    }
    lab.home.write("etc/config.toml", &text);
}

impl Drop for Enforced<'_> {
    fn drop(&mut self) {
        self.lab.home.run(["detach"]);
    }
}
