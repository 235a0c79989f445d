//! Devices and tc programs at them, one way of attaching at a time.

use std::fs;
use std::net::UdpSocket;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use aya_obj::generated::bpf_attach_type;
use smc_policy::kernel::error::KernelError;
use smc_policy::kernel::sys as kernel;
use smc_policy::kernel::tc::{self, Attached, Device, Done, Side, Way};

use crate::{Counting, Home, command, netns, sys};

/// Ours are the programs called "smcpol_" and something.
#[must_use]
pub fn is_ours(_: u32, name: &str) -> bool {
    name.starts_with("smcpol_")
}

/// Every way that this kernel has: a kernel with tcx has both.
#[must_use]
pub fn ways() -> Vec<Way> {
    match tc::way() {
        Way::Tcx => vec![Way::Tcx, Way::Clsact],
        Way::Clsact => vec![Way::Clsact],
    }
}

/// A network namespace with a folder for links, and one way of attaching.
#[derive(Debug)]
pub struct World {
    /// How it attaches.
    pub way: Way,
    /// Its folders.
    pub home: Home,
    /// Its inode.
    pub namespace: u64,
}

impl World {
    /// Runs `body` in a new world for each way.
    ///
    /// # Panics
    /// As `body` does: say `needs!(Root, Netns, Bpffs)` first.
    pub fn each(body: impl Fn(&Self) + Sync) {
        for way in ways() {
            println!("{way:?}");
            netns::in_new_namespace(&[], || body(&Self::here(way)));
        }
    }

    /// In the network namespace of the calling thread.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn here(way: Way) -> Self {
        let namespace = fs::metadata("/proc/thread-self/ns/net").unwrap().ino();
        Self { way, home: Home::new(), namespace }
    }

    /// The folder of links.
    #[must_use]
    pub fn links(&self) -> PathBuf {
        self.home.bpffs().join("links")
    }

    /// The names in it, sorted.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn pins(&self) -> Vec<String> {
        let entries = fs::read_dir(self.links()).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Attaches it and tells what was done.
    ///
    /// # Panics
    /// When that fails.
    #[track_caller]
    pub fn attach(&self, device: &Device, side: Side, program: &impl AsFd) -> Done {
        self.try_attach(device, side, program).expect("attached")
    }

    /// As [`Self::attach`], where that may fail.
    ///
    /// # Errors
    /// Why not.
    pub fn try_attach(&self, device: &Device, side: Side, program: &impl AsFd) -> Result<Done, KernelError> {
        let program = program.as_fd();
        tc::attach_by(self.way, &self.links(), self.namespace, device, side, program, &is_ours)
    }

    /// Detaches what is ours and tells whether there was something.
    ///
    /// # Panics
    /// When that fails.
    #[track_caller]
    pub fn detach(&self, device: &Device, side: Side) -> bool {
        tc::detach(&self.links(), self.namespace, device, side, &is_ours).expect("detached")
    }

    /// Attaches a foreign program behind all that are there, or ahead of them, for as long as what is returned is held or
    /// the device's qdisc, which must be there for filters, is.
    ///
    /// # Panics
    /// When that fails.
    #[track_caller]
    pub fn add_foreign(
        &self,
        device: &Device,
        side: Side,
        program: &Counting,
        ahead: bool,
    ) -> Option<OwnedFd> {
        let link = match (self.way, side) {
            (Way::Tcx, Side::Egress) if ahead => {
                kernel::tcx_link_create(device.index, bpf_attach_type::BPF_TCX_EGRESS, program.as_fd())
            }
            (Way::Tcx, Side::Ingress) if ahead => {
                kernel::tcx_link_create(device.index, bpf_attach_type::BPF_TCX_INGRESS, program.as_fd())
            }
            (Way::Tcx, Side::Egress) => sys::attach_tcx(program, device.index, sys::Way::Out),
            (Way::Tcx, Side::Ingress) => sys::attach_tcx(program, device.index, sys::Way::In),
            (Way::Clsact, _) => {
                let selector = if ahead { "protocol all pref 1" } else { "protocol all pref 7" };
                self.add_filter(device, side, program, selector);
                return None;
            }
        };
        Some(link.expect("a link"))
    }

    /// Attaches a program with the command tc; the device must have a qdisc for it.
    ///
    /// # Panics
    /// When that fails.
    #[track_caller]
    pub fn add_filter(&self, device: &Device, side: Side, program: &Counting, selector: &str) {
        let pin = self.home.bpffs().join("foreign");
        kernel::pin(program.as_fd(), &pin).expect("a pin");
        run(&format!(
            "tc filter add dev {} {side} {selector} bpf direct-action object-pinned {}",
            device.name,
            pin.display()
        ));
        fs::remove_file(pin).expect("no pin");
    }

    /// Neither pins nor qdiscs are left.
    ///
    /// # Panics
    /// If some are.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        tc::prune(&self.links()).unwrap();
        assert_eq!(self.pins(), [""; 0]);
        assert!(!self.links().exists());
        assert_eq!(qdiscs(), "", "no qdisc");
    }
}

/// Runs a command of words without quotes and returns what it prints.
///
/// # Panics
/// When that fails.
#[track_caller]
#[allow(clippy::must_use_candidate, reason = "what it prints may be nothing")]
pub fn run(words: &str) -> String {
    let words: Vec<&str> = words.split_whitespace().collect();
    command::output(words[0], &words[1..])
}

/// The ingress and clsact qdiscs of this namespace, a line each.
///
/// # Panics
/// When that fails.
#[must_use]
pub fn qdiscs() -> String {
    let all = run("tc qdisc show");
    let those = all.lines().filter(|line| line.contains("clsact") || line.contains("ingress"));
    those.map(|line| format!("{line}\n")).collect()
}

/// The device of this name.
///
/// # Panics
/// When that fails.
#[track_caller]
#[must_use]
pub fn device(name: &str) -> Device {
    let devices = tc::devices().unwrap();
    let found = devices.iter().find(|d| d.name == name).cloned();
    found.unwrap_or_else(|| panic!("no {name}: {devices:?}"))
}

/// Names and ways of a chain.
///
/// # Panics
/// When that fails.
#[track_caller]
#[must_use]
pub fn chain(device: &Device, side: Side) -> Vec<(String, Way)> {
    let chain = tc::chain(device, side).expect("the chain");
    chain.into_iter().map(|Attached { name, way, .. }| (name, way)).collect()
}

/// What [`chain`] says of programs with these names.
#[must_use]
pub fn named(names: &[&str], way: Way) -> Vec<(String, Way)> {
    names.iter().map(|name| ((*name).to_owned(), way)).collect()
}

/// Adds v0 and its peer v1, a tun device t0, all up, with addresses for what [`send`] sends; nothing else sends.
///
/// # Panics
/// When that fails.
pub fn add_devices() {
    run("ip link add v0 type veth peer name v1");
    run("ip tuntap add dev t0 mode tun");
    for name in ["v0", "v1", "t0"] {
        fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1").unwrap();
    }
    for name in ["v0", "v1", "t0"] {
        run(&format!("ip link set {name} up"));
    }
    run("ip address add 10.8.0.1/24 dev v0 label v0:main");
    run("ip neigh add 10.8.0.2 lladdr 02:00:00:00:00:02 dev v0");
    run("ip address add 10.9.0.1/24 dev t0");
}

/// Sends that many packets out of lo, v0 or t0.
///
/// # Panics
/// When that fails.
pub fn send(name: &str, packets: usize) {
    let to = match name {
        "lo" => "127.0.0.1:9",
        "v0" => "10.8.0.2:9",
        "t0" => "10.9.0.2:9",
        _ => panic!("{name}"),
    };
    // Somebody must be there on lo, or the kernel answers.
    let _receiver = (name == "lo").then(|| UdpSocket::bind(to).unwrap());
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    for _ in 0..packets {
        // What tun drops, having no reader, has passed the egress.
        let _ = socket.send_to(b"x", to);
    }
}
