//! Hosts of one machine: network namespaces, joined by veth devices, each with a policy of its own.

use std::fs::{self, File};
use std::net::{IpAddr, SocketAddr};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use crate::connection::{Failure, Half, Kind, Listener, Outcome, Pair};
use crate::{command, sys};

/// A network namespace with a name in /run/netns, until it goes.
#[derive(Debug)]
pub struct Host {
    name: String,
    namespace: File,
}

impl Host {
    /// A new one; its loopback interface is up.
    ///
    /// # Panics
    /// When that is not possible.
    #[must_use]
    pub fn new(what: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("smcpol-{}-{number}-{what}", std::process::id());
        command::output("ip", &["netns", "add", &name]);
        let namespace = File::open(format!("/run/netns/{name}")).expect("the new namespace");
        let host = Self { name, namespace };
        // Addresses are usable at once, without looking for duplicates.
        host.sysctl("net.ipv6.conf.default.accept_dad", "0");
        host.sysctl("net.ipv6.conf.all.accept_dad", "0");
        host.ip("link set lo up");
        host
    }

    /// Its name in /run/netns.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `body` there, in a thread of its own. Programs that `body` starts are there too.
    ///
    /// # Panics
    /// As `body` does.
    pub fn run<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        run_in(&self.namespace, body)
    }

    /// Runs commands of ip(8), one a line, each without the word `ip`.
    ///
    /// # Panics
    /// When one fails.
    #[track_caller]
    pub fn ip(&self, commands: &str) {
        let done = command::run_with("ip", &["-netns", &self.name, "-batch", "-"], commands);
        done.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Loads rules of nft(8).
    ///
    /// # Panics
    /// When they are refused.
    #[track_caller]
    pub fn nft(&self, rules: &str) {
        self.run(|| command::run_with("nft", &["-f", "-"], rules)).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Writes a file of /proc/sys.
    ///
    /// # Panics
    /// When that is not possible.
    #[track_caller]
    pub fn sysctl(&self, name: &str, value: &str) {
        let path = format!("/proc/sys/{}", name.replace('.', "/"));
        self.run(|| fs::write(&path, value)).unwrap_or_else(|error| panic!("{path}: {error}"));
    }

    /// A listener on this host.
    ///
    /// # Panics
    /// When that is not possible.
    #[must_use]
    pub fn listen(&self, kind: Kind, ip: &str, port: u16) -> Listener {
        let ip: IpAddr = ip.parse().expect("an address");
        self.run(|| Listener::bind(kind, SocketAddr::new(ip, port)))
    }

    /// Connects from this host to the listener on `server`, which it reaches at `to`; sends `sizes` random bytes both
    /// ways, asks the kernel about both ends, closes in order.
    ///
    /// # Errors
    /// The first step that failed.
    pub fn exchange(
        &self,
        from: (Kind, Option<IpAddr>),
        to: SocketAddr,
        server: (&Self, &Listener),
        sizes: &[usize],
    ) -> Result<Outcome, Failure> {
        let (kind, local) = from;
        let (host, listener) = server;
        let pair = Pair::open_by(|| self.run(|| Half::connect(kind, local, to)), listener)?;
        pair.exchange(sizes)?;
        let outcome = pair.judge_by(|half| self.run(|| half.judge()), |half| host.run(|| half.judge()))?;
        pair.close()?;
        Ok(outcome)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // It ends when the last process and socket in it do; here only its name goes.
        if let Err(error) = command::run("ip", &["netns", "delete", &self.name]) {
            eprintln!("{error}");
        }
    }
}

/// A line of config.toml: policies are enforced at these hosts and nowhere else.
#[must_use]
pub fn only_at(hosts: &[&Host]) -> String {
    let names: Vec<&str> = hosts.iter().map(|host| host.name()).collect();
    format!("namespaces = {names:?}\n")
}

/// Runs `body` in the network namespace that this is a file of, in a thread of its own.
///
/// # Panics
/// As `body` does.
pub fn run_in<T: Send>(namespace: &File, body: impl FnOnce() -> T + Send) -> T {
    let result = thread::scope(|scope| {
        let run = || {
            sys::enter_network(namespace).expect("another network namespace");
            body()
        };
        scope.spawn(run).join()
    });
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Joins two hosts by a pair of veth devices, which are up. Each is given by its host, its name and its addresses
/// (`10.1.0.2/24 fd01::2/64`).
///
/// # Panics
/// When that is not possible.
#[track_caller]
pub fn join(one: (&Host, &str, &str), two: (&Host, &str, &str)) {
    let ((first, device, _), (second, peer, _)) = (one, two);
    first.ip(&format!("link add {device} type veth peer name {peer} netns {}", second.name));
    for (host, device, addresses) in [one, two] {
        host.ip(&format!("link set {device} up\n{}", add(device, addresses)));
    }
}

/// Lines for [`Host::ip`] that add these addresses to a device.
#[must_use]
pub fn add(device: &str, addresses: &str) -> String {
    addresses.split_whitespace().map(|address| format!("address add {address} dev {device}\n")).collect()
}

/// A client and a server with a router between them.
#[derive(Debug)]
pub struct Routed {
    /// 10.1.0.2 and fd00:1::2 at its device `eth0`.
    pub client: Host,
    /// 10.1.0.1 and fd00:1::1 at `lan`, 10.2.0.1 and fd00:2::1 at `wan`. It forwards.
    pub router: Host,
    /// 10.2.0.2 and fd00:2::2 at `eth0`.
    pub server: Host,
}

impl Routed {
    /// The server's addresses.
    pub const SERVER: [&str; 2] = ["10.2.0.2", "fd00:2::2"];

    /// Makes them. Everybody reaches everybody.
    ///
    /// # Panics
    /// When that is not possible.
    #[must_use]
    pub fn new() -> Self {
        let [client, router, server] = ["client", "router", "server"].map(Host::new);
        join((&client, "eth0", "10.1.0.2/24 fd00:1::2/64"), (&router, "lan", "10.1.0.1/24 fd00:1::1/64"));
        join((&server, "eth0", "10.2.0.2/24 fd00:2::2/64"), (&router, "wan", "10.2.0.1/24 fd00:2::1/64"));
        client.ip("route add default via 10.1.0.1\nroute add ::/0 via fd00:1::1");
        server.ip("route add default via 10.2.0.1\nroute add ::/0 via fd00:2::1");
        router.sysctl("net.ipv4.ip_forward", "1");
        router.sysctl("net.ipv6.conf.all.forwarding", "1");
        Self { client, router, server }
    }

    /// Connects from the client with a `kind` socket to `to` and expects that to succeed.
    ///
    /// # Panics
    /// When it does not.
    #[track_caller]
    #[must_use]
    pub fn exchange(&self, kind: Kind, to: SocketAddr, listener: &Listener) -> Outcome {
        self.client
            .exchange((kind, None), to, (&self.server, listener), &[1, 1000])
            .unwrap_or_else(|failure| panic!("{kind:?} to {to}: {failure}"))
    }
}

impl Default for Routed {
    fn default() -> Self {
        Self::new()
    }
}
