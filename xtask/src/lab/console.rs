//! Reading what a machine says: the kernel's console, and the channel with the job's output and its end.

use std::collections::BTreeMap;

/// Beginnings of kernel messages that mean something broke, whatever the job's exit code was.
const COMPLAINTS: [&str; 10] = [
    "BUG: ",
    "WARNING: ",
    "Oops: ",
    "Kernel panic",
    "general protection fault",
    "INFO: task ",
    "unregister_netdevice: waiting for",
    "refcount_t: ",
    "kernel BUG at",
    "stack segment: ",
];

/// Lines of the kernel's log that say that the kernel itself is in trouble.
pub(crate) fn complaints(log: &str) -> Vec<&str> {
    log.lines().map(|line| line.trim_end_matches('\r')).filter(|line| is_complaint(line)).collect()
}

fn is_complaint(line: &str) -> bool {
    // "[    1.234567] message": a word inside a message, such as "Spectre V2 : WARNING: ...", is none.
    let message = match line.trim_start().strip_prefix('[').and_then(|rest| rest.split_once("] ")) {
        Some((_, message)) => message,
        None => line,
    };
    COMPLAINTS.iter().any(|beginning| message.starts_with(beginning))
}

/// The last lines of a log, for an error report.
pub(crate) fn tail(log: &str, lines: usize) -> String {
    let all: Vec<&str> = log.lines().map(|line| line.trim_end_matches('\r')).collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// What came over the job's channel, taken apart as it arrives (see init.sh).
#[derive(Debug, Default)]
pub(crate) struct Channel {
    /// Bytes of a line that has not ended, or of a file that is not whole yet.
    pending: Vec<u8>,
    /// Name and size of the file that is arriving.
    file: Option<(String, usize)>,
    /// Files the job left in its results folder.
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    /// Whether the job was started.
    pub(crate) started: bool,
    /// The job's exit code.
    pub(crate) exit: Option<u8>,
    /// What the first process could not do.
    pub(crate) trouble: Option<String>,
}

/// Announces a line of the machine's own.
const MARK: u8 = 0o36;

impl Channel {
    /// Takes bytes in and returns those that are the job's output.
    pub(crate) fn take(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.pending.extend_from_slice(bytes);
        let mut output = Vec::new();
        loop {
            if let Some((name, size)) = &self.file {
                if self.pending.len() < *size {
                    return output;
                }
                let rest = self.pending.split_off(*size);
                self.files.insert(name.clone(), std::mem::replace(&mut self.pending, rest));
                self.file = None;
            }
            match self.pending.iter().position(|&byte| byte == MARK) {
                None => {
                    output.append(&mut self.pending);
                    return output;
                }
                Some(at) => {
                    output.extend(self.pending.drain(..at));
                    let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') else {
                        return output;
                    };
                    let line: Vec<u8> = self.pending.drain(..=end).collect();
                    self.note(String::from_utf8_lossy(&line[1..line.len() - 1]).trim_end());
                }
            }
        }
    }

    fn note(&mut self, line: &str) {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "started" => self.started = true,
            "exit" => self.exit = rest.parse().ok(),
            "lab" => self.trouble = Some(rest.to_owned()),
            "file" => {
                if let Some((name, size)) = rest.rsplit_once(' ')
                    && let Ok(size) = size.parse()
                {
                    self.file = Some((name.to_owned(), size));
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernels_own_trouble_is_a_complaint() {
        let log = "[    0.1] Spectre V2 : WARNING: Unprivileged eBPF is enabled\r\n\
                   [    2.5] WARNING: net/smc/smc.c:12 at f, CPU#0\r\n\
                   [    2.6][   T12] BUG: kernel NULL pointer dereference\n\
                   smc: all fine\nKernel panic - not syncing\n";
        let found = complaints(log);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[2].starts_with("Kernel panic"));
    }

    #[test]
    fn the_tail_is_short() {
        assert_eq!(tail("a\r\nb\nc", 2), "b\nc");
        assert_eq!(tail("a", 5), "a");
    }

    #[test]
    fn output_and_protocol_are_told_apart_however_the_bytes_arrive() {
        let stream =
            b"\x1estarted 1.5\nhello\nno newline\x1efile a b 5\nx\x1e\ny\n\x1efile empty 0\n\x1eexit 3\n";
        for size in 1..stream.len() {
            let mut channel = Channel::default();
            let output: Vec<u8> = stream.chunks(size).flat_map(|chunk| channel.take(chunk)).collect();
            assert_eq!(String::from_utf8_lossy(&output), "hello\nno newline");
            assert_eq!((channel.started, channel.exit, &channel.trouble), (true, Some(3), &None));
            assert_eq!(channel.files["a b"], b"x\x1e\ny\n");
            assert_eq!(channel.files["empty"], b"");
        }
    }

    #[test]
    fn trouble_is_kept() {
        let mut channel = Channel::default();
        channel.take(b"\x1elab cannot load the module smc\n\x1eexit 1\n");
        assert_eq!(channel.trouble.as_deref(), Some("cannot load the module smc"));
        assert!(!channel.started);
    }
}
