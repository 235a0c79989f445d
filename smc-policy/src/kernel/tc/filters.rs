//! clsact qdiscs and their filters, as rtnetlink says them (linux/rtnetlink.h, linux/pkt_sched.h, linux/pkt_cls.h;
//! net/sched/cls_api.c, net/sched/cls_bpf.c).

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    time::Duration,
};

use super::{Side, program_name};
use crate::netlink::{
    message::{
        FLAG_ACK, FLAG_CREATE, FLAG_DUMP, FLAG_ECHO, FLAG_EXCLUSIVE, FLAG_REPLACE, Malformed, attributes,
        push_attribute, u32_at,
    },
    socket::{NetlinkSocket, Protocol},
};

const RTM_NEWQDISC: u16 = 36;
const RTM_DELQDISC: u16 = 37;
const RTM_GETQDISC: u16 = 38;
const RTM_NEWTFILTER: u16 = 44;
const RTM_DELTFILTER: u16 = 45;
const RTM_GETTFILTER: u16 = 46;

/// `struct tcmsg`.
const TCMSG: usize = 20;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_CHAIN: u16 = 11;
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_ID: u16 = 11;
/// The program's return code is the verdict.
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;

/// The place of a device's ingress or clsact qdisc (`TC_H_CLSACT`, `TC_H_INGRESS`).
const PARENT: u32 = 0xffff_fff1;
/// The handle that a qdisc in this place has.
const HANDLE: u32 = 0xffff_0000;
/// All protocols (`ETH_P_ALL`).
const ALL_PROTOCOLS: u16 = 3;

/// The kind of qdisc that has filters at both sides.
pub const CLSACT: &str = "clsact";
/// The kind of filter that runs a BPF program.
pub const BPF: &str = "bpf";

const LIMIT: Duration = Duration::from_secs(5);

impl Side {
    /// What a filter's parent is called (`TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_EGRESS)` and so on).
    fn parent(self) -> u32 {
        match self {
            Self::Egress => 0xffff_fff3,
            Self::Ingress => 0xffff_fff2,
        }
    }
}

/// A filter of a device. Of those that are no BPF program, one stands for all of its priority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Packets meet low ones first; 1 to 65535.
    pub priority: u16,
    /// Packets meet those in chain 0; others only by a jump.
    pub chain: u32,
    /// `ETH_P_*`, host byte order.
    pub protocol: u16,
    /// Unique within the priority.
    pub handle: u32,
    /// "bpf", "u32", ...
    pub kind: String,
    /// The program's id, of a filter of kind [`BPF`].
    pub program: u32,
    /// The program's name.
    pub program_name: String,
    /// What the filter is called, of kind [`BPF`]: free text of whoever made it.
    pub name: String,
    /// The program decides, not the filter's actions.
    pub is_direct: bool,
}

impl Filter {
    /// Is it one that meets every packet, as those made here?
    pub fn meets_all(&self) -> bool {
        self.chain == 0 && self.protocol == ALL_PROTOCOLS && self.kind == BPF
    }
}

/// Asks and tells about one device of the calling thread's network namespace.
#[derive(Debug)]
pub struct Filters {
    socket: NetlinkSocket,
    device: u32,
}

impl Filters {
    /// Of the device with this index.
    ///
    /// # Errors
    /// The system calls'.
    pub fn of(device: u32) -> io::Result<Self> {
        Ok(Self { socket: NetlinkSocket::open(Protocol::Route, LIMIT)?, device })
    }

    /// The kind of the qdisc in clsact's place.
    ///
    /// # Errors
    /// ENODEV: no such device; the system calls'.
    pub fn qdisc(&mut self) -> io::Result<Option<String>> {
        let request = tcmsg(self.device, HANDLE, 0, 0);
        let mut kind = None;
        // Without the flag, the kernel answers to those who monitor it only.
        let asked =
            self.socket.request(RTM_GETQDISC, FLAG_ACK | FLAG_ECHO, &request, RTM_NEWQDISC, |payload| {
                kind = kind_of(payload)?;
                Ok(())
            });
        match asked.map_err(io::Error::from) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            other => other.map(|()| kind),
        }
    }

    /// Makes a clsact qdisc.
    ///
    /// # Errors
    /// EEXIST: something is in its place; ENOENT: the kernel has none; the system calls'.
    pub fn add_qdisc(&mut self) -> io::Result<()> {
        let mut message = tcmsg(self.device, HANDLE, PARENT, 0);
        push_text(&mut message, TCA_KIND, CLSACT);
        self.tell(RTM_NEWQDISC, FLAG_CREATE | FLAG_EXCLUSIVE, &message)
    }

    /// Removes the qdisc in clsact's place with all its filters.
    ///
    /// # Errors
    /// The system calls'.
    pub fn delete_qdisc(&mut self) -> io::Result<()> {
        let message = tcmsg(self.device, HANDLE, PARENT, 0);
        self.tell(RTM_DELQDISC, 0, &message)
    }

    /// The filters, in the order in which packets meet those of chain 0.
    ///
    /// # Errors
    /// The system calls'.
    pub fn list(&mut self, side: Side) -> io::Result<Vec<Filter>> {
        let request = tcmsg(self.device, 0, side.parent(), 0);
        let mut filters: Vec<Filter> = Vec::new();
        self.socket.request(RTM_GETTFILTER, FLAG_DUMP, &request, RTM_NEWTFILTER, |payload| {
            filters.push(filter(payload)?);
            Ok(())
        })?;
        condense(&mut filters);
        let mut named = Vec::with_capacity(filters.len());
        for mut filter in filters {
            if filter.program != 0 {
                let Some(name) = program_name(filter.program)? else { continue };
                filter.program_name = name;
            }
            named.push(filter);
        }
        Ok(named)
    }

    /// Makes a filter with direct action for every packet, which goes ahead of all of its priority (`list_add_rcu` in
    /// `cls_bpf_change`).
    ///
    /// # Errors
    /// EEXIST, ENOENT: the kernel has no such filters; EOPNOTSUPP: the qdisc shares its filters; the system calls'.
    pub fn add(
        &mut self,
        side: Side,
        priority: u16,
        handle: u32,
        program: BorrowedFd<'_>,
        name: &str,
    ) -> io::Result<()> {
        let message = bpf_filter(self.device, side, (priority, handle), program, name);
        self.tell(RTM_NEWTFILTER, FLAG_CREATE | FLAG_EXCLUSIVE, &message)
    }

    /// Puts another program into a filter made by [`Self::add`], in place: every packet meets the old one or the new one
    /// (`list_replace_rcu` in `cls_bpf_change`).
    ///
    /// # Errors
    /// ENOENT: the filter has gone; the system calls'.
    pub fn replace(
        &mut self,
        side: Side,
        old: &Filter,
        program: BorrowedFd<'_>,
        name: &str,
    ) -> io::Result<()> {
        let message = bpf_filter(self.device, side, (old.priority, old.handle), program, name);
        self.tell(RTM_NEWTFILTER, FLAG_REPLACE, &message)
    }

    /// Removes a filter; one that has gone already is fine.
    ///
    /// # Errors
    /// The system calls'.
    pub fn delete(&mut self, side: Side, filter: &Filter) -> io::Result<()> {
        let info = info(filter.priority, filter.protocol);
        let mut message = tcmsg(self.device, filter.handle, side.parent(), info);
        push_text(&mut message, TCA_KIND, &filter.kind);
        push_attribute(&mut message, TCA_CHAIN, &filter.chain.to_ne_bytes());
        match self.tell(RTM_DELTFILTER, 0, &message) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            other => other,
        }
    }

    fn tell(&mut self, kind: u16, flags: u16, message: &[u8]) -> io::Result<()> {
        Ok(self.socket.request(kind, flags | FLAG_ACK, message, kind, |_| Ok(()))?)
    }
}

/// `struct tcmsg`: family and padding, device, handle, parent, info.
fn tcmsg(device: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    [0, device, handle, parent, info].into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// A filter's `tcm_info`: priority, and protocol in network byte order.
fn info(priority: u16, protocol: u16) -> u32 {
    u32::from(priority) << 16 | u32::from(protocol.to_be())
}

fn push_text(message: &mut Vec<u8>, kind: u16, text: &str) {
    let mut bytes = text.as_bytes().to_vec();
    bytes.push(0);
    push_attribute(message, kind, &bytes);
}

fn bpf_filter(
    device: u32,
    side: Side,
    (priority, handle): (u16, u32),
    program: BorrowedFd<'_>,
    name: &str,
) -> Vec<u8> {
    let mut message = tcmsg(device, handle, side.parent(), info(priority, ALL_PROTOCOLS));
    push_text(&mut message, TCA_KIND, BPF);
    let mut options = Vec::new();
    push_attribute(&mut options, TCA_BPF_FD, &program.as_raw_fd().to_ne_bytes());
    push_text(&mut options, TCA_BPF_NAME, name);
    push_attribute(&mut options, TCA_BPF_FLAGS, &TCA_BPF_FLAG_ACT_DIRECT.to_ne_bytes());
    push_attribute(&mut message, TCA_OPTIONS, &options);
    message
}

/// The kind that a message about a qdisc or filter says.
fn kind_of(payload: &[u8]) -> Result<Option<String>, Malformed> {
    for attribute in attributes(payload.get(TCMSG..).unwrap_or_default()) {
        if let (TCA_KIND, value) = attribute? {
            return Ok(Some(text(value)));
        }
    }
    Ok(None)
}

/// What a message of a dump says. The kernel sends one with handle 0 ahead of each priority's filters.
fn filter(payload: &[u8]) -> Result<Filter, Malformed> {
    const WHAT: &str = "tc filter";
    let info = u32_at(payload, 16, WHAT)?;
    let mut filter = Filter {
        priority: (info >> 16) as u16,
        chain: 0,
        protocol: u16::from_be(info as u16),
        handle: u32_at(payload, 8, WHAT)?,
        kind: kind_of(payload)?.unwrap_or_default(),
        program: 0,
        program_name: String::new(),
        name: String::new(),
        is_direct: false,
    };
    for attribute in attributes(payload.get(TCMSG..).unwrap_or_default()) {
        let (kind, value) = attribute?;
        match kind {
            TCA_CHAIN => filter.chain = u32_at(value, 0, WHAT)?,
            TCA_OPTIONS if filter.kind == BPF => {
                for option in attributes(value) {
                    let (kind, value) = option?;
                    match kind {
                        TCA_BPF_ID => filter.program = u32_at(value, 0, WHAT)?,
                        TCA_BPF_NAME => filter.name = text(value),
                        TCA_BPF_FLAGS => {
                            filter.is_direct = u32_at(value, 0, WHAT)? & TCA_BPF_FLAG_ACT_DIRECT != 0;
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Ok(filter)
}

/// Leaves of a dump the filters that run a program, and one for the rest of each priority.
fn condense(filters: &mut Vec<Filter>) {
    let is_program = |filter: &Filter| filter.program != 0;
    let place = |filter: &Filter| (filter.chain, filter.priority, filter.protocol);
    // The message ahead of programs stands for nothing.
    filters.retain(|filter| is_program(filter) || filter.kind != BPF || filter.handle != 0);
    filters.dedup_by(|later, earlier| {
        !is_program(later) && !is_program(earlier) && place(later) == place(earlier)
    });
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use proptest::prelude::*;

    use super::*;

    fn message(priority: u16, handle: u32, kind: &str, options: &[u8]) -> Vec<u8> {
        let mut message = tcmsg(7, handle, Side::Egress.parent(), info(priority, ALL_PROTOCOLS));
        push_text(&mut message, TCA_KIND, kind);
        push_attribute(&mut message, TCA_CHAIN, &0u32.to_ne_bytes());
        if !options.is_empty() {
            push_attribute(&mut message, TCA_OPTIONS | 0x8000, options);
        }
        message
    }

    fn program(id: u32) -> Vec<u8> {
        let mut options = Vec::new();
        push_text(&mut options, TCA_BPF_NAME, "p");
        push_attribute(&mut options, TCA_BPF_FLAGS, &1u32.to_ne_bytes());
        push_attribute(&mut options, TCA_BPF_ID, &id.to_ne_bytes());
        options
    }

    #[test]
    fn a_dump_becomes_programs_and_one_for_each_other_priority() {
        let dump = [
            message(1, 0, "u32", &[]),
            message(1, 0x8000_0000, "u32", &[4, 0, 1, 0]),
            message(1, 0x8000_0800, "u32", &[4, 0, 1, 0]),
            message(2, 0, "bpf", &[]),
            message(2, 2, "bpf", &program(12)),
            message(2, 1, "bpf", &program(11)),
            message(3, 0, "flower", &[]),
            message(4, 1, "bpf", &[4, 0, 5, 0]),
        ];
        let mut filters: Vec<_> = dump.iter().map(|m| filter(m).unwrap()).collect();
        condense(&mut filters);
        let seen: Vec<_> = filters.iter().map(|f| (f.priority, f.kind.as_str(), f.program)).collect();
        let classic = (4, "bpf", 0);
        assert_eq!(seen, [(1, "u32", 0), (2, "bpf", 12), (2, "bpf", 11), (3, "flower", 0), classic]);
        assert!(filters[1].is_direct && filters[1].meets_all() && filters[1].name == "p");
        assert!(!filters[0].meets_all());
    }

    #[test]
    fn what_is_asked_for_reads_back() {
        let file = std::fs::File::open("/").unwrap();
        let message = bpf_filter(7, Side::Ingress, (5, 9), file.as_fd(), "a name");
        let read = filter(&message).unwrap();
        assert_eq!((read.priority, read.handle, read.name.as_str()), (5, 9, "a name"));
        assert!(read.is_direct && read.meets_all());
        assert_eq!(u32_at(&message, 4, "").unwrap(), 7);
        assert_eq!(u32_at(&message, 12, "").unwrap(), 0xffff_fff2);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
            let _ = filter(&bytes);
        }

        #[test]
        fn arbitrary_options_never_panic(options in prop::collection::vec(any::<u8>(), 1..80)) {
            let _ = filter(&message(1, 1, BPF, &options));
        }
    }
}
