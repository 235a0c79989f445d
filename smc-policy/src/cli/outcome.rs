//! Exit codes, and how errors become them.

use std::process::ExitCode;

use crate::{
    kernel::{
        apply::ApplyError,
        error::{Fault, KernelError},
        rollback::RollbackError,
    },
    policy::{CompileError, Record},
};

/// The exit codes (also in `--help` and docs/operations.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    /// Done, or the answer is yes.
    Ok = 0,
    /// The answer is no.
    No = 1,
    /// Usage, policy or configuration error.
    Usage = 2,
    /// The kernel or host lacks what is needed.
    Host = 3,
    /// Not permitted.
    Permission = 4,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// A verb that did not do what was asked: one clear message with the next step.
#[derive(Debug)]
pub(super) struct Failure {
    /// The exit code.
    pub(super) exit: Exit,
    /// What to say on standard error.
    pub(super) message: String,
    /// Findings about the policy files, for `--json`; printed already for people.
    pub(super) findings: Vec<Record>,
}

impl Failure {
    /// Usage, policy or configuration error.
    pub(super) fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// With a given exit code.
    pub(super) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into(), findings: Vec::new() }
    }
}

impl From<KernelError> for Failure {
    fn from(e: KernelError) -> Self {
        let exit = match e.fault() {
            Fault::Host => Exit::Host,
            Fault::Permission => Exit::Permission,
        };
        Self::new(exit, e.to_string())
    }
}

impl From<CompileError> for Failure {
    fn from(e: CompileError) -> Self {
        Self::usage(e.to_string())
    }
}

impl From<ApplyError> for Failure {
    fn from(e: ApplyError) -> Self {
        match e {
            ApplyError::Kernel(e) => e.into(),
            ApplyError::Compile(e) => e.into(),
            ApplyError::Waiting { .. } => Self::new(Exit::No, e.to_string()),
            ApplyError::NoWayBack(_) => Self::new(Exit::Host, e.to_string()),
        }
    }
}

impl From<RollbackError> for Failure {
    fn from(e: RollbackError) -> Self {
        match e {
            RollbackError::Apply(e) => e.into(),
            RollbackError::Nothing(_) | RollbackError::Unreadable(_) => Self::usage(e.to_string()),
        }
    }
}

/// What a verb returns.
pub(super) type Done = Result<Exit, Failure>;
