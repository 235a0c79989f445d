//! Puts a policy in force by one hook or the other, for the network namespace of the calling thread.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use serde_json::Value;
use smc_policy::kernel::barrier::wait_for_programs;
use smc_policy::kernel::object::{Prepared, Sizes, TcProgram};
use smc_policy::kernel::sys as kernel;
use smc_policy::policy::{Settings, Slots, SourceFile, compile, load};

use crate::sys::{self, Way};
use crate::tool::BPFFS;
use crate::{Lab, Need, command};

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
    attached: Vec<Attached>,
}

#[derive(Debug)]
enum Attached {
    /// Lasts as long as this descriptor.
    Tcx(#[expect(dead_code, reason = "held for its end")] OwnedFd),
    /// The qdisc of the device of this name.
    Clsact(String),
}

/// Puts the policy in force by this hook, with these settings, at the devices that are there.
///
/// # Panics
/// When that is not possible.
#[track_caller]
pub fn enforce<'a>(lab: &'a Lab, policy: &str, settings: Settings, hook: Hook) -> Enforced<'a> {
    let policy = format!("version = 1\n{policy}");
    if hook == Hook::HsCtrl {
        assert_eq!(settings, Settings::default(), "no way to say it yet");
        lab.apply(&policy);
        return Enforced { lab, attached: vec![] };
    }
    let programs = loaded(&policy, &settings);
    let mut attached = Vec::new();
    for device in devices() {
        let (out, inward) = if device.has_ethernet_header {
            (TcProgram::EgressEthernet, TcProgram::IngressEthernet)
        } else {
            (TcProgram::EgressIp, TcProgram::IngressIp)
        };
        let program =
            |wanted| &programs.iter().find(|(program, _)| *program == wanted).expect("all of them").1;
        let both = [(program(out), Way::Out), (program(inward), Way::In)];
        if Need::Tcx.is_met() {
            for (program, way) in both {
                attached.push(Attached::Tcx(
                    sys::attach_tcx(program, device.index, way).expect("attached by a link"),
                ));
            }
        } else {
            attach_by_clsact(&device.name, both);
            attached.push(Attached::Clsact(device.name));
        }
    }
    assert!(!attached.is_empty(), "no device with an address");
    Enforced { lab, attached }
}

impl Drop for Enforced<'_> {
    fn drop(&mut self) {
        if self.attached.is_empty() {
            self.lab.home.run(["detach"]);
        }
        for attached in &self.attached {
            if let Attached::Clsact(device) = attached {
                // The device may be gone.
                let _ = command::run("tc", &["qdisc", "delete", "dev", device, "clsact"]);
            }
        }
    }
}

fn loaded(policy: &str, settings: &Settings) -> [(TcProgram, OwnedFd); 4] {
    let file = SourceFile { path: PathBuf::from("policy.toml"), text: policy.to_owned() };
    let policy = load(std::slice::from_ref(&file)).unwrap_or_else(|errors| panic!("{errors:?}")).policy;
    let tables = compile(&policy, &Slots::in_order(&policy), settings).expect("tables");
    let prepared = Prepared::new(Sizes { cells: 4096, slots: 16 }, None).expect("maps");
    let programs =
        TcProgram::ALL.map(|program| (program, prepared.load_tc(program).expect("the verifier accepts it")));
    let map = |name| kernel::SharedCells::map(prepared.map(name).expect("a map")).expect("its memory");
    assert!(map("smcpol_tab1").fill(&tables.cells), "the table is large enough");
    wait_for_programs().expect("a barrier");
    map("smcpol_gen").store(0, 1);
    programs
}

/// A device of the calling thread's network namespace.
struct Device {
    index: u32,
    name: String,
    has_ethernet_header: bool,
}

/// Those with an address.
fn devices() -> Vec<Device> {
    let text = command::output("ip", &["-json", "address"]);
    let all: Value = serde_json::from_str(&text).expect("JSON from ip");
    let all = all.as_array().into_iter().flatten();
    let with_address =
        all.filter(|device| device["addr_info"].as_array().is_some_and(|list| !list.is_empty()));
    with_address
        .map(|device| Device {
            index: device["ifindex"].as_u64().and_then(|index| index.try_into().ok()).expect("an index"),
            name: device["ifname"].as_str().expect("a name").to_owned(),
            has_ethernet_header: matches!(device["link_type"].as_str(), Some("ether" | "loopback")),
        })
        .collect()
}

/// For kernels before 6.6: the programs' pins are for the tc command to find them.
fn attach_by_clsact(device: &str, programs: [(&OwnedFd, Way); 2]) {
    command::output("tc", &["qdisc", "add", "dev", device, "clsact"]);
    for (program, way) in programs {
        let pin = Path::new(BPFFS).join(format!("smc-policy-test-{}", std::process::id()));
        kernel::pin(program.as_fd(), &pin).expect("pinned");
        let way = if way == Way::In { "ingress" } else { "egress" };
        let pin_text = pin.to_str().expect("a path in UTF-8");
        command::output(
            "tc",
            &["filter", "add", "dev", device, way, "bpf", "direct-action", "object-pinned", pin_text],
        );
        std::fs::remove_file(&pin).expect("unpinned");
    }
}
