//! CPU counts as the kernel lists them.

use std::{fs, io};

/// Number of possible CPUs: what per-CPU maps have values for.
///
/// # Errors
/// Of reading `/sys/devices/system/cpu/possible`.
pub fn possible() -> io::Result<usize> {
    count("/sys/devices/system/cpu/possible")
}

/// Number of CPUs that are online.
///
/// # Errors
/// Of reading `/sys/devices/system/cpu/online`.
pub fn online() -> io::Result<usize> {
    count("/sys/devices/system/cpu/online")
}

fn count(path: &str) -> io::Result<usize> {
    let text = fs::read_to_string(path).map_err(|e| io::Error::new(e.kind(), format!("{path}: {e}")))?;
    parse(text.trim()).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{path}: cannot read '{}'", text.trim()))
    })
}

/// A list such as `0-3,8,10-11`.
fn parse(list: &str) -> Option<usize> {
    list.split(',').try_fold(0usize, |sum, part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        sum.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn cpu_lists() {
        assert_eq!(parse("0"), Some(1));
        assert_eq!(parse("0-7"), Some(8));
        assert_eq!(parse("0-3,8,10-11"), Some(7));
        assert_eq!(parse(""), None);
        assert_eq!(parse("3-1"), None);
        assert_eq!(parse("a"), None);
    }
}
