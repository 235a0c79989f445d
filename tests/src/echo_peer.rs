//! A TCP peer behind a TUN device that echoes TCP options, as some servers, load balancers and middleboxes do.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::packet::{Link, Packet, flags};
use crate::{command, sys};

/// This host's addresses at the device, and addresses of the peer: any other of their networks.
pub const ADDRESSES: [(&str, &str); 2] = [("10.77.0.1", "10.77.0.5"), ("fd77::1", "fd77::5")];

/// Which options of a SYN the SYN-ACK repeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// The whole block.
    All,
    /// An MSS of its own, and what it does not know.
    Unknown,
    /// What it does not know, the last first, at odd offsets.
    Reordered,
    /// Kind 254 only.
    Experimental,
    /// What it does not know and is 4 bytes or longer.
    AtLeast4,
    /// What it knows.
    Known,
    /// The SMC option only.
    SmcOnly,
    /// The SMC option and a canary that is not the SYN's: its nonce is another one.
    WrongNonce,
    /// None of them.
    Nothing,
}

/// What it does with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behaviour {
    /// Acknowledges everything and says nothing.
    Silent,
    /// Sends back what it gets.
    Echo,
    /// Answers `HTTP/1.1 400` and closes.
    Http,
    /// Speaks first.
    Banner,
    /// Closes on the first data.
    Fin,
    /// Resets on the first data.
    Rst,
    /// Answers as an SMC server that wants TCP.
    Decline,
}

impl Behaviour {
    /// All that no SMC server shows.
    pub const ALL: [Self; 6] = [Self::Silent, Self::Echo, Self::Http, Self::Banner, Self::Fin, Self::Rst];
}

/// What [`Behaviour::Banner`] says.
pub const BANNER: &[u8] = b"SSH-2.0-echo_peer\r\n";

/// What [`Behaviour::Decline`] says: a CLC decline (`smc_clc_msg_decline`, net/smc/smc_clc.h) for want of a device.
pub const DECLINE: [u8; 28] = {
    let mut decline = [0; 28];
    let head: [u8; 8] = [0xe2, 0xd4, 0xc3, 0xd9, 4, 0, 28, 0x10];
    let mut at = 0;
    while at < 8 {
        decline[at] = head[at];
        at += 1;
    }
    // From byte 16 on the reason, at the end the eyecatcher again.
    (decline[16], decline[17]) = (3, 7);
    (decline[24], decline[25], decline[26], decline[27]) = (0xe2, 0xd4, 0xc3, 0xd9);
    decline
};

/// A SYN that came.
#[derive(Debug, Clone)]
pub struct SeenSyn {
    /// From this port.
    pub port: u16,
    /// With this sequence number.
    pub sequence: u32,
    /// With these options.
    pub options: Vec<u8>,
    /// The whole packet, from its IP header on.
    pub packet: Vec<u8>,
}

/// SYNs that do not get through to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swallows {
    /// All of them get through.
    Nothing,
    /// The next ones, so many.
    Next(u32),
    /// Those with a canary.
    Marked,
}

impl SeenSyn {
    /// Each option whole, without NOPs and what follows the end.
    #[must_use]
    pub fn list(&self) -> Vec<Vec<u8>> {
        list(&self.options)
    }

    /// Has it the SMC option?
    #[must_use]
    pub fn has_smc(&self) -> bool {
        self.list().iter().any(|option| is_smc(option))
    }

    /// Its canary.
    #[must_use]
    pub fn canary(&self) -> Option<Vec<u8>> {
        self.list().into_iter().find(|option| is_canary(option))
    }
}

fn is_smc(option: &[u8]) -> bool {
    option.starts_with(&[254, 6, 0xe2, 0xd4, 0xc3, 0xd9])
}

fn is_canary(option: &[u8]) -> bool {
    option[0] == 254 && option[2..].starts_with(b"SP")
}

/// Each option whole.
pub(crate) fn list(mut options: &[u8]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    while let [kind, rest @ ..] = options {
        match kind {
            0 => break,
            1 => options = rest,
            _ => {
                let length = usize::from(*rest.first().expect("a length")).max(2);
                let (option, behind) = options.split_at(length.min(options.len()));
                all.push(option.to_vec());
                options = behind;
            }
        }
    }
    all
}

impl Style {
    /// The options of a SYN-ACK to a SYN with these.
    #[must_use]
    pub fn answer(self, syn: &[u8]) -> Vec<u8> {
        let unknown = |option: &Vec<u8>| !matches!(option[0], 2..=5 | 8);
        let all = list(syn);
        let with_mss = |rest: Vec<Vec<u8>>| [vec![2, 4, 5, 0xb4], rest.concat()].concat();
        match self {
            Self::All => syn.to_vec(),
            Self::Unknown => with_mss(all.into_iter().filter(unknown).collect()),
            Self::Reordered => {
                let unknown = all.into_iter().rev().filter(unknown);
                let odd = unknown.flat_map(|option| [vec![1], option].concat()).collect::<Vec<_>>();
                [odd, vec![2, 4, 5, 0xb4]].concat()
            }
            Self::Experimental => with_mss(all.into_iter().filter(|option| option[0] == 254).collect()),
            Self::AtLeast4 => {
                with_mss(all.into_iter().filter(|option| unknown(option) && option.len() >= 4).collect())
            }
            Self::Known => all.into_iter().filter(|option| !unknown(option)).collect::<Vec<_>>().concat(),
            Self::SmcOnly => with_mss(all.into_iter().filter(|option| is_smc(option)).collect()),
            Self::WrongNonce => {
                let mut all: Vec<_> = all.into_iter().filter(unknown).collect();
                for option in all.iter_mut().filter(|option| is_canary(option)) {
                    *option.last_mut().expect("a nonce") ^= 1;
                }
                with_mss(all)
            }
            Self::Nothing => vec![2, 4, 5, 0xb4],
        }
    }
}

/// What is known to the peer's thread and to the test.
#[derive(Debug)]
struct State {
    style: Style,
    behaviour: Behaviour,
    swallows: Swallows,
    syns: Vec<SeenSyn>,
    connections: HashMap<(u16, u16), Connection>,
}

/// A connection that the peer has.
#[derive(Debug, Default)]
struct Connection {
    received: Vec<u8>,
    next: u32,
    sent: u32,
    is_over: bool,
}

/// The peer, until it goes.
#[derive(Debug)]
pub struct EchoPeer {
    state: Arc<Mutex<State>>,
    device: File,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl EchoPeer {
    /// Makes the TUN device in the calling thread's network namespace, with [`ADDRESSES`], and the peer behind it.
    ///
    /// # Panics
    /// When that is not possible.
    #[must_use]
    pub fn start(device: &str) -> Self {
        let file = sys::open_tun(device).expect("a TUN device");
        for (address, network) in [(ADDRESSES[0].0, "24"), (ADDRESSES[1].0, "64")] {
            let address = format!("{address}/{network}");
            let nodad: &[&str] = if address.contains(':') { &["nodad"] } else { &[] };
            let words = [&["address", "add", &address, "dev", device][..], nodad].concat();
            command::output("/bin/ip", &words);
        }
        command::output("/bin/ip", &["link", "set", device, "up"]);
        let state = Arc::new(Mutex::new(State {
            style: Style::Nothing,
            behaviour: Behaviour::Silent,
            swallows: Swallows::Nothing,
            syns: vec![],
            connections: HashMap::new(),
        }));
        let is_over = Arc::new(AtomicBool::new(false));
        let (theirs, ends, reader) =
            (state.clone(), is_over.clone(), file.try_clone().expect("another descriptor"));
        let thread = thread::spawn(move || serve(&reader, &theirs, &ends));
        Self { state, device: file, is_over, thread: Some(thread) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("the peer's thread lives")
    }

    /// Behaves so from now on, and forgets what it has seen.
    pub fn set(&self, style: Style, behaviour: Behaviour) {
        let mut state = self.state();
        state.style = style;
        state.behaviour = behaviour;
        state.swallows = Swallows::Nothing;
        state.syns.clear();
        state.connections.clear();
    }

    /// What the path to the peer does with SYNs, until [`Self::set`] is called again.
    pub fn swallow(&self, what: Swallows) {
        self.state().swallows = what;
    }

    /// The SYNs that came since, those that were swallowed too.
    #[must_use]
    pub fn syns(&self) -> Vec<SeenSyn> {
        self.state().syns.clone()
    }

    /// What came from the host's port `port`.
    #[must_use]
    pub fn received(&self, port: u16) -> Vec<u8> {
        let state = self.state();
        let of_port = state.connections.iter().filter(|((from, _), _)| *from == port);
        of_port.flat_map(|(_, connection)| connection.received.clone()).collect()
    }

    /// Whether the host has ended the connection of its port `port`.
    #[must_use]
    pub fn is_ended(&self, port: u16) -> bool {
        self.state().connections.iter().any(|((from, _), connection)| *from == port && connection.is_over)
    }

    /// Sends a packet to the host.
    ///
    /// # Panics
    /// When the device refuses it.
    pub fn send(&self, packet: &Packet) {
        let packet = Packet { link: Link::Ip, ..packet.clone() };
        (&self.device).write_all(&packet.bytes()).expect("the device takes it");
    }
}

impl Drop for EchoPeer {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(mut device: &File, state: &Mutex<State>, is_over: &AtomicBool) {
    let mut buffer = vec![0; 1 << 16];
    while !is_over.load(Ordering::Acquire) {
        if !sys::is_readable(device, Duration::from_millis(50)).is_ok_and(|readable| readable) {
            continue;
        }
        let Ok(length) = device.read(&mut buffer) else { continue };
        let Some(segment) = Segment::parse(&buffer[..length]) else { continue };
        let answers = state.lock().map(|mut state| state.answer(&segment)).unwrap_or_default();
        for answer in answers {
            let _ = device.write_all(&answer.bytes());
        }
    }
}

/// A TCP segment that came.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) ports: (u16, u16),
    pub(crate) sequence: u32,
    pub(crate) acknowledged: u32,
    pub(crate) flags: u8,
    pub(crate) options: Vec<u8>,
    pub(crate) data: Vec<u8>,
    pub(crate) packet: Vec<u8>,
}

impl Segment {
    /// `None`: something else. No extension headers come from this host's TCP.
    pub(crate) fn parse(packet: &[u8]) -> Option<Self> {
        let (source, destination, at, end): (IpAddr, IpAddr, usize, usize) = match packet.first()? >> 4 {
            4 if *packet.get(9)? == 6 => {
                let address = |at: usize| <[u8; 4]>::try_from(packet.get(at..at + 4)?).ok().map(IpAddr::from);
                let length = u16::from_be_bytes([packet[2], packet[3]]);
                (address(12)?, address(16)?, usize::from(packet[0] & 15) * 4, length.into())
            }
            6 if *packet.get(6)? == 6 => {
                let address =
                    |at: usize| <[u8; 16]>::try_from(packet.get(at..at + 16)?).ok().map(IpAddr::from);
                let length = u16::from_be_bytes([packet[4], packet[5]]);
                (address(8)?, address(24)?, 40, usize::from(length) + 40)
            }
            _ => return None,
        };
        let tcp = packet.get(at..end)?;
        let header = usize::from(tcp.get(12)? >> 4) * 4;
        let word = |at: usize| Some(u32::from_be_bytes(tcp.get(at..at + 4)?.try_into().ok()?));
        Some(Self {
            source,
            destination,
            ports: ((word(0)? >> 16) as u16, word(0)? as u16),
            sequence: word(4)?,
            acknowledged: word(8)?,
            flags: tcp[13],
            options: tcp.get(20..header)?.to_vec(),
            data: tcp.get(header..)?.to_vec(),
            packet: packet[..end].to_vec(),
        })
    }

    fn answer(&self, connection: &Connection, flags: u8, options: &[u8], data: &[u8]) -> Packet {
        let (from, to) = (self.destination.to_string(), self.source.to_string());
        Packet {
            link: Link::Ip,
            source_port: self.ports.1,
            sequence: connection.sent,
            acknowledged: connection.next,
            flags,
            payload: data.to_vec(),
            ..Packet::syn(&from, &to, self.ports.0, options)
        }
    }
}

/// The peer's first sequence number.
const FIRST: u32 = 1000;

impl State {
    fn answer(&mut self, segment: &Segment) -> Vec<Packet> {
        use flags::{ACK, FIN, PSH, RST, SYN};
        let behaviour = self.behaviour;
        if segment.flags & SYN != 0 {
            let (port, sequence, options) = (segment.ports.0, segment.sequence, segment.options.clone());
            let answer = self.style.answer(&options);
            let syn = SeenSyn { port, sequence, options, packet: segment.packet.clone() };
            let is_marked = syn.canary().is_some();
            self.syns.push(syn);
            match &mut self.swallows {
                Swallows::Next(left) if *left > 0 => {
                    *left -= 1;
                    return vec![];
                }
                Swallows::Marked if is_marked => return vec![],
                _ => {}
            }
            let new = Connection { next: sequence.wrapping_add(1), sent: FIRST, ..Connection::default() };
            let packet = segment.answer(&new, SYN | ACK, &answer, &[]);
            self.connections.insert(segment.ports, Connection { sent: FIRST + 1, ..new });
            return vec![packet];
        }
        let Some(connection) = self.connections.get_mut(&segment.ports) else { return vec![] };
        connection.is_over |= segment.flags & RST != 0;
        if connection.is_over {
            return vec![];
        }
        let mut packets = Vec::new();
        let mut say = |connection: &mut Connection, flags: u8, data: &[u8]| {
            packets.push(segment.answer(connection, flags, &[], data));
            let fin = u32::from(flags & FIN != 0);
            connection.sent = connection.sent.wrapping_add(data.len() as u32 + fin);
        };
        if segment.sequence != connection.next {
            return vec![];
        }
        if behaviour == Behaviour::Banner && connection.sent == FIRST + 1 {
            say(connection, PSH | ACK, BANNER);
        }
        if !segment.data.is_empty() {
            connection.received.extend(&segment.data);
            connection.next = connection.next.wrapping_add(segment.data.len() as u32);
            match behaviour {
                Behaviour::Silent | Behaviour::Banner => say(connection, ACK, &[]),
                Behaviour::Echo => say(connection, PSH | ACK, &segment.data),
                Behaviour::Decline if connection.received.len() == segment.data.len() => {
                    say(connection, PSH | ACK, &DECLINE);
                }
                Behaviour::Decline => say(connection, ACK, &[]),
                Behaviour::Http => {
                    say(
                        connection,
                        PSH | ACK | FIN,
                        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
                    );
                }
                Behaviour::Fin => say(connection, FIN | ACK, &[]),
                Behaviour::Rst => {
                    say(connection, RST | ACK, &[]);
                    connection.is_over = true;
                }
            }
        }
        if segment.flags & FIN != 0 {
            connection.next = connection.next.wrapping_add(1);
            connection.is_over = true;
            say(connection, FIN | ACK, &[]);
        }
        packets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn styles() {
        let canary = [254, 8, b'S', b'P', 1, 2, 3, 4];
        let smc = [254, 6, 0xe2, 0xd4, 0xc3, 0xd9];
        let syn = [&[2, 4, 5, 0xb4, 1, 3, 3, 8, 1, 1][..], &smc, &canary].concat();
        let mss = [2, 4, 5, 0xb4];
        assert_eq!(Style::All.answer(&syn), syn);
        assert_eq!(Style::Unknown.answer(&syn), [&mss[..], &smc, &canary].concat());
        assert_eq!(Style::Reordered.answer(&syn), [&[1][..], &canary, &[1], &smc, &mss].concat());
        assert_eq!(Style::SmcOnly.answer(&syn), [&mss[..], &smc].concat());
        assert_eq!(Style::Nothing.answer(&syn), mss);
        assert_eq!(Style::Known.answer(&syn), [&mss[..], &[3, 3, 8]].concat());
        let short = [&mss[..], &[253, 3, 9], &canary].concat();
        assert_eq!(Style::AtLeast4.answer(&short), [&mss[..], &canary].concat());
        let wrong = Style::WrongNonce.answer(&syn);
        assert_eq!(wrong[..wrong.len() - 1], [&mss[..], &smc, &canary[..7]].concat());
    }
}
