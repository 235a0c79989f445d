//! Small pieces of text: counts, ages, durations.

use std::time::Duration;

/// `1 rule`, `2 rules`.
pub(super) fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// `1 entry`, `2 entries`.
pub(super) fn many(n: usize, one: &str, more: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { more })
}

/// An age or a time to wait, in its two largest units: `3 d 4 h`, `5 min 2 s`, `0 s`.
pub(super) fn duration(seconds: u64) -> String {
    let parts = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")];
    let mut rest = seconds;
    let mut words = Vec::new();
    for (size, unit) in parts {
        let n = rest / size;
        rest %= size;
        if n > 0 || (unit == "s" && words.is_empty()) {
            words.push(format!("{n} {unit}"));
        } else if !words.is_empty() {
            break;
        }
        if words.len() == 2 {
            break;
        }
    }
    words.join(" ")
}

/// Bytes in the largest unit that leaves a whole part.
pub(super) fn bytes(n: u64) -> String {
    match n {
        0..=1023 => format!("{n} B"),
        1024..=1_048_575 => format!("{} KiB", n.div_ceil(1024)),
        _ => format!("{:.1} MiB", n as f64 / 1_048_576.0),
    }
}

/// Reads `60s`, `5m`, `2h`, `1d` or plain seconds; for clap.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let help = || format!("'{text}' is no duration: write 60s, 5m, 2h or 1d");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match &text[digits.len()..] {
        "" | "s" => 1,
        "m" | "min" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => return Err(help()),
    };
    let n: u64 = digits.parse().map_err(|_| help())?;
    let seconds = n.checked_mul(factor).ok_or_else(help)?;
    if seconds == 0 { Err("it must be at least a second".into()) } else { Ok(Duration::from_secs(seconds)) }
}

/// As [`parse_duration`], for a time in which a person is to answer.
pub(super) fn parse_patience(text: &str) -> Result<Duration, String> {
    const LONGEST: u64 = 7 * 86_400;
    let time = parse_duration(text)?;
    if time.as_secs() > LONGEST { Err("it must be at most 7 d".into()) } else { Ok(time) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        assert_eq!(duration(0), "0 s");
        assert_eq!(duration(59), "59 s");
        assert_eq!(duration(302), "5 min 2 s");
        assert_eq!(duration(3_600), "1 h");
        assert_eq!(duration(273_600), "3 d 4 h");
        assert_eq!(duration(86_401), "1 d", "a second more is not worth a word");
        assert_eq!(parse_duration("60s"), Ok(Duration::from_secs(60)));
        assert_eq!(parse_duration("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(parse_duration("90"), Ok(Duration::from_secs(90)));
        for bad in ["", "s", "5x", "-1s", "1.5h", "0", "99999999999999999999d", "18446744073709551615d"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn patience_ends() {
        assert!(parse_patience("7d").is_ok());
        assert!(parse_patience("8d").is_err());
        assert!(parse_patience("18446744073709551615").is_err());
    }

    #[test]
    fn amounts() {
        assert_eq!(bytes(8), "8 B");
        assert_eq!(bytes(8192), "8 KiB");
        assert_eq!(bytes(3 << 20), "3.0 MiB");
        assert_eq!(count(1, "rule"), "1 rule");
        assert_eq!(count(0, "rule"), "0 rules");
    }
}
