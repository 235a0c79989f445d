//! The network devices of the calling thread's network namespace.

use std::{collections::HashSet, io, time::Duration};

use crate::kernel::error::{Doing, KernelError};
use crate::netlink::{
    message::{FLAG_DUMP, Malformed, array_at, attributes, u16_at, u32_at},
    socket::{NetlinkSocket, Protocol},
};

// linux/rtnetlink.h
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
/// `struct ifinfomsg`.
const IFINFOMSG: usize = 16;
const IFLA_IFNAME: u16 = 3;

// linux/if_arp.h
const ARPHRD_RAWIP: u16 = 519;
const ARPHRD_IP6GRE: u16 = 823;

/// A dump of 100,000 devices takes less.
const LIMIT: Duration = Duration::from_secs(5);

/// What a device's packets begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkLayer {
    /// An Ethernet header.
    Ethernet,
    /// The IP header.
    Ip,
}

impl LinkLayer {
    /// `None`: something that the programs do not understand.
    fn of(hardware: u16) -> Option<Self> {
        match hardware {
            libc::ARPHRD_ETHER | libc::ARPHRD_LOOPBACK => Some(Self::Ethernet),
            libc::ARPHRD_NONE
            | libc::ARPHRD_TUNNEL
            | libc::ARPHRD_TUNNEL6
            | libc::ARPHRD_SIT
            | libc::ARPHRD_IPGRE
            | ARPHRD_IP6GRE
            | libc::ARPHRD_PPP
            | ARPHRD_RAWIP => Some(Self::Ip),
            _ => None,
        }
    }
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its number, unique in its namespace while it exists.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// `ARPHRD_*` (linux/if_arp.h).
    pub hardware: u16,
    /// What its packets begin with; none: nothing that the programs understand.
    pub link_layer: Option<LinkLayer>,
    /// Has it an IPv4 or IPv6 address?
    pub has_address: bool,
}

/// All devices, by index.
///
/// # Errors
/// [`KernelError::Io`].
pub fn devices() -> Result<Vec<Device>, KernelError> {
    let listed = || -> io::Result<Vec<Device>> {
        let mut socket = NetlinkSocket::open(Protocol::Route, LIMIT)?;
        let mut devices = Vec::new();
        socket.request(RTM_GETLINK, FLAG_DUMP, &[0; IFINFOMSG], RTM_NEWLINK, |payload| {
            devices.push(device(payload)?);
            Ok(())
        })?;
        let mut addressed = HashSet::new();
        // struct ifaddrmsg, of every family.
        socket.request(RTM_GETADDR, FLAG_DUMP, &[0; 8], RTM_NEWADDR, |payload| {
            addressed.extend(addressed_device(payload)?);
            Ok(())
        })?;
        for device in &mut devices {
            device.has_address = addressed.contains(&device.index);
        }
        // A dump resumes by position: a device may be in it twice when others come and go.
        devices.sort_by_key(|device| device.index);
        devices.dedup_by_key(|device| device.index);
        Ok(devices)
    };
    listed().doing(|| "list the network devices".into())
}

/// Reads `struct ifinfomsg` (family and padding, type, index, flags, change) and its attributes.
fn device(payload: &[u8]) -> Result<Device, Malformed> {
    const WHAT: &str = "network device";
    let hardware = u16_at(payload, 2, WHAT)?;
    let index = u32_at(payload, 4, WHAT)?;
    let mut name = String::new();
    for attribute in attributes(payload.get(IFINFOMSG..).unwrap_or_default()) {
        let (kind, value) = attribute?;
        if kind == IFLA_IFNAME {
            let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
            name = String::from_utf8_lossy(&value[..end]).into_owned();
        }
    }
    Ok(Device { index, name, hardware, link_layer: LinkLayer::of(hardware), has_address: false })
}

/// Reads `struct ifaddrmsg` (family, prefix length, flags, scope, index): the device, if it is an IP address.
fn addressed_device(payload: &[u8]) -> Result<Option<u32>, Malformed> {
    const WHAT: &str = "network address";
    let [family] = array_at(payload, 0, WHAT)?;
    let index = u32_at(payload, 4, WHAT)?;
    Ok([libc::AF_INET, libc::AF_INET6].contains(&i32::from(family)).then_some(index))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::netlink::message::push_attribute;

    fn link(hardware: u16, index: u32, name: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 2];
        bytes.extend(hardware.to_ne_bytes());
        bytes.extend(index.to_ne_bytes());
        bytes.resize(IFINFOMSG, 0);
        push_attribute(&mut bytes, 13, &1000u32.to_ne_bytes());
        push_attribute(&mut bytes, IFLA_IFNAME, name);
        bytes
    }

    #[test]
    fn a_device_as_the_kernel_says_it() {
        let read = device(&link(0xfffe, 7, b"tun0\0")).unwrap();
        let expected = Device {
            index: 7,
            name: "tun0".into(),
            hardware: 0xfffe,
            link_layer: Some(LinkLayer::Ip),
            has_address: false,
        };
        assert_eq!(read, expected);
        assert_eq!(device(&link(1, 2, b"eth0\0")).unwrap().link_layer, Some(LinkLayer::Ethernet));
        assert_eq!(device(&link(32, 2, b"ib0\0")).unwrap().link_layer, None);
        assert!(device(&[0; 7]).is_err());
    }

    #[test]
    fn only_ip_addresses_count() {
        let address = |family: i32| {
            let mut bytes = vec![family as u8, 24, 0, 0];
            bytes.extend(9u32.to_ne_bytes());
            addressed_device(&bytes).unwrap()
        };
        assert_eq!((address(libc::AF_INET), address(libc::AF_INET6)), (Some(9), Some(9)));
        assert_eq!(address(45), None, "MCTP");
        assert!(addressed_device(&[2, 24, 0, 0, 9]).is_err());
    }

    #[test]
    fn loopback_is_here() {
        let devices = devices().unwrap();
        let lo = devices.iter().find(|d| d.name == "lo").unwrap();
        assert_eq!((lo.hardware, lo.link_layer), (libc::ARPHRD_LOOPBACK, Some(LinkLayer::Ethernet)));
        assert!(devices.is_sorted_by(|a, b| a.index < b.index));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = device(&bytes);
            let _ = addressed_device(&bytes);
        }
    }
}
