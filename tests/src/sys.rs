//! The system calls that std does not offer: sockets of other families, and a private network namespace. The only
//! unsafe code of this crate.

use std::ffi::CStr;
use std::io;
use std::net::{SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

/// `AF_SMC`.
pub const AF_SMC: i32 = 43;
/// `IPPROTO_SMC` (Linux 6.11).
pub const IPPROTO_SMC: i32 = 256;

/// A stream socket.
///
/// # Errors
/// What socket(2) says.
pub fn stream_socket(family: i32, protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: socket(2) takes no pointers.
    let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, protocol) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just returned by socket(2) and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// bind(2).
///
/// # Errors
/// What bind(2) says.
pub fn bind(socket: impl AsFd, address: SocketAddr) -> io::Result<()> {
    let address = RawAddress::from(address);
    // SAFETY: pointer and length describe a live, initialised socket address.
    check(unsafe { libc::bind(socket.as_fd().as_raw_fd(), address.pointer(), address.length()) })
}

/// listen(2).
///
/// # Errors
/// What listen(2) says.
pub fn listen(socket: impl AsFd, backlog: i32) -> io::Result<()> {
    // SAFETY: listen(2) takes no pointers.
    check(unsafe { libc::listen(socket.as_fd().as_raw_fd(), backlog) })
}

/// connect(2), blocking; bounded by the socket's send time limit.
///
/// # Errors
/// What connect(2) says.
pub fn connect(socket: impl AsFd, address: SocketAddr) -> io::Result<()> {
    let address = RawAddress::from(address);
    // SAFETY: pointer and length describe a live, initialised socket address.
    check(unsafe { libc::connect(socket.as_fd().as_raw_fd(), address.pointer(), address.length()) })
}

/// Sets `SO_RCVTIMEO` and `SO_SNDTIMEO`.
///
/// # Errors
/// What setsockopt(2) says.
pub fn set_time_limits(socket: impl AsFd, limit: Duration) -> io::Result<()> {
    let value = libc::timeval {
        tv_sec: limit.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_usec: limit.subsec_micros().into(),
    };
    set_option(&socket, libc::SO_RCVTIMEO, &value)?;
    set_option(&socket, libc::SO_SNDTIMEO, &value)
}

/// Sets `SO_REUSEADDR`.
///
/// # Errors
/// What setsockopt(2) says.
pub fn set_reuse_address(socket: impl AsFd) -> io::Result<()> {
    set_option(&socket, libc::SO_REUSEADDR, &1_i32)
}

/// Whether `socket` becomes readable within `limit` (at most 24 days).
///
/// # Errors
/// What poll(2) says; an interruption counts as "no".
pub fn is_readable(socket: impl AsFd, limit: Duration) -> io::Result<bool> {
    let mut one = libc::pollfd { fd: socket.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let limit = limit.as_millis().try_into().unwrap_or(i32::MAX);
    // SAFETY: the pointer is to one live pollfd, and the count says one.
    match unsafe { libc::poll(&raw mut one, 1, limit) } {
        0 => Ok(false),
        1.. => Ok(true),
        _ => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(false),
            error => Err(error),
        },
    }
}

/// Moves the calling thread, and what it starts from now on, into a new network namespace.
///
/// # Errors
/// What unshare(2) says: needs `CAP_SYS_ADMIN`.
pub fn unshare_network() -> io::Result<()> {
    // SAFETY: unshare(2) takes no pointers; a network namespace of its own breaks nothing that std relies on.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) })
}

/// Lets `command` see /proc/sys read-only, in a mount namespace of its own.
pub fn with_read_only_proc_sys(command: &mut Command) {
    fn remount() -> io::Result<()> {
        let mount = |from: Option<&CStr>, at: &CStr, flags| {
            let from = from.map_or(std::ptr::null(), CStr::as_ptr);
            // SAFETY: strings end in NUL and outlive the call; no file system type and no data are given.
            check(unsafe { libc::mount(from, at.as_ptr(), std::ptr::null(), flags, std::ptr::null()) })
        };
        // SAFETY: unshare(2) takes no pointers.
        check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
        mount(None, c"/", libc::MS_REC | libc::MS_PRIVATE)?;
        mount(Some(c"/proc/sys"), c"/proc/sys", libc::MS_BIND)?;
        mount(None, c"/proc/sys", libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY)
    }
    // SAFETY: between fork and exec only system calls are made: nothing allocates and no lock is taken.
    unsafe { command.pre_exec(remount) };
}

fn set_option<T>(socket: &impl AsFd, option: i32, value: &T) -> io::Result<()> {
    // SAFETY: pointer and length describe `value`, which outlives the call; callers pass the C type of the option.
    check(unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    })
}

fn check(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

enum RawAddress {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
}

impl From<SocketAddr> for RawAddress {
    fn from(address: SocketAddr) -> Self {
        match address {
            SocketAddr::V4(v4) => Self::V4(libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            }),
            SocketAddr::V6(v6) => Self::V6(raw_v6(v6)),
        }
    }
}

fn raw_v6(v6: SocketAddrV6) -> libc::sockaddr_in6 {
    libc::sockaddr_in6 {
        sin6_family: libc::AF_INET6 as libc::sa_family_t,
        sin6_port: v6.port().to_be(),
        sin6_flowinfo: 0,
        sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
        sin6_scope_id: v6.scope_id(),
    }
}

impl RawAddress {
    const fn pointer(&self) -> *const libc::sockaddr {
        match self {
            Self::V4(v4) => std::ptr::from_ref(v4).cast(),
            Self::V6(v6) => std::ptr::from_ref(v6).cast(),
        }
    }

    const fn length(&self) -> libc::socklen_t {
        match self {
            Self::V4(_) => size_of::<libc::sockaddr_in>() as libc::socklen_t,
            Self::V6(_) => size_of::<libc::sockaddr_in6>() as libc::socklen_t,
        }
    }
}
