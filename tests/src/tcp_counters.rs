//! What the kernel counts of TCP segments that it had to throw away.

use std::fs;

/// Counters of the calling thread's network namespace, both IP families together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpErrors {
    /// `InErrs`: segments with any error, checksums included.
    pub in_errs: u64,
    /// `InCsumErrors`: segments with a wrong checksum.
    pub in_csum_errors: u64,
}

impl TcpErrors {
    /// Now.
    ///
    /// # Panics
    /// When the kernel does not tell.
    #[must_use]
    pub fn now() -> Self {
        let text = fs::read_to_string("/proc/thread-self/net/snmp").expect("/proc/thread-self/net/snmp");
        // A line of names and one of values.
        let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
        let mut words = || lines.next().expect("a line on TCP").split(' ');
        let (names, values) = (words(), words());
        let pairs: Vec<_> = names.zip(values).collect();
        let value = |wanted: &str| {
            let pair = pairs.iter().find(|(name, _)| *name == wanted);
            pair.and_then(|(_, value)| value.parse().ok()).unwrap_or_else(|| panic!("no {wanted}: {text}"))
        };
        Self { in_errs: value("InErrs"), in_csum_errors: value("InCsumErrors") }
    }
}
