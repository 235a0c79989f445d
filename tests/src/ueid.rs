//! A user-defined enterprise id: without one in common, Linux hosts outside s390 do not speak SMCv2.

use std::time::Duration;

use smc_policy::netlink::message::{AnswerError, FLAG_ACK, Malformed, array_at, attributes, push_attribute};
use smc_policy::netlink::socket::{NetlinkSocket, Protocol, RequestError};

const LIMIT: Duration = Duration::from_secs(5);
/// 32 characters, padded with spaces, and a NUL: of just this length (`smc_nl_add_ueid`, net/smc/smc_clc.c).
const UEID: &[u8; 33] = b"SMC-POLICY-TESTS                \0";

/// Adds the tests' UEID to this kernel, for all namespaces; one that is there already is fine. Needs `CAP_NET_ADMIN`.
///
/// # Errors
/// The kernel's refusal; ENOENT: no SMC.
pub fn ensure() -> Result<(), RequestError> {
    const ADD_UEID: u8 = 10;
    const TABLE_ENTRY: u16 = 1;
    let mut socket = NetlinkSocket::open(Protocol::Generic, LIMIT)?;
    let family = family_id(&mut socket, b"SMC_GEN_NETLINK\0")?;
    // struct genlmsghdr: command, version, reserved u16 (linux/genetlink.h).
    let mut message = vec![ADD_UEID, 1, 0, 0];
    push_attribute(&mut message, TABLE_ENTRY, UEID);
    match socket.request(family, FLAG_ACK, &message, family, |_| Ok(())) {
        Err(RequestError::Answer(AnswerError::Refused(error)))
            if error.raw_os_error() == Some(libc::EEXIST) =>
        {
            Ok(())
        }
        other => other,
    }
}

fn family_id(socket: &mut NetlinkSocket, name: &[u8]) -> Result<u16, RequestError> {
    const CONTROLLER: u16 = 16;
    const GET_FAMILY: u8 = 3;
    const FAMILY_ID: u16 = 1;
    const FAMILY_NAME: u16 = 2;
    let mut message = vec![GET_FAMILY, 1, 0, 0];
    push_attribute(&mut message, FAMILY_NAME, name);
    let mut id = None;
    socket.request(CONTROLLER, FLAG_ACK, &message, CONTROLLER, |payload| {
        for attribute in attributes(payload.get(4..).unwrap_or_default()) {
            if let (FAMILY_ID, value) = attribute? {
                id = Some(array_at(value, 0, "family id").map(u16::from_ne_bytes)?);
            }
        }
        Ok(())
    })?;
    id.ok_or_else(|| {
        let missing = Malformed::Short { what: "family id", need: 2, have: 0 };
        RequestError::Answer(AnswerError::Malformed(missing))
    })
}
