//! What goes over a device: SYNs and SYN-ACKs, each with its SMC option and its checksum judged.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use serde_json::Value;

use crate::command;
use crate::packet::{Link, MAGIC, flags, is_partial, is_right, parse_with};
use crate::sys::packets;

/// Records from its making on.
#[derive(Debug)]
pub struct Capture {
    socket: OwnedFd,
    link: Link,
    device: String,
}

/// A SYN or SYN-ACK with a right checksum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// It is a SYN-ACK.
    pub is_answer: bool,
    /// Sender.
    pub source: SocketAddr,
    /// Receiver.
    pub destination: SocketAddr,
    /// It has the SMC option.
    pub has_option: bool,
    /// The host that captures sends it.
    pub is_outgoing: bool,
    /// The device is to complete its checksum.
    pub is_partial: bool,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.is_answer { "SYN-ACK" } else { "SYN" };
        let option = if self.has_option { "with" } else { "without" };
        let checksum = if self.is_partial { "to be completed" } else { "complete" };
        write!(f, "{what} {} -> {} {option} the option, checksum {checksum}", self.source, self.destination)
    }
}

impl Capture {
    /// Begins at this device of the calling thread's network namespace.
    ///
    /// # Panics
    /// When there is no such device, or it cannot be listened to.
    #[must_use]
    pub fn begin(device: &str) -> Self {
        let text = command::output("ip", &["-json", "link", "show", "dev", device]);
        let found: Value = serde_json::from_str(&text).expect("JSON from ip");
        let number =
            found[0]["ifindex"].as_u64().and_then(|number| number.try_into().ok()).expect("a number");
        let link = match found[0]["link_type"].as_str() {
            Some("ether" | "loopback") => Link::Ethernet(vec![]),
            _ => Link::Ip,
        };
        let socket = packets::packet_socket(number, 8 << 20).expect("a packet socket");
        Self { socket, link, device: device.to_owned() }
    }

    /// The SYNs and SYN-ACKs since the last call.
    ///
    /// # Panics
    /// When the checksum of one is wrong, or one has more than one SMC option.
    #[track_caller]
    #[must_use]
    pub fn take(&self) -> Vec<Seen> {
        let mut all = Vec::new();
        while let Some(packet) = packets::next_packet(&self.socket).expect("a packet") {
            let found = [flags::SYN, flags::SYN | flags::ACK]
                .into_iter()
                .find_map(|wanted| Some((wanted, parse_with(&packet.bytes, &self.link, &[MAGIC], wanted)?)));
            let Some((wanted, syn)) = found else { continue };
            let segment = syn.segment.clone().unwrap_or_else(|| panic!("cut: {syn:?}"));
            let segment = &packet.bytes[segment];
            let is_good = if packet.is_partial {
                is_partial(syn.source, syn.destination, segment)
            } else {
                is_right(syn.source, syn.destination, segment)
            };
            assert!(is_good, "{}: wrong checksum: {packet:02x?}", self.device);
            assert!(syn.smc.len() <= 1, "{}: more than one option: {syn:?}", self.device);
            all.push(Seen {
                is_answer: wanted != flags::SYN,
                source: SocketAddr::new(syn.source, syn.source_port),
                destination: SocketAddr::new(syn.destination, syn.destination_port),
                has_option: !syn.smc.is_empty(),
                is_outgoing: packet.is_outgoing,
                is_partial: packet.is_partial,
            });
        }
        all
    }

    /// Whether the SYN and the SYN-ACK of the one connection since the last call had the option.
    ///
    /// # Panics
    /// When there were others than one SYN and one SYN-ACK, or as [`Self::take`].
    #[track_caller]
    #[must_use]
    pub fn one(&self) -> [bool; 2] {
        let all = self.take();
        match &all[..] {
            [syn, answer] if !syn.is_answer && answer.is_answer => [syn.has_option, answer.has_option],
            _ => panic!("{}: not a SYN and a SYN-ACK: {all:#?}", self.device),
        }
    }
}
