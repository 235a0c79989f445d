//! Reads one address, network, range, endpoint or port of a text, or says what to write instead.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use smc_policy_common::query::Addr;

use super::address::{AddrRange, from_ip};

/// Why a piece of text is no address (network, range, port) and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}{}{help}", if help.is_empty() { "" } else { ": " })]
pub struct ParseError {
    /// What is wrong, one line.
    pub message: String,
    /// What to write instead; may be empty.
    pub help: String,
}

impl ParseError {
    fn new(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self { message: message.into(), help: help.into() }
    }
}

/// An address, a network (`address/bits`) or a range (`first-last`). `::ffff:a.b.c.d` is the IPv4 address, a network
/// of such addresses (96 to 128 bits) the IPv4 network.
///
/// # Errors
/// Anything else, host names and networks with host bits set included.
pub fn addresses(text: &str) -> Result<AddrRange, ParseError> {
    // First, because of long lists: nothing with a slash is anything else.
    if let Some((address, bits)) = text.split_once('/') {
        return network(text, address, bits);
    }
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Ok(AddrRange::single(from_ip(ip)));
    }
    if let Some((first, last)) = text.split_once('-')
        && let Ok(first) = first.parse::<IpAddr>()
    {
        return range(text, first, last);
    }
    Err(no_address(text))
}

fn network(text: &str, address: &str, bits: &str) -> Result<AddrRange, ParseError> {
    let ip: IpAddr = address.parse().map_err(|_| {
        if address.bytes().all(|byte| byte.is_ascii_digit()) {
            ParseError::new(
                format!("`{}` is not a network", text.escape_debug()),
                "a network is written 10.0.0.0/8 or 2001:db8::/32",
            )
        } else {
            no_address(address)
        }
    })?;
    let width = if ip.is_ipv4() { 32 } else { 128 };
    let plain = !bits.is_empty() && bits.len() <= 3 && bits.bytes().all(|byte| byte.is_ascii_digit());
    let bits = match bits.parse::<u32>() {
        Ok(number) if plain && number <= width => number,
        Ok(number) if plain => {
            return Err(ParseError::new(
                format!("/{number} is longer than an {} address", if width == 32 { "IPv4" } else { "IPv6" }),
                format!("the number of bits is 0 to {width}"),
            ));
        }
        _ => {
            let help = match bits.parse::<Ipv4Addr>().map(Ipv4Addr::to_bits) {
                Ok(mask) if ip.is_ipv4() && mask.leading_ones() == mask.count_ones() => {
                    format!("write the mask as a number of bits: {ip}/{}", mask.leading_ones())
                }
                _ => format!("a network is written address/bits, bits from 0 to {width}"),
            };
            return Err(ParseError::new(format!("`{}` is not a number of bits", bits.escape_debug()), help));
        }
    };
    let host_bits = |number: u128| number & u128::MAX.checked_shr(128 - width + bits).unwrap_or(0);
    let (number, range) = match ip {
        IpAddr::V4(v4) => {
            let mask = u32::MAX.checked_shr(bits).unwrap_or(0);
            (u128::from(v4.to_bits()), AddrRange::V4(v4.to_bits(), v4.to_bits() | mask))
        }
        IpAddr::V6(v6) => match v6.to_ipv4_mapped() {
            Some(v4) if bits >= 96 => {
                let mask = u32::MAX.checked_shr(bits - 96).unwrap_or(0);
                (v6.to_bits(), AddrRange::V4(v4.to_bits(), v4.to_bits() | mask))
            }
            _ => {
                let mask = u128::MAX.checked_shr(bits).unwrap_or(0);
                (v6.to_bits(), AddrRange::V6(v6.to_bits(), v6.to_bits() | mask))
            }
        },
    };
    let extra = host_bits(number);
    if extra != 0 {
        let base: IpAddr = match ip {
            IpAddr::V4(_) => Ipv4Addr::from_bits((number ^ extra) as u32).into(),
            IpAddr::V6(_) => Ipv6Addr::from_bits(number ^ extra).into(),
        };
        return Err(ParseError::new(
            format!("{text} has host bits set"),
            format!("did you mean {base}/{bits}? a single address is written {ip}"),
        ));
    }
    Ok(range)
}

fn range(text: &str, first: IpAddr, last: &str) -> Result<AddrRange, ParseError> {
    let last: IpAddr = last.parse().map_err(|_| {
        let help = match first {
            IpAddr::V4(v4) if last.parse::<u8>().is_ok() => {
                let [a, b, c, _] = v4.octets();
                format!("write both ends in full: {first}-{a}.{b}.{c}.{last}")
            }
            _ => "a range is written first-last, both of them addresses, without spaces".to_owned(),
        };
        ParseError::new(format!("the end of the range, `{}`, is not an address", last.escape_debug()), help)
    })?;
    match (AddrRange::single(from_ip(first)), AddrRange::single(from_ip(last))) {
        (AddrRange::V4(lo, _), AddrRange::V4(hi, _)) if lo <= hi => Ok(AddrRange::V4(lo, hi)),
        (AddrRange::V6(lo, _), AddrRange::V6(hi, _)) if lo <= hi => Ok(AddrRange::V6(lo, hi)),
        (AddrRange::V4(..), AddrRange::V6(..)) | (AddrRange::V6(..), AddrRange::V4(..)) => {
            Err(ParseError::new(
                format!("{text} begins with one address family and ends with the other"),
                "both ends must be IPv4 or both IPv6",
            ))
        }
        _ => Err(ParseError::new(
            format!("{text} ends before it begins"),
            format!("did you mean {last}-{first}?"),
        )),
    }
}

/// What is wrong with a text that is no address.
fn no_address(text: &str) -> ParseError {
    let message = format!("`{}` is not an address, a network or a range", text.escape_debug());
    let numbers = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let trimmed: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    if text.is_empty() {
        ParseError::new("the address is empty", "")
    } else if trimmed != text && addresses(&trimmed).is_ok() {
        ParseError::new(message, format!("without spaces: {trimmed}"))
    } else if let Some((address, _)) =
        text.split_once('%').filter(|(address, _)| address.parse::<IpAddr>().is_ok())
    {
        ParseError::new(
            format!("`{}` has a zone", text.escape_debug()),
            format!("a connection's addresses carry no interface name: write {address}"),
        )
    } else if let Ok((addr, Some(port))) = endpoint(text) {
        ParseError::new(
            format!("`{text}` has a port"),
            format!(
                "ports have a key of their own: peers = [\"{}\"], ports = [{port}]",
                super::address::to_ip(addr)
            ),
        )
    } else if let Some(inner) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
        ParseError::new(message, format!("write it without brackets: {}", inner.escape_debug()))
    } else if numbers(text) && text.contains('.') {
        let parts: Vec<&str> = text.split('.').collect();
        let zeros = |part: &&str| part.len() > 1 && part.starts_with('0');
        if parts.len() == 4 && parts.iter().any(zeros) {
            ParseError::new(message, "leading zeros are refused: some programs read them as octal numbers")
        } else {
            ParseError::new(
                message,
                "an IPv4 address has four numbers from 0 to 255, a network is written 10.0.0.0/8",
            )
        }
    } else if text.contains('*') {
        ParseError::new(message, "there are no wildcards: a network is written 10.0.0.0/8")
    } else if !text.contains(':')
        && text.chars().any(char::is_alphabetic)
        && text.chars().all(|c| c.is_alphanumeric() || matches!(c, '.' | '-' | '_'))
    {
        ParseError::new(
            format!("`{text}` is a host name"),
            "a policy must not depend on DNS: write its addresses, or a list of them under [sets]",
        )
    } else {
        ParseError::new(message, "written 10.0.0.1, 10.0.0.0/8, 10.0.0.1-10.0.0.9, 2001:db8::/32 or \"@set\"")
    }
}

/// An address with or without a port: `IP`, `IPv4:PORT`, `[IPv6]:PORT`, `[IPv6]`.
///
/// # Errors
/// Anything else.
pub fn endpoint(text: &str) -> Result<(Addr, Option<u16>), ParseError> {
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Ok((from_ip(ip), None));
    }
    let bad = || {
        ParseError::new(
            format!("`{}` is not an address, with or without a port", text.escape_debug()),
            "written 10.0.0.1, 10.0.0.1:443, 2001:db8::1 or [2001:db8::1]:443",
        )
    };
    let (ip, port) = if let Some(rest) = text.strip_prefix('[') {
        let (ip, rest) = rest.split_once(']').ok_or_else(bad)?;
        let ip = IpAddr::V6(ip.parse().map_err(|_| bad())?);
        if rest.is_empty() {
            return Ok((from_ip(ip), None));
        }
        (ip, rest.strip_prefix(':').ok_or_else(bad)?)
    } else {
        let (ip, port) = text.split_once(':').ok_or_else(bad)?;
        (IpAddr::V4(ip.parse().map_err(|_| bad())?), port)
    };
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    match port.parse::<u16>() {
        Ok(port) if digits && port != 0 => Ok((from_ip(ip), Some(port))),
        _ => Err(ParseError::new(format!("`{}` is not a port", port.escape_debug()), PORTS)),
    }
}

const PORTS: &str = "ports are 1 to 65535";

/// A port given as a number.
///
/// # Errors
/// It is not in 1 to 65535.
pub fn port(number: i128) -> Result<u16, ParseError> {
    match u16::try_from(number) {
        Ok(port) if port != 0 => Ok(port),
        _ => Err(not_a_port(&number)),
    }
}

/// For what is given in the place of a port.
pub(super) fn not_a_port(number: &dyn std::fmt::Display) -> ParseError {
    ParseError::new(format!("{number} is not a port"), PORTS)
}

/// A range of ports, `first-last`.
///
/// # Errors
/// Anything else.
pub fn port_range(text: &str) -> Result<(u16, u16), ParseError> {
    let number = |text: &str| match text.parse::<u16>() {
        Ok(port) if port != 0 && text.bytes().all(|byte| byte.is_ascii_digit()) => Some(port),
        _ => None,
    };
    let message = format!("`{}` is not a range of ports", text.escape_debug());
    match text.split_once('-').map(|(first, last)| (number(first), number(last))) {
        Some((Some(first), Some(last))) if first <= last => Ok((first, last)),
        Some((Some(first), Some(last))) => Err(ParseError::new(
            format!("{text} ends before it begins"),
            format!("did you mean {last}-{first}?"),
        )),
        _ => {
            let help = match number(text) {
                Some(port) => format!("a single port is a number without quotes: {port}"),
                None if text.bytes().any(|byte| byte.is_ascii_alphabetic()) => {
                    format!("names of services are not read; {PORTS}, a range is written \"8000-8099\"")
                }
                None => format!("written \"8000-8099\"; {PORTS}"),
            };
            Err(ParseError::new(message, help))
        }
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use proptest::prelude::*;

    use super::*;

    fn said(text: &str) -> String {
        match addresses(text) {
            Ok(range) => format!("{range}"),
            Err(error) => format!("{error}"),
        }
    }

    #[test]
    fn what_is_accepted() {
        for (text, read) in [
            ("10.0.0.1", "10.0.0.1"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("10.0.0.1/32", "10.0.0.1"),
            ("10.0.0.1-10.0.0.1", "10.0.0.1"),
            ("10.0.0.0-10.0.0.255", "10.0.0.0/24"),
            ("10.0.0.1-10.0.0.9", "10.0.0.1-10.0.0.9"),
            ("::/0", "::/0"),
            ("2001:db8::/32", "2001:db8::/32"),
            ("2001:db8::1-2001:db8::ff", "2001:db8::1-2001:db8::ff"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
            ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
            ("::ffff:0.0.0.0/96", "0.0.0.0/0"),
            ("::ffff:10.0.0.1/128", "10.0.0.1"),
            ("::ffff:10.0.0.1-10.0.0.9", "10.0.0.1-10.0.0.9"),
            ("::1", "::1"),
            // The deprecated IPv4-compatible form is IPv6.
            ("::10.0.0.1", "::a00:1"),
        ] {
            assert_eq!(said(text), read, "{text}");
        }
    }

    #[test]
    fn what_is_refused_and_what_to_write_instead() {
        let texts = [
            "10.0.0.1/8",
            "2001:db8::1/32",
            "::ffff:10.0.0.1/104",
            "::ffff:0:0/95",
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0/255.255.0.0",
            "10.0.0.0/+8",
            "10.0.0.0/",
            "/8",
            "10/8",
            "10.0.0.9-10.0.0.1",
            "10.0.0.1-::1",
            "10.0.0.1-20",
            "10.0.0.1 - 10.0.0.9",
            "example.com",
            "my-host",
            "localhost/24",
            "www.example.com/24",
            "fe80::1%eth0",
            "10.0.0.1:443",
            "[2001:db8::1]:443",
            "[::1]",
            "10.0.0",
            "10.0.0.01",
            "10.0.0.256",
            "10.*",
            "",
            " 10.0.0.1",
            "10.0.0.1,10.0.0.2",
            "::g",
        ];
        let all: Vec<String> = texts.iter().map(|text| format!("{text:24} {}", said(text))).collect();
        assert_snapshot!(all.join("\n"), @r#"
        10.0.0.1/8               10.0.0.1/8 has host bits set: did you mean 10.0.0.0/8? a single address is written 10.0.0.1
        2001:db8::1/32           2001:db8::1/32 has host bits set: did you mean 2001:db8::/32? a single address is written 2001:db8::1
        ::ffff:10.0.0.1/104      ::ffff:10.0.0.1/104 has host bits set: did you mean ::ffff:10.0.0.0/104? a single address is written ::ffff:10.0.0.1
        ::ffff:0:0/95            ::ffff:0:0/95 has host bits set: did you mean ::fffe:0:0/95? a single address is written ::ffff:0.0.0.0
        10.0.0.0/33              /33 is longer than an IPv4 address: the number of bits is 0 to 32
        ::/129                   /129 is longer than an IPv6 address: the number of bits is 0 to 128
        10.0.0.0/255.255.0.0     `255.255.0.0` is not a number of bits: write the mask as a number of bits: 10.0.0.0/16
        10.0.0.0/+8              `+8` is not a number of bits: a network is written address/bits, bits from 0 to 32
        10.0.0.0/                `` is not a number of bits: a network is written address/bits, bits from 0 to 32
        /8                       `/8` is not a network: a network is written 10.0.0.0/8 or 2001:db8::/32
        10/8                     `10/8` is not a network: a network is written 10.0.0.0/8 or 2001:db8::/32
        10.0.0.9-10.0.0.1        10.0.0.9-10.0.0.1 ends before it begins: did you mean 10.0.0.1-10.0.0.9?
        10.0.0.1-::1             10.0.0.1-::1 begins with one address family and ends with the other: both ends must be IPv4 or both IPv6
        10.0.0.1-20              the end of the range, `20`, is not an address: write both ends in full: 10.0.0.1-10.0.0.20
        10.0.0.1 - 10.0.0.9      `10.0.0.1 - 10.0.0.9` is not an address, a network or a range: without spaces: 10.0.0.1-10.0.0.9
        example.com              `example.com` is a host name: a policy must not depend on DNS: write its addresses, or a list of them under [sets]
        my-host                  `my-host` is a host name: a policy must not depend on DNS: write its addresses, or a list of them under [sets]
        localhost/24             `localhost` is a host name: a policy must not depend on DNS: write its addresses, or a list of them under [sets]
        www.example.com/24       `www.example.com` is a host name: a policy must not depend on DNS: write its addresses, or a list of them under [sets]
        fe80::1%eth0             `fe80::1%eth0` has a zone: a connection's addresses carry no interface name: write fe80::1
        10.0.0.1:443             `10.0.0.1:443` has a port: ports have a key of their own: peers = ["10.0.0.1"], ports = [443]
        [2001:db8::1]:443        `[2001:db8::1]:443` has a port: ports have a key of their own: peers = ["2001:db8::1"], ports = [443]
        [::1]                    `[::1]` is not an address, a network or a range: write it without brackets: ::1
        10.0.0                   `10.0.0` is not an address, a network or a range: an IPv4 address has four numbers from 0 to 255, a network is written 10.0.0.0/8
        10.0.0.01                `10.0.0.01` is not an address, a network or a range: leading zeros are refused: some programs read them as octal numbers
        10.0.0.256               `10.0.0.256` is not an address, a network or a range: an IPv4 address has four numbers from 0 to 255, a network is written 10.0.0.0/8
        10.*                     `10.*` is not an address, a network or a range: there are no wildcards: a network is written 10.0.0.0/8
                                 the address is empty
         10.0.0.1                ` 10.0.0.1` is not an address, a network or a range: without spaces: 10.0.0.1
        10.0.0.1,10.0.0.2        `10.0.0.1,10.0.0.2` is not an address, a network or a range: written 10.0.0.1, 10.0.0.0/8, 10.0.0.1-10.0.0.9, 2001:db8::/32 or "@set"
        ::g                      `::g` is not an address, a network or a range: written 10.0.0.1, 10.0.0.0/8, 10.0.0.1-10.0.0.9, 2001:db8::/32 or "@set"
        "#);
    }

    #[test]
    fn endpoints() {
        let v4 = Addr::v4(0x0a00_0001);
        assert_eq!(endpoint("10.0.0.1"), Ok((v4, None)));
        assert_eq!(endpoint("10.0.0.1:443"), Ok((v4, Some(443))));
        assert_eq!(endpoint("[::ffff:10.0.0.1]:443"), Ok((v4, Some(443))));
        assert_eq!(endpoint("[::1]:1"), Ok((Addr::v6(1), Some(1))));
        assert_eq!(endpoint("[::1]"), Ok((Addr::v6(1), None)));
        assert_eq!(endpoint("::1"), Ok((Addr::v6(1), None)));
        for text in [
            "",
            "10.0.0.1:",
            "10.0.0.1:0",
            "10.0.0.1:65536",
            "10.0.0.1:+5",
            "[::1",
            "[::1]5",
            "host:443",
            "[10.0.0.1]:4",
        ] {
            assert!(endpoint(text).is_err(), "{text}");
        }
    }

    #[test]
    fn ports() {
        assert_eq!(port_range("8000-8099"), Ok((8000, 8099)));
        assert_eq!(port_range("1-65535"), Ok((1, 65535)));
        let said = |text| port_range(text).map_err(|error| error.to_string());
        let texts = ["443", "8099-8000", "0-10", "1-65536", "https", "1-2-3", "-5", "5-", "", "+1-5"];
        let all: Vec<String> =
            texts.iter().map(|text| format!("{text:10} {}", said(text).unwrap_err())).collect();
        assert_snapshot!(all.join("\n"), @r#"
        443        `443` is not a range of ports: a single port is a number without quotes: 443
        8099-8000  8099-8000 ends before it begins: did you mean 8000-8099?
        0-10       `0-10` is not a range of ports: written "8000-8099"; ports are 1 to 65535
        1-65536    `1-65536` is not a range of ports: written "8000-8099"; ports are 1 to 65535
        https      `https` is not a range of ports: names of services are not read; ports are 1 to 65535, a range is written "8000-8099"
        1-2-3      `1-2-3` is not a range of ports: written "8000-8099"; ports are 1 to 65535
        -5         `-5` is not a range of ports: written "8000-8099"; ports are 1 to 65535
        5-         `5-` is not a range of ports: written "8000-8099"; ports are 1 to 65535
                   `` is not a range of ports: written "8000-8099"; ports are 1 to 65535
        +1-5       `+1-5` is not a range of ports: written "8000-8099"; ports are 1 to 65535
        "#);
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,40}", part in "[0-9a-f:./%@*\\[\\] -]{0,40}") {
            for text in [text, part] {
                let _ = (addresses(&text), endpoint(&text), port_range(&text));
            }
        }

        #[test]
        fn what_is_printed_reads_back(lo in any::<u128>(), hi in any::<u128>(), keep in 0u32..128, family in any::<bool>()) {
            let (lo, hi) = (lo.min(hi), lo.min(hi) | (lo.max(hi) >> keep));
            let range = if family {
                AddrRange::V4((lo as u32).min(hi as u32), (lo as u32).max(hi as u32))
            } else {
                AddrRange::V6(lo, hi)
            };
            prop_assume!(!matches!(range, AddrRange::V6(lo, hi) if lo < 1 << 64 || hi < 1 << 64));
            prop_assert_eq!(addresses(&range.to_string()), Ok(range));
        }
    }
}
