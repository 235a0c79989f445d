//! The first message of an SMC client and what may answer it (RFC 7609, net/smc/smc_clc.h).

use serde::{Serialize, Serializer};

/// "SMCR" and "SMCD" in EBCDIC: one of the two begins and ends every message.
const EYE_CATCHERS: [[u8; 4]; 2] = [[0xe2, 0xd4, 0xc3, 0xd9], [0xe2, 0xd4, 0xc3, 0xc4]];
const ACCEPT: u8 = 2;
const DECLINE: u8 = 4;
/// Header of every message: eye catcher, type, length, version and flags.
const HEADER: usize = 8;
/// Where a decline has its diagnosis: after the header and the sender's id.
const DIAGNOSIS: usize = 16;
/// The shortest message that answers a proposal: a decline of version 1 (`struct smc_clc_msg_decline`).
const SHORTEST: u16 = 28;
/// Most bytes that are kept of what is no CLC message.
const SHOWN: usize = 32;

/// A proposal of version 1 for SMC-R that every SMC peer can read and none can accept: it names a network that no host
/// is in (240.0.0.0/4; no IPv6 prefix at all), so the peer declines before it has touched a device
/// (`smc_listen_prfx_check`, net/smc/af_smc.c). It has the layout of the first Linux clients, without the extensions whose
/// parsing has had faults.
pub fn proposal() -> Vec<u8> {
    let eye_catcher = EYE_CATCHERS[0];
    let mut message = Vec::with_capacity(52);
    message.extend(eye_catcher);
    // Type 1, length, version 1 in the upper four bits, SMC-R in the lower ones.
    message.extend([1, 0, 52, 0x10]);
    // The sender's id, for whoever reads a packet capture; its GID and MAC, and no SMC-D information.
    message.extend(*b"smcprobe");
    message.extend([0; 16 + 6 + 2]);
    message.extend([240, 0, 0, 0, 4, 0, 0, 0]);
    message.extend(eye_catcher);
    message
}

/// What answered a proposal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Reply {
    /// A CLC decline: SMC.
    Decline {
        /// The peer's reason, which `smc-policy explain` knows; not there if the rest of the message did not come.
        #[serde(serialize_with = "code")]
        diagnosis: Option<u32>,
    },
    /// A CLC accept: SMC.
    Accept,
    /// Something else: an application of plain TCP, or the proposal itself.
    Foreign {
        /// Its first bytes.
        #[serde(serialize_with = "hex")]
        bytes: Vec<u8>,
    },
}

fn code<S: Serializer>(code: &Option<u32>, to: S) -> Result<S::Ok, S::Error> {
    code.map(|code| format!("{code:#010x}")).serialize(to)
}

fn hex<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

/// Judges the first bytes of the peer's stream as the kernel does (`smc_clc_wait_msg`). `None`: more bytes are needed;
/// `is_all`: no more will come.
pub fn judge(stream: &[u8], is_all: bool) -> Option<Reply> {
    let foreign = || {
        let bytes = stream.get(..SHOWN).unwrap_or(stream).to_vec();
        (!bytes.is_empty()).then_some(Reply::Foreign { bytes })
    };
    let Some(head) = stream.first_chunk::<HEADER>() else {
        let may_become_one = EYE_CATCHERS.iter().any(|eye| eye.iter().zip(stream).all(|(a, b)| a == b));
        return if may_become_one && !is_all { None } else { foreign() };
    };
    let length = u16::from_be_bytes([head[5], head[6]]);
    let is_clc = EYE_CATCHERS.iter().any(|eye| head.starts_with(eye)) && head[7] >> 4 > 0;
    match head[4] {
        DECLINE | ACCEPT if !is_clc || length < SHORTEST => foreign(),
        ACCEPT => Some(Reply::Accept),
        DECLINE => match stream.get(DIAGNOSIS..DIAGNOSIS + 4).and_then(|bytes| bytes.first_chunk()) {
            Some(bytes) => Some(Reply::Decline { diagnosis: Some(u32::from_be_bytes(*bytes)) }),
            None if is_all => Some(Reply::Decline { diagnosis: None }),
            None => None,
        },
        _ => foreign(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decline(version: u8, length: u8) -> Vec<u8> {
        let mut message = vec![0xe2, 0xd4, 0xc3, 0xd9, 4, 0, length, version << 4];
        message.extend([7; 8]);
        message.extend(0x0307_0000_u32.to_be_bytes());
        message.resize(usize::from(length), 0);
        message
    }

    #[test]
    fn the_proposal_is_as_long_as_it_says() {
        let proposal = proposal();
        assert_eq!((proposal.len(), usize::from(proposal[6])), (52, 52));
        assert!(proposal.ends_with(&EYE_CATCHERS[0]));
        // 40 bytes of header and local information, then 8 of the prefix: the network's length is the fifth.
        assert_eq!(proposal[40..45], [240, 0, 0, 0, 4]);
    }

    #[test]
    fn clc_messages_are_smc() {
        for message in [decline(1, 28), decline(2, 44)] {
            let declined = Some(Reply::Decline { diagnosis: Some(0x0307_0000) });
            assert_eq!(judge(&message, false), declined);
            assert_eq!(judge(&message[..20], false), declined);
            assert_eq!(judge(&message[..19], false), None);
            assert_eq!(judge(&message[..19], true), Some(Reply::Decline { diagnosis: None }));
        }
        assert_eq!(judge(&[0xe2, 0xd4, 0xc3, 0xc4, 2, 0, 78, 0x20], false), Some(Reply::Accept));
    }

    #[test]
    fn everything_else_is_not() {
        let is_foreign = |bytes: &[u8]| matches!(judge(bytes, false), Some(Reply::Foreign { .. }));
        assert!(is_foreign(&proposal()), "an echo of what was sent");
        assert!(is_foreign(b"HTTP/1.1 400 Bad Request\r\n"));
        assert!(is_foreign(b"S"), "decided by the first byte");
        assert!(is_foreign(&decline(0, 28)), "no version");
        assert!(is_foreign(&decline(1, 27)), "too short for a decline");
        assert_eq!(judge(&[0xe2, 0xd4], false), None);
        assert_eq!(judge(&[0xe2, 0xd4], true), Some(Reply::Foreign { bytes: vec![0xe2, 0xd4] }));
        assert_eq!(judge(&[], false), None);
        assert_eq!(judge(&[], true), None);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..70), is_all in any::<bool>()) {
            let reply = judge(&bytes, is_all);
            prop_assert!(reply.is_some() || !is_all || bytes.is_empty());
        }

        /// However the stream is cut: what a part decides, more bytes do not decide otherwise.
        #[test]
        fn a_judgement_stands(version in 0_u8..3, length in 20_u8..60, cut in 0_usize..60) {
            let whole = decline(version, length);
            let part = judge(&whole[..cut.min(whole.len())], false);
            let is_smc = |reply: &Reply| !matches!(reply, Reply::Foreign { .. });
            if let (Some(part), Some(all)) = (part, judge(&whole, true)) {
                prop_assert_eq!(is_smc(&part), is_smc(&all));
            }
        }
    }
}
