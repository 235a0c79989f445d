//! What this process and kernel can do, each question with the place it reads.

use std::fs;

use super::error::KernelError;

const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;

/// The effective capabilities, as a bit mask (`CapEff` in /proc/self/status).
fn effective() -> u64 {
    // Without /proc nothing is known: the kernel will say what it minds.
    fs::read_to_string("/proc/self/status").ok().as_deref().and_then(parse_effective).unwrap_or(u64::MAX)
}

fn parse_effective(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|l| l.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// Changing or asking what is in force needs these: CAP_SYS_ADMIN to open BPF objects by id and the kernel's BTF, and
/// for bpffs; CAP_NET_ADMIN for the network programs.
///
/// # Errors
/// [`KernelError::NotPermitted`] naming the missing ones.
pub fn require(doing: &str) -> Result<(), KernelError> {
    match missing(effective()) {
        None => Ok(()),
        Some(capability) => Err(KernelError::NotPermitted { doing: doing.to_owned(), capability }),
    }
}

fn missing(effective: u64) -> Option<String> {
    let names: Vec<_> = [(CAP_SYS_ADMIN, "CAP_SYS_ADMIN"), (CAP_NET_ADMIN, "CAP_NET_ADMIN")]
        .iter()
        .filter(|(bit, _)| effective >> bit & 1 == 0)
        .map(|(_, name)| *name)
        .collect();
    (!names.is_empty()).then(|| names.join(" and "))
}

/// The active lockdown mode, if it is one that refuses something.
pub fn lockdown() -> Option<String> {
    active_lockdown(&fs::read_to_string("/sys/kernel/security/lockdown").ok()?)
}

/// The file lists all modes, the active one in brackets.
fn active_lockdown(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    let (mode, _) = rest.split_once(']')?;
    (mode != "none").then(|| mode.to_owned())
}

/// Adds what is known to the kernel's EPERM: with all capabilities there, lockdown is the usual reason.
pub fn explain_refusal(error: KernelError) -> KernelError {
    match (&error, lockdown()) {
        (KernelError::Refused { program, error: e, .. }, Some(mode))
            if e.raw_os_error() == Some(libc::EPERM) =>
        {
            KernelError::Missing {
                feature: format!("kernel lockdown ({mode}) refuses the BPF program {program}"),
                next: "boot with lockdown=none or lockdown=integrity, or without Secure Boot".into(),
            }
        }
        // All capabilities, but of a user namespace's root.
        (KernelError::Io { doing, error: e }, _) if e.raw_os_error() == Some(libc::EPERM) => {
            KernelError::NotPermitted {
                doing: format!("to {doing}"),
                capability: "CAP_SYS_ADMIN and CAP_NET_ADMIN in the initial user namespace".into(),
            }
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_of_a_process() {
        assert_eq!(parse_effective("Name:\tx\nCapEff:\t000001ffffffffff\n"), Some(0x1ff_ffff_ffff));
        assert_eq!(parse_effective("CapPrm:\t0\n"), None);
        assert_eq!(missing(u64::MAX), None);
        assert_eq!(missing(0).as_deref(), Some("CAP_SYS_ADMIN and CAP_NET_ADMIN"));
        assert_eq!(missing(1 << CAP_SYS_ADMIN).as_deref(), Some("CAP_NET_ADMIN"));
    }

    #[test]
    fn lockdown_modes() {
        assert_eq!(active_lockdown("[none] integrity confidentiality\n"), None);
        assert_eq!(active_lockdown("none integrity [confidentiality]\n").as_deref(), Some("confidentiality"));
        assert_eq!(active_lockdown(""), None);
    }
}
