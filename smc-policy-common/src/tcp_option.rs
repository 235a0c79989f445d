//! TCP options that both sides know.

/// End of the option list.
pub const END: u8 = 0;
/// No operation: padding of one byte.
pub const NOP: u8 = 1;
/// TCP Authentication Option (RFC 5925), whose signature may cover the other options.
pub const AUTHENTICATION: u8 = 29;
/// The other option kind for experiments (RFC 4727).
pub const EXPERIMENTAL_253: u8 = 253;
/// Experimental option 254 (RFC 6994): what SMC, and not only SMC, uses.
pub const EXPERIMENTAL: u8 = 254;
/// The SMC option's magic, "SMCR" in EBCDIC (`TCPOPT_SMC_MAGIC`, include/net/tcp.h).
pub const SMC_MAGIC: u32 = 0xe2d4_c3d9;
/// Shortest SMC option with kind and length. The kernel takes longer ones of an even length too
/// (`smc_parse_options`, net/ipv4/tcp_input.c).
pub const SMC_LENGTH: u8 = 6;
/// ExID of the guard's canary, `fe 08 <ExID:2> <nonce:4>` (RFC 6994): "SP" in ASCII. Nobody is known to use it for
/// anything else; it is not registered with IANA. No stack knows it, so only who echoes options returns it.
pub const CANARY_EXID: u16 = 0x5350;
/// Length of the canary with kind and length.
pub const CANARY_LENGTH: u8 = 8;
/// Length of the short canary, which has no nonce: for SYNs without room for more.
pub const CANARY_SHORT: u8 = 4;
