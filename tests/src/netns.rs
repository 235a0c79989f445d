//! A network namespace that belongs to one test.

use std::net::IpAddr;
use std::panic::resume_unwind;
use std::thread;
use std::time::Duration;

use smc_policy::netlink::message::{AnswerError, FLAG_ACK, FLAG_CREATE, push_attribute};
use smc_policy::netlink::socket::{NetlinkSocket, Protocol, RequestError};

use crate::sys;

/// Loopback is the first interface of every namespace.
const LO: u32 = 1;
const LIMIT: Duration = Duration::from_secs(5);

/// Runs `body` in a new network namespace whose loopback interface is up and holds `addresses` besides 127.0.0.0/8 and
/// ::1. Threads and programs that `body` starts are in it too.
///
/// # Panics
/// As `body` does, and when the namespace cannot be made.
pub fn in_new_namespace<T: Send>(addresses: &[IpAddr], body: impl FnOnce() -> T + Send) -> T {
    // A thread of its own: the test runner's threads must keep their namespace.
    let result = thread::scope(|scope| {
        scope
            .spawn(|| {
                sys::unshare_network().expect("a new network namespace");
                set_loopback_up().expect("loopback up");
                for address in addresses {
                    add_loopback_address(*address).expect("an address for loopback");
                }
                body()
            })
            .join()
    });
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Whether such a namespace can be made here.
#[must_use]
pub fn is_possible() -> bool {
    thread::spawn(sys::unshare_network).join().is_ok_and(|result| result.is_ok())
}

/// Sets the loopback interface of the calling thread's namespace up.
///
/// # Errors
/// The kernel's refusal.
pub fn set_loopback_up() -> Result<(), RequestError> {
    const NEW_LINK: u16 = 16;
    const UP: u32 = 1;
    // struct ifinfomsg: family, pad, type u16, index i32, flags u32, change u32 (linux/rtnetlink.h).
    let mut message = vec![0; 4];
    message.extend(LO.to_ne_bytes());
    message.extend(UP.to_ne_bytes());
    message.extend(UP.to_ne_bytes());
    route_request(NEW_LINK, FLAG_ACK, &message)
}

/// Adds `address` to the loopback interface of the calling thread's namespace; one that is there already is fine.
///
/// # Errors
/// The kernel's refusal.
pub fn add_loopback_address(address: IpAddr) -> Result<(), RequestError> {
    const NEW_ADDRESS: u16 = 20;
    const NO_DUPLICATE_DETECTION: u8 = 2;
    const IFA_ADDRESS: u16 = 1;
    const IFA_LOCAL: u16 = 2;
    let (family, bits, bytes) = match address {
        IpAddr::V4(v4) => (libc::AF_INET, 32, v4.octets().to_vec()),
        IpAddr::V6(v6) => (libc::AF_INET6, 128, v6.octets().to_vec()),
    };
    // struct ifaddrmsg: family, prefix length, flags, scope, index u32 (linux/if_addr.h).
    let mut message = vec![family as u8, bits, NO_DUPLICATE_DETECTION, 0];
    message.extend(LO.to_ne_bytes());
    push_attribute(&mut message, IFA_LOCAL, &bytes);
    push_attribute(&mut message, IFA_ADDRESS, &bytes);
    route_request(NEW_ADDRESS, FLAG_ACK | FLAG_CREATE, &message)
}

fn route_request(kind: u16, flags: u16, message: &[u8]) -> Result<(), RequestError> {
    let mut socket = NetlinkSocket::open(Protocol::Route, LIMIT)?;
    match socket.request(kind, flags, message, kind, |_| Ok(())) {
        Err(RequestError::Answer(AnswerError::Refused(error)))
            if error.raw_os_error() == Some(libc::EEXIST) =>
        {
            Ok(())
        }
        other => other,
    }
}
