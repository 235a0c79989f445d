//! A test's own world: a network namespace with addresses on its loopback interface, and folders for the binary.

use std::net::{IpAddr, Ipv6Addr};

use crate::netns;
use crate::tool::{Home, Run};
use crate::ueid;

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
}

impl Lab {
    /// Runs `body` in a new world. 127.0.0.0/8, ::1 and [`v6_addresses`] are there, and a UEID, so that SMC-D works
    /// between them.
    ///
    /// # Panics
    /// As `body` does, and when the world cannot be made: say `needs!(Root, SmcD, Netns)` first.
    pub fn run<T: Send>(body: impl FnOnce(&Self) -> T + Send) -> T {
        ueid::ensure().expect("a UEID");
        netns::in_new_namespace(&v6_addresses(), || body(&Self::default()))
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
}
