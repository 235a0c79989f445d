//! What the running kernel has of all that this tool can make use of, and what follows from that.
//!
//! `probes` asks, changing nothing; everything here is pure: from the answers to the table that a person reads.

use serde::Serialize;

use super::hook::Hook;
use crate::paths::Paths;

mod bpf_loop;
mod modules;
mod probes;
mod version;

pub use modules::Module;
pub use version::{OLDEST, Version};

/// Is it there?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Has {
    /// Yes.
    Yes,
    /// No.
    No,
    /// It could not be found out.
    Unknown,
}

impl Has {
    /// Both.
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::No, _) | (_, Self::No) => Self::No,
            (Self::Yes, Self::Yes) => Self::Yes,
            _ => Self::Unknown,
        }
    }

    /// At least one.
    fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Yes, _) | (_, Self::Yes) => Self::Yes,
            (Self::No, Self::No) => Self::No,
            _ => Self::Unknown,
        }
    }
}

impl std::fmt::Display for Has {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::Unknown => "unknown",
        })
    }
}

/// What one question was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Is it there?
    pub has: Has,
    /// What was seen.
    pub detail: String,
}

impl Answer {
    /// It is there.
    pub fn yes(detail: impl Into<String>) -> Self {
        Self { has: Has::Yes, detail: detail.into() }
    }

    /// It is not.
    pub fn no(detail: impl Into<String>) -> Self {
        Self { has: Has::No, detail: detail.into() }
    }

    /// It could not be found out, and why.
    pub fn unknown(detail: impl Into<String>) -> Self {
        Self { has: Has::Unknown, detail: detail.into() }
    }
}

/// All answers.
#[derive(Clone, Debug)]
pub struct Facts {
    /// As `uname -r` prints it.
    pub release: String,
    /// SMC itself.
    pub smc: Module,
    /// The list of SMC's sockets.
    pub smc_diag: Module,
    /// The sysctl that selects a policy.
    pub hs_ctrl: Answer,
    /// tc programs attached by links.
    pub tcx: Answer,
    /// tc programs attached as filters: both modules that it takes.
    pub clsact: Answer,
    /// The helper of that name.
    pub bpf_loop: Answer,
    /// The kernel's type information.
    pub btf: Answer,
    /// The type information of SMC.
    pub btf_smc: Answer,
    /// Programs at the end of a function of the module smc.
    pub fexit_modules: Answer,
    /// Programs that change what `update_socket_protocol` returns.
    pub fmod_ret: Answer,
    /// SMC as a protocol of AF_INET.
    pub ipproto_smc: Answer,
    /// Kernel lockdown: is a mode active that refuses something?
    pub lockdown: Answer,
    /// The unified control group hierarchy.
    pub cgroup2: Answer,
    /// bpffs where this tool wants it.
    pub bpffs: Answer,
}

impl Facts {
    /// Asks the running kernel. What needs a privilege that this process lacks is unknown.
    pub fn probe(paths: &Paths) -> Self {
        probes::facts(paths)
    }
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Capability {
    /// What it is called, the same in every version.
    pub name: &'static str,
    /// Is it there?
    pub has: Has,
    /// What was seen.
    pub detail: String,
    /// What that means for this tool, with the next step where there is one.
    pub meaning: &'static str,
}

/// Whether a hook can be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Usable {
    /// The hook.
    pub name: Hook,
    /// Can it be used now?
    pub works: Has,
    /// Names of what is missing, or if nothing is, of what is not known; with "or": one of them would do.
    pub lacks: Vec<&'static str>,
}

/// Which hooks can be used now.
pub fn hooks(facts: &Facts) -> [Usable; 2] {
    let hook = |name, needs: &[(&'static str, Has)]| {
        let works = needs.iter().fold(Has::Yes, |all, (_, has)| all.and(*has));
        let lacks = needs.iter().filter(|(_, has)| works != Has::Yes && *has == works).map(|(name, _)| *name);
        Usable { name, works, lacks: lacks.collect() }
    };
    let attaching = ("tcx or clsact", facts.tcx.has.or(facts.clsact.has));
    let common = [("btf", facts.btf.has), ("bpffs", facts.bpffs.has)];
    [
        hook(
            Hook::HsCtrl,
            &[("hs_ctrl", facts.hs_ctrl.has), ("btf_smc", facts.btf_smc.has), common[0], common[1]],
        ),
        hook(Hook::Tc, &[attaching, ("bpf_loop", facts.bpf_loop.has), common[0], common[1]]),
    ]
}

/// The table.
pub fn table(facts: &Facts) -> Vec<Capability> {
    let row = |name, answer: &Answer, [yes, no, unknown]: [&'static str; 3]| Capability {
        name,
        has: answer.has,
        detail: answer.detail.clone(),
        meaning: match answer.has {
            Has::Yes => yes,
            Has::No => no,
            Has::Unknown => unknown,
        },
    };
    let no_privilege = "run it as root to know";
    vec![
        kernel(&facts.release),
        smc(&facts.smc),
        row(
            "hs_ctrl",
            &facts.hs_ctrl,
            [
                "policies are enforced before a packet is built, at no cost for packets",
                if matches!(facts.smc, Module::Loaded | Module::BuiltIn) {
                    "only the tc hook can be used; hs_ctrl takes Linux 6.19 with CONFIG_SMC_HS_CTRL_BPF"
                } else {
                    "only the tc hook can be used; hs_ctrl takes Linux 6.19 with CONFIG_SMC_HS_CTRL_BPF, and smc loaded"
                },
                no_privilege,
            ],
        ),
        row(
            "tcx",
            &facts.tcx,
            [
                "tc programs are attached by links, ahead of others",
                "the tc hook takes a clsact qdisc instead; tcx takes Linux 6.6",
                no_privilege,
            ],
        ),
        row(
            "clsact",
            &facts.clsact,
            [
                "tc programs can be attached where there is no tcx; the kernel loads these modules itself",
                "without tcx the tc hook cannot be used; it takes CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF",
                "needed only where there is no tcx",
            ],
        ),
        row(
            "bpf_loop",
            &facts.bpf_loop,
            [
                "the tc programs can be loaded",
                "the tc hook cannot be used: its programs need this helper, of Linux 5.17",
                no_privilege,
            ],
        ),
        row(
            "btf",
            &facts.btf,
            [
                "fields of sockets are found by it",
                "no policy can be enforced: fields of sockets cannot be found; rebuild the kernel with \
                 CONFIG_DEBUG_INFO_BTF=y",
                no_privilege,
            ],
        ),
        row(
            "btf_smc",
            &facts.btf_smc,
            [
                "hs_ctrl can be registered, where the kernel has it",
                "hs_ctrl cannot be used; rebuild the kernel with CONFIG_DEBUG_INFO_BTF=y and \
                 CONFIG_DEBUG_INFO_BTF_MODULES=y",
                "it can be seen when smc is loaded",
            ],
        ),
        row(
            "bpffs",
            &facts.bpffs,
            [
                "what is in force is pinned there",
                "nothing can be put in force: `mount -t bpf bpf /sys/fs/bpf`, or name another place in SMC_POLICY_BPFFS",
                no_privilege,
            ],
        ),
        row(
            "lockdown",
            &facts.lockdown,
            [
                "the kernel may refuse BPF programs; what was tried for the other lines works nevertheless",
                "nothing is refused on its account",
                "`mount -t securityfs securityfs /sys/kernel/security` to know",
            ],
        ),
        smc_diag(&facts.smc_diag),
        row(
            "ipproto_smc",
            &facts.ipproto_smc,
            [
                "programs can ask for SMC by AF_SMC and by IPPROTO_SMC; a policy holds for both",
                "programs can ask for SMC by AF_SMC only (smc_run), where smc is loaded; IPPROTO_SMC takes Linux 6.11",
                "a policy holds for sockets of either kind",
            ],
        ),
        row(
            "fexit_modules",
            &facts.fexit_modules,
            [
                "the echo guard learns from failed negotiations",
                "the echo guard does not learn from failed negotiations; its canary works all the same",
                "the echo guard tries it at the first apply when smc is loaded",
            ],
        ),
        row(
            "fmod_ret",
            &facts.fmod_ret,
            [
                "programs could be given SMC without being changed; this version does not do so yet",
                "programs get SMC by smc_run or by being changed; update_socket_protocol takes Linux 6.6 with CONFIG_MPTCP",
                "it can be tried as root; this version does not use it yet",
            ],
        ),
        row(
            "cgroup2",
            &facts.cgroup2,
            [
                "connections of groups of processes can be watched; this version does not do so yet",
                "connections of groups of processes cannot be watched; this version does not do so anyway",
                "this version does not use it yet",
            ],
        ),
    ]
}

fn kernel(release: &str) -> Capability {
    let version = Version::parse(release);
    let (has, meaning) = match version {
        Some(version) if version >= OLDEST => (Has::Yes, "Linux 6.1 and later are supported"),
        Some(_) => (
            Has::No,
            "older than Linux 6.1: not supported, nothing was tested there; use 6.1 or a later kernel",
        ),
        None => {
            (Has::Unknown, "Linux 6.1 and later are supported; this name does not say which version it is")
        }
    };
    Capability { name: "kernel", has, detail: release.to_owned(), meaning }
}

fn smc(module: &Module) -> Capability {
    let (has, meaning) = match module {
        Module::Loaded | Module::BuiltIn => (Has::Yes, "programs can negotiate SMC, a policy says with whom"),
        Module::File(_) => (
            Has::No,
            "nothing negotiates SMC before somebody loads it: `modprobe smc`, and for every boot a line `smc` in \
             /etc/modules-load.d/smc.conf; smc-policy never does",
        ),
        Module::Absent => {
            (Has::No, "this host's programs cannot negotiate SMC: it takes a kernel with CONFIG_SMC")
        }
        Module::Unknown(_) => (Has::Unknown, "nothing negotiates SMC before it is loaded: `modprobe smc`"),
    };
    Capability { name: "smc", has, detail: module.to_string(), meaning }
}

fn smc_diag(module: &Module) -> Capability {
    let (has, meaning) = match module {
        Module::Loaded | Module::BuiltIn => {
            (Has::Yes, "`apply` names the live connections that a policy denies")
        }
        Module::File(_) => (
            Has::No,
            "live connections are not listed unless the kernel loads it when asked: `modprobe smc_diag`",
        ),
        Module::Absent => {
            (Has::No, "live connections cannot be listed; policies work: it takes CONFIG_SMC_DIAG")
        }
        Module::Unknown(_) => (Has::Unknown, "live connections are listed by it; policies work without"),
    };
    Capability { name: "smc_diag", has, detail: module.to_string(), meaning }
}
