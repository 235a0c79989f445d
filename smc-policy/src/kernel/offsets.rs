//! Where the socket fields that the programs read are in the running kernel.

use super::btf::{Btf, BtfError};

/// The value that a program takes for "this kernel has no such field" (smc-policy-ebpf/src/sock.rs).
const ABSENT: u32 = u32::MAX;

/// A member whose width differs between kernels; the program reads its low 32 bits.
const LOW_WORD: &str = "OFF_REQ_TIMEOUT";

/// Global of the object, struct, member path, and whether a kernel may lack it.
const FIELDS: [(&str, &str, &str, bool); 13] = [
    ("OFF_FAMILY", "sock_common", "skc_family", false),
    ("OFF_DADDR", "sock_common", "skc_daddr", false),
    ("OFF_SADDR", "sock_common", "skc_rcv_saddr", false),
    ("OFF_DPORT", "sock_common", "skc_dport", false),
    ("OFF_NUM", "sock_common", "skc_num", false),
    // Without CONFIG_IPV6.
    ("OFF_V6_DADDR", "sock_common", "skc_v6_daddr", true),
    ("OFF_V6_SADDR", "sock_common", "skc_v6_rcv_saddr", true),
    // Only tell first transmissions from later ones.
    ("OFF_RETRANSMITS", "tcp_sock", "inet_conn.icsk_retransmits", true),
    // With CONFIG_TCP_AO.
    ("OFF_AO_INFO", "tcp_sock", "ao_info", true),
    // Only tells a reset from another end.
    ("OFF_SK_ERR", "sock", "sk_err", true),
    ("OFF_REQ_RETRANS", "inet_request_sock", "req.num_retrans", true),
    ("OFF_REQ_TIMEOUT", "inet_request_sock", "req.timeout", true),
    ("OFF_REQ_EXPIRES", "inet_request_sock", "req.rsk_timer.expires", true),
];

/// Those that only the learner reads: in the structs of the module smc, and on the way from there.
const SMC_FIELDS: [(&str, &str, &str); 6] = [
    ("OFF_NET", "sock_common", "skc_net.net"),
    ("OFF_NET_COOKIE", "net", "net_cookie"),
    ("OFF_SOCKET_SK", "socket", "sk"),
    ("OFF_CLCSOCK", "smc_sock", "clcsock"),
    ("OFF_LISTEN_SMC", "smc_sock", "listen_smc"),
    ("OFF_PEER_DIAGNOSIS", "smc_sock", "peer_diagnosis"),
];

/// Where `tcp_sock.syn_smc` is, a bit: only with CONFIG_SMC.
fn syn_smc(vmlinux: &Btf<'_>) -> [Result<(&'static str, u32), BtfError>; 2] {
    let (offset, mask) = vmlinux.bit("tcp_sock", "syn_smc").map_or((ABSENT, 0), |(o, m)| (o, m.into()));
    [Ok(("OFF_SYN_SMC", offset)), Ok(("MASK_SYN_SMC", mask))]
}

/// Byte offsets, ready to be written into the object's globals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offsets(Vec<(&'static str, u32)>);

impl Offsets {
    /// Looks the fields up in vmlinux's BTF.
    ///
    /// # Errors
    /// [`BtfError`] when a field is missing that every kernel must have.
    pub fn find(vmlinux: &Btf<'_>) -> Result<Self, BtfError> {
        FIELDS
            .iter()
            .map(|(global, structure, path, optional)| {
                match if *global == LOW_WORD {
                    vmlinux.offset_of_low_word(structure, path)
                } else {
                    vmlinux.offset(structure, path)
                } {
                    Ok(offset) => Ok((*global, offset)),
                    Err(_) if *optional => Ok((*global, ABSENT)),
                    Err(e) => Err(e),
                }
            })
            .chain(syn_smc(vmlinux))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Adds those of SMC's own sockets, from the BTF that describes them.
    ///
    /// # Errors
    /// [`BtfError`] when a field is missing.
    pub fn with_smc(mut self, smc: &Btf<'_>) -> Result<Self, BtfError> {
        for (global, structure, path) in SMC_FIELDS {
            self.0.push((global, smc.offset(structure, path)?));
        }
        Ok(self)
    }

    /// Adds a global that is no offset.
    pub fn with(mut self, global: &'static str, value: u32) -> Self {
        self.0.push((global, value));
        self
    }

    /// Has this kernel sockets that ask for SMC?
    pub fn has_smc(&self) -> bool {
        self.globals().any(|(name, value)| name == "OFF_SYN_SMC" && value != ABSENT)
    }

    /// Name and value of each global.
    pub fn globals(&self) -> impl Iterator<Item = (&'static str, u32)> + '_ {
        self.0.iter().copied()
    }
}
