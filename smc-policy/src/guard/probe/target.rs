//! What to probe: hosts and ports in texts.

use std::{
    collections::HashSet,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6},
};

/// Ports that are tried where none is said: HTTPS, HTTP and SSH. Load balancers and other middleboxes, which are what
/// echoes, nearly always serve the first two; hosts without any service of their own the third.
pub const DEFAULT_PORTS: [u16; 3] = [443, 80, 22];

/// What is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// An address, IPv4-mapped ones as IPv4; with the interface of a link-local one.
    Address(IpAddr, u32),
    /// A name to be looked up.
    Name(String),
}

/// A host, with a port or without.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The host.
    pub host: Host,
    /// The port; `None`: [`DEFAULT_PORTS`].
    pub port: Option<u16>,
}

/// One address and port to probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Where.
    pub address: SocketAddr,
    /// The name that it was found by.
    pub name: Option<String>,
}

/// Reads `IP`, `IP:PORT`, `[v6]`, `[v6]:PORT`, `[v6%interface]:PORT` (the interface as a number), `NAME` or `NAME:PORT`.
///
/// # Errors
/// What could be written instead, or why it cannot be probed.
pub fn parse(text: &str) -> Result<Wanted, String> {
    let text = text.trim();
    let refuse = || {
        format!(
            "'{text}' is no target: write 192.0.2.1:443, [2001:db8::1]:443 or server.example:443; without a port \
             443, 80 and 22 are tried"
        )
    };
    let address = |ip: IpAddr, scope, port| {
        let ip = ip.to_canonical();
        let why = match ip {
            _ if ip.is_multicast() => Some("a multicast address"),
            _ if ip.is_unspecified() => Some("no host's address"),
            IpAddr::V4(v4) if v4.is_broadcast() => Some("the broadcast address"),
            IpAddr::V6(v6) if v6.is_unicast_link_local() && scope == 0 => {
                Some("link-local: say which interface, as [fe80::1%2]:443 (`ip link` has the numbers)")
            }
            _ => None,
        };
        match why {
            Some(why) => Err(format!("'{text}' cannot be probed: {why}")),
            None => Ok(Wanted { host: Host::Address(ip, scope), port }),
        }
    };
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port != 0).ok_or_else(refuse);
    if let Ok(ip) = text.parse::<IpAddr>() {
        return address(ip, 0, None);
    }
    if let Some(rest) = text.strip_prefix('[') {
        let (inner, after) = rest.split_once(']').ok_or_else(refuse)?;
        let port = match after.strip_prefix(':') {
            Some(text) => Some(port(text)?),
            None if after.is_empty() => None,
            None => return Err(refuse()),
        };
        let (ip, scope) = inner.split_once('%').unwrap_or((inner, "0"));
        let ip: Ipv6Addr = ip.parse().map_err(|_| refuse())?;
        return address(ip.into(), scope.parse().map_err(|_| refuse())?, port);
    }
    let (host, port) = match text.split_once(':') {
        Some((host, text)) => (host, Some(port(text)?)),
        None => (text, None),
    };
    if let Ok(ip) = host.parse::<IpAddr>() {
        return address(ip, 0, port);
    }
    let is_name = host.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'));
    // What has digits and dots only was meant as an address.
    let has_letter = host.chars().any(|c| c.is_ascii_alphabetic());
    if is_name && has_letter { Ok(Wanted { host: Host::Name(host.to_owned()), port }) } else { Err(refuse()) }
}

/// Reads a file of targets: one a line, `#` begins a comment.
///
/// # Errors
/// Every line that is no target, with its number from 1.
pub fn parse_file(text: &str) -> Result<Vec<Wanted>, Vec<(usize, String)>> {
    let mut wanted = Vec::new();
    let mut errors = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        match parse(line) {
            Ok(one) => wanted.push(one),
            Err(error) => errors.push((number + 1, error)),
        }
    }
    if errors.is_empty() { Ok(wanted) } else { Err(errors) }
}

/// The addresses and ports, each once, in order. `look_up` finds the addresses of a name.
///
/// # Errors
/// Of `look_up`, or that it found none.
pub fn expand(
    wanted: &[Wanted],
    mut look_up: impl FnMut(&str) -> io::Result<Vec<IpAddr>>,
) -> Result<Vec<Target>, String> {
    let mut seen = HashSet::new();
    let mut targets = Vec::new();
    for Wanted { host, port } in wanted {
        let (addresses, scope, name) = match host {
            Host::Address(ip, scope) => (vec![*ip], *scope, None),
            Host::Name(name) => {
                let found = look_up(name).map_err(|error| format!("cannot look up {name}: {error}"))?;
                if found.is_empty() {
                    return Err(format!("{name} has no address"));
                }
                (found, 0, Some(name.clone()))
            }
        };
        for ip in addresses {
            for port in port.as_ref().map_or(&DEFAULT_PORTS[..], std::slice::from_ref) {
                let address = match ip.to_canonical() {
                    IpAddr::V4(v4) => SocketAddr::new(v4.into(), *port),
                    IpAddr::V6(v6) => SocketAddrV6::new(v6, *port, 0, scope).into(),
                };
                if seen.insert(address) {
                    targets.push(Target { address, name: name.clone() });
                }
            }
        }
    }
    Ok(targets)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(ip: &str, scope: u32, port: impl Into<Option<u16>>) -> Result<Wanted, String> {
        Ok(Wanted { host: Host::Address(ip.parse().unwrap(), scope), port: port.into() })
    }

    #[test]
    fn targets() {
        assert_eq!(parse("192.0.2.1"), at("192.0.2.1", 0, None));
        assert_eq!(parse(" 192.0.2.1:443 "), at("192.0.2.1", 0, 443));
        assert_eq!(parse("2001:db8::1"), at("2001:db8::1", 0, None));
        assert_eq!(parse("[2001:db8::1]"), at("2001:db8::1", 0, None));
        assert_eq!(parse("[2001:db8::1]:80"), at("2001:db8::1", 0, 80));
        assert_eq!(parse("[fe80::1%2]:80"), at("fe80::1", 2, 80));
        assert_eq!(parse("[::ffff:192.0.2.1]:80"), at("192.0.2.1", 0, 80));
        let name = |name: &str, port| Ok(Wanted { host: Host::Name(name.into()), port });
        assert_eq!(parse("server.example"), name("server.example", None));
        assert_eq!(parse("server-1:8443"), name("server-1", Some(8443)));
        for bad in [
            "",
            ":",
            ":443",
            "a:",
            "a:0",
            "a:99999",
            "a:b:c",
            "1.2.3",
            "1.2.3.4.5:80",
            "[::1",
            "[::1]80",
            "a/24",
            "10.0.0.0/8",
            "[x]:1",
            "[fe80::1%eth0]:1",
            "white space",
            "1.2.3.4:port",
        ] {
            assert!(parse(bad).unwrap_err().contains("is no target"), "{bad}");
        }
        for (bad, why) in [
            ("224.0.0.1:80", "multicast"),
            ("ff02::1", "multicast"),
            ("0.0.0.0:80", "no host's"),
            ("255.255.255.255", "broadcast"),
            ("fe80::1", "interface"),
        ] {
            assert!(parse(bad).unwrap_err().contains(why), "{bad}");
        }
    }

    #[test]
    fn files() {
        let text = "# ours\n192.0.2.1:443   # web\n\n  server.example\n";
        assert_eq!(parse_file(text).map(|wanted| wanted.len()), Ok(2));
        let errors = parse_file("192.0.2.1\nnot one\n\n1.2.3\n").unwrap_err();
        assert_eq!(errors.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [2, 4]);
    }

    #[test]
    fn each_is_probed_once() {
        let wanted: Vec<Wanted> = ["192.0.2.1", "a.example:443", "192.0.2.1:80", "a.example:443"]
            .iter()
            .map(|text| parse(text).unwrap())
            .collect();
        let look_up = |name: &str| {
            assert_eq!(name, "a.example");
            Ok(vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()])
        };
        let targets = expand(&wanted, look_up).unwrap();
        let shown: Vec<String> = targets.iter().map(|target| target.address.to_string()).collect();
        assert_eq!(shown, ["192.0.2.1:443", "192.0.2.1:80", "192.0.2.1:22", "[2001:db8::1]:443"]);
        assert_eq!(targets[3].name.as_deref(), Some("a.example"));
        let error = expand(&wanted, |_| Err(io::Error::other("no such host"))).unwrap_err();
        assert_eq!(error, "cannot look up a.example: no such host");
        assert_eq!(expand(&wanted, |_| Ok(vec![])).unwrap_err(), "a.example has no address");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,40}") {
            let _ = parse(&text);
            let _ = parse_file(&text);
        }
    }
}
