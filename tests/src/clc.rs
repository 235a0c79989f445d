//! What makes a client wait for the server's CLC accept: a device for SMC.

use std::net::{IpAddr, SocketAddr};

use crate::echo_peer::{ADDRESSES, Behaviour, EchoPeer, Style};
use crate::half::Transport;
use crate::{Half, Kind, Need, command, eventually};

/// "No device for SMC" (SMC_CLC_DECL_NOSMCDEV, net/smc/smc_clc.h).
const NO_DEVICE: u32 = 0x0303_0000;

/// Sees to it that connections to the peer behind `device`, of the calling thread's network namespace, are negotiated to the
/// end, as far as this kernel can. With which sockets it can, and the peer's address.
///
/// Without a device that it could use a client sends a decline, and does not wait for what it gets.
///
/// # Panics
/// When SMC does not take the device.
#[must_use]
pub fn device(device: &str, peer: &EchoPeer) -> Vec<(Kind, IpAddr)> {
    let [v4, v6] = ADDRESSES.map(|(_, ip)| ip.parse::<IpAddr>().expect("an address"));
    let ways = |kinds: Vec<Kind>, ip: IpAddr| kinds.into_iter().map(move |kind| (kind, ip));
    if Need::SmcD.is_met() {
        return ways(Kind::smc_v4(), v4).chain(ways(Kind::smc_v6(), v6)).collect();
    }
    // Names of RDMA devices are those of all namespaces.
    let name = format!("rxe-{device}");
    if command::run("rdma", &["link", "add", &name, "type", "rxe", "netdev", device]).is_err() {
        return Vec::new();
    }
    // SMC hears of a new device by and by. (SMC-R v2 is for IPv4, and v1 takes a GID that software devices do not have.)
    peer.set(Style::SmcOnly, Behaviour::Decline);
    eventually("SMC takes the device", || {
        let half = Half::connect(Kind::AfSmc, None, SocketAddr::new(v4, 443)).expect("a connection");
        !matches!(half.judge().expect("its record").transport, Transport::Fallback(NO_DEVICE, _))
    });
    // Nor is it for IPv4 by a socket of AF_INET6.
    ways(Kind::smc_v4(), v4).filter(|(kind, _)| !kind.is_v6()).collect()
}
