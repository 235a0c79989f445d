//! Moments as the language writes them: RFC 3339 with an offset.

use std::fmt;

use jiff::Timestamp;
use serde::{Serialize, Serializer};

/// A moment, to the second, from 1970 to 9999.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Moment(u64);

impl Moment {
    /// From seconds since 1970.
    #[must_use]
    pub const fn from_unix(seconds: u64) -> Self {
        Self(seconds)
    }

    /// Seconds since 1970.
    #[must_use]
    pub const fn to_unix(self) -> u64 {
        self.0
    }

    /// Reads `2027-01-31T00:00:00Z`, also with another offset. A part of a second is left out.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let timestamp: Timestamp = text.parse().ok()?;
        u64::try_from(timestamp.as_second()).ok().map(Self)
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match i64::try_from(self.0).ok().and_then(|seconds| Timestamp::from_second(seconds).ok()) {
            Some(timestamp) => f.pad(&timestamp.to_string()),
            // Beyond the calendar.
            None => write!(f, "{} s after 1970", self.0),
        }
    }
}

impl Serialize for Moment {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn read_with_any_offset_and_written_in_utc() {
        for (text, written) in [
            ("2027-01-31T00:00:00Z", "2027-01-31T00:00:00Z"),
            ("2027-01-31 01:30:00+01:30", "2027-01-31T00:00:00Z"),
            ("1970-01-01T00:00:00.9Z", "1970-01-01T00:00:00Z"),
        ] {
            assert_eq!(Moment::parse(text).unwrap().to_string(), written);
        }
        for text in ["2027-01-31", "2027-01-31T00:00:00", "1969-12-31T23:59:59Z", "soon", ""] {
            assert_eq!(Moment::parse(text), None, "{text}");
        }
    }

    #[test]
    fn beyond_the_calendar_there_are_seconds() {
        assert_eq!(Moment::from_unix(u64::MAX).to_string(), "18446744073709551615 s after 1970");
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(seconds in 0u64..253_370_764_800) {
            let moment = Moment::from_unix(seconds);
            prop_assert_eq!(Moment::parse(&moment.to_string()), Some(moment));
        }
    }
}
