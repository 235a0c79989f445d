//! Where the tool keeps and looks for things.

use std::{env, path::PathBuf};

/// The folders in use. Each has an environment variable, so that several instances (tests, containers) need not meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// Administrator's configuration (`SMC_POLICY_ETC`, else /etc/smc-policy).
    pub etc: PathBuf,
    /// Vendor's configuration (`SMC_POLICY_USR`, else /usr/lib/smc-policy).
    pub usr: PathBuf,
    /// What is in force, gone at reboot (`SMC_POLICY_RUN_DIR`, else /run/smc-policy).
    pub run: PathBuf,
    /// What lasts (`SMC_POLICY_STATE_DIR`, else /var/lib/smc-policy).
    pub state: PathBuf,
    /// Where bpffs is mounted (`SMC_POLICY_BPFFS`, else /sys/fs/bpf).
    pub bpffs: PathBuf,
}

impl Paths {
    /// The folders as the environment says.
    pub fn from_env() -> Self {
        let get =
            |name, default: &str| env::var_os(name).map_or_else(|| PathBuf::from(default), PathBuf::from);
        Self {
            etc: get("SMC_POLICY_ETC", "/etc/smc-policy"),
            usr: get("SMC_POLICY_USR", "/usr/lib/smc-policy"),
            run: get("SMC_POLICY_RUN_DIR", "/run/smc-policy"),
            state: get("SMC_POLICY_STATE_DIR", "/var/lib/smc-policy"),
            bpffs: get("SMC_POLICY_BPFFS", "/sys/fs/bpf"),
        }
    }

    /// The administrator's policy folder.
    pub fn etc_policies(&self) -> PathBuf {
        self.etc.join("policy.d")
    }

    /// How this host enforces its policy.
    pub fn etc_config(&self) -> PathBuf {
        self.etc.join("config.toml")
    }

    /// The vendor's policy folder.
    pub fn usr_policies(&self) -> PathBuf {
        self.usr.join("policy.d")
    }

    /// Where the maps and programs of all instances are pinned, a folder each.
    pub fn pins(&self) -> PathBuf {
        self.bpffs.join("smc-policy")
    }

    /// Where the links of tc programs to devices are pinned.
    pub fn links(&self) -> PathBuf {
        self.pins().join("links")
    }

    /// The lock that whoever changes something holds.
    pub fn lock(&self) -> PathBuf {
        self.run.join("lock")
    }
}
