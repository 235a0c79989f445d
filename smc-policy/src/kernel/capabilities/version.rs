//! The kernel's version. Pure.

use std::fmt;

/// A kernel's version, without what comes after the second number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 6 of 6.12.
    pub major: u32,
    /// 12 of 6.12.
    pub minor: u32,
}

/// Older kernels are not supported: nothing is tested there.
pub const OLDEST: Version = Version { major: 6, minor: 1 };

impl Version {
    /// Reads it from a release as `uname -r` prints it: `6.12.118+deb13-amd64`, `7.0-rc1`. `None`: it does not begin with
    /// two numbers.
    pub fn parse(release: &str) -> Option<Self> {
        let (major, rest) = release.split_once('.')?;
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        Some(Self { major: number(major)?, minor: number(&rest[..end])? })
    }
}

fn number(digits: &str) -> Option<u32> {
    // parse() would take a sign.
    digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn releases() {
        for (release, major, minor) in [
            ("6.12.118+deb13-amd64", 6, 12),
            ("6.1.0-57-amd64", 6, 1),
            ("7.3.4-smclab", 7, 3),
            ("7.0-rc1", 7, 0),
            ("6.6rc2", 6, 6),
            ("5.10.134-18.al8.x86_64", 5, 10),
            ("6.19", 6, 19),
        ] {
            assert_eq!(Version::parse(release), Some(Version { major, minor }), "{release}");
        }
        for bad in
            ["", "6", "6.", ".1", "linux-6.1", "+6.1", "6.-1", "6.x", "99999999999.1", "unknown", "6 .1"]
        {
            assert_eq!(Version::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn order_is_by_number() {
        let of = |release: &str| Version::parse(release).unwrap();
        assert!(of("5.19.0") < OLDEST && of("6.0.9") < OLDEST);
        assert!(of("6.1.0") >= OLDEST && of("6.10.0") > of("6.9.9") && of("10.0") > of("9.99"));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(major: u32, minor: u32, rest in "([.+-][^\0]*)?") {
            let version = Version { major, minor };
            prop_assert_eq!(Version::parse(&format!("{version}{rest}")), Some(version));
        }

        #[test]
        fn no_text_makes_it_panic(text: String) {
            let _ = Version::parse(&text);
        }
    }
}
