//! What the kernel's 32-bit fallback and decline codes mean.
//!
//! Names are those of `net/smc/smc_clc.h` (`SMC_CLC_DECL_<name>`), unless the comment beside an entry says otherwise.

/// One code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reason {
    /// The code as `smcss` and `SMC_DIAG` show it.
    pub code: u32,
    /// The kernel's name for it.
    pub name: &'static str,
    /// What it says, in one clause.
    pub meaning: &'static str,
}

/// The peer did not send the SMC option, or a policy kept it from being sent (`SMC_CLC_DECL_PEERNOSMC`).
pub const PEER_NO_SMC: u32 = 0x0301_0000;

/// The code's entry; `None` for a code that no known kernel uses.
///
/// The internal errors of older kernels, 0x99990000 to 0x99990003, are found under their present numbers.
#[must_use]
pub fn lookup(code: u32) -> Option<&'static Reason> {
    let code = match code {
        0x9999_0000..=0x9999_0003 => code - 0x9999_0000 + 0x0999_0000,
        _ => code,
    };
    REASONS.binary_search_by_key(&code, |reason| reason.code).ok().and_then(|index| REASONS.get(index))
}

const fn reason(code: u32, name: &'static str, meaning: &'static str) -> Reason {
    Reason { code, name, meaning }
}

/// Every known code, ascending.
pub static REASONS: &[Reason] = &[
    reason(0x0101_0000, "MEM", "not enough memory for the connection's SMC data structures"),
    reason(
        0x0201_0000,
        "TIMEOUT_CL",
        "timed out waiting for a CLC or LLC message (link confirmation) during the handshake",
    ),
    reason(0x0202_0000, "TIMEOUT_AL", "timed out waiting for an LLC add-link exchange"),
    reason(0x0300_0000, "CNFERR", "this host could not determine the IP address to put in the SMC proposal"),
    reason(
        0x0301_0000,
        "PEERNOSMC",
        "the peer's SYN or SYN-ACK carried no SMC option, or a policy of this host kept it out",
    ),
    // The name is ours.
    reason(
        0x0301_0001,
        "OPTUNSUPP_VENDOR",
        "a socket option SMC cannot honour (vendor kernels report this code)",
    ),
    reason(0x0302_0000, "IPSEC", "an IPsec (xfrm) policy applies to the connection; SMC cannot bypass it"),
    reason(
        0x0303_0000,
        "NOSMCDEV",
        "no usable SMC-D or SMC-R device for this connection (on kernels before 6.7 it can also hide a subnet mismatch, and it is what an IPv6 connection over eRDMA shows)",
    ),
    reason(0x0303_0001, "NOSMCDDEV", "no SMC-D device"),
    reason(
        0x0303_0002,
        "NOSMCRDEV",
        "no usable SMC-R device: the chosen RDMA device became unusable, or none qualifies",
    ),
    reason(0x0303_0003, "NOISM2SUPP", "the SMC-D hardware has no ISMv2"),
    reason(0x0303_0004, "NOV2EXT", "the peer's proposal has no SMCv2 extension"),
    reason(0x0303_0005, "NOV2DEXT", "the peer sent no SMC-D v2 extension"),
    reason(0x0303_0006, "NOSEID", "the peer has no system enterprise id (in practice on s390 only)"),
    reason(0x0303_0007, "NOSMCD2DEV", "no SMC-D v2 device"),
    reason(
        0x0303_0008,
        "NOUEID",
        "no user-defined enterprise id (UEID) in common; SMCv2 needs one outside s390",
    ),
    reason(
        0x0303_0009,
        "RELEASEERR",
        "SMC release negotiation failed: the release chosen in the CLC exchange changed or is invalid",
    ),
    reason(
        0x0303_000a,
        "MAXCONNERR",
        "negotiated connections per link group is zero or above the local maximum (SMC v2.1)",
    ),
    reason(
        0x0303_000b,
        "MAXLINKERR",
        "negotiated links per link group is zero or above the local maximum (SMC v2.1)",
    ),
    // The name is ours: patches on the mailing list used FEATUNSUPP and REQLGR for this code.
    reason(
        0x0303_000c,
        "VENDORERR",
        "vendor feature negotiation changed during the handshake (vendor kernels only)",
    ),
    reason(0x0304_0000, "MODEUNSUPP", "the two hosts offer different device kinds (SMC-D here, SMC-R there)"),
    reason(0x0305_0000, "RMBE_EC", "the peer uses eyecatchers inside its receive buffers"),
    reason(
        0x0306_0000,
        "OPTUNSUPP",
        "a socket option or flag SMC cannot honour: MSG_FASTOPEN and TCP_FASTOPEN* on upstream kernels, every option the vendor marks unsupported on its kernels (TCP_ULP among them)",
    ),
    reason(
        0x0307_0000,
        "DIFFPREFIX",
        "the hosts are in different IP subnets; SMCv1 (RoCEv1) needs one subnet",
    ),
    reason(0x0308_0000, "GETVLANERR", "the VLAN id of the connection's device could not be read"),
    reason(0x0309_0000, "ISMVLANERR", "the VLAN id could not be registered at the ISM device"),
    reason(0x030a_0000, "NOACTLINK", "the link group has no active SMC-R link left"),
    reason(
        0x030b_0000,
        "NOSRVLINK",
        "the client found no local link matching the server's QP number, GID and MAC",
    ),
    reason(0x030c_0000, "VERSMISMAT", "the negotiated SMC version is not acceptable"),
    reason(0x030d_0000, "MAX_DMB", "the SMC-D device's limit of DMBs is reached"),
    reason(0x030e_0000, "NOROUTE", "SMC-Rv2: the client found no route to the peer's RDMA address"),
    reason(
        0x030f_0000,
        "NOINDIRECT",
        "SMC-Rv2: the indirect (gateway) flag of the peer does not match the local route",
    ),
    reason(0x0400_0000, "SYNCERR", "the server reuses a link group that the client wants to create anew"),
    reason(0x0500_0000, "PEERDECL", "the peer declined the proposal"),
    reason(0x0999_0000, "INTERR", "RDMA resources could not be created or initialised"),
    reason(0x0999_0001, "ERR_RTOK", "internal error handling the peer's RDMA token"),
    reason(0x0999_0002, "ERR_RDYLNK", "the queue pair could not be brought to ready (modify QP failed)"),
    reason(
        0x0999_0003,
        "ERR_REGBUF",
        "a memory region could not be registered: the number or size of regions exceeds what the RDMA device allows",
    ),
    // From a patch on the mailing list; vendor kernels.
    reason(0x0999_0004, "CREDITSERR", "flow-control credits could not be announced (vendor kernels)"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_ascend_so_that_the_search_finds_each() {
        assert!(REASONS.is_sorted_by(|a, b| a.code < b.code));
        for reason in REASONS {
            assert_eq!(lookup(reason.code), Some(reason));
            assert!(!reason.name.is_empty() && !reason.meaning.is_empty());
        }
    }

    #[test]
    fn known_unknown_and_old_codes() {
        assert_eq!(lookup(PEER_NO_SMC).unwrap().name, "PEERNOSMC");
        assert_eq!(lookup(0x0500_0000).unwrap().name, "PEERDECL");
        assert_eq!(lookup(0x9999_0002), lookup(0x0999_0002));
        assert_eq!(lookup(0x9999_0002).unwrap().name, "ERR_RDYLNK");
        for unknown in [0, 1, 0x9999_0004, u32::MAX] {
            assert_eq!(lookup(unknown), None, "{unknown:#010x}");
        }
    }
}
