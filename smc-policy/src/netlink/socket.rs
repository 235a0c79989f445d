//! A netlink socket.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use super::message::{self, AnswerError, Flow, Malformed};

/// Enough for every datagram the kernel builds for a dump: at most 32 KiB (`netlink_dump`, net/netlink/af_netlink.c).
const BUFFER: usize = 64 * 1024;

/// A netlink protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Interfaces and addresses (`NETLINK_ROUTE`).
    Route,
    /// Socket monitoring (`NETLINK_SOCK_DIAG`).
    SockDiag,
    /// Generic netlink (`NETLINK_GENERIC`).
    Generic,
}

impl Protocol {
    const fn number(self) -> libc::c_int {
        match self {
            Self::Route => libc::NETLINK_ROUTE,
            Self::SockDiag => libc::NETLINK_SOCK_DIAG,
            Self::Generic => libc::NETLINK_GENERIC,
        }
    }
}

/// Why a request got no usable answer.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The socket could not be opened or used.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The kernel's answer: a refusal or nonsense.
    #[error(transparent)]
    Answer(#[from] AnswerError),
    /// No answer within the socket's time limit.
    #[error("the kernel did not answer in time")]
    TimedOut,
}

impl From<RequestError> for io::Error {
    fn from(error: RequestError) -> Self {
        match error {
            RequestError::Io(error) | RequestError::Answer(AnswerError::Refused(error)) => error,
            RequestError::TimedOut => Self::new(io::ErrorKind::TimedOut, error),
            RequestError::Answer(AnswerError::Malformed(malformed)) => {
                Self::new(io::ErrorKind::InvalidData, malformed)
            }
        }
    }
}

/// A netlink socket that talks to the kernel, and to the kernel only.
#[derive(Debug)]
pub struct NetlinkSocket {
    // Reads and writes are plain read(2) and write(2): a datagram each.
    file: File,
    seq: u32,
    buffer: Vec<u8>,
}

impl NetlinkSocket {
    /// Opens a socket in the calling thread's network namespace. No answer may take longer than `limit`.
    ///
    /// # Errors
    /// What socket(2), connect(2) or setsockopt(2) say.
    pub fn open(protocol: Protocol, limit: Duration) -> io::Result<Self> {
        // SAFETY: socket(2) takes no pointers.
        let fd =
            unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol.number()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just returned by socket(2) and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };

        // Connected to port 0, a netlink socket takes messages from the kernel only (netlink_getsockbyportid).
        // SAFETY: sockaddr_nl is plain integers, for which all zeroes is a valid value.
        let mut kernel: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        kernel.nl_family = libc::AF_NETLINK as libc::sa_family_t;
        // SAFETY: the pointer is to a live sockaddr_nl and the length is its size.
        let connected = unsafe {
            libc::connect(
                fd.as_raw_fd(),
                (&raw const kernel).cast(),
                size_of::<libc::sockaddr_nl>() as libc::socklen_t,
            )
        };
        if connected != 0 {
            return Err(io::Error::last_os_error());
        }

        let limit = libc::timeval {
            tv_sec: libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX),
            // Less than a million: fits every suseconds_t.
            tv_usec: limit.subsec_micros() as libc::suseconds_t,
        };
        // SAFETY: the pointer is to a live timeval and the length is its size.
        let set = unsafe {
            libc::setsockopt(
                fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVTIMEO,
                (&raw const limit).cast(),
                size_of::<libc::timeval>() as libc::socklen_t,
            )
        };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { file: File::from(fd), seq: 0, buffer: vec![0; BUFFER] })
    }

    /// Sends one request and hands the payload of every answering message of type `answer` to `each`, until the answer
    /// is complete. A request that is no dump must ask for an acknowledgement ([`message::FLAG_ACK`]).
    ///
    /// # Errors
    /// The kernel's refusal, malformed bytes (also when `each` says so), or no answer in time.
    pub fn request(
        &mut self,
        kind: u16,
        flags: u16,
        payload: &[u8],
        answer: u16,
        mut each: impl FnMut(&[u8]) -> Result<(), Malformed>,
    ) -> Result<(), RequestError> {
        self.seq = self.seq.wrapping_add(1);
        self.file.write_all(&message::request(kind, flags, self.seq, payload))?;
        loop {
            let length = match self.file.read(&mut self.buffer) {
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(RequestError::TimedOut);
                }
                Err(error) => return Err(error.into()),
            };
            // A datagram longer than the buffer loses its end, which `walk` finds as a length beyond it.
            let datagram = self.buffer.get(..length).unwrap_or_default();
            if message::walk(datagram, self.seq, answer, &mut each)? == Flow::End {
                return Ok(());
            }
        }
    }
}
