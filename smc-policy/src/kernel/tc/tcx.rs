//! The way of links (kernel/bpf/tcx.c, Linux 6.6). A link lasts as long as its pin:
//! `<links>/<namespace>-<device>-<out or in>`.
//!
//! A pin may outlast what it stands for: the device goes, or moves to another network namespace, and a new one gets its
//! index. So a pinned link counts only if the device's chain has it.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya_obj::generated::bpf_attach_type;

use super::{Device, Done, IsOurs, Side, is_gone, program_name};
use crate::kernel::{
    error::{Doing, KernelError, remove_if_there},
    namespace::NamespaceId,
    sys,
};

/// A program of a chain.
#[derive(Debug)]
pub struct Entry {
    /// The kernel's id.
    pub program: u32,
    /// Its name.
    pub name: String,
    /// The link's id; 0: attached without one, which this tool never does.
    link: u32,
}

/// Has this kernel tcx?
///
/// # Errors
/// The system call's.
pub fn probe() -> io::Result<bool> {
    // No device has index 0: tcx says ENODEV, a kernel without it does not know the type of attachment.
    match sys::tcx_query(0, bpf_attach_type::BPF_TCX_EGRESS) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        Err(error) if !is_gone(&error) => Err(error),
        _ => Ok(true),
    }
}

/// The chain in the order in which packets meet it.
///
/// # Errors
/// The system calls'; ENODEV: no such device.
pub fn list(device: u32, side: Side) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for (program, link) in sys::tcx_query(device, attach_type(side))? {
        if let Some(name) = program_name(program)? {
            entries.push(Entry { program, name, link });
        }
    }
    Ok(entries)
}

/// See [`super::attach`].
///
/// # Errors
/// [`KernelError::Io`].
pub fn attach(
    links: &Path,
    namespace: NamespaceId,
    device: &Device,
    side: Side,
    program: BorrowedFd<'_>,
    is_ours: IsOurs<'_>,
) -> Result<Done, KernelError> {
    let wanted = sys::program_info(program).doing(|| "ask what a tc program is".into())?;
    let doing = || format!("attach {} to {}", wanted.name, device.name);
    let path = pin_path(links, namespace, device.index, side);
    let chain = list(device.index, side).doing(doing)?;
    let pinned = Pinned::open(&path)?.filter(|pinned| chain.iter().any(|e| e.link == pinned.id));
    if pinned.is_none() {
        remove_if_there(&path)?;
    }
    let mut ours = ours(&chain, pinned.as_ref(), is_ours);
    let Some(first) = ours.next() else {
        let link = sys::tcx_link_create(device.index, attach_type(side), program).doing(doing)?;
        pin(&link, &path)?;
        return Ok(Done::Attached);
    };
    let link = match pinned {
        Some(pinned) if pinned.id == first.link => pinned.link,
        // A process that died before it pinned its link is a link less: this one is held by somebody.
        _ => {
            let link = sys::link_by_id(first.link).doing(doing)?;
            remove_if_there(&path)?;
            pin(&link, &path)?;
            link
        }
    };
    let done = if first.program == wanted.id {
        Done::Unchanged
    } else {
        sys::link_update(link.as_fd(), program).doing(doing)?;
        Done::Replaced
    };
    for more in ours {
        end(more).doing(|| format!("detach {} from {}", more.name, device.name))?;
    }
    Ok(done)
}

/// See [`super::detach`].
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
    let path = pin_path(links, namespace, device.index, side);
    let pinned = Pinned::open(&path)?;
    let chain = match list(device.index, side) {
        Err(error) if is_gone(&error) => Vec::new(),
        other => other.doing(|| format!("list the tc programs of {}", device.name))?,
    };
    let mut any = false;
    for entry in ours(&chain, pinned.as_ref(), is_ours) {
        end(entry).doing(|| format!("detach {} from {}", entry.name, device.name))?;
        any = true;
    }
    // Last: who finds it after a crash knows that there may be something to detach.
    remove_if_there(&path)?;
    Ok(any)
}

/// Removes pins in `links` of which the device or its namespace is gone, and the folder when nothing is left in it.
/// How many.
///
/// # Errors
/// [`KernelError::Io`].
pub fn prune(links: &Path) -> Result<usize, KernelError> {
    let entries = match fs::read_dir(links) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        other => other.doing(|| format!("list {}", links.display()))?,
    };
    let mut removed = 0;
    for entry in entries {
        let path = entry.doing(|| format!("list {}", links.display()))?.path();
        if Pinned::open(&path)?.is_some_and(|pinned| pinned.device == 0) {
            remove_if_there(&path)?;
            removed += 1;
        }
    }
    // Others may be in it.
    let _ = fs::remove_dir(links);
    Ok(removed)
}

/// A link that is pinned and has a device, whichever namespace that is in: it can be changed without going there.
#[derive(Debug)]
pub struct PinnedLink {
    /// The namespace that the device was in when the link was made.
    pub namespace: NamespaceId,
    /// The link's id; pins of a device that moved may name one link twice.
    pub id: u32,
    /// The id of its program.
    pub program: u32,
    path: PathBuf,
    link: OwnedFd,
}

impl PinnedLink {
    /// Its program's name; empty: it has gone.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn program_name(&self) -> Result<String, KernelError> {
        let name =
            program_name(self.program).doing(|| format!("ask for the program of {}", self.path.display()))?;
        Ok(name.unwrap_or_default())
    }

    /// Puts another program in the place of its program.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn replace(&self, program: BorrowedFd<'_>) -> Result<(), KernelError> {
        sys::link_update(self.link.as_fd(), program)
            .doing(|| format!("replace the program of {}", self.path.display()))
    }

    /// Takes the program from its device, and removes the pin.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn end(&self) -> Result<(), KernelError> {
        sys::link_detach(self.link.as_fd()).doing(|| format!("detach {}", self.path.display()))?;
        self.unpin()
    }

    /// Removes the pin alone.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn unpin(&self) -> Result<(), KernelError> {
        remove_if_there(&self.path)
    }
}

/// The links pinned in `links` that have a device.
///
/// # Errors
/// [`KernelError::Io`].
pub fn pinned(links: &Path) -> Result<Vec<PinnedLink>, KernelError> {
    let doing = || format!("list {}", links.display());
    let entries = match fs::read_dir(links) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.doing(doing)?,
    };
    let mut all = Vec::new();
    for entry in entries {
        let entry = entry.doing(doing)?;
        let namespace =
            entry.file_name().to_str().and_then(|name| name.split('-').next()?.parse::<NamespaceId>().ok());
        if let (Some(namespace), Some(pinned)) = (namespace, Pinned::open(&entry.path())?)
            && pinned.device != 0
        {
            let Pinned { link, id, program, .. } = pinned;
            all.push(PinnedLink { namespace, id, program, path: entry.path(), link });
        }
    }
    Ok(all)
}

fn ours<'a>(
    chain: &'a [Entry],
    pinned: Option<&Pinned>,
    is_ours: IsOurs<'a>,
) -> impl Iterator<Item = &'a Entry> + use<'a> {
    let pinned = pinned.map(|pinned| pinned.id);
    let linked = chain.iter().filter(|e| e.link != 0);
    linked.filter(move |e| pinned == Some(e.link) || is_ours(e.program, &e.name))
}

/// Ends the attachment, whoever holds the link.
fn end(entry: &Entry) -> io::Result<()> {
    match sys::link_by_id(entry.link).and_then(|link| sys::link_detach(link.as_fd())) {
        Err(e) if e.raw_os_error() != Some(libc::ENOENT) => Err(e),
        _ => Ok(()),
    }
}

fn attach_type(side: Side) -> bpf_attach_type {
    match side {
        Side::Egress => bpf_attach_type::BPF_TCX_EGRESS,
        Side::Ingress => bpf_attach_type::BPF_TCX_INGRESS,
    }
}

fn pin_path(links: &Path, namespace: NamespaceId, device: u32, side: Side) -> PathBuf {
    let side = match side {
        Side::Egress => "out",
        Side::Ingress => "in",
    };
    links.join(format!("{namespace}-{device}-{side}"))
}

/// A pinned tcx link.
struct Pinned {
    link: OwnedFd,
    id: u32,
    device: u32,
    program: u32,
}

impl Pinned {
    /// `None`: nothing is there, or something else.
    fn open(path: &Path) -> Result<Option<Self>, KernelError> {
        let opened = sys::get_pinned(path).and_then(|link| {
            let info = sys::tcx_link_info(link.as_fd())?;
            Ok(info.map(|info| Self { link, id: info.id, device: info.device, program: info.program }))
        });
        match opened {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            other => other.doing(|| format!("open {}", path.display())),
        }
    }
}

fn pin(link: &OwnedFd, path: &Path) -> Result<(), KernelError> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).doing(|| format!("make the folder {}", folder.display()))?;
    }
    sys::pin(link.as_fd(), path).doing(|| format!("pin {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_names_namespace_device_and_side() {
        let path = |side| pin_path(Path::new("/l"), 4026531840, 7, side);
        assert_eq!(path(Side::Egress), Path::new("/l/4026531840-7-out"));
        assert_eq!(path(Side::Ingress), Path::new("/l/4026531840-7-in"));
    }

    #[test]
    fn ours_are_those_pinned_and_those_that_say_so() {
        let entry = |link| Entry { program: link, name: format!("p{link}"), link };
        let chain = [entry(0), entry(1), entry(2), entry(3)];
        let none = ours(&chain, None, &|_, _| false).count();
        let all: Vec<_> = ours(&chain, None, &|_, _| true).map(|e| e.link).collect();
        let named: Vec<_> = ours(&chain, None, &|id, name| id == 3 && name == "p3").map(|e| e.link).collect();
        assert_eq!((none, all, named), (0, vec![1, 2, 3], vec![3]), "those without a link are others'");
    }
}
