//! A middlebox in front of a genuine server, which repeats unknown TCP options of SYNs in the server's SYN-ACKs.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::echo_peer::{Segment, list};
use crate::packet::{Link, Packet, flags};
use crate::{command, sys};

/// This host's address at the device: client and server have it.
pub const HOST: &str = "10.88.0.1";
/// The server's address as the client sees it.
pub const SERVER: &str = "10.88.0.5";
/// The client's address as the server sees it.
const CLIENT: &str = "10.88.0.6";

/// The middlebox, until it goes.
#[derive(Debug)]
pub struct Middlebox {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Middlebox {
    /// Makes the TUN device in the calling thread's network namespace, with [`HOST`]. Connections to [`SERVER`] come to the
    /// same port of [`HOST`].
    ///
    /// # Panics
    /// When that is not possible.
    #[must_use]
    pub fn start(device: &str) -> Self {
        let file = sys::open_tun(device).expect("a TUN device");
        command::output("/bin/ip", &["address", "add", &format!("{HOST}/24"), "dev", device]);
        command::output("/bin/ip", &["link", "set", device, "up"]);
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = is_over.clone();
        Self { is_over, thread: Some(thread::spawn(move || carry(&file, &ends))) }
    }
}

impl Drop for Middlebox {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn carry(mut device: &File, is_over: &AtomicBool) {
    let [host, server, client]: [IpAddr; 3] =
        [HOST, SERVER, CLIENT].map(|ip| ip.parse().expect("an address"));
    let mut buffer = vec![0; 1 << 16];
    // The options of the SYNs, by the client's and the server's port.
    let mut syns: HashMap<(u16, u16), Vec<Vec<u8>>> = HashMap::new();
    while !is_over.load(Ordering::Acquire) {
        if !sys::is_readable(device, Duration::from_millis(50)).is_ok_and(|readable| readable) {
            continue;
        }
        let Ok(length) = device.read(&mut buffer) else { continue };
        let Some(segment) = Segment::parse(&buffer[..length]) else { continue };
        let to_server = segment.source == host && segment.destination == server;
        if !to_server && (segment.source, segment.destination) != (host, client) {
            continue;
        }
        let mut options = segment.options.clone();
        if segment.flags & flags::SYN != 0 && to_server {
            syns.insert(segment.ports, list(&segment.options));
        } else if segment.flags & flags::SYN != 0 {
            let (from, to) = segment.ports;
            let own = list(&options);
            let unknown = syns.get(&(to, from)).into_iter().flatten().filter(|option| option[0] == 254);
            for option in unknown.filter(|option| !own.contains(option)) {
                options.extend(option);
            }
            assert!(options.len() <= 40, "no room for what is to be repeated: {options:02x?}");
        }
        let (from, to) = if to_server { (CLIENT, HOST) } else { (SERVER, HOST) };
        let packet = Packet {
            link: Link::Ip,
            source_port: segment.ports.0,
            sequence: segment.sequence,
            acknowledged: segment.acknowledged,
            flags: segment.flags,
            payload: segment.data,
            ..Packet::syn(from, to, segment.ports.1, &options)
        };
        let _ = device.write_all(&packet.bytes());
    }
}
