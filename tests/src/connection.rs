//! Real connections: opened with any kind of socket, used both ways with verified content, judged by what the kernel
//! says about both ends.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use smc_policy::smc::diag::{self, Mode};
use smc_policy::smc::parse::SmcSocket;
use smc_policy::smc::reasons::{self, PEER_NO_SMC};

use crate::rng::Rng;
use crate::sys;

/// No step of a connection may take longer. Real ones take milliseconds, in emulation a few tens of them; the kernel's
/// own limit for an SMC handshake is 6 s.
const LIMIT: Duration = Duration::from_secs(20);

/// How an application opens its socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `socket(AF_SMC, SOCK_STREAM, 0)`.
    AfSmc,
    /// `socket(AF_SMC, SOCK_STREAM, 1)`: IPv6, also IPv4 as ::ffff:a.b.c.d.
    AfSmc6,
    /// `socket(AF_INET, SOCK_STREAM, IPPROTO_SMC)`.
    IpprotoSmc,
    /// `socket(AF_INET6, SOCK_STREAM, IPPROTO_SMC)`: IPv6, also IPv4 as ::ffff:a.b.c.d.
    IpprotoSmc6,
    /// An ordinary TCP socket.
    Tcp,
    /// An ordinary TCP socket of `AF_INET6`.
    Tcp6,
}

impl Kind {
    /// The kinds that are SMC and take IPv4 addresses.
    pub const SMC_V4: [Self; 4] = [Self::AfSmc, Self::IpprotoSmc, Self::AfSmc6, Self::IpprotoSmc6];
    /// The kinds that are SMC and take IPv6 addresses.
    pub const SMC_V6: [Self; 2] = [Self::AfSmc6, Self::IpprotoSmc6];

    /// Whether it is an SMC socket.
    #[must_use]
    pub const fn is_smc(self) -> bool {
        !matches!(self, Self::Tcp | Self::Tcp6)
    }

    /// Whether it is an IPv6 socket.
    #[must_use]
    pub const fn is_v6(self) -> bool {
        matches!(self, Self::AfSmc6 | Self::IpprotoSmc6 | Self::Tcp6)
    }

    /// Opens one.
    ///
    /// # Errors
    /// What socket(2) says.
    pub fn open(self) -> io::Result<OwnedFd> {
        let (family, protocol) = match self {
            Self::AfSmc => (sys::AF_SMC, 0),
            Self::AfSmc6 => (sys::AF_SMC, 1),
            Self::IpprotoSmc => (libc::AF_INET, sys::IPPROTO_SMC),
            Self::IpprotoSmc6 => (libc::AF_INET6, sys::IPPROTO_SMC),
            Self::Tcp => (libc::AF_INET, 0),
            Self::Tcp6 => (libc::AF_INET6, 0),
        };
        let socket = sys::stream_socket(family, protocol)?;
        sys::set_time_limits(&socket, LIMIT)?;
        Ok(socket)
    }

    /// `address` as this kind takes it: IPv4 is mapped for IPv6 sockets.
    fn spelled(self, address: SocketAddr) -> SocketAddr {
        match address {
            SocketAddr::V4(v4) if self.is_v6() => SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()),
            other => other,
        }
    }
}

/// A listening socket of any kind.
#[derive(Debug)]
pub struct Listener {
    kind: Kind,
    socket: TcpListener,
    /// Where clients connect to; `None`: the address it is bound to.
    reached_at: Option<IpAddr>,
}

impl Listener {
    /// Listens on `address`; port 0 lets the kernel choose.
    ///
    /// # Panics
    /// When that is not possible.
    #[must_use]
    pub fn bind(kind: Kind, address: SocketAddr) -> Self {
        Self::try_bind(kind, address)
            .unwrap_or_else(|error| panic!("listen on {address} ({kind:?}): {error}"))
    }

    fn try_bind(kind: Kind, address: SocketAddr) -> io::Result<Self> {
        let socket = kind.open()?;
        sys::set_reuse_address(&socket)?;
        sys::bind(&socket, kind.spelled(address))?;
        sys::listen(&socket, 128)?;
        Ok(Self { kind, socket: TcpListener::from(socket), reached_at: None })
    }

    /// The same listener, which clients reach under `ip`: for wildcard addresses.
    ///
    /// # Panics
    /// When its descriptor cannot be duplicated.
    #[must_use]
    pub fn reached_at(&self, ip: IpAddr) -> Self {
        let socket = self.socket.try_clone().expect("another descriptor");
        Self { kind: self.kind, socket, reached_at: Some(ip) }
    }

    /// The address that clients connect to, with the port in use; IPv4 is shown as IPv4.
    ///
    /// # Panics
    /// When the kernel does not tell.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        let bound = canonical(self.socket.local_addr().expect("a bound socket's address"));
        SocketAddr::new(self.reached_at.unwrap_or(bound.ip()), bound.port())
    }

    /// Its port.
    ///
    /// # Panics
    /// When the kernel does not tell.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.address().port()
    }

    /// Waits for a connection until `give_up` is set.
    fn accept(&self, give_up: &AtomicBool) -> io::Result<TcpStream> {
        let end = Instant::now() + LIMIT;
        while !give_up.load(Ordering::Acquire) && Instant::now() < end {
            if sys::is_readable(&self.socket, Duration::from_millis(20))? {
                let (stream, _) = self.socket.accept()?;
                sys::set_time_limits(&stream, LIMIT)?;
                return Ok(stream);
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }
}

/// What carries the data of one end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// An SMC socket over RDMA.
    SmcR,
    /// An SMC socket over shared memory.
    SmcD,
    /// An SMC socket that fell back to TCP, with this host's reason and the peer's.
    Fallback(u32, u32),
    /// No SMC socket.
    Tcp,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SmcR => f.write_str("SMC-R"),
            Self::SmcD => f.write_str("SMC-D"),
            Self::Fallback(reason, peer) => {
                let name = reasons::lookup(*reason).map_or("unknown", |reason| reason.name);
                write!(f, "fallback {reason:#010x}/{peer:#010x} {name}")
            }
            Self::Tcp => f.write_str("TCP"),
        }
    }
}

/// One end of a connection.
#[derive(Debug, Clone, Copy)]
pub struct End {
    /// What carries its data.
    pub transport: Transport,
    /// Own address as getsockname(2) tells it, IPv4 as IPv4.
    pub local: SocketAddr,
    /// Peer's address as getpeername(2) tells it, IPv4 as IPv4.
    pub peer: SocketAddr,
    /// Inode of the socket.
    pub inode: u64,
    /// What `SMC_DIAG` says; `None` for TCP sockets.
    pub diag: Option<SmcSocket>,
}

/// A connection that carried its data both ways, intact and with nothing before, between or after it.
#[derive(Debug, Clone, Copy)]
pub struct Outcome {
    /// The connecting end.
    pub client: End,
    /// The accepting end.
    pub server: End,
    /// Duration of connect(2).
    pub connect_time: Duration,
}

impl Outcome {
    /// Whether both ends use SMC.
    #[must_use]
    pub fn is_smc(&self) -> bool {
        [self.client, self.server]
            .iter()
            .all(|end| matches!(end.transport, Transport::SmcD | Transport::SmcR))
    }

    /// Whether both ends fell back because the option was not there: what a deny looks like.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        [self.client, self.server]
            .iter()
            .all(|end| matches!(end.transport, Transport::Fallback(PEER_NO_SMC, 0)))
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { client, server, connect_time } = self;
        write!(
            f,
            "{} -> {}: client {}, server {}, connect {connect_time:.1?}",
            client.local, client.peer, client.transport, server.transport
        )
    }
}

/// A connection that failed, and where.
#[derive(Debug)]
pub struct Failure {
    /// What was being done.
    pub step: &'static str,
    /// What went wrong.
    pub error: io::Error,
    /// What the other end ran into; often the cause.
    pub other_end: Option<Box<Self>>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.step, self.error)?;
        self.other_end.as_ref().map_or(Ok(()), |other| write!(f, " (other end: {other})"))
    }
}

trait At<T> {
    fn at(self, step: &'static str) -> Result<T, Failure>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, step: &'static str) -> Result<T, Failure> {
        self.map_err(|error| Failure { step, error, other_end: None })
    }
}

/// Payload sizes of an ordinary exchange, each sent both ways: one byte, and more than any buffer on the way holds.
pub const SIZES: &[usize] = &[1, 100_000];

/// Connects with a `kind` socket from `local` (`None`: the kernel chooses) to the listener, sends [`SIZES`] random bytes
/// both ways, compares them, asks the kernel about both ends, closes in order.
///
/// # Errors
/// The first step that failed. Foreign or missing bytes are a failure.
pub fn exchange(kind: Kind, local: Option<IpAddr>, listener: &Listener) -> Result<Outcome, Failure> {
    exchange_sized(kind, local, listener, SIZES)
}

/// As [`exchange`], with other payload sizes.
///
/// # Errors
/// As [`exchange`].
pub fn exchange_sized(
    kind: Kind,
    local: Option<IpAddr>,
    listener: &Listener,
    sizes: &[usize],
) -> Result<Outcome, Failure> {
    let pair = Pair::open(kind, local, listener)?;
    pair.exchange(sizes)?;
    let outcome = pair.judge()?;
    pair.close()?;
    Ok(outcome)
}

/// Both ends of an open connection.
#[derive(Debug)]
pub struct Pair {
    client: (Kind, TcpStream),
    server: (Kind, TcpStream),
    connect_time: Duration,
}

impl Pair {
    /// Connects with a `kind` socket from `local` (`None`: the kernel chooses) to the listener.
    ///
    /// # Errors
    /// What connect(2) or accept(2) say.
    pub fn open(kind: Kind, local: Option<IpAddr>, listener: &Listener) -> Result<Self, Failure> {
        let give_up = AtomicBool::new(false);
        let (client, server) = thread::scope(|scope| {
            let server = scope.spawn(|| listener.accept(&give_up).at("accept"));
            let client = connect(kind, local, listener.address()).at("connect");
            give_up.store(client.is_err(), Ordering::Release);
            (client, server.join().expect("the accepting thread"))
        });
        let (client, connect_time) = client?;
        Ok(Self { client: (kind, client), server: (listener.kind, server?), connect_time })
    }

    /// Sends random bytes of each of `sizes` both ways and compares them.
    ///
    /// # Errors
    /// A time-out, an early end, or foreign bytes.
    pub fn exchange(&self, sizes: &[usize]) -> Result<(), Failure> {
        let (client, server) = (&self.client.1, &self.server.1);
        thread::scope(|scope| {
            // An end that fails closes, or the other would wait for its time limit.
            let server = scope.spawn(|| answer(server, sizes).inspect_err(|_| abandon(server)));
            let client = ask(client, sizes).inspect_err(|_| abandon(client));
            match (client, server.join().expect("the server's thread")) {
                (Ok(()), server) => server,
                (Err(failure), server) => Err(Failure { other_end: server.err().map(Box::new), ..failure }),
            }
        })
    }

    /// Asks the kernel about both ends.
    ///
    /// # Errors
    /// When `SMC_DIAG` does not answer, or does not show them as established.
    pub fn judge(&self) -> Result<Outcome, Failure> {
        Ok(Outcome {
            client: end(&self.client).at("the client's SMC_DIAG record")?,
            server: end(&self.server).at("the server's SMC_DIAG record")?,
            connect_time: self.connect_time,
        })
    }

    /// Closes, client first; each end must see the end of the stream and not a byte more.
    ///
    /// # Errors
    /// More bytes, or no end.
    pub fn close(self) -> Result<(), Failure> {
        close_in_order(self.client.1, self.server.1).at("close")
    }
}

fn abandon(stream: &TcpStream) {
    // It may be closed already, which is as good.
    let _ = stream.shutdown(Shutdown::Both);
}

fn connect(kind: Kind, local: Option<IpAddr>, peer: SocketAddr) -> io::Result<(TcpStream, Duration)> {
    let socket = kind.open()?;
    if let Some(local) = local {
        sys::bind(&socket, kind.spelled(SocketAddr::new(local, 0)))?;
    }
    let start = Instant::now();
    sys::connect(&socket, kind.spelled(peer))?;
    Ok((TcpStream::from(socket), start.elapsed()))
}

/// The client's half of an exchange: its bytes, then the server's.
fn ask(stream: &TcpStream, sizes: &[usize]) -> Result<(), Failure> {
    for (round, &size) in sizes.iter().enumerate() {
        send(stream, payload(0, round, size)).at("client sends")?;
        expect(stream, &payload(1, round, size)).at("client receives")?;
    }
    Ok(())
}

/// The server's half.
fn answer(stream: &TcpStream, sizes: &[usize]) -> Result<(), Failure> {
    for (round, &size) in sizes.iter().enumerate() {
        expect(stream, &payload(0, round, size)).at("server receives")?;
        send(stream, payload(1, round, size)).at("server sends")?;
    }
    Ok(())
}

/// Bytes that differ between the two directions and between rounds.
fn payload(direction: u64, round: usize, size: usize) -> Vec<u8> {
    Rng::from_seed((round as u64) << 32 | (size as u64) << 1 | direction).bytes(size)
}

fn send(mut stream: &TcpStream, bytes: Vec<u8>) -> io::Result<()> {
    stream.write_all(&bytes)
}

fn expect(mut stream: &TcpStream, expected: &[u8]) -> io::Result<()> {
    let mut bytes = vec![0; expected.len()];
    stream.read_exact(&mut bytes)?;
    if bytes == expected {
        return Ok(());
    }
    let at = bytes.iter().zip(expected).position(|(got, want)| got != want).unwrap_or_default();
    let found = &bytes[at..bytes.len().min(at + 16)];
    Err(io::Error::other(format!("foreign bytes at {at} of {}: {found:02x?}", expected.len())))
}

fn close_in_order(mut client: TcpStream, mut server: TcpStream) -> io::Result<()> {
    client.shutdown(Shutdown::Write)?;
    let mut rest = Vec::new();
    server.read_to_end(&mut rest)?;
    drop(server);
    client.read_to_end(&mut rest)?;
    if rest.is_empty() {
        Ok(())
    } else {
        Err(io::Error::other(format!("{} bytes after the last: {rest:02x?}", rest.len())))
    }
}

fn end((kind, stream): &(Kind, TcpStream)) -> io::Result<End> {
    let inode = std::fs::metadata(format!("/proc/self/fd/{}", stream.as_raw_fd()))?.ino();
    let diag = if kind.is_smc() { Some(record(inode)?) } else { None };
    let transport = match diag.map(|socket| (socket.carried_by(), socket.fallback)) {
        None => Transport::Tcp,
        Some((Some(Mode::SmcR), _)) => Transport::SmcR,
        Some((Some(Mode::SmcD), _)) => Transport::SmcD,
        Some((Some(Mode::FallbackTcp), Some(fallback))) => {
            Transport::Fallback(fallback.reason, fallback.peer_diagnosis)
        }
        Some(_) => return Err(io::Error::other(format!("not an established connection: {diag:?}"))),
    };
    let (local, peer) = (canonical(stream.local_addr()?), canonical(stream.peer_addr()?));
    Ok(End { transport, local, peer, inode, diag })
}

/// The kernel's record of the socket with `inode`. A dump may miss a socket while others come and go, so it is asked
/// again.
fn record(inode: u64) -> io::Result<SmcSocket> {
    for _ in 0..20 {
        let sockets = diag::sockets().map_err(io::Error::other)?;
        if let Some(socket) = sockets.into_iter().find(|socket| socket.inode == inode) {
            return Ok(socket);
        }
        thread::sleep(Duration::from_millis(10));
    }
    Err(io::Error::other(format!("no SMC socket with inode {inode}")))
}

const fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}
