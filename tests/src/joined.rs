//! Two hosts that run the same tests at the same time, each in its role, joined by a network.
//!
//! A test function runs in both; a plain TCP connection between them (the wire) keeps them in step. One that fails
//! hangs up, by which the other fails too.
//!
//! | variable | meaning |
//! |---|---|
//! | `SMC_POLICY_ROLE` | `server` (10.99.0.1, fd00:99::1) or `client` (10.99.0.2, fd00:99::2), both on eth0 |

use std::fmt::Display;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::str::FromStr;
use std::sync::atomic::AtomicBool;
use std::sync::{Once, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::connection::{Failure, Half, Kind, Listener, SIZES, Transport};
use crate::{command, sys, ueid};

/// For the other machine to boot and for its longest step.
const LIMIT: Duration = Duration::from_secs(180);
/// The wire's port at the server.
const PORT: u16 = 7;
/// The device that joins them.
pub const DEVICE: &str = "eth0";
/// The RDMA device over it.
pub const RDMA: &str = "rxe0";

/// What this host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Accepts connections.
    Server,
    /// Connects.
    Client,
}

impl Role {
    /// As the environment says; `None`: there is no other host.
    ///
    /// # Panics
    /// When it says something else.
    #[must_use]
    pub fn of_this_host() -> Option<Self> {
        match std::env::var("SMC_POLICY_ROLE").as_deref() {
            Ok("server") => Some(Self::Server),
            Ok("client") => Some(Self::Client),
            Ok(other) => panic!("SMC_POLICY_ROLE={other}"),
            Err(_) => None,
        }
    }

    /// The host's addresses, IPv4 and IPv6.
    #[must_use]
    pub fn addresses(self) -> [IpAddr; 2] {
        let last = if self == Self::Server { 1 } else { 2 };
        [
            Ipv4Addr::new(10, 99, 0, last).into(),
            Ipv6Addr::new(0xfd00, 0x99, 0, 0, 0, 0, 0, last.into()).into(),
        ]
    }
}

/// The wire to the other host, for one test.
#[derive(Debug)]
pub struct Joined {
    /// What this host is.
    pub role: Role,
    wire: BufReader<TcpStream>,
}

/// What became of a connection between the hosts, as each of them says.
#[derive(Debug, Clone, Copy)]
pub struct Met {
    /// At the client.
    pub client: Transport,
    /// At the server.
    pub server: Transport,
    /// Duration of connect(2) at the client.
    pub connect_time: Duration,
    /// From before connect(2) to the last byte, at the client.
    pub whole_time: Duration,
}

impl Met {
    /// Whether both ends use SMC over RDMA.
    #[must_use]
    pub fn is_smc_r(&self) -> bool {
        [self.client, self.server] == [Transport::SmcR; 2]
    }

    /// Whether both ends saw the SMC option, even if they have no device for it in common.
    #[must_use]
    pub fn is_negotiated(&self) -> bool {
        self.client.is_negotiated() && self.server.is_negotiated()
    }

    /// Whether both ends fell back because the option was not there.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        self.client.is_denied() && self.server.is_denied()
    }
}

impl Display for Met {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { client, server, connect_time, whole_time } = self;
        write!(
            f,
            "client {client}, server {server}, connect {connect_time:.1?}, with {SIZES:?} bytes both ways {whole_time:.1?}"
        )
    }
}

impl Joined {
    /// Waits until the other host has come to the same test.
    ///
    /// # Panics
    /// When it does not, or when there is none: say `needs!(Peer)` first.
    #[must_use]
    pub fn meet(test: &str) -> Self {
        let role = Role::of_this_host().expect("a role");
        let wire = match role {
            Role::Server => accept(test),
            Role::Client => call(test),
        };
        let mut joined = Self { role, wire: BufReader::new(wire) };
        joined.step(test);
        joined
    }

    /// Waits until the other host has come here too.
    ///
    /// # Panics
    /// When it has not, or is somewhere else.
    #[track_caller]
    pub fn step(&mut self, name: &str) {
        let theirs: String = self.swap(name);
        assert_eq!(name, theirs, "the other host is at another step");
    }

    /// Tells the other host something (in one line) and returns what that tells.
    ///
    /// # Panics
    /// When the other host has given up.
    #[track_caller]
    pub fn swap<T: FromStr>(&mut self, ours: impl Display) -> T {
        writeln!(self.wire.get_ref(), "{ours}").expect("the other host listens");
        let mut line = String::new();
        self.wire.read_line(&mut line).expect("the other host answers");
        assert!(line.ends_with('\n'), "the other host gave up");
        let line = line.trim_end();
        line.parse().unwrap_or_else(|_| panic!("the other host says {line:?}"))
    }

    /// Sees to what SMC-R takes at both hosts: an RDMA device over the joining network, called [`RDMA`], and a UEID. Connects
    /// to `port` until it is SMC-R.
    ///
    /// # Panics
    /// When it does not become that.
    pub fn set_up_smc_r(&mut self, port: u16) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            ueid::ensure().expect("a UEID");
            // Another binary's tests in this machine may have made it.
            let _ = command::run("rdma", &["link", "add", RDMA, "type", "rxe", "netdev", DEVICE]);
        });
        // SMC hears of a new device by and by.
        let is_ready = |_| self.connect(Kind::AfSmc, Role::Server.addresses()[0], port).is_smc_r();
        assert!((0..10).any(is_ready), "no SMC-R");
    }

    /// Makes a connection between sockets of this kind and uses it. What both ends say about it, the same on both hosts.
    ///
    /// # Panics
    /// When the connection fails.
    #[track_caller]
    pub fn connect(&mut self, kind: Kind, address: IpAddr, port: u16) -> Met {
        let opened = self.open(kind, address, port);
        let met = opened.met;
        self.close(opened);
        met
    }

    /// As [`Self::connect`], and leaves it open.
    ///
    /// # Panics
    /// When the connection fails.
    #[track_caller]
    pub fn open(&mut self, kind: Kind, address: IpAddr, port: u16) -> Opened {
        let address = SocketAddr::new(address, port);
        let listener = (self.role == Role::Server).then(|| Listener::bind(kind, address));
        self.step("listening");
        let began = Instant::now();
        let made = || {
            let half = match &listener {
                Some(listener) => listener.accept(&AtomicBool::new(false))?,
                None => Half::connect(kind, None, address)?,
            };
            self.talk(&half)?;
            let whole = began.elapsed();
            let transport = half.judge()?.transport;
            Ok((half, whole, transport))
        };
        let (half, whole, transport) =
            made().unwrap_or_else(|failure: Failure| panic!("{kind:?}, {address}: {failure}"));
        let ours = Told { transport, connect: half.time, whole };
        let theirs: Told = self.swap(&ours);
        let (client, server) = if self.role == Role::Client { (ours, theirs) } else { (theirs, ours) };
        let met = Met {
            client: client.transport,
            server: server.transport,
            connect_time: client.connect,
            whole_time: client.whole,
        };
        if self.role == Role::Client {
            println!("  {kind:?} to {address}: {met}");
        }
        Opened { half, met }
    }

    /// Sends data both ways over an open connection, verified.
    ///
    /// # Panics
    /// When that fails.
    #[track_caller]
    pub fn use_again(&mut self, opened: &Opened) {
        self.talk(&opened.half).unwrap_or_else(|failure| panic!("{failure}: {}", opened.met));
    }

    /// Closes a connection in order.
    ///
    /// # Panics
    /// When more bytes come, or no end.
    #[track_caller]
    pub fn close(&mut self, opened: Opened) {
        if self.role == Role::Client {
            opened.half.finish().expect("finished");
        }
        opened.half.close().expect("closed");
    }

    fn talk(&self, half: &Half) -> Result<(), Failure> {
        match self.role {
            Role::Server => half.answer(SIZES),
            Role::Client => half.ask(SIZES),
        }
    }
}

/// A connection that is open.
#[derive(Debug)]
pub struct Opened {
    half: Half,
    /// What became of it.
    pub met: Met,
}

/// What one host says about its end, as a line.
struct Told {
    transport: Transport,
    connect: Duration,
    whole: Duration,
}

impl Display for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (word, reason, peer) = match self.transport {
            Transport::SmcR => ("smc-r", 0, 0),
            Transport::SmcD => ("smc-d", 0, 0),
            Transport::Tcp => ("tcp", 0, 0),
            Transport::Fallback(reason, peer) => ("fallback", reason, peer),
        };
        write!(f, "{word} {reason} {peer} {} {}", self.connect.as_micros(), self.whole.as_micros())
    }
}

impl FromStr for Told {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        let mut words = line.split(' ');
        let word = words.next().ok_or(())?;
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok()).ok_or(());
        let reasons = [number()?, number()?].map(|code| code as u32);
        let transport = match word {
            "smc-r" => Transport::SmcR,
            "smc-d" => Transport::SmcD,
            "tcp" => Transport::Tcp,
            "fallback" => Transport::Fallback(reasons[0], reasons[1]),
            _ => return Err(()),
        };
        let (connect, whole) = (Duration::from_micros(number()?), Duration::from_micros(number()?));
        Ok(Self { transport, connect, whole })
    }
}

/// The server's end of the wire.
fn accept(test: &str) -> TcpStream {
    static LISTENER: OnceLock<TcpListener> = OnceLock::new();
    let address = (Role::Server.addresses()[0], PORT);
    let listener = LISTENER.get_or_init(|| TcpListener::bind(address).expect("the wire's port"));
    assert!(sys::is_readable(listener, LIMIT).expect("poll"), "the client does not come to {test}");
    let (wire, _) = listener.accept().expect("the client");
    sys::set_time_limits(&wire, LIMIT).expect("time limits");
    wire.set_nodelay(true).expect("no delay");
    wire
}

/// The client's end.
fn call(test: &str) -> TcpStream {
    let address = SocketAddr::new(Role::Server.addresses()[0], PORT);
    let end = Instant::now() + LIMIT;
    loop {
        match TcpStream::connect_timeout(&address, Duration::from_secs(2)) {
            Ok(wire) => {
                sys::set_time_limits(&wire, LIMIT).expect("time limits");
                wire.set_nodelay(true).expect("no delay");
                return wire;
            }
            Err(error) => assert!(Instant::now() < end, "the server does not come to {test}: {error}"),
        }
        thread::sleep(Duration::from_millis(100));
    }
}
