//! Reads socket fields at offsets that user space found in the kernel's BTF (Rust emits no CO-RE relocations).
//!
//! `tcp_sock` and `inet_request_sock` both begin with a `sock_common` (include/net/sock.h), so the same offsets serve
//! both.

use aya_ebpf::Global;
use smc_policy_common::query::Addr;

/// An offset that user space did not set: the field does not exist in this kernel.
pub const ABSENT: u32 = u32::MAX;

macro_rules! offsets {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $($(#[$doc])* #[unsafe(no_mangle)] pub static $name: Global<u32> = Global::new(ABSENT);)*
    };
}

offsets! {
    /// `sock_common.skc_family`, u16.
    OFF_FAMILY;
    /// `sock_common.skc_daddr`, the peer, be32.
    OFF_DADDR;
    /// `sock_common.skc_rcv_saddr`, our address, be32.
    OFF_SADDR;
    /// `sock_common.skc_dport`, the peer's port, be16.
    OFF_DPORT;
    /// `sock_common.skc_num`, our port, host order, u16.
    OFF_NUM;
    /// `sock_common.skc_v6_daddr`, 16 bytes.
    OFF_V6_DADDR;
    /// `sock_common.skc_v6_rcv_saddr`, 16 bytes.
    OFF_V6_SADDR;
    /// `tcp_sock.inet_conn.icsk_retransmits`, u8.
    OFF_RETRANSMITS;
    /// Byte of `tcp_sock.syn_smc`, a bit.
    OFF_SYN_SMC;
    /// Its bit in that byte, as a mask.
    MASK_SYN_SMC;
    /// `tcp_sock.ao_info`, a pointer: TCP-AO is in use.
    OFF_AO_INFO;
    /// `sock.sk_err`, a positive errno, int.
    OFF_SK_ERR;
    /// `inet_request_sock.req.num_retrans`, u8.
    OFF_REQ_RETRANS;
    /// `inet_request_sock.req.timeout`, jiffies: its low 32 bits (an unsigned long in 6.18, a u32 in 7.3).
    OFF_REQ_TIMEOUT;
    /// `inet_request_sock.req.rsk_timer.expires`, unsigned long, jiffies.
    OFF_REQ_EXPIRES;
    /// `sock_common.skc_net.net`, a pointer.
    OFF_NET;
    /// `net.net_cookie`, u64.
    OFF_NET_COOKIE;
    /// `socket.sk`, a pointer.
    OFF_SOCKET_SK;
    /// `smc_sock.clcsock`, a pointer: the TCP socket under it.
    OFF_CLCSOCK;
    /// `smc_sock.listen_smc`, a pointer: the listening socket that it came by.
    OFF_LISTEN_SMC;
    /// `smc_sock.peer_diagnosis`, u32: why the peer declined.
    OFF_PEER_DIAGNOSIS;
}

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;

/// A pointer to a kernel struct that starts with `sock_common`, as a program's context hands it over.
#[derive(Clone, Copy)]
pub struct Sock(*const u8);

impl Sock {
    /// Argument `n` of a struct_ops callback.
    ///
    /// # Safety
    /// `ctx` is the context of a struct_ops program whose argument `n` is a pointer to such a struct.
    #[inline(always)]
    pub unsafe fn from_argument(ctx: *mut core::ffi::c_void, n: usize) -> Self {
        // SAFETY: the context of a struct_ops program is an array of its 8-byte arguments.
        Self(unsafe { *ctx.cast::<*const u8>().add(n) })
    }

    /// What `bpf_skc_to_tcp_sock` returns.
    ///
    /// # Safety
    /// `tcp` is such a pointer and not null.
    #[inline(always)]
    pub unsafe fn from_tcp(tcp: *const u8) -> Self {
        Self(tcp)
    }

    #[inline(always)]
    fn read<T: Copy>(self, offset: &Global<u32>) -> T {
        // SAFETY: the pointer is a trusted BTF pointer and the offset, a constant to the verifier, names a field of
        // its type: the verifier checks both and refuses the program otherwise.
        unsafe { self.0.add(offset.load() as usize).cast::<T>().read_volatile() }
    }

    /// A field that older kernels may lack.
    #[inline(always)]
    pub fn read_if_present<T: Copy>(self, offset: &Global<u32>) -> Option<T> {
        if offset.load() == ABSENT { None } else { Some(self.read(offset)) }
    }

    /// The peer's port, host order.
    #[inline(always)]
    pub fn peer_port(self) -> u16 {
        u16::from_be(self.read(&OFF_DPORT))
    }

    /// Our port, host order.
    #[inline(always)]
    pub fn local_port(self) -> u16 {
        self.read(&OFF_NUM)
    }

    /// The peer's address and ours.
    #[inline(always)]
    pub fn addresses(self) -> (Addr, Addr) {
        // An AF_INET6 socket with an IPv4 peer has the v4-mapped address in the IPv6 fields.
        if self.read::<u16>(&OFF_FAMILY) == AF_INET || OFF_V6_DADDR.load() == ABSENT {
            (Addr::v4(u32::from_be(self.read(&OFF_DADDR))), Addr::v4(u32::from_be(self.read(&OFF_SADDR))))
        } else {
            (self.v6(&OFF_V6_DADDR), self.v6(&OFF_V6_SADDR))
        }
    }

    /// The cookie of its network namespace.
    #[inline(always)]
    pub fn network_cookie(self) -> u64 {
        Self(self.read(&OFF_NET)).read(&OFF_NET_COOKIE)
    }

    #[inline(always)]
    fn v6(self, offset: &Global<u32>) -> Addr {
        let [hi, lo]: [u64; 2] = self.read(offset);
        Addr { hi: u64::from_be(hi), lo: u64::from_be(lo) }
    }
}

/// A pointer to a `smc_sock` (net/smc/smc.h).
#[derive(Clone, Copy)]
pub struct Smc(Sock);

impl Smc {
    /// Argument `n` of a tracing program. `None`: it is null, which the kernel does not rule out for tracepoints.
    ///
    /// # Safety
    /// `ctx` is the context of a tracing program whose argument `n` is such a pointer.
    #[inline(always)]
    pub unsafe fn from_argument(ctx: *mut core::ffi::c_void, n: usize) -> Option<Self> {
        // SAFETY: the context of a tracing program is an array of 8-byte arguments too.
        let sock = unsafe { Sock::from_argument(ctx, n) };
        if sock.0.is_null() { None } else { Some(Self(sock)) }
    }

    /// The TCP socket at `offset`, [`OFF_CLCSOCK`]. `None`: it has gone. (Whatever pointer on the way is null or stale, the
    /// kernel reads zeros or what is there instead of faulting.)
    #[inline(always)]
    pub fn tcp(self, offset: &Global<u32>) -> Option<Sock> {
        let socket = Sock(self.0.read(offset));
        let sock = Sock(socket.read(&OFF_SOCKET_SK));
        matches!(sock.read::<u16>(&OFF_FAMILY), AF_INET | AF_INET6).then_some(sock)
    }

    /// Why the peer declined; 0: it did not.
    #[inline(always)]
    pub fn peer_diagnosis(self) -> u32 {
        self.0.read(&OFF_PEER_DIAGNOSIS)
    }

    /// Whether the pointer at `offset` is not null.
    #[inline(always)]
    pub fn is_set(self, offset: &Global<u32>) -> bool {
        self.0.read::<u64>(offset) != 0
    }
}
