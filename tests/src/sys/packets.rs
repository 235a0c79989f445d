//! Packet sockets: packet(7).

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use super::{check, set_option, set_option_at};

/// A socket that sees every packet of the device with this number, with what is before its IP header, and says of each
/// what the kernel knows about its checksum: packet(7).
///
/// # Errors
/// What socket(2), setsockopt(2) and bind(2) say.
pub fn packet_socket(device: u32, buffer: i32) -> io::Result<OwnedFd> {
    const PACKET_AUXDATA: i32 = 8;
    // Protocol 0: nothing is seen before it is bound.
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: socket(2) takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just returned by socket(2) and nothing else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    set_option(&socket, libc::SO_RCVBUFFORCE, &buffer)?;
    set_option_at(&socket, libc::SOL_PACKET, PACKET_AUXDATA, &1_i32)?;
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as libc::sa_family_t,
        sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
        sll_ifindex: device as i32,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = size_of_val(&address) as libc::socklen_t;
    // SAFETY: pointer and length describe a live, initialised address.
    check(unsafe { libc::bind(fd, (&raw const address).cast(), length) })?;
    Ok(socket)
}

/// A packet that a [`packet_socket`] has seen.
#[derive(Debug)]
pub struct SeenPacket {
    /// Its bytes, at most 64 KiB of them.
    pub bytes: Vec<u8>,
    /// This host sends it.
    pub is_outgoing: bool,
    /// The checksum field is to be completed by the device: it holds the sum of the pseudo header only.
    pub is_partial: bool,
}

/// The next packet; `None`: there is none now.
///
/// # Errors
/// What recvmsg(2) says.
pub fn next_packet(socket: impl AsFd) -> io::Result<Option<SeenPacket>> {
    const PACKET_AUXDATA: i32 = 8;
    const PACKET_OUTGOING: u8 = 4;
    const TP_STATUS_CSUMNOTREADY: u32 = 1 << 3;
    let mut bytes = vec![0; 1 << 16];
    // SAFETY: an address of zeros is a valid value of this plain struct.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    // Words: control messages are aligned to them.
    let mut control = [0_u64; 16];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: zeros are a valid value of this plain struct; null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = (&raw mut address).cast();
    message.msg_namelen = size_of_val(&address) as libc::socklen_t;
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: the message points to buffers that outlive the call, with their lengths.
    let length = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, 0) };
    if length < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
    }
    bytes.truncate(length as usize);
    // SAFETY: the message was filled in by recvmsg(2); the macros stay inside its control buffer, which is aligned, and
    // a PACKET_AUXDATA message holds a struct that begins with the status word.
    let status = unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        let mut status = 0;
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_PACKET && (*header).cmsg_type == PACKET_AUXDATA {
                status = libc::CMSG_DATA(header).cast::<u32>().read_unaligned();
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
        status
    };
    let is_outgoing = address.sll_pkttype == PACKET_OUTGOING;
    Ok(Some(SeenPacket { bytes, is_outgoing, is_partial: status & TP_STATUS_CSUMNOTREADY != 0 }))
}
