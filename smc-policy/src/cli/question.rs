//! Reads what `explain` is asked: an address with or without a port, or a fallback reason code.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// What the words mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// `IP`, `IP:PORT`, `[v6]` or `[v6]:PORT`.
    Peer {
        /// The address; v4-mapped ones are IPv4.
        ip: IpAddr,
        /// The service port.
        port: Option<u16>,
    },
    /// A fallback reason; of "a/b" the first, which is this host's.
    Reason(u32),
}

/// Reads it.
///
/// # Errors
/// What could be written instead.
pub(super) fn parse(text: &str) -> Result<Subject, String> {
    let text = text.trim();
    let peer = |ip: IpAddr, port| Ok(Subject::Peer { ip: ip.to_canonical(), port });
    if let Ok(ip) = text.parse::<IpAddr>() {
        return peer(ip, None);
    }
    if let Ok(socket) = text.parse::<SocketAddr>() {
        return peer(socket.ip(), Some(socket.port()));
    }
    if let Some(ip) =
        text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).and_then(|t| t.parse::<Ipv6Addr>().ok())
    {
        return peer(ip.into(), None);
    }
    let first = text.split('/').next().unwrap_or(text);
    if let Some(code) = reason(first) {
        return Ok(Subject::Reason(code));
    }
    Err(format!(
        "'{text}' is neither an address (192.0.2.1, 192.0.2.1:443, [2001:db8::1]:443) nor a fallback reason code \
         (0x03010000); host names are not looked up: a policy must not depend on DNS"
    ))
}

/// `0x03010000`, `03010000` as smcss prints it, or decimal `50397184`.
fn reason(text: &str) -> Option<u32> {
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return u32::from_str_radix(hex, 16).ok();
    }
    if text.len() == 8 && text.starts_with('0') {
        return u32::from_str_radix(text, 16).ok();
    }
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_codes() {
        let peer = |ip: &str, port| Ok(Subject::Peer { ip: ip.parse().unwrap(), port });
        assert_eq!(parse("192.0.2.1"), peer("192.0.2.1", None));
        assert_eq!(parse(" 192.0.2.1:443 "), peer("192.0.2.1", Some(443)));
        assert_eq!(parse("2001:db8::1"), peer("2001:db8::1", None));
        assert_eq!(parse("[2001:db8::1]"), peer("2001:db8::1", None));
        assert_eq!(parse("[2001:db8::1]:443"), peer("2001:db8::1", Some(443)));
        assert_eq!(parse("::ffff:192.0.2.1"), peer("192.0.2.1", None));
        assert_eq!(parse("[::ffff:192.0.2.1]:1"), peer("192.0.2.1", Some(1)));
        for code in ["0x03010000", "0X3010000", "03010000", "50397184", "0x03010000/0x0"] {
            assert_eq!(parse(code), Ok(Subject::Reason(0x0301_0000)), "{code}");
        }
        for bad in ["", "example.org", "192.0.2.1:99999", "192.0.2", "0xzz", "/", "[::1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(parse("example.org").unwrap_err().contains("host names"));
    }
}
