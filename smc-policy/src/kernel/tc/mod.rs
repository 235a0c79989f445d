//! tc programs on the devices of the calling thread's network namespace: attaching, listing, removing.
//!
//! Two ways: links (`tcx`, Linux 6.6), else filters of a clsact qdisc (`clsact`). The crate aya is not used here: it
//! takes programs by path and devices by name, does not tell a chain's links or a link's device, and cannot name a filter,
//! so that three of bpf(2)'s commands are all that it would spare.

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    sync::OnceLock,
};

use super::{
    error::{Doing, KernelError},
    namespace::NamespaceId,
    sys,
};

mod clsact;
mod devices;
mod filters;
mod tcx;

pub use devices::{Device, LinkLayer, devices};
pub use tcx::{PinnedLink, pinned, probe as has_tcx, prune};

/// Which of a device's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Those that leave by it.
    Egress,
    /// Those that come in by it.
    Ingress,
}

impl Side {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Egress, Self::Ingress];
}

/// How programs are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// By links (Linux 6.6 and later).
    Tcx,
    /// By filters of a clsact qdisc.
    Clsact,
}

impl Way {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Egress => "egress",
            Self::Ingress => "ingress",
        })
    }
}

/// What this kernel has. A kernel with tcx has clsact too, and there packets meet tcx's programs first.
pub fn way() -> Way {
    static WAY: OnceLock<Way> = OnceLock::new();
    *WAY.get_or_init(|| match tcx::probe() {
        Ok(false) => Way::Clsact,
        // Not permitted: then nothing is, and that is what the next request is told.
        Ok(true) | Err(_) => Way::Tcx,
    })
}

/// Something that a device's packets meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// The program by the kernel's id; 0: a classifier that is no BPF program.
    pub program: u32,
    /// The program's name, which may be empty, or the classifier's kind.
    pub name: String,
    /// How it is attached.
    pub way: Way,
}

/// What [`attach`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// Nothing: the program was there.
    Unchanged,
    /// There was none of ours.
    Attached,
    /// It took the place of another of ours.
    Replaced,
    /// Nothing: the device has gone meanwhile.
    NoDevice,
}

/// Tells by the kernel's id and the program's name whether a program is one of ours.
pub type IsOurs<'a> = &'a dyn Fn(u32, &str) -> bool;

/// The programs, and classifiers of other kinds, in the order in which packets meet them; of a device that is gone: none.
///
/// # Errors
/// [`KernelError::Io`].
pub fn chain(device: &Device, side: Side) -> Result<Vec<Attached>, KernelError> {
    let listed = || -> io::Result<Vec<Attached>> {
        let mut chain = Vec::new();
        if way() == Way::Tcx {
            let entries = tcx::list(device.index, side)?;
            chain.extend(entries.into_iter().map(|e| Attached {
                program: e.program,
                name: e.name,
                way: Way::Tcx,
            }));
        }
        chain.extend(clsact::list(device.index, side)?);
        Ok(chain)
    };
    match listed() {
        Err(error) if is_gone(&error) => Ok(Vec::new()),
        other => other.doing(|| format!("list the tc programs of {}", device.name)),
    }
}

/// Makes `program` the first of the chain, the way this kernel has ([`way`]). A program of ours that is there is
/// replaced where it is, so that no packet meets both or none; one that others have put theirs ahead of stays behind them.
///
/// `links` is the folder of this tool's links on bpffs; `namespace` the calling thread's network namespace. Only one
/// caller at a time.
///
/// # Errors
/// [`KernelError::Missing`] when the device has another kind of qdisc in clsact's place, or the kernel lacks a module;
/// [`KernelError::Io`].
pub fn attach(
    links: &Path,
    namespace: NamespaceId,
    device: &Device,
    side: Side,
    program: BorrowedFd<'_>,
    is_ours: IsOurs<'_>,
) -> Result<Done, KernelError> {
    attach_by(way(), links, namespace, device, side, program, is_ours)
}

/// As [`attach`], a given way: also clsact's on a kernel that has tcx.
///
/// # Errors
/// As [`attach`]'s.
pub fn attach_by(
    by: Way,
    links: &Path,
    namespace: NamespaceId,
    device: &Device,
    side: Side,
    program: BorrowedFd<'_>,
    is_ours: IsOurs<'_>,
) -> Result<Done, KernelError> {
    let attached = match by {
        Way::Tcx => tcx::attach(links, namespace, device, side, program, is_ours).and_then(|done| {
            clsact::detach(device, side, is_ours)?;
            Ok(done)
        }),
        Way::Clsact => clsact::attach(device, side, program, is_ours).and_then(|done| {
            if way() == Way::Tcx {
                tcx::detach(links, namespace, device, side, is_ours)?;
            }
            Ok(done)
        }),
    };
    match attached {
        Err(KernelError::Io { error, .. }) if is_gone(&error) => Ok(Done::NoDevice),
        other => other,
    }
}

/// Why [`attach`] cannot attach anything to the device, as far as that can be told without trying.
pub fn obstacle(device: &Device) -> Option<KernelError> {
    if way() == Way::Clsact { clsact::obstacle(device) } else { None }
}

/// Removes the programs of ours from the device, whichever way they are attached, and nothing else: a clsact qdisc goes
/// only if [`attach`] made it and nobody else has a filter in it. Whether there was one.
///
/// # Errors
/// [`KernelError::Io`].
pub fn detach(
    links: &Path,
    namespace: NamespaceId,
    device: &Device,
    side: Side,
    is_ours: IsOurs<'_>,
) -> Result<bool, KernelError> {
    let by_link = way() == Way::Tcx && tcx::detach(links, namespace, device, side, is_ours)?;
    let by_filter = clsact::detach(device, side, is_ours)?;
    Ok(by_link || by_filter)
}

/// The device has gone (ENODEV), or the device of a link (ENOLINK).
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENOLINK))
}

/// The name of a program. `None`: it has gone meanwhile.
fn program_name(id: u32) -> io::Result<Option<String>> {
    let program = sys::program_by_id(id).and_then(|program| sys::program_info(program.as_fd()));
    match program {
        Ok(info) => Ok(Some(info.name)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}
