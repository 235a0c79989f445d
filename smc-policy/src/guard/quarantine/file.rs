//! The file: JSON, an entry a line.

use serde::Deserialize;

use super::record::{Record, sort};

/// Version of the file.
pub const VERSION: u32 = 1;

/// A quarantine that was saved or exported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct File {
    /// When, seconds since 1970.
    pub saved: u64,
    /// What was in it.
    pub entries: Vec<Record>,
}

/// Why a text is no such file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Not JSON, or not of this form; with line and column.
    #[error("{0}")]
    Form(#[from] serde_json::Error),
    /// Another version's.
    #[error("it is of version {0}, and this smc-policy reads version {VERSION}")]
    Version(u32),
    /// An entry says what cannot be.
    #[error("entry {number} ({peer}): {what}")]
    Entry {
        /// Which, from 1.
        number: usize,
        /// Its peer.
        peer: std::net::IpAddr,
        /// What is wrong.
        what: String,
    },
}

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    #[serde(rename = "version")]
    _version: u32,
    saved: u64,
    entries: Vec<Record>,
}

impl File {
    /// Reads it.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn parse(text: &str) -> Result<Self, FileError> {
        let Versioned { version } = serde_json::from_str(text)?;
        if version != VERSION {
            return Err(FileError::Version(version));
        }
        let Form { saved, entries, .. } = serde_json::from_str(text)?;
        for (index, entry) in entries.iter().enumerate() {
            if let Some(what) = entry.defect() {
                return Err(FileError::Entry { number: index + 1, peer: entry.peer, what });
            }
        }
        Ok(Self { saved, entries })
    }

    /// Its text, entries sorted.
    ///
    /// # Errors
    /// None that is known: serde_json's.
    pub fn to_text(&self) -> Result<String, FileError> {
        let mut entries = self.entries.clone();
        sort(&mut entries);
        let lines = entries.iter().map(|entry| Ok(format!("    {}", serde_json::to_string(entry)?)));
        let lines = lines.collect::<Result<Vec<_>, FileError>>()?.join(",\n");
        let list = if lines.is_empty() { "[]".into() } else { format!("[\n{lines}\n  ]") };
        Ok(format!(
            "{{\n  \"version\": {VERSION},\n  \"saved\": {},\n  \"entries\": {list}\n}}\n",
            self.saved
        ))
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use proptest::prelude::*;
    use smc_policy_common::quarantine::{Cause, Entry};

    use super::super::{Store, record::tests::record};
    use super::*;

    fn error(text: &str) -> String {
        File::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn how_it_looks() {
        let echo = Record {
            store: Store::Learned,
            evidence: vec![0xfe, 0x08],
            ..record("192.0.2.1", 443, Cause::Echo, 1_800_000_000)
        };
        let path = Record {
            comment: Some("cable".into()),
            ..record("2001:db8::1", 0, Cause::RdmaPath, 1_800_000_000)
        };
        let file = File { saved: 1_800_000_060, entries: vec![path, echo] };
        assert_snapshot!(file.to_text().unwrap(), @r#"
        {
          "version": 1,
          "saved": 1800000060,
          "entries": [
            {"peer":"192.0.2.1","port":443,"store":"learned","cause":"echo","direction":"outbound","count":1,"first_seen":1800000000,"last_seen":1800000000,"until":1800003600,"span":3600,"evidence":"fe08"},
            {"peer":"2001:db8::1","port":0,"store":"commanded","cause":"rdma-path","direction":"both","count":1,"first_seen":1800000000,"last_seen":1800000000,"until":1800003600,"span":3600,"comment":"cable"}
          ]
        }
        "#);
        assert_eq!(File::parse(&File::default().to_text().unwrap()).unwrap(), File::default());
    }

    #[test]
    fn what_is_refused() {
        let with = |from: &str, to: &str| {
            let file = File { saved: 5, entries: vec![record("192.0.2.1", 443, Cause::Operator, 1)] };
            error(&file.to_text().unwrap().replace(from, to))
        };
        assert_snapshot!(with("\"version\": 1", "\"version\": 2"), @"it is of version 2, and this smc-policy reads version 1");
        assert_snapshot!(with("operator", "operatr"), @"'operatr' is no cause; there are echo, short-echo, no-clc, silence, reset, rdma-path, operator, probe, link-check at line 5 column 72");
        assert_snapshot!(with("outbound", "both"), @"entry 1 (192.0.2.1): an entry for connections from the peer is for all ports: port must be 0");
        assert_snapshot!(with("outbound", "sideways"), @"'sideways' is no direction; write outbound, inbound or both at line 5 column 96");
        assert_snapshot!(with("\"span\":3600", "\"span\":3600000"), @"entry 1 (192.0.2.1): span must be at most 604800 (7 d)");
        assert_snapshot!(with("\"span\"", "\"spam\""), @"unknown field `spam`, expected one of `peer`, `port`, `store`, `cause`, `direction`, `count`, `first_seen`, `last_seen`, `until`, `span`, `evidence`, `resets`, `comment` at line 5 column 155");
        assert_snapshot!(with("\"count\":1", "\"count\":0"), @"entry 1 (192.0.2.1): count must be at least 1");
        assert_snapshot!(with("192.0.2.1", "example.org"), @"invalid IP address syntax at line 5 column 25");
        assert_snapshot!(with("3600}", "3600,\"evidence\":\"xyz\"}"), @"'xyz' is not hexadecimal at line 5 column 178");
        assert_snapshot!(error(""), @"EOF while parsing a value at line 1 column 0");
    }

    #[test]
    fn mapped_addresses_are_ipv4() {
        let file = File { saved: 5, entries: vec![record("192.0.2.1", 443, Cause::Operator, 1)] };
        let text = file.to_text().unwrap().replace("192.0.2.1", "::ffff:192.0.2.1");
        assert_eq!(File::parse(&text).unwrap(), file);
    }

    fn any_record() -> impl Strategy<Value = Record> {
        let words = (any::<u32>(), any::<bool>(), any::<u16>(), 0..Cause::ALL.len(), any::<bool>());
        let rest = (1..=u32::MAX, any::<[u64; 3]>(), 0..=604_800u32);
        let texts = (prop::collection::vec(any::<u8>(), 0..=16), prop::option::of(".*"));
        (words, rest, texts).prop_map(
            |((ip, six, port, cause, learned), (count, times, span), (evidence, comment))| {
                let cause = Cause::ALL[cause];
                let directions = super::super::directions_of(cause);
                Record {
                    peer: if six {
                        std::net::Ipv6Addr::from_bits(u128::from(ip) << 90 | 1).into()
                    } else {
                        std::net::Ipv4Addr::from_bits(ip).into()
                    },
                    port: if directions & Entry::INBOUND != 0 { 0 } else { port },
                    store: if learned { Store::Learned } else { Store::Commanded },
                    cause,
                    directions,
                    count,
                    first_seen: times[0],
                    last_seen: times[1],
                    until: times[2],
                    span,
                    evidence,
                    resets: count as u8,
                    comment,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(saved: u64, mut entries in prop::collection::vec(any_record(), 0..8)) {
            sort(&mut entries);
            let file = File { saved, entries };
            prop_assert_eq!(File::parse(&file.to_text().unwrap()).unwrap(), file);
        }

        #[test]
        fn no_text_panics(text in ".*") {
            let _ = File::parse(&text);
        }

        #[test]
        fn no_damage_panics(at: usize, byte: u8, entry in any_record()) {
            let mut bytes = File { saved: 1, entries: vec![entry] }.to_text().unwrap().into_bytes();
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = File::parse(&String::from_utf8_lossy(&bytes));
        }
    }
}
