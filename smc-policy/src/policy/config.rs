//! How this host enforces its policy: what `/etc/smc-policy/config.toml` says.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use smc_policy_common::table::EXTRA_MAGICS;

use super::settings::{Magic, Settings};

mod cgroup;
mod parse;
mod pattern;

pub(super) use parse::{FILE_KEYS, only_keys_of};
pub use parse::{Parsed, parse};

/// The hook asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HookChoice {
    /// hs_ctrl where the kernel has it, else tc.
    #[default]
    Auto,
    /// The kernel's `smc_hs_ctrl` (Linux 6.19 and later).
    HsCtrl,
    /// tc programs at egress and ingress.
    Tc,
}

impl HookChoice {
    /// The word for it in config.toml.
    pub fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::HsCtrl => "hs_ctrl",
            Self::Tc => "tc",
        }
    }
}

/// How peers that echo TCP options are met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Guard {
    /// SYNs are marked; who returns the mark goes without SMC, from the first connection on. And what [`Self::Learn`]
    /// does.
    #[default]
    Canary,
    /// Who fails to negotiate goes without SMC, from the second connection on.
    Learn,
    /// Neither.
    Off,
}

/// What becomes of an answer that returns the mark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnEcho {
    /// It loses the SMC option: this connection is plain TCP already.
    #[default]
    Blank,
    /// It is left as it is; the peer enters the quarantine, so that the next connection is plain TCP.
    LearnOnly,
}

/// Where the policy is enforced.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Namespaces {
    /// The network namespace that the tool runs in.
    #[default]
    Host,
    /// Every network namespace.
    All,
    /// Those mounted in /run/netns under these names; `host` is the one that the tool runs in.
    Named(Vec<String>),
}

/// Which devices get tc programs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interfaces {
    /// Patterns of names; without any: every device with an IP address.
    pub include: Vec<String>,
    /// Patterns of names that get none.
    pub exclude: Vec<String>,
}

impl Interfaces {
    /// Is the device of this name to have programs?
    pub fn wants(&self, name: &str, has_address: bool) -> bool {
        let any = |patterns: &[String]| patterns.iter().any(|p| pattern::matches(p, name));
        let included = if self.include.is_empty() { has_address } else { any(&self.include) };
        included && !any(&self.exclude)
    }
}

/// The whole file. Its default is what holds without one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// The hook.
    pub hook: HookChoice,
    /// Decide and count, and let every connection negotiate.
    pub observe: bool,
    /// Devices (tc only).
    pub interfaces: Interfaces,
    /// Network namespaces.
    pub namespaces: Namespaces,
    /// A SYN that is sent again goes without the SMC option.
    pub plain_retransmissions: bool,
    /// Judge SYNs that only pass through this host too, as outbound (tc only).
    pub forwarded: bool,
    /// Further magics of the SMC option (tc only); at most [`EXTRA_MAGICS`].
    pub magics: Vec<Magic>,
    /// The echo guard.
    pub guard: Guard,
    /// What the guard does with an echo.
    pub on_echo: OnEcho,
    /// Cgroups whose processes' SYNs are marked; none: all processes'.
    pub cgroups: Vec<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            hook: HookChoice::default(),
            observe: false,
            interfaces: Interfaces::default(),
            namespaces: Namespaces::default(),
            plain_retransmissions: true,
            forwarded: false,
            magics: Vec::new(),
            guard: Guard::default(),
            on_echo: OnEcho::default(),
            cgroups: Vec::new(),
        }
    }
}

impl Config {
    /// What of it travels in the tables.
    pub fn settings(&self) -> Settings {
        let mut magics = [None; EXTRA_MAGICS];
        for (place, magic) in magics.iter_mut().zip(&self.magics) {
            *place = Some(*magic);
        }
        Settings {
            observe: self.observe,
            plain_retransmissions: self.plain_retransmissions,
            forwarded: self.forwarded,
            canary: self.guard == Guard::Canary,
            learn_only: self.on_echo == OnEcho::LearnOnly,
            magics,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_chosen_by_address_and_patterns() {
        let of = |include: &[&str], exclude: &[&str]| Interfaces {
            include: include.iter().map(|p| (*p).to_owned()).collect(),
            exclude: exclude.iter().map(|p| (*p).to_owned()).collect(),
        };
        let by_default = of(&[], &["docker*"]);
        assert!(by_default.wants("eth0", true) && !by_default.wants("eth1", false));
        assert!(!by_default.wants("docker0", true));
        let named = of(&["eth?", "lo"], &["eth9"]);
        assert!(named.wants("eth0", false) && named.wants("lo", true));
        assert!(!named.wants("eth10", true) && !named.wants("eth9", true) && !named.wants("wlan0", true));
        assert!(of(&["*.100"], &[]).wants("bond0.100", true));
    }
}
