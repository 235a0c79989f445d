//! Hosts behind a TUN device that treat the options of a SYN as servers, load balancers and firewalls do, each by its
//! address: TCP as far as a probe needs it, by no kernel.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use smc_policy::guard::probe::segment::{Segment, checksum, flags};

use crate::{command, packet, sys};

/// What is done with a SYN and its options. The numbers are the last byte of the addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Style {
    /// Returns the whole option block.
    WholeBlock = 10,
    /// Its own MSS, and every unknown option as it came.
    OwnMssAndUnknown = 11,
    /// The options in the reverse order and oddly aligned.
    Reordered = 12,
    /// Its own MSS, and every option of kind 254.
    Only254 = 13,
    /// Its own MSS, and every option of kind 253.
    Only253 = 14,
    /// Its own MSS, and every unknown option of 4 bytes or more.
    UnknownOf4 = 15,
    /// Its own MSS, and the SMC option.
    OnlySmc = 16,
    /// Every option that it knows as it came.
    OnlyKnown = 17,
    /// Its own MSS: plain TCP.
    Plain = 18,
    /// Does not answer SYNs with an option of kind 254.
    Drops254 = 19,
    /// Does not answer SYNs with an unknown option.
    DropsUnknown = 20,
    /// Returns every known option, but MSS only if there is an unknown one.
    Strips = 21,
    /// Accepts nothing.
    Closed = 22,
    /// Answers TCP, but no ICMP.
    NoPing = 23,
    /// Answers the first SYN of a connection only when it comes a second time.
    Lossy = 24,
    /// Answers nothing.
    BlackHole = 99,
}

impl Style {
    const ALL: [Self; 16] = [
        Self::WholeBlock,
        Self::OwnMssAndUnknown,
        Self::Reordered,
        Self::Only254,
        Self::Only253,
        Self::UnknownOf4,
        Self::OnlySmc,
        Self::OnlyKnown,
        Self::Plain,
        Self::Drops254,
        Self::DropsUnknown,
        Self::Strips,
        Self::Closed,
        Self::NoPing,
        Self::Lossy,
        Self::BlackHole,
    ];

    /// The addresses of the host of this style: 10.77.0.x and fd77::x.
    #[must_use]
    pub fn addresses(self) -> [IpAddr; 2] {
        let last = self as u8;
        [Ipv4Addr::new(10, 77, 0, last).into(), Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, last.into()).into()]
    }

    fn of(address: IpAddr) -> Option<Self> {
        Self::ALL.into_iter().find(|style| style.addresses().contains(&address))
    }

    /// The option block of the SYN-ACK for a SYN with this one; `None`: no answer.
    fn answer(self, block: &[u8]) -> Option<Vec<u8>> {
        const MSS: [u8; 4] = [2, 4, 5, 0xb4];
        let options = split(block);
        let is_known = |option: &[u8]| matches!(option[0], 2 | 3 | 4 | 8);
        let has_unknown = options.iter().any(|option| !is_known(option));
        let with_mss = |wanted: &dyn Fn(&[u8]) -> bool| {
            let kept = options.iter().filter(|option| !is_known(option) && wanted(option));
            Some(MSS.into_iter().chain(kept.copied().flatten().copied()).collect())
        };
        match self {
            Self::WholeBlock => Some(block.to_vec()),
            Self::OwnMssAndUnknown => with_mss(&|_| true),
            Self::Reordered => {
                Some([1].into_iter().chain(options.iter().rev().copied().flatten().copied()).collect())
            }
            Self::Only254 => with_mss(&|option| option[0] == 254),
            Self::Only253 => with_mss(&|option| option[0] == 253),
            Self::UnknownOf4 => with_mss(&|option| option.len() >= 4),
            Self::OnlySmc => with_mss(&|option| option == &packet::SMC[2..]),
            Self::Drops254 if options.iter().any(|option| option[0] == 254) => None,
            Self::DropsUnknown if has_unknown => None,
            Self::Strips if has_unknown => Some(MSS.to_vec()),
            Self::OnlyKnown | Self::Strips => {
                Some(options.iter().filter(|option| is_known(option)).copied().flatten().copied().collect())
            }
            Self::Plain | Self::Drops254 | Self::DropsUnknown | Self::NoPing | Self::Lossy => {
                Some(MSS.to_vec())
            }
            Self::Closed | Self::BlackHole => None,
        }
    }
}

/// What the peer does on a connection, by the port.
pub mod ports {
    /// Takes everything and says nothing.
    pub const SILENT: u16 = 9;
    /// Returns every byte.
    pub const ECHO: u16 = 7;
    /// Answers as an HTTP server does to nonsense, and closes.
    pub const HTTP: u16 = 80;
    /// Speaks first.
    pub const BANNER: u16 = 22;
    /// Closes on the first byte.
    pub const FIN: u16 = 79;
    /// Resets on the first byte.
    pub const RST: u16 = 513;
    /// Answers with a CLC decline: what a genuine SMC server behind it would say.
    pub const DECLINES: u16 = 5000;
}

/// Options with kind and length, without padding.
fn split(block: &[u8]) -> Vec<&[u8]> {
    let mut options = Vec::new();
    let mut at = 0;
    while let Some(kind) = block.get(at) {
        let length = match kind {
            0 => break,
            1 => 1,
            _ => usize::from(block[at + 1]),
        };
        if *kind != 1 {
            options.push(&block[at..at + length]);
        }
        at += length;
    }
    options
}

/// The hosts, until this goes.
#[derive(Debug)]
pub struct TunPeers {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    open: HashMap<(SocketAddr, SocketAddr), Connection>,
    /// First SYNs that a lossy host has not answered.
    lost: Vec<(SocketAddr, SocketAddr)>,
    /// What was wrong with what came in.
    complaints: Vec<String>,
    syns: usize,
}

#[derive(Debug, Clone, Copy)]
struct Connection {
    /// The next byte expected.
    next: u32,
    /// The next byte to send.
    send: u32,
    /// The SYN-ACK was acknowledged.
    is_established: bool,
}

impl TunPeers {
    /// Starts them behind device tun0 of the calling thread's namespace, which gets 10.77.0.1 and fd77::1.
    ///
    /// # Panics
    /// When the device cannot be made.
    #[must_use]
    pub fn start() -> Self {
        let device = sys::open_tun("tun0").expect("a TUN device");
        let commands = "addr add 10.77.0.1/24 dev tun0\n\
                        addr add fd77::1/64 dev tun0 nodad\n\
                        link set tun0 up\n";
        command::run_with("ip", &["-batch", "-"], commands).unwrap_or_else(|error| panic!("{error}"));
        let (stop, state) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(State::default())));
        let thread = thread::spawn({
            let (stop, state) = (stop.clone(), state.clone());
            move || serve(device, &stop, &state)
        });
        Self { stop, thread: Some(thread), state }
    }

    /// Connections that the hosts still have, half open or open.
    ///
    /// # Panics
    /// When the peers' thread has panicked.
    #[must_use]
    pub fn open(&self) -> Vec<String> {
        let state = self.state.lock().expect("the peers live");
        state.open.iter().map(|((to, from), connection)| format!("{from} to {to}: {connection:?}")).collect()
    }

    /// What was wrong with packets that came in, and how many SYNs came.
    ///
    /// # Panics
    /// When the peers' thread has panicked.
    #[must_use]
    pub fn seen(&self) -> (Vec<String>, usize) {
        let state = self.state.lock().expect("the peers live");
        (state.complaints.clone(), state.syns)
    }
}

impl Drop for TunPeers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "the peers' thread has panicked");
        }
    }
}

fn serve(mut device: File, stop: &AtomicBool, state: &Mutex<State>) {
    let mut buffer = vec![0; 1 << 16];
    while !stop.load(Ordering::Relaxed) {
        if !sys::is_readable(&device, Duration::from_millis(50)).unwrap_or(false) {
            continue;
        }
        let Ok(length) = device.read(&mut buffer) else { return };
        let Some((from, to, protocol, body)) = open_packet(&buffer[..length]) else { continue };
        let Some(style) = Style::of(to).filter(|style| *style != Style::BlackHole) else { continue };
        let answers = match protocol {
            6 => {
                let mut state = state.lock().expect("nobody panics");
                if !packet::is_right(from, to, body) {
                    state.complaints.push(format!("wrong checksum from {from} to {to}: {body:02x?}"));
                }
                state.hear(style, from, to, body)
            }
            1 | 58 if style != Style::NoPing => echo_reply(from, to, body).into_iter().collect(),
            _ => vec![],
        };
        for answer in answers {
            let bytes = packet_of(to, from, protocol, &answer);
            // The device may be down already.
            let _ = device.write(&bytes);
        }
    }
}

impl State {
    fn hear(&mut self, style: Style, from: IpAddr, to: IpAddr, bytes: &[u8]) -> Vec<Vec<u8>> {
        let Some(segment) = Segment::parse(bytes) else {
            self.complaints.push(format!("no TCP segment: {bytes:02x?}"));
            return vec![];
        };
        let key = (SocketAddr::new(to, segment.destination_port), SocketAddr::new(from, segment.source_port));
        let answers = if segment.is(flags::SYN) {
            self.syns += 1;
            self.hear_syn(style, key, &segment)
        } else if let Some(connection) = self.open.get(&key).copied() {
            self.hear_connection(key, connection, &segment)
        } else if segment.flags & flags::RST == 0 {
            vec![segment.reset()]
        } else {
            vec![]
        };
        answers.iter().map(|answer| answer.bytes(to, from)).collect()
    }

    fn hear_syn(&mut self, style: Style, key: (SocketAddr, SocketAddr), syn: &Segment) -> Vec<Segment> {
        let answer = Segment {
            source_port: syn.destination_port,
            destination_port: syn.source_port,
            sequence: 1000,
            acknowledgement: syn.sequence.wrapping_add(1),
            window: u16::MAX,
            ..Segment::default()
        };
        if style == Style::Closed {
            return vec![Segment { sequence: 0, flags: flags::RST | flags::ACK, ..answer }];
        }
        if style == Style::Lossy && !self.lost.contains(&key) {
            self.lost.push(key);
            return vec![];
        }
        let Some(options) = style.answer(&syn.options) else { return vec![] };
        let connection = Connection { next: answer.acknowledgement, send: 1001, is_established: false };
        self.open.insert(key, connection);
        vec![Segment { flags: flags::SYN | flags::ACK, options, ..answer }]
    }

    fn hear_connection(
        &mut self,
        key: (SocketAddr, SocketAddr),
        mut connection: Connection,
        segment: &Segment,
    ) -> Vec<Segment> {
        let answer = Segment {
            source_port: segment.destination_port,
            destination_port: segment.source_port,
            sequence: connection.send,
            acknowledgement: connection.next,
            flags: flags::ACK,
            window: u16::MAX,
            ..Segment::default()
        };
        if segment.flags & flags::RST != 0 {
            // As Linux does (RFC 5961): at the exact place it ends the connection, elsewhere it is nothing.
            if segment.sequence == connection.next {
                self.open.remove(&key);
            }
            return vec![];
        }
        if segment.acknowledgement == connection.send {
            connection.is_established = true;
        }
        if segment.sequence != connection.next || !connection.is_established {
            return vec![answer];
        }
        connection.next = connection.next.wrapping_add(segment.payload.len() as u32);
        let answer = Segment { acknowledgement: connection.next, ..answer };
        let (payload, extra) = reply(key.0.port(), connection, &segment.payload);
        connection.send = connection.send.wrapping_add(payload.len() as u32);
        connection.send = connection.send.wrapping_add(u32::from(extra & flags::FIN != 0));
        if extra & flags::RST != 0 {
            self.open.remove(&key);
        } else {
            self.open.insert(key, connection);
        }
        let push = if payload.is_empty() { 0 } else { flags::PSH };
        vec![Segment { payload, flags: answer.flags | extra | push, ..answer }]
    }
}

/// What is said, and which flags are set besides.
fn reply(port: u16, connection: Connection, payload: &[u8]) -> (Vec<u8>, u8) {
    let is_first = connection.send == 1001;
    match port {
        ports::BANNER if is_first => (b"SSH-2.0-x\r\n".to_vec(), 0),
        _ if payload.is_empty() => (vec![], 0),
        ports::ECHO => (payload.to_vec(), 0),
        ports::HTTP => (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n".to_vec(), flags::FIN),
        ports::FIN => (vec![], flags::FIN),
        ports::RST => (vec![], flags::RST),
        ports::DECLINES => {
            let mut decline = vec![0xe2, 0xd4, 0xc3, 0xd9, 4, 0, 28, 0x10];
            decline.extend([0; 8]);
            decline.extend(0x0307_0000_u32.to_be_bytes());
            decline.extend([0; 4]);
            decline.extend([0xe2, 0xd4, 0xc3, 0xd9]);
            (decline, 0)
        }
        _ => (vec![], 0),
    }
}

/// Sender, receiver, protocol and body of an IP packet without options or extension headers.
fn open_packet(bytes: &[u8]) -> Option<(IpAddr, IpAddr, u8, &[u8])> {
    let v4 = |at: usize| Some(IpAddr::from(<[u8; 4]>::try_from(bytes.get(at..at + 4)?).ok()?));
    let v6 = |at: usize| Some(IpAddr::from(<[u8; 16]>::try_from(bytes.get(at..at + 16)?).ok()?));
    match bytes.first()? >> 4 {
        4 => Some((v4(12)?, v4(16)?, bytes[9], &bytes[20..])),
        6 => Some((v6(8)?, v6(24)?, bytes[6], &bytes[40..])),
        _ => None,
    }
}

fn packet_of(from: IpAddr, to: IpAddr, protocol: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut header = vec![0x45, 0];
            header.extend((20 + body.len() as u16).to_be_bytes());
            header.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
            header.extend(from.octets());
            header.extend(to.octets());
            let sum = checksum(&[&header]);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            header
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let mut header = vec![0x60, 0, 0, 0];
            header.extend((body.len() as u16).to_be_bytes());
            header.extend([protocol, 64]);
            header.extend(from.octets());
            header.extend(to.octets());
            header
        }
        _ => panic!("addresses of two families"),
    };
    bytes.extend(body);
    bytes
}

fn echo_reply(from: IpAddr, to: IpAddr, request: &[u8]) -> Option<Vec<u8>> {
    let kind = match request.first()? {
        8 => 0,
        128 => 129,
        _ => return None,
    };
    let mut reply = request.to_vec();
    reply[0] = kind;
    reply[2..4].fill(0);
    let sum = match (to, from) {
        (IpAddr::V6(to), IpAddr::V6(from)) => {
            let length = (reply.len() as u32).to_be_bytes();
            checksum(&[&to.octets(), &from.octets(), &length, &[0, 0, 0, 58], &reply])
        }
        _ => checksum(&[&reply]),
    };
    reply[2..4].copy_from_slice(&sum.to_be_bytes());
    Some(reply)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn styles_are_what_they_say() {
        let block: Vec<u8> =
            [&[2, 4, 5, 0xb4, 1, 3, 3, 7, 253, 3, 9][..], &packet::SMC, &[254, 4, 1, 2]].concat();
        let kinds = |style: Style| -> Vec<u8> {
            split(&style.answer(&block).unwrap()).iter().map(|option| option[0]).collect()
        };
        assert_eq!(kinds(Style::WholeBlock), [2, 3, 253, 254, 254]);
        assert_eq!(kinds(Style::OwnMssAndUnknown), [2, 253, 254, 254]);
        assert_eq!(kinds(Style::Reordered), [254, 254, 253, 3, 2]);
        assert_eq!(kinds(Style::Only254), [2, 254, 254]);
        assert_eq!(kinds(Style::Only253), [2, 253]);
        assert_eq!(kinds(Style::UnknownOf4), [2, 254, 254]);
        assert_eq!(kinds(Style::OnlySmc), [2, 254]);
        assert_eq!(kinds(Style::OnlyKnown), [2, 3]);
        assert_eq!(kinds(Style::Strips), [2]);
        assert_eq!((Style::Drops254.answer(&block), Style::DropsUnknown.answer(&block)), (None, None));
        assert_eq!(Style::of("fd77::100".parse().unwrap()), None);
        assert_eq!(Style::of("fd77::a".parse().unwrap()), Some(Style::WholeBlock));
    }
}
