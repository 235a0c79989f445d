//! One end of a connection: what a host does and sees by itself, whether the other end is in the same process, in
//! another network namespace or in another machine.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::thread;
use std::time::{Duration, Instant};

use smc_policy::smc::diag::{self, Mode};
use smc_policy::smc::parse::SmcSocket;
use smc_policy::smc::reasons::{self, PEER_NO_SMC};

use crate::connection::Kind;
use crate::rng::Rng;
use crate::sys;

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

impl Transport {
    /// Whether it is SMC.
    #[must_use]
    pub const fn is_smc(self) -> bool {
        matches!(self, Self::SmcD | Self::SmcR)
    }

    /// Whether the SMC option was there both ways, even if the hosts then found no device in common.
    #[must_use]
    pub const fn is_negotiated(self) -> bool {
        match self {
            Self::SmcR | Self::SmcD => true,
            Self::Fallback(reason, _) => reason != PEER_NO_SMC,
            Self::Tcp => false,
        }
    }

    /// Whether it is what a deny looks like: a fallback because the option was not there.
    #[must_use]
    pub const fn is_denied(self) -> bool {
        matches!(self, Self::Fallback(PEER_NO_SMC, 0))
    }
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

pub(crate) trait At<T> {
    fn at(self, step: &'static str) -> Result<T, Failure>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, step: &'static str) -> Result<T, Failure> {
        self.map_err(|error| Failure { step, error, other_end: None })
    }
}

/// An open socket of one end.
#[derive(Debug)]
pub struct Half {
    kind: Kind,
    stream: TcpStream,
    /// Duration of connect(2), or of the wait for the connection.
    pub time: Duration,
}

impl Half {
    /// Its stream.
    #[must_use]
    pub const fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Connects with a `kind` socket from `local` (`None`: the kernel chooses).
    ///
    /// # Errors
    /// What bind(2) and connect(2) say.
    pub fn connect(kind: Kind, local: Option<IpAddr>, peer: SocketAddr) -> Result<Self, Failure> {
        let connect = || {
            let socket = kind.open()?;
            if let Some(local) = local {
                sys::bind(&socket, kind.spelled(SocketAddr::new(local, 0)))?;
            }
            let start = Instant::now();
            sys::connect(&socket, kind.spelled(peer))?;
            Ok(Self { kind, time: start.elapsed(), stream: TcpStream::from(socket) })
        };
        connect().at("connect")
    }

    /// What a listener of this kind has accepted after this time.
    #[must_use]
    pub const fn accepted(kind: Kind, stream: TcpStream, time: Duration) -> Self {
        Self { kind, stream, time }
    }

    /// The client's part: sends random bytes of each of `sizes` and compares the server's.
    ///
    /// # Errors
    /// A time-out, an early end, or foreign bytes.
    pub fn ask(&self, sizes: &[usize]) -> Result<(), Failure> {
        let stream = &self.stream;
        let ask = || {
            for (round, &size) in sizes.iter().enumerate() {
                send(stream, payload(0, round, size)).at("client sends")?;
                expect(stream, &payload(1, round, size)).at("client receives")?;
            }
            Ok(())
        };
        // An end that fails closes, or the other would wait for its time limit.
        ask().inspect_err(|_| abandon(stream))
    }

    /// The server's part.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn answer(&self, sizes: &[usize]) -> Result<(), Failure> {
        let stream = &self.stream;
        let answer = || {
            for (round, &size) in sizes.iter().enumerate() {
                expect(stream, &payload(0, round, size)).at("server receives")?;
                send(stream, payload(1, round, size)).at("server sends")?;
            }
            Ok(())
        };
        answer().inspect_err(|_| abandon(stream))
    }

    /// Asks the kernel about it. The calling thread must be in the socket's network namespace.
    ///
    /// # Errors
    /// When `SMC_DIAG` does not answer, or does not show it as established.
    pub fn judge(&self) -> Result<End, Failure> {
        end(self.kind, &self.stream).at("its SMC_DIAG record")
    }

    /// Sends no more: the client is the first to do so.
    ///
    /// # Errors
    /// What shutdown(2) says.
    pub fn finish(&self) -> Result<(), Failure> {
        self.stream.shutdown(Shutdown::Write).at("shutdown")
    }

    /// Closes when the other end sends no more; must see the end of the stream and not a byte more.
    ///
    /// # Errors
    /// More bytes, or no end.
    pub fn close(self) -> Result<(), Failure> {
        nothing_more(&self.stream).at("close")
    }
}

fn abandon(stream: &TcpStream) {
    // It may be closed already, which is as good.
    let _ = stream.shutdown(Shutdown::Both);
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

fn nothing_more(mut stream: &TcpStream) -> io::Result<()> {
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest)?;
    if rest.is_empty() {
        Ok(())
    } else {
        Err(io::Error::other(format!("{} bytes after the last: {rest:02x?}", rest.len())))
    }
}

fn end(kind: Kind, stream: &TcpStream) -> io::Result<End> {
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

/// The address with IPv4 as IPv4.
pub(crate) const fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}
