//! Netlink framing: building requests and walking answers. Pure, no system calls.
//!
//! Layouts: `linux/netlink.h` (uapi), `struct nlmsghdr` and `struct nlattr`. Both use the host's byte order and pad to
//! four bytes. Nothing here trusts a length that came from outside.

use std::io;

/// Ends a dump; its payload is an `i32` error number or absent (`NLMSG_DONE`).
pub const DONE: u16 = 3;
/// An error, or with error number 0 an acknowledgement (`NLMSG_ERROR`).
pub const ERROR: u16 = 2;
/// To be skipped (`NLMSG_NOOP`).
pub const NOOP: u16 = 1;
/// Request flag: set on every request (`NLM_F_REQUEST`).
pub const FLAG_REQUEST: u16 = 0x1;
/// Request flag: answer with an acknowledgement (`NLM_F_ACK`).
pub const FLAG_ACK: u16 = 0x4;
/// Request flag: tell the sender, too, what others are told (`NLM_F_ECHO`).
pub const FLAG_ECHO: u16 = 0x8;
/// Request flag: change what is there (`NLM_F_REPLACE`).
pub const FLAG_REPLACE: u16 = 0x100;
/// Request flag: refuse if it is there (`NLM_F_EXCL`).
pub const FLAG_EXCLUSIVE: u16 = 0x200;
/// Request flag: create what is not there (`NLM_F_CREATE`).
pub const FLAG_CREATE: u16 = 0x400;
/// Request flag: everything there is (`NLM_F_DUMP`).
pub const FLAG_DUMP: u16 = 0x300;

const HEADER: usize = 16;
const ATTRIBUTE_HEADER: usize = 4;
/// `NLA_F_NESTED | NLA_F_NET_BYTEORDER`: flags in the top bits of an attribute's type.
const ATTRIBUTE_FLAGS: u16 = 0xc000;

/// Bytes that are no well-formed netlink answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A header or a payload is cut off, or the datagram did not fit into the buffer.
    #[error("{what}: {have} bytes where {need} are needed")]
    Short {
        /// What was being read.
        what: &'static str,
        /// Bytes needed.
        need: usize,
        /// Bytes there.
        have: usize,
    },
    /// A length field smaller than its own header.
    #[error("{what}: impossible length {length}")]
    Length {
        /// What was being read.
        what: &'static str,
        /// The length found.
        length: usize,
    },
}

/// One message of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// `nlmsg_type`.
    pub kind: u16,
    /// `nlmsg_flags`.
    pub flags: u16,
    /// `nlmsg_seq`: the request's number.
    pub seq: u32,
    /// What follows the header.
    pub payload: &'a [u8],
}

/// Iterates over the messages of one datagram; ends after the first malformed one.
#[derive(Debug, Clone)]
pub struct Messages<'a> {
    rest: &'a [u8],
}

/// The messages of `datagram`.
#[must_use]
pub const fn messages(datagram: &[u8]) -> Messages<'_> {
    Messages { rest: datagram }
}

impl<'a> Iterator for Messages<'a> {
    type Item = Result<Message<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let message = self.take();
        if message.is_err() {
            self.rest = &[];
        }
        Some(message)
    }
}

impl<'a> Messages<'a> {
    fn take(&mut self) -> Result<Message<'a>, Malformed> {
        const WHAT: &str = "netlink message";
        let length = u32_at(self.rest, 0, WHAT)? as usize;
        if length < HEADER {
            return Err(Malformed::Length { what: WHAT, length });
        }
        let payload = self.rest.get(HEADER..length).ok_or(Malformed::Short {
            what: WHAT,
            need: length,
            have: self.rest.len(),
        })?;
        let message = Message {
            kind: u16_at(self.rest, 4, WHAT)?,
            flags: u16_at(self.rest, 6, WHAT)?,
            seq: u32_at(self.rest, 8, WHAT)?,
            payload,
        };
        // The padding of the last message may be missing.
        self.rest = self.rest.get(align(length)..).unwrap_or_default();
        Ok(message)
    }
}

/// Iterates over attributes; ends after the first malformed one.
#[derive(Debug, Clone)]
pub struct Attributes<'a> {
    rest: &'a [u8],
}

/// The attributes in `bytes`: pairs of type (flags removed) and value.
#[must_use]
pub const fn attributes(bytes: &[u8]) -> Attributes<'_> {
    Attributes { rest: bytes }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = Result<(u16, &'a [u8]), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let attribute = self.take();
        if attribute.is_err() {
            self.rest = &[];
        }
        Some(attribute)
    }
}

impl<'a> Attributes<'a> {
    fn take(&mut self) -> Result<(u16, &'a [u8]), Malformed> {
        const WHAT: &str = "netlink attribute";
        let length = usize::from(u16_at(self.rest, 0, WHAT)?);
        if length < ATTRIBUTE_HEADER {
            return Err(Malformed::Length { what: WHAT, length });
        }
        let value = self.rest.get(ATTRIBUTE_HEADER..length).ok_or(Malformed::Short {
            what: WHAT,
            need: length,
            have: self.rest.len(),
        })?;
        let kind = u16_at(self.rest, 2, WHAT)? & !ATTRIBUTE_FLAGS;
        self.rest = self.rest.get(align(length)..).unwrap_or_default();
        Ok((kind, value))
    }
}

/// What a walked datagram means for the request it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// More datagrams follow.
    More,
    /// The answer is complete.
    End,
}

/// Why an answer is not usable.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// The kernel refused the request, with its error number.
    #[error(transparent)]
    Refused(io::Error),
    /// The bytes make no sense.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// Walks one datagram of the answer to request `seq` and hands every data message to `each`.
///
/// Messages of other requests and of another kind than `kind` are skipped. An acknowledgement ends the answer as `DONE`
/// does.
///
/// # Errors
/// The kernel's refusal, or bytes that are malformed, also when `each` says so.
pub fn walk<'a>(
    datagram: &'a [u8],
    seq: u32,
    kind: u16,
    mut each: impl FnMut(&'a [u8]) -> Result<(), Malformed>,
) -> Result<Flow, AnswerError> {
    for message in messages(datagram) {
        let message = message?;
        if message.seq != seq {
            continue;
        }
        match message.kind {
            NOOP => {}
            // A dump that fails half way says so in the payload of DONE.
            DONE if message.payload.len() < 4 => return Ok(Flow::End),
            DONE | ERROR => {
                let errno = i32_at(message.payload, 0, "netlink error")?;
                return match errno {
                    0 => Ok(Flow::End),
                    refused => {
                        Err(AnswerError::Refused(io::Error::from_raw_os_error(refused.wrapping_neg())))
                    }
                };
            }
            other if other == kind => each(message.payload)?,
            _ => {}
        }
    }
    Ok(Flow::More)
}

/// A whole request message.
#[must_use]
pub fn request(kind: u16, flags: u16, seq: u32, payload: &[u8]) -> Vec<u8> {
    let length = HEADER + payload.len();
    let mut bytes = Vec::with_capacity(align(length));
    bytes.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((flags | FLAG_REQUEST).to_ne_bytes());
    bytes.extend(seq.to_ne_bytes());
    bytes.extend(0_u32.to_ne_bytes()); // nlmsg_pid: the kernel fills it in
    bytes.extend(payload);
    bytes.resize(align(length), 0);
    bytes
}

/// Appends an attribute to `payload`. `value` must be shorter than 64 KiB; what is longer is cut.
pub fn push_attribute(payload: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let value = value.get(..usize::from(u16::MAX) - ATTRIBUTE_HEADER).unwrap_or(value);
    let length = u16::try_from(ATTRIBUTE_HEADER + value.len()).unwrap_or(u16::MAX);
    payload.extend(length.to_ne_bytes());
    payload.extend(kind.to_ne_bytes());
    payload.extend(value);
    payload.resize(align(payload.len()), 0);
}

const fn align(length: usize) -> usize {
    length.saturating_add(3) & !3
}

/// `N` bytes at `offset`.
///
/// # Errors
/// [`Malformed::Short`] naming `what` when `bytes` ends before.
pub fn array_at<const N: usize>(
    bytes: &[u8],
    offset: usize,
    what: &'static str,
) -> Result<[u8; N], Malformed> {
    let short = Malformed::Short { what, need: offset.saturating_add(N), have: bytes.len() };
    bytes.get(offset..).and_then(|rest| rest.first_chunk()).copied().ok_or(short)
}

pub(crate) fn u16_at(bytes: &[u8], offset: usize, what: &'static str) -> Result<u16, Malformed> {
    array_at(bytes, offset, what).map(u16::from_ne_bytes)
}

pub(crate) fn u32_at(bytes: &[u8], offset: usize, what: &'static str) -> Result<u32, Malformed> {
    array_at(bytes, offset, what).map(u32::from_ne_bytes)
}

fn i32_at(bytes: &[u8], offset: usize, what: &'static str) -> Result<i32, Malformed> {
    array_at(bytes, offset, what).map(i32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_request_is_one_message() {
        let bytes = request(20, FLAG_DUMP, 7, &[1, 2, 3]);
        assert_eq!(bytes.len(), 20);
        let all: Vec<_> = messages(&bytes).collect();
        let expected = Message { kind: 20, flags: FLAG_DUMP | FLAG_REQUEST, seq: 7, payload: &[1, 2, 3] };
        assert_eq!(all, [Ok(expected)]);
    }

    #[test]
    fn attributes_come_back_without_flags() {
        let mut bytes = Vec::new();
        push_attribute(&mut bytes, 5, b"abc");
        push_attribute(&mut bytes, 2 | 0x8000, b"");
        let all: Vec<_> = attributes(&bytes).collect();
        assert_eq!(all, [Ok((5, b"abc".as_slice())), Ok((2, b"".as_slice()))]);
    }

    #[test]
    fn refusal_end_and_foreign_messages() {
        let none = |_: &[u8]| -> Result<(), Malformed> { panic!("no data message here") };
        let refused = request(ERROR, 0, 1, &(-libc::ENOENT).to_ne_bytes());
        match walk(&refused, 1, 20, none) {
            Err(AnswerError::Refused(error)) => assert_eq!(error.raw_os_error(), Some(libc::ENOENT)),
            other => panic!("{other:?}"),
        }
        assert_eq!(walk(&refused, 2, 20, none).unwrap(), Flow::More, "another request's answer");
        assert_eq!(walk(&request(ERROR, 0, 1, &0_i32.to_ne_bytes()), 1, 20, none).unwrap(), Flow::End);
        assert_eq!(walk(&request(DONE, 0, 1, &[]), 1, 20, none).unwrap(), Flow::End);
        assert!(matches!(
            walk(&request(DONE, 0, 1, &(-libc::EINVAL).to_ne_bytes()), 1, 20, none),
            Err(AnswerError::Refused(_))
        ));
        // i32::MIN has no positive counterpart.
        assert!(walk(&request(ERROR, 0, 1, &i32::MIN.to_ne_bytes()), 1, 20, none).is_err());
    }

    #[test]
    fn a_length_beyond_the_datagram_is_refused() {
        let mut bytes = request(20, 0, 1, &[0; 8]);
        bytes[0] = 25;
        assert!(matches!(messages(&bytes).next(), Some(Err(Malformed::Short { .. }))));
        bytes[0] = 15;
        let mut all = messages(&bytes);
        assert!(matches!(all.next(), Some(Err(Malformed::Length { length: 15, .. }))));
        assert_eq!(all.next(), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = messages(&bytes).count();
            let _ = attributes(&bytes).count();
            let _ = walk(&bytes, 0, 20, |_| Ok(()));
        }

        /// Only lengths are odd here, so that the walk gets past the first header.
        #[test]
        fn odd_lengths_never_panic(length in any::<u32>(), kind in 0..24_u16, body in proptest::collection::vec(any::<u8>(), 0..64)) {
            let mut bytes = request(kind, 0, 0, &body);
            bytes[..4].copy_from_slice(&length.to_ne_bytes());
            let _ = walk(&bytes, 0, 20, |payload| attributes(payload).try_for_each(|one| one.map(|_| ())));
        }

        #[test]
        fn what_was_pushed_comes_back(values in proptest::collection::vec((0..0x3fff_u16, proptest::collection::vec(any::<u8>(), 0..40)), 0..8)) {
            let mut bytes = Vec::new();
            for (kind, value) in &values {
                push_attribute(&mut bytes, *kind, value);
            }
            let back: Vec<_> = attributes(&bytes).map(|one| one.map(|(kind, value)| (kind, value.to_vec()))).collect::<Result<_, _>>().unwrap();
            prop_assert_eq!(back, values);
        }
    }
}
