//! Addresses that `SMC_DIAG` leaves out, found by joining with the kernel's list of TCP sockets. Pure.
//!
//! The kernel fills addresses for `AF_SMC` sockets only; `IPPROTO_SMC` sockets are dumped with their ports and zero
//! addresses (`smc_diag_msg_common_fill`, net/smc/smc_diag.c). The TCP socket under an SMC socket has an inode and a
//! cookie of its own, so that the ports are all there is to join by. Where they fit more than one TCP socket, the
//! addresses stay unknown: a wrong address would be worse than none.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

use super::parse::{Family, SmcSocket, TcpSocket};

type Ports = (u16, u16);

/// Whether `tcp` lists are needed at all: some socket has a port and no address.
#[must_use]
pub fn is_needed(sockets: &[SmcSocket]) -> bool {
    sockets.iter().any(lacks_address)
}

/// Fills `local` and `peer` of the sockets that lack them, where the ports leave no doubt.
pub fn fill_addresses(sockets: &mut [SmcSocket], tcp: &[TcpSocket]) {
    // TCP sockets that belong to an SMC socket with known addresses are no candidates for the others.
    let taken: HashSet<(SocketAddr, SocketAddr)> =
        sockets.iter().filter_map(|socket| Some((socket.local?, socket.peer?))).collect();
    let mut by_ports: HashMap<Ports, Vec<&TcpSocket>> = HashMap::new();
    for one in tcp.iter().filter(|one| !taken.contains(&(one.local, one.peer))) {
        by_ports.entry((one.local.port(), one.peer.port())).or_default().push(one);
    }
    for socket in sockets.iter_mut().filter(|socket| lacks_address(socket)) {
        let ports = (socket.local_port, socket.peer_port);
        let mut fitting = by_ports.get(&ports).into_iter().flatten().filter(|one| can_carry(one, socket));
        if let (Some(one), None) = (fitting.next(), fitting.next()) {
            socket.local = Some(one.local);
            socket.peer = (socket.peer_port != 0).then_some(one.peer);
        }
    }
}

const fn lacks_address(socket: &SmcSocket) -> bool {
    socket.local_port != 0 && socket.local.is_none()
}

fn can_carry(tcp: &TcpSocket, socket: &SmcSocket) -> bool {
    match socket.family {
        Family::Inet => !tcp.v6,
        Family::Inet6 => tcp.v6,
        // Connected: accepted by an IPPROTO_SMC listener, whichever IP version (`smc_clcsock_accept` gives every accepted
        // socket the family AF_SMC). Not connected: bound to the wildcard address, for its own would be filled.
        Family::Smc => socket.peer_port != 0 || tcp.local.ip().is_unspecified(),
        Family::Other(_) => true,
    }
}

#[cfg(test)]
#[cfg(target_endian = "little")]
mod tests {
    use super::*;
    use crate::smc::parse::fixture;

    fn at(text: &str) -> Option<SocketAddr> {
        Some(text.parse().unwrap())
    }

    fn ends(socket: &SmcSocket) -> (Option<SocketAddr>, Option<SocketAddr>) {
        (socket.local, socket.peer)
    }

    #[test]
    fn captured_sockets_get_their_addresses() {
        let mut sockets = fixture::smc();
        let before = sockets.clone();
        assert!(is_needed(&sockets));
        fill_addresses(&mut sockets, &fixture::tcp());
        assert_eq!(ends(&sockets[1]), (at("127.0.0.2:7001"), at("127.0.0.1:40270")));
        assert_eq!(ends(&sockets[2]), (at("127.0.0.1:40270"), at("127.0.0.2:7001")));
        assert_eq!(ends(&sockets[3]), (at("127.0.0.2:7001"), None));
        assert!(!is_needed(&sockets));
        for index in [0, 4, 5, 6] {
            assert_eq!(sockets[index], before[index], "filled by the kernel");
        }
    }

    #[test]
    fn two_candidates_are_none() {
        let mut sockets = fixture::smc();
        let mut tcp = fixture::tcp();
        let twin = |one: &TcpSocket| TcpSocket {
            local: SocketAddr::new("127.0.0.8".parse().unwrap(), one.local.port()),
            ..*one
        };
        tcp.extend(tcp.clone().iter().map(twin));
        fill_addresses(&mut sockets, &tcp);
        for socket in &sockets[1..=3] {
            assert_eq!(ends(socket), (None, None));
        }
    }

    #[test]
    fn a_candidate_of_a_known_socket_is_out() {
        let mut sockets = fixture::smc();
        let mut tcp = fixture::tcp();
        // The client's ports twice, but one of the two is another SMC socket's.
        let other = TcpSocket {
            v6: false,
            local: at("127.0.0.7:40270").unwrap(),
            peer: at("127.0.0.2:7001").unwrap(),
        };
        tcp.push(other);
        let mut known = sockets[0];
        (known.local, known.peer) = (Some(other.local), Some(other.peer));
        sockets.push(known);
        fill_addresses(&mut sockets, &tcp);
        assert_eq!(ends(&sockets[2]), (at("127.0.0.1:40270"), at("127.0.0.2:7001")));
    }

    #[test]
    fn the_ip_version_must_fit() {
        let mut sockets = fixture::smc();
        let mut tcp = fixture::tcp();
        for one in &mut tcp {
            one.v6 = true;
        }
        fill_addresses(&mut sockets, &tcp);
        assert_eq!(ends(&sockets[2]), (None, None), "an AF_INET socket is carried by no AF_INET6 one");
        assert_eq!(ends(&sockets[1]).0, at("127.0.0.2:7001"), "an accepted one may be");
    }

    #[test]
    fn an_unbound_socket_stays_unknown() {
        let mut socket = fixture::smc()[3];
        (socket.local_port, socket.peer_port) = (0, 0);
        assert!(!is_needed(&[socket]));
        let mut sockets = [socket];
        fill_addresses(&mut sockets, &fixture::tcp());
        assert_eq!(ends(&sockets[0]), (None, None));
    }
}
