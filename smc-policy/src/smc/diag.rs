//! The SMC sockets of this network namespace, from the kernel's `SMC_DIAG`. Needs no privilege.
//!
//! Only dumps exist, the kernel filters nothing, and it answers for the calling thread's namespace. Only the fallback
//! extension is asked for: the kernel's answers about buffers and connections of SMC-D sockets have crashed kernels.
//! Like `ss` and `smcss`, a dump may make the kernel load `smc_diag` when `smc` is loaded already; it never loads `smc`.

use std::collections::HashSet;
use std::io;
use std::time::Duration;

use crate::netlink::message::{AnswerError, FLAG_DUMP, Malformed};
use crate::netlink::socket::{NetlinkSocket, Protocol, RequestError};

use super::join;
use super::parse::{self, AF_SMC, SmcSocket, TcpSocket};

pub use super::parse::{Fallback, Family, Mode, State};

/// `SOCK_DIAG_BY_FAMILY` (linux/sock_diag.h).
const BY_FAMILY: u16 = 20;
/// `1 << (SMC_DIAG_FALLBACK - 1)`. Kernels so far send that attribute always; the bit is asked for all the same.
const EXTENSION_FALLBACK: u8 = 1 << 4;
/// `struct inet_diag_sockid`.
const SOCKID: usize = 48;
/// Two dumps of 100,000 sockets take well under a second.
const LIMIT: Duration = Duration::from_secs(5);

/// Why the list of sockets could not be read.
#[derive(Debug, thiserror::Error)]
pub enum DiagError {
    /// The kernel has no handler for `AF_SMC`: `smc_diag` is neither loaded nor built in.
    #[error(
        "the kernel does not list SMC sockets: load the module with `modprobe smc_diag` (part of the kernel's SMC support)"
    )]
    NoSmcDiag,
    /// The kernel has no handler for TCP sockets.
    #[error(
        "the kernel does not list TCP sockets, which hold the addresses of SMC sockets: load the module with `modprobe tcp_diag`"
    )]
    NoTcpDiag,
    /// A security module or seccomp filter forbids it; the kernel itself asks for no privilege.
    #[error(
        "reading the list of SMC sockets is not permitted here ({0}): a seccomp filter or security module forbids netlink sockets (NETLINK_SOCK_DIAG)"
    )]
    NotPermitted(#[source] io::Error),
    /// No answer within five seconds.
    #[error("the kernel did not send the list of SMC sockets within 5 s: try again")]
    TimedOut,
    /// The socket could not be used.
    #[error("cannot read the list of SMC sockets: {0}")]
    Io(#[source] io::Error),
    /// The answer is no valid list.
    #[error(
        "the kernel's list of SMC sockets cannot be read ({0}): please report this with the kernel version"
    )]
    Malformed(#[source] Malformed),
}

/// All SMC sockets of this network namespace, with their addresses wherever the kernel tells them one way or another.
///
/// Sockets that appear or go while the kernel lists them may be missing; none is listed twice.
///
/// # Errors
/// See [`DiagError`].
pub fn sockets() -> Result<Vec<SmcSocket>, DiagError> {
    let mut sockets = sockets_as_dumped()?;
    if join::is_needed(&sockets) {
        join::fill_addresses(&mut sockets, &tcp_sockets()?);
    }
    Ok(sockets)
}

/// As [`sockets`], but with only the addresses that `SMC_DIAG` itself fills: cheaper on hosts with many TCP sockets when
/// addresses are not needed.
///
/// # Errors
/// See [`DiagError`].
pub fn sockets_as_dumped() -> Result<Vec<SmcSocket>, DiagError> {
    let mut sockets = Vec::new();
    dump(&smc_request(), DiagError::NoSmcDiag, |payload| {
        sockets.push(parse::smc_socket(payload)?);
        Ok(())
    })?;
    // The kernel resumes a long dump by position: a new socket meanwhile shows an old one again.
    let mut seen = HashSet::new();
    sockets.retain(|socket| seen.insert(socket.cookie));
    Ok(sockets)
}

fn tcp_sockets() -> Result<Vec<TcpSocket>, DiagError> {
    let mut sockets = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        dump(&tcp_request(family as u8), DiagError::NoTcpDiag, |payload| {
            sockets.push(parse::tcp_socket(payload)?);
            Ok(())
        })?;
    }
    Ok(sockets)
}

/// `struct smc_diag_req`.
fn smc_request() -> Vec<u8> {
    let mut request = vec![AF_SMC, 0, 0, EXTENSION_FALLBACK];
    request.resize(4 + SOCKID, 0);
    request
}

/// `struct inet_diag_req_v2`, for every state but `TIME_WAIT`: such a socket has left its SMC socket.
fn tcp_request(family: u8) -> Vec<u8> {
    const TIME_WAIT: u32 = 1 << 6;
    let mut request = vec![family, libc::IPPROTO_TCP as u8, 0, 0];
    request.extend((!TIME_WAIT).to_ne_bytes());
    request.resize(8 + SOCKID, 0);
    request
}

fn dump(
    request: &[u8],
    missing: DiagError,
    each: impl FnMut(&[u8]) -> Result<(), Malformed>,
) -> Result<(), DiagError> {
    let answered = NetlinkSocket::open(Protocol::SockDiag, LIMIT)
        .map_err(RequestError::Io)
        .and_then(|mut socket| socket.request(BY_FAMILY, FLAG_DUMP, request, BY_FAMILY, each));
    answered.map_err(|error| classify(error, missing))
}

/// `missing` is the answer to ENOENT, which the kernel gives where no handler is registered for the family
/// (`__sock_diag_cmd`, net/core/sock_diag.c); a kernel without sock_diag has no such protocol at all.
fn classify(error: RequestError, missing: DiagError) -> DiagError {
    match error {
        RequestError::TimedOut => DiagError::TimedOut,
        RequestError::Answer(AnswerError::Malformed(malformed)) => DiagError::Malformed(malformed),
        RequestError::Io(error) | RequestError::Answer(AnswerError::Refused(error)) => {
            match error.raw_os_error() {
                Some(libc::ENOENT | libc::EPROTONOSUPPORT) => missing,
                Some(libc::EPERM | libc::EACCES) => DiagError::NotPermitted(error),
                _ => DiagError::Io(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(errno: i32) -> String {
        let error = AnswerError::Refused(io::Error::from_raw_os_error(errno));
        classify(error.into(), DiagError::NoSmcDiag).to_string()
    }

    #[test]
    fn requests_have_the_kernel_s_sizes() {
        assert_eq!(smc_request().len(), 52);
        assert_eq!(tcp_request(2).len(), 56);
    }

    #[test]
    fn every_error_says_what_to_do() {
        assert!(refused(libc::ENOENT).contains("modprobe smc_diag"));
        let no_protocol = RequestError::Io(io::Error::from_raw_os_error(libc::EPROTONOSUPPORT));
        assert!(classify(no_protocol, DiagError::NoTcpDiag).to_string().contains("modprobe tcp_diag"));
        assert!(refused(libc::EPERM).contains("seccomp"));
        assert!(refused(libc::ENOMEM).contains("os error 12"));
        assert!(classify(RequestError::TimedOut, DiagError::NoSmcDiag).to_string().contains("try again"));
    }
}
