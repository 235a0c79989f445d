//! What a test cannot do without, found out in one place.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::OnceLock;

use smc_policy::kernel::capabilities::Version;
use smc_policy::smc::diag;

use crate::connection::{Kind, Listener, exchange};
use crate::joined::Role;
use crate::{Hook, command, netns, sys, tool, ueid};

/// Something that not every machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Need {
    /// User id 0.
    Root,
    /// The binary under test, answering `--version`.
    Tool,
    /// SMC sockets (`AF_SMC`).
    Smc,
    /// SMC as a module that can be unloaded.
    SmcModule,
    /// `IPPROTO_SMC` sockets (Linux 6.11).
    IpprotoSmc,
    /// `SMC_DIAG`.
    SmcDiag,
    /// SMC connections over shared memory inside this machine.
    SmcD,
    /// A device by which clients wait for a server's CLC accept ([`crate::clc`]).
    ClcDevice,
    /// `net.smc.hs_ctrl` (Linux 6.19).
    HsCtrl,
    /// What the tests of this run enforce policies by ([`crate::hook`]), and SMC sockets.
    Hook,
    /// No `net.smc.hs_ctrl`, to see what is said about that.
    NoHsCtrl,
    /// A kernel that takes modules.
    Modules,
    /// A machine of the lab, which is the tests' alone.
    LabKernel,
    /// No SMC at all, to see what is said about that.
    NoSmc,
    /// Network namespaces of one's own.
    Netns,
    /// A mounted bpffs.
    Bpffs,
    /// tc programs attached by links (Linux 6.6).
    Tcx,
    /// tc filters of kind u32.
    U32,
    /// Test runs of tc programs on packets that are not linear (Linux 6.19).
    NonlinearRuns,
    /// TCP-AO (Linux 6.7).
    TcpAo,
    /// SYN cookies.
    SynCookies,
    /// A second host, joined with this one ([`crate::joined`]).
    Peer,
    /// Filtering by nft.
    Nft,
    /// Network address translation by nft.
    Nat,
    /// VLAN devices.
    Vlan,
    /// ipip tunnels.
    Ipip,
    /// wireguard devices, and wg(8).
    Wireguard,
}

impl Need {
    /// Whether this machine has it.
    #[must_use]
    pub fn is_met(self) -> bool {
        match self {
            Self::Root => is_root(),
            Self::Tool => tool::is_there(),
            Self::Smc => has_protocol("SMC"),
            // Only a module that was loaded has a state.
            Self::SmcModule => Path::new("/sys/module/smc/initstate").exists(),
            Self::IpprotoSmc => {
                // Asking the kernel for a socket would load the module.
                has_protocol("SMC") && sys::stream_socket(libc::AF_INET, sys::IPPROTO_SMC).is_ok()
            }
            Self::SmcDiag => diag::sockets_as_dumped().is_ok(),
            Self::SmcD => {
                static WORKS: OnceLock<bool> = OnceLock::new();
                *WORKS.get_or_init(|| {
                    [Self::Root, Self::Smc, Self::SmcDiag, Self::Netns].iter().all(|need| need.is_met())
                        && smc_d_works()
                })
            }
            Self::Hook => match crate::hook() {
                Hook::HsCtrl => Self::HsCtrl.is_met() && Self::IpprotoSmc.is_met() && Self::SmcD.is_met(),
                Hook::Tc => Self::Smc.is_met(),
            },
            // SMC of 6.1 does not find the software device of RDMA.
            Self::ClcDevice => {
                static IS_MADE: OnceLock<bool> = OnceLock::new();
                let made = || {
                    ip("link add name d type dummy\n")?;
                    command::run("rdma", &["link", "add", "rxe-need", "type", "rxe", "netdev", "d"])
                };
                Self::SmcD.is_met() || is_kernel_since(6, 12) && *IS_MADE.get_or_init(|| in_namespace(made))
            }
            Self::HsCtrl => Path::new("/proc/sys/net/smc/hs_ctrl").exists(),
            Self::NoHsCtrl => !Self::HsCtrl.is_met(),
            Self::Modules => Path::new("/proc/modules").exists(),
            Self::LabKernel => std::env::var("SMC_POLICY_KERNEL").is_ok_and(|name| name != "host"),
            Self::NoSmc => !Self::Smc.is_met(),
            Self::Netns => netns::is_possible(),
            Self::Bpffs => is_mounted("bpf", tool::BPFFS),
            Self::Tcx => is_kernel_since(6, 6),
            Self::U32 => netns::in_new_namespace(&[], || {
                ["qdisc add dev lo clsact", "filter add dev lo egress u32 match u32 0 0"]
                    .iter()
                    .all(|words| command::run("tc", &words.split_whitespace().collect::<Vec<_>>()).is_ok())
            }),
            Self::NonlinearRuns => is_kernel_since(6, 19),
            Self::Nft => {
                let rule = "table inet t { chain c { type filter hook input priority 0; }; }";
                in_namespace(|| command::run_with("nft", &["-f", "-"], rule))
            }
            Self::Nat => {
                let rule =
                    "table ip nat { chain out { type nat hook postrouting priority 100; masquerade; }; }";
                in_namespace(|| command::run_with("nft", &["-f", "-"], rule))
            }
            Self::Vlan => {
                in_namespace(|| ip("link add name d type dummy\nlink add link d name v type vlan id 5\n"))
            }
            Self::Ipip => in_namespace(|| ip("link add name t type ipip local 10.0.0.1 remote 10.0.0.2\n")),
            Self::Wireguard => in_namespace(|| {
                ip("link add name w type wireguard\n")?;
                command::run("wg", &["show", "w"])
            }),
            Self::TcpAo => {
                let socket = sys::stream_socket(libc::AF_INET, 0);
                socket.is_ok_and(|socket| sys::set_tcp_ao_key(socket, Ipv4Addr::LOCALHOST).is_ok())
            }
            Self::SynCookies => Path::new("/proc/sys/net/ipv4/tcp_syncookies").exists(),
            Self::Peer => Role::of_this_host().is_some(),
        }
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Root => "root",
            Self::Tool => "the smc-policy binary (SMC_POLICY_BIN)",
            Self::Smc => "SMC",
            Self::SmcModule => "SMC as a module",
            Self::IpprotoSmc => "IPPROTO_SMC",
            Self::SmcDiag => "SMC_DIAG",
            Self::SmcD => "SMC-D",
            Self::ClcDevice => "a device for CLC",
            Self::Hook if crate::hook() == Hook::Tc => "SMC",
            Self::Hook | Self::HsCtrl => "hs_ctrl",
            Self::NoHsCtrl => "no hs_ctrl",
            Self::Modules => "a kernel that takes modules",
            Self::LabKernel => "a machine of the lab",
            Self::NoSmc => "no SMC",
            Self::Netns => "network namespaces",
            Self::Bpffs => "bpffs",
            Self::Tcx => "tcx",
            Self::U32 => "u32 filters",
            Self::NonlinearRuns => "test runs on non-linear packets",
            Self::Nft => "nft",
            Self::Nat => "NAT",
            Self::Vlan => "VLAN",
            Self::Ipip => "ipip",
            Self::Wireguard => "wireguard",
            Self::TcpAo => "TCP-AO",
            Self::SynCookies => "SYN cookies",
            Self::Peer => "a second host (SMC_POLICY_ROLE)",
        })
    }
}

/// Returns from the calling test unless everything named is there: `needs!(Root, Smc)`, variants of [`Need`]. What is
/// missing is printed and appended to the file named by `SMC_POLICY_SKIPS`.
#[macro_export]
macro_rules! needs {
    ($($need:ident),+ $(,)?) => {
        // The name of the test is that of the function around this one.
        fn here() {}
        if $crate::needs::is_skipped(std::any::type_name_of_val(&here), &[$($crate::Need::$need),+]) {
            return;
        }
    };
}

/// As [`needs!`] with all that a test of the binary takes that puts policies in force; more needs may be named.
#[macro_export]
macro_rules! needs_hook {
    ($($more:ident),*) => {
        $crate::needs!(Root, Tool, Netns, Bpffs, Smc, Hook, SmcDiag $(, $more)*)
    };
}

/// Used by [`needs!`]: whether something in `needs` is missing, which is reported under the name of the test that the
/// function called `name` is in.
///
/// # Panics
/// When the file for skipped tests cannot be written.
#[must_use]
pub fn is_skipped(name: &str, needs: &[Need]) -> bool {
    let Some(missing) = needs.iter().find(|need| !need.is_met()) else { return false };
    let test = name.strip_suffix("::here").unwrap_or(name);
    let test = &match std::env::var("SMC_POLICY_RUN_AS") {
        Ok(run) => test.replacen(test.split("::").next().unwrap_or(test), &run, 1),
        Err(_) => test.to_owned(),
    };
    println!("skipped {test}: needs {missing}");
    if let Some(path) = std::env::var_os("SMC_POLICY_SKIPS") {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let written = file.and_then(|mut file| writeln!(file, "{test}: needs {missing}"));
        written.expect("the file named by SMC_POLICY_SKIPS");
    }
    true
}

fn is_kernel_since(major: u32, minor: u32) -> bool {
    Version::parse(&smc_policy::kernel::release()) >= Some(Version { major, minor })
}

fn ip(commands: &str) -> Result<String, String> {
    command::run_with("ip", &["-batch", "-"], commands)
}

/// Whether it works in a network namespace of its own, which goes with whatever it makes.
fn in_namespace(probe: impl FnOnce() -> Result<String, String> + Send) -> bool {
    netns::is_possible() && netns::in_new_namespace(&[], probe).is_ok()
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|metadata| metadata.uid() == 0)
}

/// Whether the kernel has registered the protocol, without making it load the module.
fn has_protocol(name: &str) -> bool {
    let protocols = fs::read_to_string("/proc/net/protocols").unwrap_or_default();
    protocols.lines().any(|line| line.split_whitespace().next() == Some(name))
}

fn is_mounted(kind: &str, at: &str) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        fields.next() == Some(at) && fields.next() == Some(kind)
    })
}

fn smc_d_works() -> bool {
    if let Err(error) = ueid::ensure() {
        println!("no SMC-D: cannot add a UEID: {error}");
        return false;
    }
    let outcome = netns::in_new_namespace(&[], || {
        let listener = Listener::bind(Kind::AfSmc, SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0));
        exchange(Kind::AfSmc, None, &listener)
    });
    match outcome {
        Ok(outcome) if outcome.is_smc() => true,
        Ok(outcome) => {
            println!("no SMC-D: {outcome}");
            false
        }
        Err(failure) => {
            println!("no SMC-D: {failure}");
            false
        }
    }
}
