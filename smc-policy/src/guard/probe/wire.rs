//! The sockets: raw ones for TCP and ICMP, and those that keep local ports free of others.
//!
//! No `unsafe` here: socket2 makes the sockets, and std's `UdpSocket` does for a raw socket what it does for its own,
//! namely sendto(2) and recvfrom(2).

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use super::{
    conversation::{Packet, Ports},
    icmp,
    segment::{self, Segment},
};

/// How long a receiving thread may be blind to the end.
const TICK: Duration = Duration::from_millis(50);
/// A burst of answers must not get lost while the threads share a busy CPU.
const RECEIVE_BUFFER: usize = 1 << 20;

/// Something that came in.
#[derive(Debug)]
pub(super) struct Heard {
    /// When.
    pub(super) at: Instant,
    /// From whom.
    pub(super) from: IpAddr,
    /// What.
    pub(super) what: What,
}

/// What came in.
#[derive(Debug)]
pub(super) enum What {
    /// A TCP segment to one of our ports.
    Tcp(Segment),
    /// An ICMP message.
    Icmp(icmp::Message),
}

/// Makes something of what a socket says its sender is, and the bytes.
type Parse = fn(IpAddr, &[u8]) -> Option<(IpAddr, What)>;

/// Ports of this host that nobody else gets while this lives.
#[derive(Debug)]
pub(super) struct ReservedPorts {
    /// Which.
    pub(super) ports: Ports,
    _sockets: Vec<Socket>,
}

impl ReservedPorts {
    /// Lets the kernel choose. `silent`: the kernel must not answer at those for negotiating.
    pub(super) fn new(silent: bool) -> io::Result<Self> {
        let mut sockets = Vec::new();
        let mut port = |silent| {
            let (socket, port) = reserve(silent)?;
            sockets.push(socket);
            Ok::<u16, io::Error>(port)
        };
        let ports = Ports {
            syns: [port(false)?, port(false)?, port(false)?, port(false)?, port(false)?],
            negotiations: [port(silent)?, port(silent)?],
        };
        Ok(Self { ports, _sockets: sockets })
    }
}

/// A port of both address families. A socket that is bound and no more reserves it, and the kernel resets what comes to it.
/// `silent`: the kernel must not, or it would end the connection that is made here. A listening socket whose filter takes
/// nothing makes it drop what comes before it could be answered (`tcp_filter` in `tcp_v4_rcv`, net/ipv4/tcp_ipv4.c); the raw
/// socket has its copy by then. Such a filter on a TCP socket takes CAP_NET_ADMIN (seen on Linux 6.18).
fn reserve(silent: bool) -> io::Result<(Socket, u16)> {
    let open = |v6: bool| {
        let (domain, any): (_, IpAddr) = if v6 {
            (Domain::IPV6, Ipv6Addr::UNSPECIFIED.into())
        } else {
            (Domain::IPV4, Ipv4Addr::UNSPECIFIED.into())
        };
        let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
        if v6 {
            socket.set_only_v6(false)?;
        }
        socket.bind(&SocketAddr::new(any, 0).into())?;
        Ok::<Socket, io::Error>(socket)
    };
    // Hosts without IPv6 have IPv4 at least.
    let socket = open(true).or_else(|_| open(false))?;
    if silent {
        socket.attach_filter(&[RETURN_NOTHING])?;
        socket.listen(1)?;
    }
    let address = socket.local_addr()?.as_socket();
    let port =
        address.map(|address| address.port()).ok_or_else(|| io::Error::other("a socket without a port"))?;
    Ok((socket, port))
}

/// Whether raw sockets are permitted.
pub(super) fn check_permission() -> io::Result<()> {
    Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::TCP)).map(drop)
}

/// The raw sockets of one address family.
#[derive(Debug)]
struct Family {
    tcp: UdpSocket,
    icmp: UdpSocket,
}

/// All raw sockets and their receiving threads, which end with this.
#[derive(Debug)]
pub(super) struct Wire {
    v4: Option<Family>,
    v6: Option<Family>,
    /// What comes in.
    pub(super) heard: mpsc::Receiver<Heard>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Wire {
    /// Opens what is needed.
    pub(super) fn open(v4: bool, v6: bool, ports: &Ports) -> io::Result<Self> {
        let (sender, heard) = mpsc::channel();
        let mut wire = Self { v4: None, v6: None, heard, stop: Arc::default(), threads: Vec::new() };
        let ports: Vec<u16> = ports.all().collect();
        if v4 {
            let tcp = raw(Domain::IPV4, Protocol::TCP, &tcp_filter(true, &ports))?;
            let icmp = raw(Domain::IPV4, Protocol::ICMPV4, &icmp_filter(true))?;
            wire.listen(&tcp, &sender, |_, bytes| {
                let (from, _, segment) = segment::parse_v4(bytes)?;
                Some((from.into(), What::Tcp(Segment::parse(segment)?)))
            })?;
            wire.listen(&icmp, &sender, |_, bytes| {
                let (from, _, message) = segment::parse_v4(bytes)?;
                Some((from.into(), What::Icmp(icmp::parse(true, message)?)))
            })?;
            wire.v4 = Some(Family { tcp, icmp });
        }
        if v6 {
            let tcp = raw(Domain::IPV6, Protocol::TCP, &tcp_filter(false, &ports))?;
            let icmp = raw(Domain::IPV6, Protocol::ICMPV6, &icmp_filter(false))?;
            wire.listen(&tcp, &sender, |from, bytes| Some((from, What::Tcp(Segment::parse(bytes)?))))?;
            wire.listen(&icmp, &sender, |from, bytes| Some((from, What::Icmp(icmp::parse(false, bytes)?))))?;
            wire.v6 = Some(Family { tcp, icmp });
        }
        Ok(wire)
    }

    fn listen(&mut self, socket: &UdpSocket, sender: &mpsc::Sender<Heard>, parse: Parse) -> io::Result<()> {
        let (socket, sender, stop) = (socket.try_clone()?, sender.clone(), self.stop.clone());
        self.threads.push(thread::spawn(move || {
            let mut buffer = vec![0; 65_536];
            while !stop.load(Ordering::Relaxed) {
                // Errors are the time limit, interruptions, and errors of packets sent before, which say nothing new.
                let Ok((length, from)) = socket.recv_from(&mut buffer) else { continue };
                let at = Instant::now();
                let bytes = buffer.get(..length).unwrap_or_default();
                if let Some((from, what)) = parse(from.ip(), bytes)
                    && sender.send(Heard { at, from, what }).is_err()
                {
                    return;
                }
            }
        }));
        Ok(())
    }

    /// Sends a packet.
    pub(super) fn send(&self, source: IpAddr, target: SocketAddr, packet: &Packet) -> io::Result<()> {
        let family = if target.is_ipv4() { &self.v4 } else { &self.v6 };
        let Some(Family { tcp, icmp }) = family else {
            return Err(io::Error::other("no raw socket of this address family"));
        };
        // A raw socket has no ports: the kernel takes the field for a protocol (rawv6_sendmsg, net/ipv6/raw.c).
        let to = match target {
            SocketAddr::V4(v4) => SocketAddr::new((*v4.ip()).into(), 0),
            SocketAddr::V6(v6) => SocketAddrV6::new(*v6.ip(), 0, 0, v6.scope_id()).into(),
        };
        match packet {
            Packet::Tcp(segment) => tcp.send_to(&segment.bytes(source, target.ip()), to)?,
            Packet::Icmp(message) => icmp.send_to(message, to)?,
        };
        Ok(())
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A thread that has panicked has said so.
            let _ = thread.join();
        }
    }
}

/// The address that this host sends from, by its routes.
pub(super) fn source(target: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr =
        if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
    // Sends nothing.
    socket.connect(target)?;
    Ok(socket.local_addr()?.ip())
}

fn raw(domain: Domain, protocol: Protocol, filter: &[SockFilter]) -> io::Result<UdpSocket> {
    let socket = Socket::new(domain, Type::RAW, Some(protocol))?;
    socket.attach_filter(filter)?;
    socket.set_recv_buffer_size(RECEIVE_BUFFER)?;
    socket.set_read_timeout(Some(TICK))?;
    Ok(socket.into())
}

/// Classic BPF (linux/bpf_common.h): load a half word or a byte at a fixed place or behind the IPv4 header, whose length
/// goes into the index register; jump if equal; return.
mod bpf {
    pub(super) const LOAD_HALF: u16 = 0x28;
    pub(super) const LOAD_BYTE: u16 = 0x30;
    pub(super) const LOAD_HALF_INDEXED: u16 = 0x48;
    pub(super) const LOAD_BYTE_INDEXED: u16 = 0x50;
    pub(super) const INDEX_IPV4_HEADER: u16 = 0xb1;
    pub(super) const JUMP_IF_EQUAL: u16 = 0x15;
    pub(super) const RETURN: u16 = 0x06;
}

const RETURN_NOTHING: SockFilter = SockFilter::new(bpf::RETURN, 0, 0, 0);

/// Lets segments to these ports through: a raw socket is handed every segment that comes to the host.
fn tcp_filter(v4: bool, ports: &[u16]) -> Vec<SockFilter> {
    let load = if v4 { bpf::LOAD_HALF_INDEXED } else { bpf::LOAD_HALF };
    one_of(v4, SockFilter::new(load, 0, 0, 2), ports.iter().map(|port| u32::from(*port)).collect())
}

/// Lets echo replies and "unreachable" through.
fn icmp_filter(v4: bool) -> Vec<SockFilter> {
    let load = if v4 { bpf::LOAD_BYTE_INDEXED } else { bpf::LOAD_BYTE };
    one_of(v4, SockFilter::new(load, 0, 0, 0), if v4 { vec![0, 3] } else { vec![129, 1] })
}

/// Lets through where what is loaded is one of `values` (at most 250). IPv4's raw sockets see the IP header, IPv6's do not.
fn one_of(v4: bool, load: SockFilter, values: Vec<u32>) -> Vec<SockFilter> {
    let mut program = Vec::new();
    if v4 {
        program.push(SockFilter::new(bpf::INDEX_IPV4_HEADER, 0, 0, 0));
    }
    program.push(load);
    for (nth, value) in values.iter().enumerate() {
        // Over the comparisons that are left and the return of nothing.
        let to_the_end = (values.len() - nth) as u8;
        program.push(SockFilter::new(bpf::JUMP_IF_EQUAL, to_the_end, 0, *value));
    }
    program.push(RETURN_NOTHING);
    program.push(SockFilter::new(bpf::RETURN, 0, 0, u32::MAX));
    program
}
