//! A test's own world: a network namespace with addresses on its loopback interface, and folders for the binary.

use std::fs;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use serde_json::Value;
use smc_policy::kernel::tc::{self, Side};
use smc_policy::kernel::{hs_ctrl, sys};

use crate::attaching::qdiscs;
use crate::connection::{Kind, Listener, Outcome, exchange};
use crate::tool::{Home, Run};
use crate::{Hook, Need, eventually, hook, netns, ueid};

/// IPv6 addresses of every lab besides ::1: fd00:5::1 to fd00:5::4 and fd00:6::1.
#[must_use]
pub fn v6_addresses() -> Vec<IpAddr> {
    (1..=4)
        .map(|last| Ipv6Addr::new(0xfd00, 5, 0, 0, 0, 0, 0, last))
        .chain([Ipv6Addr::new(0xfd00, 6, 0, 0, 0, 0, 0, 1)])
        .map(IpAddr::V6)
        .collect()
}

/// What a test of the binary works with.
#[derive(Debug, Default)]
pub struct Lab {
    /// The binary's folders.
    pub home: Home,
    /// What was registered before the test.
    others: Vec<String>,
}

impl Lab {
    /// Runs `body` in a new world. 127.0.0.0/8, ::1 and [`v6_addresses`] are there, and a UEID, so that SMC-D works
    /// between them.
    ///
    /// # Panics
    /// As `body` does, and when the world cannot be made: say `needs!(Root, SmcD, Netns)` first.
    pub fn run<T: Send>(body: impl FnOnce(&Self) -> T + Send) -> T {
        ueid::ensure().expect("a UEID");
        netns::in_new_namespace(&v6_addresses(), || {
            body(&Self { others: registrations(), ..Self::default() })
        })
    }

    /// Runs `body` in a new world on a kernel that cannot speak SMC, or not within one machine.
    ///
    /// # Panics
    /// As `body` does, and when the world cannot be made.
    pub fn run_without_smc_d<T: Send>(body: impl FnOnce(&Self) -> T + Send) -> T {
        netns::in_new_namespace(&[], || body(&Self::default()))
    }

    /// Applies a policy and expects that to succeed.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn apply(&self, policy: &str) -> Run {
        let path = self.home.write("policy.toml", policy);
        self.home.run(["apply".as_ref(), path.as_os_str()]).ok()
    }

    /// `status --json`, whatever its exit code says about drift.
    ///
    /// # Panics
    /// If it prints no JSON.
    #[track_caller]
    #[must_use]
    pub fn status(&self) -> Value {
        self.home.run(["status", "--json"]).json()
    }

    /// The generation in force.
    ///
    /// # Panics
    /// If `status` does not tell.
    #[track_caller]
    #[must_use]
    pub fn generation(&self) -> u64 {
        let status = self.status();
        status["generation"].as_u64().unwrap_or_else(|| panic!("no generation: {status:#}"))
    }

    /// How many connections the rule has decided.
    ///
    /// # Panics
    /// If `status` does not name the rule.
    #[track_caller]
    #[must_use]
    pub fn hits(&self, rule: &str) -> u64 {
        let status = self.status();
        let rules = status["rules"].as_array().into_iter().flatten();
        let found = rules.into_iter().find(|entry| entry["name"] == rule);
        found
            .and_then(|entry| entry["hits"].as_u64())
            .unwrap_or_else(|| panic!("no hits of {rule}: {status:#}"))
    }

    /// Where instances are pinned.
    #[must_use]
    pub fn pins(&self) -> PathBuf {
        self.home.bpffs().join("smc-policy")
    }

    /// The instances that are pinned, complete or not.
    #[must_use]
    pub fn instances(&self) -> Vec<String> {
        let not = |name: &String| !["links", "current", "new-current", "shared"].contains(&name.as_str());
        names(&self.pins()).into_iter().filter(not).collect()
    }

    /// What decides in this network namespace by the hook of this run, under the name that the kernel knows; empty:
    /// nothing.
    #[must_use]
    pub fn deciding(&self) -> String {
        match hook() {
            Hook::HsCtrl if Need::HsCtrl.is_met() => selected(),
            // Not while the module is not loaded.
            Hook::HsCtrl => String::new(),
            Hook::Tc => fs::read_link(self.pins().join("current"))
                .map_or_else(|_| String::new(), |id| format!("smcpol_{}", id.display())),
        }
    }

    /// The instances that are registered with the kernel since the test began.
    ///
    /// # Panics
    /// If the kernel does not tell.
    #[must_use]
    pub fn registrations(&self) -> Vec<String> {
        registrations().into_iter().filter(|id| !self.others.contains(id)).collect()
    }

    /// Nothing but what belongs to the policy in force is there: one instance, pinned, registered and selected, one
    /// record, and no half-written file.
    ///
    /// # Panics
    /// If there is less, or more.
    #[track_caller]
    pub fn assert_nothing_piles_up(&self) {
        let instances = self.instances();
        assert_eq!(self.deciding(), format!("smcpol_{}", instances.join(" and ")), "one instance");
        match hook() {
            Hook::HsCtrl => self.assert_registered(&instances),
            Hook::Tc => assert!(!names(&self.pins().join("links")).is_empty() || !Need::Tcx.is_met()),
        }
        self.assert_files(1);
    }

    /// The policy is enforced by this hook, and of the other one nothing is there: no registration and no choice of ours,
    /// or no program, pin, link or qdisc.
    ///
    /// # Panics
    /// If it is otherwise.
    #[track_caller]
    pub fn assert_enforced_by(&self, hook: Hook) {
        let instances = self.instances();
        assert_eq!(instances.len(), 1, "one instance: {instances:?}");
        let pins = names(&self.pins().join(&instances[0]));
        let programs = pins.iter().filter(|name| name.starts_with("out-") || name.starts_with("in-"));
        let (programs, attached) = (programs.count(), programs_attached());
        let is_selected = Need::HsCtrl.is_met() && selected() == format!("smcpol_{}", instances[0]);
        let folder = names(&self.pins());
        match hook {
            Hook::HsCtrl => {
                assert!(is_selected && pins.contains(&"registration".to_owned()), "{pins:?}");
                self.assert_registered(&instances);
                // The guard looks at answers at devices with this hook too.
                let judging: Vec<_> = attached.iter().filter(|at| !at.contains(" smcpol_ack_")).collect();
                assert_eq!((programs, judging), (0, vec![]), "{pins:?}");
                let others = ["current", "new-current"];
                assert!(!folder.iter().any(|name| others.contains(&name.as_str())), "{folder:?}");
                assert_eq!(qdiscs(), "");
            }
            Hook::Tc => {
                assert!(!is_selected && !pins.contains(&"registration".to_owned()), "{pins:?}");
                if Need::HsCtrl.is_met() {
                    self.assert_registered(&[]);
                }
                assert!(programs >= 2 && !attached.is_empty(), "{pins:?} {attached:?}");
                let answers: Vec<_> = attached.iter().filter(|at| at.contains(" smcpol_ack_")).collect();
                assert!(answers.is_empty(), "left of hs_ctrl: {answers:?}");
                assert_eq!(fs::read_link(self.pins().join("current")).unwrap(), Path::new(&instances[0]));
            }
        }
        let status = self.home.run(["status", "--json"]).expect_code(0).json();
        assert_eq!(status["hook"], hook.to_string(), "{status:#}");
        self.assert_files(1);
    }

    /// Nothing of the tool is loaded, registered, selected or recorded.
    ///
    /// # Panics
    /// If something is.
    #[track_caller]
    pub fn assert_nothing_in_force(&self) {
        assert_eq!((self.deciding(), self.instances()), (String::new(), vec![]));
        assert_eq!(names(&self.pins()), [""; 0], "pins");
        if Need::HsCtrl.is_met() {
            self.assert_registered(&[]);
        }
        self.assert_files(0);
        assert_eq!(programs_attached(), [""; 0]);
    }

    #[track_caller]
    fn assert_registered(&self, expected: &[String]) {
        // The kernel lets go of a registration's map some time after the last process.
        eventually(&format!("{expected:?} alone are registered"), || self.registrations() == expected);
    }

    #[track_caller]
    fn assert_files(&self, records: usize) {
        let (run, state) = (names(&self.home.path("run")), names(&self.home.path("state")));
        let found = run.iter().filter(|name| name.starts_with("gen-")).count();
        assert_eq!(found, records, "records: {run:?}");
        let half = run.iter().chain(&state).filter(|name| name.ends_with(".tmp") || *name == "next.json");
        assert_eq!(half.collect::<Vec<_>>(), [""; 0], "half-written: {run:?} {state:?}");
    }

    /// The record of generation `n`.
    #[must_use]
    pub fn record(&self, n: u64) -> PathBuf {
        self.home.path(&format!("run/gen-{n}"))
    }

    /// Changes what the pinned instances say of their programs: the next `apply` takes them for another version's.
    ///
    /// # Panics
    /// If nothing is applied.
    pub fn pretend_other_version(&self) {
        let instances = self.instances();
        assert!(!instances.is_empty(), "nothing is pinned");
        for id in instances {
            let path = self.pins().join(id).join("info");
            let map = sys::get_pinned(&path).expect("the pinned map");
            let mut info = sys::map_lookup(map.as_fd(), 0).expect("what the instance says");
            // Bytes 16 to 32 identify the object (smc-policy/src/kernel/instance.rs).
            info[16] ^= 0xff;
            sys::map_update(map.as_fd(), 0, &info).expect("changed");
        }
    }

    /// `explain --json` with these arguments.
    ///
    /// # Panics
    /// If it prints no JSON, or its exit code says something else than the JSON.
    #[track_caller]
    #[must_use]
    pub fn explain(&self, arguments: &[&str]) -> Value {
        let run = self.home.run(["explain", "--json"].iter().chain(arguments));
        let answer = run.json();
        let expected = i32::from(answer["action"] != "allow");
        assert_eq!(run.code(), Some(expected), "exit code: {run:#?}");
        answer
    }
}

/// The programs of the tool at devices of this network namespace.
///
/// # Panics
/// When the kernel does not tell.
#[must_use]
pub fn programs_attached() -> Vec<String> {
    let mut found = Vec::new();
    for device in tc::devices().expect("the devices") {
        for side in Side::ALL {
            let chain = tc::chain(&device, side).expect("the programs of a device");
            let ours = chain.iter().filter(|a| a.name.starts_with("smcpol_"));
            found.extend(ours.map(|a| format!("{} {side} {}", device.name, a.name)));
        }
    }
    found
}

fn registrations() -> Vec<String> {
    let all = hs_ctrl::registrations().expect("the kernel's registrations");
    all.into_iter().map(|(id, _)| id).collect()
}

/// The names in a folder, sorted; of one that is not there: none.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// What this network namespace has selected in `net.smc.hs_ctrl`.
///
/// # Panics
/// If the kernel has no such sysctl.
#[must_use]
pub fn selected() -> String {
    let text = fs::read_to_string("/proc/sys/net/smc/hs_ctrl").expect("net.smc.hs_ctrl");
    text.trim_end_matches(['\n', '\0']).to_owned()
}

/// A listener on `ip`, at a port that the kernel chooses.
///
/// # Panics
/// If `ip` is no address of this namespace.
#[must_use]
pub fn listen(kind: Kind, ip: &str) -> Listener {
    Listener::bind(kind, SocketAddr::new(ip.parse().expect("an address"), 0))
}

/// Connects and expects SMC on both ends.
///
/// # Panics
/// If it fails or is something else.
#[track_caller]
pub fn assert_smc(kind: Kind, local: Option<&str>, listener: &Listener) {
    let outcome = outcome(kind, local, listener);
    assert!(is_smc(&outcome), "expected SMC: {kind:?} {outcome}");
}

/// Whether it is SMC, or where there is no device for SMC within one machine, whether both ends have seen the option.
#[must_use]
pub fn is_smc(outcome: &Outcome) -> bool {
    if Need::SmcD.is_met() { outcome.is_smc() } else { outcome.is_negotiated() }
}

/// Connects and expects what a deny looks like: both ends on TCP because there was no SMC option.
///
/// # Panics
/// If it fails or is something else.
#[track_caller]
pub fn assert_denied(kind: Kind, local: Option<&str>, listener: &Listener) {
    let outcome = outcome(kind, local, listener);
    assert!(outcome.is_denied(), "expected a fallback: {kind:?} {outcome}");
}

#[track_caller]
fn outcome(kind: Kind, local: Option<&str>, listener: &Listener) -> Outcome {
    let local = local.map(|ip| ip.parse().expect("an address"));
    exchange(kind, local, listener)
        .unwrap_or_else(|failure| panic!("{kind:?} to {}: {failure}", listener.address()))
}
