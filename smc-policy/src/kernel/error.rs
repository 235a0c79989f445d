//! What can go wrong between the tool and the kernel, with the next step for whoever reads it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Whose turn it is; decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The kernel or host lacks something (exit code 3).
    Host,
    /// A capability is missing (exit code 4).
    Permission,
}

/// An error of the kernel layer.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The process may not do this.
    #[error("not permitted: {doing} needs {capability}; run as root, or grant the capability")]
    NotPermitted {
        /// What was tried.
        doing: String,
        /// Which capabilities are missing.
        capability: String,
    },
    /// The kernel or host lacks a feature.
    #[error("{feature}; {next}")]
    Missing {
        /// What is missing.
        feature: String,
        /// The next step.
        next: String,
    },
    /// Somebody else's program decides already.
    #[error(
        "net.smc.hs_ctrl is set to '{name}', which is not smc-policy's; nothing was changed: \
         `--replace` takes over (and `detach` restores it)"
    )]
    ForeignHsCtrl {
        /// The name found selected.
        name: String,
    },
    /// A system call or file operation failed.
    #[error("cannot {doing}: {error}")]
    Io {
        /// What was tried, starting with a verb.
        doing: String,
        /// Why not.
        error: io::Error,
    },
    /// The kernel's verifier refused a program.
    #[error(
        "the kernel's verifier refused the program {program} ({error}); please report it with these lines:\n{log}"
    )]
    Refused {
        /// The program.
        program: String,
        /// The system call's error.
        error: io::Error,
        /// The verifier's last lines.
        log: String,
    },
    /// The embedded object cannot be used (a defect of the build).
    #[error("the eBPF object inside this program is damaged: {0}")]
    Object(String),
    /// The kernel's type information is unusable.
    #[error("cannot read the kernel's type information: {0}; smc-policy needs it to find socket fields")]
    Btf(#[from] super::btf::BtfError),
    /// A file that records a policy cannot be used.
    #[error("{path}: {what}; `smc-policy apply` with the policy you want writes it anew", path = path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

impl KernelError {
    /// Whose turn it is.
    pub fn fault(&self) -> Fault {
        match self {
            Self::NotPermitted { .. } => Fault::Permission,
            Self::Io { error, .. } if error.kind() == io::ErrorKind::PermissionDenied => Fault::Permission,
            // The verifier says EACCES of a program it does not like.
            Self::Refused { error, .. } if error.raw_os_error() == Some(libc::EPERM) => Fault::Permission,
            _ => Fault::Host,
        }
    }
}

/// Turns an `io::Error` into a [`KernelError`] that says what was tried.
pub trait Doing<T> {
    /// `doing` starts with a verb: "pin the map smcpol_gen".
    ///
    /// # Errors
    /// [`KernelError::Io`] for every error.
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T, KernelError>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T, KernelError> {
        self.map_err(|error| KernelError::Io { doing: doing(), error })
    }
}

/// Removes a file; one that is not there is removed already.
///
/// # Errors
/// [`KernelError::Io`].
pub(super) fn remove_if_there(path: &Path) -> Result<(), KernelError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(e).doing(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
