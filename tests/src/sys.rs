//! The system calls that std does not offer: sockets of other families, private namespaces, mounts. The only unsafe code
//! of this crate, with its submodules.

pub mod packets;

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV6};
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

/// Lets a listener keep connections to itself until data or a time-out (seconds) comes: `TCP_DEFER_ACCEPT`.
///
/// # Errors
/// What setsockopt(2) says.
pub fn set_defer_accept(socket: impl AsFd, seconds: i32) -> io::Result<()> {
    set_option_at(&socket, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, &seconds)
}

/// Has segments to and from `peer`'s address signed by TCP-AO (Linux 6.7 with CONFIG_TCP_AO).
///
/// # Errors
/// What setsockopt(2) says; ENOPROTOOPT: the kernel has none.
pub fn set_tcp_ao_key(socket: impl AsFd, peer: Ipv4Addr) -> io::Result<()> {
    const TCP_AO_ADD_KEY: i32 = 38;
    /// `struct tcp_ao_add` (include/uapi/linux/tcp.h).
    #[repr(C, align(8))]
    struct Add {
        family: u16,
        port: u16,
        address: [u8; 4],
        rest: [u8; 120],
        algorithm: [u8; 64],
        interface: i32,
        bits: u32,
        reserved: u16,
        prefix: u8,
        send_id: u8,
        receive_id: u8,
        mac_length: u8,
        flags: u8,
        key_length: u8,
        key: [u8; 80],
    }
    let (mut algorithm, mut key) = ([0; 64], [0; 80]);
    algorithm[..10].copy_from_slice(b"hmac(sha1)");
    key[..6].copy_from_slice(b"secret");
    let add = Add {
        family: libc::AF_INET as u16,
        port: 0,
        address: peer.octets(),
        rest: [0; 120],
        algorithm,
        interface: 0,
        bits: 0,
        reserved: 0,
        prefix: 32,
        send_id: 100,
        receive_id: 100,
        mac_length: 0,
        flags: 0,
        key_length: 6,
        key,
    };
    set_option_at(&socket, libc::IPPROTO_TCP, TCP_AO_ADD_KEY, &add)
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

/// Moves the calling thread, and what it starts from now on, into a mount namespace of its own: what it mounts goes with
/// it, and nobody else sees it.
///
/// # Errors
/// What unshare(2) and mount(2) say: needs `CAP_SYS_ADMIN`.
pub fn unshare_mounts() -> io::Result<()> {
    // SAFETY: unshare(2) takes no pointers. The thread's working directory becomes its own, which std does not rely on
    // being shared.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    mount(None, c"/", None, libc::MS_REC | libc::MS_PRIVATE, None)
}

/// Makes what is at `at` read-only, for the calling thread's mount namespace.
///
/// # Errors
/// What mount(2) says.
pub fn mount_read_only(at: &CStr) -> io::Result<()> {
    mount(Some(at), at, None, libc::MS_BIND, None)?;
    mount(None, at, None, libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY, None)
}

/// Mounts an empty tmpfs at `at`; `options` as `size=64k`.
///
/// # Errors
/// What mount(2) says.
pub fn mount_tmpfs(at: &CStr, options: &CStr) -> io::Result<()> {
    mount(Some(c"tmpfs"), at, Some(c"tmpfs"), 0, Some(options))
}

/// Makes the file or folder `from` appear at `at` too.
///
/// # Errors
/// What mount(2) says.
pub fn bind_mount(from: &CStr, at: &CStr) -> io::Result<()> {
    mount(Some(from), at, None, libc::MS_BIND, None)
}

/// Takes away what is mounted at `at`, at once for whoever looks, even if it is in use.
///
/// # Errors
/// What umount2(2) says.
pub fn unmount(at: &CStr) -> io::Result<()> {
    // SAFETY: the string ends in NUL and outlives the call.
    check(unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) })
}

fn mount(
    from: Option<&CStr>,
    at: &CStr,
    kind: Option<&CStr>,
    flags: libc::c_ulong,
    options: Option<&CStr>,
) -> io::Result<()> {
    let pointer = |text: Option<&CStr>| text.map_or(std::ptr::null(), CStr::as_ptr);
    // SAFETY: every string ends in NUL and outlives the call; null is allowed where something is left out.
    check(unsafe { libc::mount(pointer(from), at.as_ptr(), pointer(kind), flags, pointer(options).cast()) })
}

/// Lets `command` see /proc/sys read-only, in a mount namespace of its own.
pub fn with_read_only_proc_sys(command: &mut Command) {
    let remount = || {
        unshare_mounts()?;
        mount_read_only(c"/proc/sys")
    };
    // SAFETY: between fork and exec only system calls are made: nothing allocates and no lock is taken.
    unsafe { command.pre_exec(remount) };
}

/// Lets `command` open at most `files` files.
pub fn with_file_limit(command: &mut Command, files: u64) {
    let limit = libc::rlimit { rlim_cur: files, rlim_max: files };
    let set = move || {
        // SAFETY: the pointer is to a live rlimit.
        check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })
    };
    // SAFETY: between fork and exec only a system call is made: nothing allocates and no lock is taken.
    unsafe { command.pre_exec(set) };
}

/// Moves the calling thread, and what it starts from now on, into the network namespace that `namespace` (an open
/// /proc/PID/ns/net, or a file in /run/netns) is a file of.
///
/// # Errors
/// What setns(2) says: needs `CAP_SYS_ADMIN`.
pub fn enter_network(namespace: impl AsFd) -> io::Result<()> {
    // SAFETY: setns(2) takes no pointers; another network namespace breaks nothing that std relies on.
    check(unsafe { libc::setns(namespace.as_fd().as_raw_fd(), libc::CLONE_NEWNET) })
}

/// Starts `command` in the network namespace that `namespace` (an open /proc/PID/ns/net) is a file of.
pub fn in_network(command: &mut Command, namespace: OwnedFd) {
    let enter = move || enter_network(&namespace);
    // SAFETY: between fork and exec only a system call is made: nothing allocates and no lock is taken.
    unsafe { command.pre_exec(enter) };
}

/// Makes a tun device that stays, of which the packets are said to begin as those of a hardware type do (`ARPHRD_*`,
/// linux/if_arp.h).
///
/// # Errors
/// What open(2) and ioctl(2) say.
pub fn make_device_of_type(name: &str, hardware: u16) -> io::Result<()> {
    // linux/if_tun.h
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    const TUNSETPERSIST: libc::c_ulong = 0x4004_54cb;
    const TUNSETLINK: libc::c_ulong = 0x4004_54cd;
    const IFF_TUN: u16 = 1;
    const NO_PACKET_INFORMATION: u16 = 0x1000;
    let tun = File::options().read(true).write(true).open("/dev/net/tun")?;
    // struct ifreq: a name of 16 bytes, here followed by flags.
    let mut request = [0u8; 40];
    let name = name.as_bytes().get(..15.min(name.len())).unwrap_or_default();
    request[..name.len()].copy_from_slice(name);
    request[16..18].copy_from_slice(&(IFF_TUN | NO_PACKET_INFORMATION).to_ne_bytes());
    let fd = tun.as_raw_fd();
    // SAFETY: the pointer is to 40 bytes, as large as struct ifreq is, which outlive the call.
    check(unsafe { libc::ioctl(fd, TUNSETIFF as _, request.as_mut_ptr()) })?;
    // SAFETY: these take a number.
    check(unsafe { libc::ioctl(fd, TUNSETLINK as _, libc::c_ulong::from(hardware)) })?;
    // SAFETY: as above.
    check(unsafe { libc::ioctl(fd, TUNSETPERSIST as _, 1 as libc::c_ulong) })
}

/// Makes a FIFO: whoever opens it waits for the other end.
///
/// # Errors
/// What mkfifo(3) says.
pub fn make_fifo(at: &CStr) -> io::Result<()> {
    // SAFETY: the string ends in NUL and outlives the call.
    check(unsafe { libc::mkfifo(at.as_ptr(), 0o600) })
}

/// Sends SIGKILL to a process, which must be one that the caller started, or a child of such a one.
///
/// # Errors
/// What kill(2) says; ESRCH: it has ended.
pub fn kill(pid: u32) -> io::Result<()> {
    signal(pid, Signal::Kill)
}

/// What [`signal`] sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Signal {
    /// SIGINT.
    Interrupt = libc::SIGINT,
    /// SIGTERM.
    Terminate = libc::SIGTERM,
    /// SIGSTOP.
    Stop = libc::SIGSTOP,
    /// SIGCONT.
    Continue = libc::SIGCONT,
    /// SIGKILL.
    Kill = libc::SIGKILL,
}

/// Sends a signal to a process, which must be one that the caller started, or a child of such a one.
///
/// # Errors
/// What kill(2) says; ESRCH: it has ended.
pub fn signal(pid: u32, signal: Signal) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 1).ok_or(io::ErrorKind::InvalidInput)?;
    // SAFETY: kill(2) takes no pointers.
    check(unsafe { libc::kill(pid, signal as i32) })
}

fn set_option<T>(socket: &impl AsFd, option: i32, value: &T) -> io::Result<()> {
    set_option_at(socket, libc::SOL_SOCKET, option, value)
}

fn set_option_at<T>(socket: &impl AsFd, level: i32, option: i32, value: &T) -> io::Result<()> {
    // SAFETY: pointer and length describe `value`, which outlives the call; callers pass the C type of the option.
    check(unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
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

/// Makes a TUN device of this name in the calling thread's namespace: what is read from the file has left through the
/// device, what is written arrives. It lasts as long as the file.
///
/// # Errors
/// What open(2) and ioctl(2) say.
pub fn open_tun(name: &str) -> io::Result<File> {
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    const IFF_TUN: i16 = 1;
    const IFF_NO_PI: i16 = 0x1000;
    /// `struct ifreq` with its flags (net/if.h).
    #[repr(C)]
    struct Request {
        name: [u8; 16],
        flags: i16,
        rest: [u8; 22],
    }
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    let mut request = Request { name: [0; 16], flags: IFF_TUN | IFF_NO_PI, rest: [0; 22] };
    request.name[..name.len().min(15)].copy_from_slice(&name.as_bytes()[..name.len().min(15)]);
    // SAFETY: the pointer is to a live ifreq, as this request takes it.
    check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF as _, &raw mut request) })?;
    Ok(file)
}

/// Which way a packet goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Into this host.
    In,
    /// Out of it.
    Out,
}

/// Attaches a tc program to the interface number `interface` of the calling thread's namespace by a tcx link (Linux
/// 6.6), which lasts as long as what is returned.
///
/// # Errors
/// What bpf(2) says; EINVAL: no tcx.
pub fn attach_tcx(program: impl AsFd, interface: u32, way: Way) -> io::Result<OwnedFd> {
    const BPF_LINK_CREATE: libc::c_int = 28;
    /// The head of `bpf_attr.link_create` (include/uapi/linux/bpf.h).
    #[repr(C)]
    struct LinkCreate {
        program: i32,
        interface: u32,
        attach_type: u32,
        flags: u32,
        rest: [u64; 4],
    }
    let attach_type = match way {
        Way::In => 46,
        Way::Out => 47,
    };
    let program = program.as_fd().as_raw_fd();
    let mut attr = LinkCreate { program, interface, attach_type, flags: 0, rest: [0; 4] };
    let fd = bpf(BPF_LINK_CREATE, &mut attr)?;
    // SAFETY: the descriptor was just returned by bpf(2) and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Runs a tc program once on `packet`, of which only the first `linear` bytes are in the linear part (Linux 6.19), and
/// returns what it made of it.
///
/// # Errors
/// What bpf(2) says; EINVAL: this kernel's test runs are linear.
pub fn test_run_nonlinear(program: impl AsFd, packet: &[u8], linear: u32) -> io::Result<Vec<u8>> {
    const BPF_PROG_TEST_RUN: libc::c_int = 10;
    /// `data_end` in `struct __sk_buff`, in words.
    const DATA_END: usize = 20;
    /// `bpf_attr.test` (include/uapi/linux/bpf.h).
    #[repr(C)]
    struct TestRun {
        program: i32,
        result: u32,
        data_size_in: u32,
        data_size_out: u32,
        data_in: *const u8,
        data_out: *mut u8,
        repeat: u32,
        duration: u32,
        ctx_size_in: u32,
        ctx_size_out: u32,
        ctx_in: *const u32,
        ctx_out: *mut u32,
        flags: u32,
        cpu: u32,
        batch_size: u32,
        padding: u32,
    }
    let mut context = [0_u32; 48];
    context[DATA_END] = linear;
    let mut out = vec![0; packet.len()];
    let mut attr = TestRun {
        program: program.as_fd().as_raw_fd(),
        result: 0,
        data_size_in: packet.len() as u32,
        data_size_out: out.len() as u32,
        data_in: packet.as_ptr(),
        data_out: out.as_mut_ptr(),
        repeat: 1,
        duration: 0,
        ctx_size_in: size_of_val(&context) as u32,
        ctx_size_out: 0,
        ctx_in: context.as_ptr(),
        ctx_out: std::ptr::null_mut(),
        flags: 0,
        cpu: 0,
        batch_size: 0,
        padding: 0,
    };
    bpf(BPF_PROG_TEST_RUN, &mut attr)?;
    Ok(out)
}

/// bpf(2) with a `bpf_attr` of which `attr` is the member for `command`.
fn bpf<T>(command: libc::c_int, attr: &mut T) -> io::Result<i32> {
    // SAFETY: pointer and length describe `attr`; what it points to is kept alive by the callers, with the lengths said
    // in it.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}
