//! Real connections: opened with any kind of socket, used both ways with verified content, judged by what the kernel
//! says about both ends.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::half::{At, canonical};
pub use crate::half::{End, Failure, Half, Transport};
use crate::{Need, sys};

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

    /// Whether this kernel has such sockets: `IPPROTO_SMC` came with Linux 6.11.
    #[must_use]
    pub fn is_there(self) -> bool {
        !matches!(self, Self::IpprotoSmc | Self::IpprotoSmc6) || Need::IpprotoSmc.is_met()
    }

    /// Those of [`Self::SMC_V4`] that this kernel has.
    #[must_use]
    pub fn smc_v4() -> Vec<Self> {
        Self::SMC_V4.into_iter().filter(|kind| kind.is_there()).collect()
    }

    /// Those of [`Self::SMC_V6`] that this kernel has.
    #[must_use]
    pub fn smc_v6() -> Vec<Self> {
        Self::SMC_V6.into_iter().filter(|kind| kind.is_there()).collect()
    }

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
    pub(crate) fn spelled(self, address: SocketAddr) -> SocketAddr {
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
    /// Listens on `address`; port 0 lets the kernel choose one that no other listener of this process had: what the kernel
    /// calls free may be in use at another address, and a rule about that one's port would mean this one too.
    ///
    /// # Panics
    /// When that is not possible.
    #[must_use]
    pub fn bind(kind: Kind, address: SocketAddr) -> Self {
        Self::try_bind(kind, address)
            .unwrap_or_else(|error| panic!("listen on {address} ({kind:?}): {error}"))
    }

    fn try_bind(kind: Kind, address: SocketAddr) -> io::Result<Self> {
        static CHOSEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
        if address.port() != 0 {
            return Self::bind_once(kind, address);
        }
        // A port that was had before stays taken until another one is found.
        let mut had_before = Vec::new();
        loop {
            let listener = Self::bind_once(kind, address)?;
            if CHOSEN.lock().unwrap_or_else(PoisonError::into_inner).insert(listener.port()) {
                return Ok(listener);
            }
            had_before.push(listener);
        }
    }

    fn bind_once(kind: Kind, address: SocketAddr) -> io::Result<Self> {
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
    ///
    /// # Errors
    /// What accept(2) says, or that none came in time.
    pub fn accept(&self, give_up: &AtomicBool) -> Result<Half, Failure> {
        let begin = Instant::now();
        let accept = || {
            while !give_up.load(Ordering::Acquire) && begin.elapsed() < LIMIT {
                if sys::is_readable(&self.socket, Duration::from_millis(20))? {
                    let (stream, _) = self.socket.accept()?;
                    sys::set_time_limits(&stream, LIMIT)?;
                    return Ok(Half::accepted(self.kind, stream, begin.elapsed()));
                }
            }
            Err(io::ErrorKind::TimedOut.into())
        };
        accept().at("accept")
    }
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
        [self.client, self.server].iter().all(|end| end.transport.is_smc())
    }

    /// Whether both ends saw the SMC option: SMC, or a fallback because they have no device for it in common.
    #[must_use]
    pub fn is_negotiated(&self) -> bool {
        [self.client, self.server].iter().all(|end| end.transport.is_negotiated())
    }

    /// Whether both ends fell back because the option was not there: what a deny looks like.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        [self.client, self.server].iter().all(|end| end.transport.is_denied())
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
    client: Half,
    server: Half,
}

impl Pair {
    /// Connects with a `kind` socket from `local` (`None`: the kernel chooses) to the listener.
    ///
    /// # Errors
    /// What connect(2) or accept(2) say.
    pub fn open(kind: Kind, local: Option<IpAddr>, listener: &Listener) -> Result<Self, Failure> {
        Self::open_by(|| Half::connect(kind, local, listener.address()), listener)
    }

    /// A connection that `connect` makes to the listener, for instance from another network namespace.
    ///
    /// # Errors
    /// As [`Self::open`].
    ///
    /// # Panics
    /// As `connect` does.
    pub fn open_by(
        connect: impl FnOnce() -> Result<Half, Failure>,
        listener: &Listener,
    ) -> Result<Self, Failure> {
        let give_up = AtomicBool::new(false);
        let (client, server) = thread::scope(|scope| {
            let server = scope.spawn(|| listener.accept(&give_up));
            let client = connect();
            give_up.store(client.is_err(), Ordering::Release);
            (client, server.join().expect("the accepting thread"))
        });
        Ok(Self { client: client?, server: server? })
    }

    /// Sends random bytes of each of `sizes` both ways and compares them.
    ///
    /// # Errors
    /// A time-out, an early end, or foreign bytes.
    pub fn exchange(&self, sizes: &[usize]) -> Result<(), Failure> {
        thread::scope(|scope| {
            let server = scope.spawn(|| self.server.answer(sizes));
            let client = self.client.ask(sizes);
            match (client, server.join().expect("the server's thread")) {
                (Ok(()), server) => server,
                (Err(failure), server) => Err(Failure { other_end: server.err().map(Box::new), ..failure }),
            }
        })
    }

    /// Asks the kernel about both ends, which are in the calling thread's network namespace.
    ///
    /// # Errors
    /// As [`Half::judge`].
    pub fn judge(&self) -> Result<Outcome, Failure> {
        self.judge_by(Half::judge, Half::judge)
    }

    /// Asks the kernel about both ends, each where it is.
    ///
    /// # Errors
    /// As [`Half::judge`].
    pub fn judge_by(
        &self,
        client: impl FnOnce(&Half) -> Result<End, Failure>,
        server: impl FnOnce(&Half) -> Result<End, Failure>,
    ) -> Result<Outcome, Failure> {
        Ok(Outcome {
            client: client(&self.client)?,
            server: server(&self.server)?,
            connect_time: self.client.time,
        })
    }

    /// Closes, client first; each end must see the end of the stream and not a byte more. One after the other: SMC-D of
    /// Linux 7.3.4 has missed an end that came while the other side was just beginning to wait for it, once in a
    /// thousand connections.
    ///
    /// # Errors
    /// More bytes, or no end.
    pub fn close(self) -> Result<(), Failure> {
        self.client.finish()?;
        self.server.close()?;
        self.client.close()
    }
}
