//! A client's meeting with an [`EchoPeer`]: it connects, says hello, and what becomes of that at both ends.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use crate::connection::{Half, Kind, Transport};
use crate::echo_peer::{Behaviour, EchoPeer};

/// What the client says.
pub const HELLO: &[u8] = b"hello";
/// How long the peer may take to have it. On a path of one machine: milliseconds.
const LIMIT: Duration = Duration::from_secs(10);

/// What became of a connection.
#[derive(Debug)]
pub struct Meeting {
    /// What carried it; or what connect(2) said, or that it was gone at once.
    pub result: Result<Transport, io::Error>,
    /// Duration of connect(2).
    pub time: Duration,
    /// What the peer received, from the first byte on.
    pub got: Vec<u8>,
    /// What the client received.
    pub said: Vec<u8>,
}

impl Meeting {
    /// Connects, says [`HELLO`], and waits for what a peer of this behaviour answers.
    ///
    /// # Panics
    /// When no SYN came to the peer.
    #[track_caller]
    #[must_use]
    pub fn arrange(peer: &EchoPeer, kind: Kind, to: SocketAddr, behaviour: Behaviour) -> Self {
        let start = Instant::now();
        let half = Half::connect(kind, None, to);
        let failed_after = start.elapsed();
        let port = peer.syns().last().expect("a SYN came").port;
        // A peer that resets on the first bytes of SMC may have done so by the time the kernel is asked.
        let half = match half {
            Ok(half) => match half.judge() {
                Ok(end) => Ok((half, end)),
                Err(_) => Err(io::ErrorKind::ConnectionReset.into()),
            },
            Err(failure) => Err(failure.error),
        };
        let (half, end) = match half {
            Ok(open) => open,
            Err(error) => {
                // What was sent before that is on its way.
                while peer.received(port).is_empty() && start.elapsed() < failed_after + LIMIT / 5 {
                    thread::sleep(Duration::from_millis(2));
                }
                let got = peer.received(port);
                return Self { result: Err(error), time: failed_after, got, said: vec![] };
            }
        };
        let mut stream = half.stream();
        // A peer that has reset the connection already gets nothing.
        let is_sent = stream.write_all(HELLO).is_ok();
        stream.set_read_timeout(Some(Duration::from_secs(5))).expect("a time limit");
        let mut said = vec![0; 512];
        let length = match behaviour {
            Behaviour::Silent => 0,
            // A reset is an error, or the end for a kernel that gives it late.
            _ => stream.read(&mut said).unwrap_or(0),
        };
        said.truncate(length);
        let has_it = || peer.received(port).ends_with(HELLO);
        while is_sent && !has_it() && start.elapsed() < failed_after + LIMIT {
            thread::sleep(Duration::from_millis(2));
        }
        let _ = stream.shutdown(Shutdown::Write);
        Self { result: Ok(end.transport), time: half.time, got: peer.received(port), said }
    }

    /// This host's fallback reason.
    #[must_use]
    pub fn reason(&self) -> Option<u32> {
        match self.result {
            Ok(Transport::Fallback(reason, _)) => Some(reason),
            _ => None,
        }
    }
}

impl fmt::Display for Meeting {
    /// Result, time, reason and the bytes that the peer received, in columns.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let result = match &self.result {
            Ok(_) => "ok".to_owned(),
            Err(error) => match error.raw_os_error() {
                Some(libc::EPROTO) => "EPROTO".to_owned(),
                Some(libc::ETIMEDOUT) => "ETIMEDOUT".to_owned(),
                Some(libc::ECONNRESET) => "ECONNRESET".to_owned(),
                _ => format!("{:?}", error.kind()),
            },
        };
        let reason = self.reason().map_or("-".to_owned(), |reason| format!("{reason:#010x}"));
        let got = match self.got.strip_suffix(HELLO) {
            Some([]) => "hello".to_owned(),
            Some(before) => format!("{} + hello", before.len()),
            None => format!("{}", self.got.len()),
        };
        write!(f, "{result:<15} {:>7.1} ms  {reason:<10}  {got:<10}", self.time.as_secs_f64() * 1e3)
    }
}
