//! Socket records of `SMC_DIAG` and `inet_diag`. Pure, no system calls.
//!
//! Layouts: `struct smc_diag_msg`, `struct smc_diag_fallback` in `linux/smc_diag.h` and `struct inet_diag_sockid`,
//! `struct inet_diag_msg` in `linux/inet_diag.h` (uapi). Ports and addresses are in network byte order, everything else
//! in the host's.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::netlink::message::{self, Malformed, array_at, u32_at};

/// The address family of SMC sockets (`AF_SMC`).
pub const AF_SMC: u8 = 43;

// struct inet_diag_sockid inside both messages: sport, dport, src[4], dst[4], if, cookie[2].
const SPORT: usize = 4;
const DPORT: usize = 6;
const SRC: usize = 8;
const DST: usize = 24;
const COOKIE: usize = 44;
// struct smc_diag_msg after the sockid.
const SMC_UID: usize = 52;
const SMC_INODE: usize = 56;
const SMC_LENGTH: usize = 64;

/// Which kind of socket the kernel says it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// `socket(AF_SMC, ...)`, IPv4 or IPv6; also every accepted socket, of whichever family its listener is.
    Smc,
    /// `socket(AF_INET, SOCK_STREAM, IPPROTO_SMC)`.
    Inet,
    /// `socket(AF_INET6, SOCK_STREAM, IPPROTO_SMC)`.
    Inet6,
    /// A family this version does not know.
    Other(u8),
}

impl From<u8> for Family {
    fn from(number: u8) -> Self {
        match libc::c_int::from(number) {
            libc::AF_INET => Self::Inet,
            libc::AF_INET6 => Self::Inet6,
            _ if number == AF_SMC => Self::Smc,
            _ => Self::Other(number),
        }
    }
}

/// State of an SMC socket (`enum smc_state`, net/smc/smc.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Data can flow.
    Active,
    /// Not connected yet.
    Init,
    /// Gone, or about to be.
    Closed,
    /// Waits for connections.
    Listen,
    /// One of the states between active and closed, by the kernel's number.
    Closing(u8),
    /// A number this version does not know.
    Other(u8),
}

impl From<u8> for State {
    fn from(number: u8) -> Self {
        match number {
            1 => Self::Active,
            2 => Self::Init,
            7 => Self::Closed,
            10 => Self::Listen,
            20..=27 => Self::Closing(number),
            _ => Self::Other(number),
        }
    }
}

/// What carries a socket's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mode {
    /// RDMA. **Also what the kernel says for every socket without a link group**: listening, not yet connected, or
    /// closing (`__smc_diag_dump`, net/smc/smc_diag.c); see [`SmcSocket::carried_by`].
    SmcR,
    /// Plain TCP under an SMC socket.
    FallbackTcp,
    /// Shared memory.
    SmcD,
    /// A number this version does not know.
    Other(u8),
}

impl From<u8> for Mode {
    fn from(number: u8) -> Self {
        match number {
            0 => Self::SmcR,
            1 => Self::FallbackTcp,
            2 => Self::SmcD,
            _ => Self::Other(number),
        }
    }
}

/// Why a socket does not use SMC; both codes are explained by [`super::reasons::lookup`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fallback {
    /// This host's reason; 0 when there is none.
    pub reason: u32,
    /// What the peer said in its decline message; 0 when there was none.
    pub peer_diagnosis: u32,
}

/// One socket as `SMC_DIAG` shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SmcSocket {
    /// Which kind of socket the application opened.
    pub family: Family,
    /// State of the SMC socket.
    pub state: State,
    /// What the kernel says carries the data.
    pub mode: Mode,
    /// Local address. IPv4 carried by an IPv6 socket is shown as IPv4. `None`: unbound, or the kernel does not tell and
    /// [`super::join`] found no single TCP socket it could be.
    pub local: Option<SocketAddr>,
    /// Peer's address, in the same way; `None` also when not connected.
    pub peer: Option<SocketAddr>,
    /// Local port, also where the address is not known; 0 when unbound.
    pub local_port: u16,
    /// Peer's port, also where the address is not known; 0 when not connected.
    pub peer_port: u16,
    /// The owner, in the reader's user namespace.
    pub uid: u32,
    /// Inode of the socket as in `/proc/PID/fd`; 0 while no process has it (not accepted yet, or closed).
    pub inode: u64,
    /// The kernel's number for this socket: unique while the machine runs.
    pub cookie: u64,
    /// Fallback reason; kernels before 5.0 do not tell.
    pub fallback: Option<Fallback>,
    /// `RCV_SHUTDOWN` (1) and `SEND_SHUTDOWN` (2) bits; 0 when the kernel does not tell.
    pub shutdown: u8,
}

impl SmcSocket {
    /// What carries the data of an established connection; `None` for sockets that are none (any more), for which the
    /// kernel's own mode says SMC-R.
    #[must_use]
    pub fn carried_by(&self) -> Option<Mode> {
        (self.state == State::Active && self.peer_port != 0).then_some(self.mode)
    }
}

/// One socket as `inet_diag` shows it: just what is needed to find the TCP socket under an SMC socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TcpSocket {
    /// Whether it is an `AF_INET6` socket, which may carry IPv4.
    pub v6: bool,
    /// Local address; IPv4 carried by an IPv6 socket is shown as IPv4.
    pub local: SocketAddr,
    /// Peer's address; unspecified and port 0 when listening.
    pub peer: SocketAddr,
}

/// Reads the payload of one `SMC_DIAG` message.
///
/// # Errors
/// When the bytes are too few or their attributes are malformed.
pub fn smc_socket(payload: &[u8]) -> Result<SmcSocket, Malformed> {
    const WHAT: &str = "SMC socket record";
    let [family, state, mode, shutdown] = array_at(payload, 0, WHAT)?;
    let family = Family::from(family);
    let (local_port, peer_port) = (port_at(payload, SPORT)?, port_at(payload, DPORT)?);
    let (src, dst): ([u8; 16], [u8; 16]) = (array_at(payload, SRC, WHAT)?, array_at(payload, DST, WHAT)?);
    // Neither end says which of the two IP versions an AF_SMC socket has. An IPv4 one uses the first word only; an IPv6
    // address with nothing behind its first 32 bits is no host's.
    let v4 = match family {
        Family::Inet => true,
        Family::Inet6 => false,
        Family::Smc | Family::Other(_) => src[4..] == [0; 12] && dst[4..] == [0; 12],
    };
    // All zero: an unbound or wildcard socket, or one that the kernel does not fill (IPPROTO_SMC).
    let filled = src != [0; 16] || dst != [0; 16];
    let known =
        |bytes: [u8; 16], port: u16| (filled && port != 0).then(|| SocketAddr::new(address(bytes, v4), port));
    let mut socket = SmcSocket {
        family,
        state: State::from(state),
        mode: Mode::from(mode),
        local: known(src, local_port),
        peer: known(dst, peer_port),
        local_port,
        peer_port,
        uid: u32_at(payload, SMC_UID, WHAT)?,
        inode: array_at(payload, SMC_INODE, WHAT).map(u64::from_ne_bytes)?,
        cookie: cookie_at(payload)?,
        fallback: None,
        shutdown,
    };
    for attribute in message::attributes(payload.get(SMC_LENGTH..).unwrap_or_default()) {
        // enum in linux/smc_diag.h: SMC_DIAG_SHUTDOWN 3, SMC_DIAG_FALLBACK 5.
        match attribute? {
            (3, value) => [socket.shutdown] = array_at(value, 0, "shutdown attribute")?,
            (5, value) => {
                socket.fallback = Some(Fallback {
                    reason: u32_at(value, 0, "fallback attribute")?,
                    peer_diagnosis: u32_at(value, 4, "fallback attribute")?,
                });
            }
            _ => {}
        }
    }
    Ok(socket)
}

/// Reads the payload of one `inet_diag` message of a TCP dump.
///
/// # Errors
/// When the bytes are too few.
pub fn tcp_socket(payload: &[u8]) -> Result<TcpSocket, Malformed> {
    const WHAT: &str = "TCP socket record";
    let [family] = array_at(payload, 0, WHAT)?;
    let v6 = Family::from(family) == Family::Inet6;
    let end = |bytes, port| SocketAddr::new(address(bytes, !v6), port);
    Ok(TcpSocket {
        v6,
        local: end(array_at(payload, SRC, WHAT)?, port_at(payload, SPORT)?),
        peer: end(array_at(payload, DST, WHAT)?, port_at(payload, DPORT)?),
    })
}

fn address(bytes: [u8; 16], v4: bool) -> IpAddr {
    if v4 {
        let [a, b, c, d, ..] = bytes;
        IpAddr::V4(Ipv4Addr::new(a, b, c, d))
    } else {
        Ipv6Addr::from(bytes).to_canonical()
    }
}

fn port_at(payload: &[u8], offset: usize) -> Result<u16, Malformed> {
    array_at(payload, offset, "port").map(u16::from_be_bytes)
}

/// Two words, the low one first (`sock_diag_save_cookie`, net/core/sock_diag.c).
fn cookie_at(payload: &[u8]) -> Result<u64, Malformed> {
    let low = u32_at(payload, COOKIE, "cookie")?;
    let high = u32_at(payload, COOKIE + 4, "cookie")?;
    Ok(u64::from(high) << 32 | u64::from(low))
}

/// Records captured from a real kernel, for the tests here and of [`super::join`].
#[cfg(test)]
pub(super) mod fixture {
    use super::{SmcSocket, TcpSocket, smc_socket, tcp_socket};

    // The kernel answers in its own byte order.
    const CAPTURED: &str = include_str!("fixtures/sockets-7.3.4.txt");

    pub(in crate::smc) fn payloads(of: &str) -> Vec<Vec<u8>> {
        let lines = CAPTURED.lines().filter_map(|line| line.strip_prefix(of)?.strip_prefix(' '));
        lines.map(bytes).collect()
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digit = |byte: &u8| char::from(*byte).to_digit(16).unwrap() as u8;
        hex.as_bytes().chunks(2).map(|pair| digit(&pair[0]) << 4 | digit(&pair[1])).collect()
    }

    pub(in crate::smc) fn smc() -> Vec<SmcSocket> {
        payloads("SMC").iter().map(|payload| smc_socket(payload).unwrap()).collect()
    }

    pub(in crate::smc) fn tcp() -> Vec<TcpSocket> {
        payloads("TCP").iter().map(|payload| tcp_socket(payload).unwrap()).collect()
    }
}

#[cfg(test)]
#[cfg(target_endian = "little")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(text: &str) -> Option<SocketAddr> {
        Some(text.parse().unwrap())
    }

    #[test]
    fn a_fallback_client_of_af_smc() {
        let expected = SmcSocket {
            family: Family::Smc,
            state: State::Active,
            mode: Mode::FallbackTcp,
            local: at("127.0.0.1:33512"),
            peer: at("127.0.0.3:7003"),
            local_port: 33512,
            peer_port: 7003,
            uid: 0,
            inode: 1178,
            cookie: 1,
            fallback: Some(Fallback { reason: 0x0301_0000, peer_diagnosis: 0 }),
            shutdown: 0,
        };
        assert_eq!(fixture::smc()[0], expected);
        assert_eq!(expected.carried_by(), Some(Mode::FallbackTcp));
    }

    #[test]
    fn ipproto_smc_has_ports_only() {
        let sockets = fixture::smc();
        let [accepted, client, listener] = [sockets[1], sockets[2], sockets[3]];
        for (socket, family, ports) in [
            (accepted, Family::Smc, (7001, 40270)),
            (client, Family::Inet, (40270, 7001)),
            (listener, Family::Inet, (7001, 0)),
        ] {
            assert_eq!((socket.local, socket.peer), (None, None));
            assert_eq!((socket.family, (socket.local_port, socket.peer_port)), (family, ports));
        }
        assert_eq!(client.carried_by(), Some(Mode::SmcD));
        // The kernel says SMC-R for what is no connection.
        assert_eq!((listener.state, listener.mode, listener.carried_by()), (State::Listen, Mode::SmcR, None));
        assert_eq!(accepted.inode, 0, "no process has fetched it");
    }

    #[test]
    fn ipv6_of_af_smc() {
        let sockets = fixture::smc();
        assert_eq!((sockets[5].local, sockets[5].peer), (at("[fd00:5::2]:51936"), at("[fd00:5::2]:7002")));
        assert_eq!((sockets[6].local, sockets[6].peer), (at("[fd00:5::2]:7002"), None));
    }

    #[test]
    fn ipv4_on_an_ipv6_socket_is_ipv4() {
        let mut payload = fixture::payloads("SMC")[5].clone();
        let mapped = |last| Ipv4Addr::new(10, 0, 0, last).to_ipv6_mapped().octets();
        payload[SRC..DST].copy_from_slice(&mapped(1));
        payload[DST..DST + 16].copy_from_slice(&mapped(2));
        let socket = smc_socket(&payload).unwrap();
        assert_eq!((socket.local, socket.peer), (at("10.0.0.1:51936"), at("10.0.0.2:7002")));
    }

    #[test]
    fn tcp_sockets() {
        let sockets = fixture::tcp();
        assert_eq!(sockets.len(), 9);
        let listener = TcpSocket {
            v6: false,
            local: "127.0.0.3:7003".parse().unwrap(),
            peer: "0.0.0.0:0".parse().unwrap(),
        };
        assert_eq!(sockets[0], listener);
        assert!(sockets[8].v6);
        assert_eq!(sockets[8].peer, "[fd00:5::2]:51936".parse().unwrap());
    }

    #[test]
    fn numbers_of_states_modes_and_shutdown() {
        let mut payload = fixture::payloads("SMC")[0].clone();
        payload[1] = 21;
        payload[2] = 9;
        payload[SMC_LENGTH + 4] = 3;
        let socket = smc_socket(&payload).unwrap();
        assert_eq!((socket.state, socket.mode, socket.shutdown), (State::Closing(21), Mode::Other(9), 3));
        assert_eq!(State::from(28), State::Other(28));
        assert_eq!(Family::from(1), Family::Other(1));
    }

    #[test]
    fn every_cut_is_refused_or_lacks_attributes() {
        let payload = &fixture::payloads("SMC")[0];
        for length in 0..payload.len() {
            match smc_socket(&payload[..length]) {
                Ok(socket) => assert!(length >= SMC_LENGTH && socket.fallback.is_none(), "{length}"),
                Err(Malformed::Short { .. }) => {}
                Err(error) => panic!("{length}: {error}"),
            }
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..140)) {
            let _ = smc_socket(&bytes);
            let _ = tcp_socket(&bytes);
        }

        #[test]
        fn a_changed_byte_never_panics(which in 0..7_usize, at in 0..84_usize, to in any::<u8>()) {
            let mut payload = fixture::payloads("SMC").swap_remove(which);
            payload[at] = to;
            let _ = smc_socket(&payload);
        }
    }
}
