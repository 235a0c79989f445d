//! The maps that all instances and generations share, pinned in `<bpffs>/smc-policy/shared`: they outlive a replacement of
//! programs and tables. The folder is called `new-shared` until it is complete.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya_obj::generated::bpf_map_type;
use smc_policy_common::quarantine::{Entry, Key, LAYOUT};

use crate::kernel::{
    error::{Doing, KernelError},
    object::{Prepared, Sizes},
    pinned::{self, get_pin, pin},
    sys::{self, MapSpec},
};

/// The folder, among those of instances.
const FOLDER: &str = "shared";
/// It while it is made: bpffs takes no dots.
const BESIDE: &str = "new-shared";
const INFO: &str = "info";
const INFO_MAGIC: u32 = 0x534d_4351;
/// Magic, layout, bytes of a key and of an entry.
const INFO_BYTES: usize = 16;

/// Maps of the object and the names of their pins.
pub(super) const MAPS: [(&str, &str); 13] = [
    ("smcpol_learned", "learned"),
    ("smcpol_entries", "commanded"),
    ("smcpol_qflags", "flags"),
    ("smcpol_qcount", "count"),
    ("smcpol_keys", "keys"),
    ("smcpol_socks", "sockets"),
    ("smcpol_netns", "namespaces"),
    ("smcpol_ports", "ports"),
    ("smcpol_events", "events"),
    ("smcpol_reader", "reader"),
    ("smcpol_told", "told"),
    ("smcpol_peers", "peers"),
    ("smcpol_storm", "storm"),
];

/// The shared maps, open.
#[derive(Debug)]
pub struct Shared {
    maps: Vec<(&'static str, OwnedFd)>,
}

impl Shared {
    /// Where they are pinned.
    pub fn folder(pins: &Path) -> PathBuf {
        pins.join(FOLDER)
    }

    /// Refuses a folder that another version made, before anything is changed.
    ///
    /// # Errors
    /// [`KernelError::Missing`], [`KernelError::Io`].
    pub fn check(pins: &Path) -> Result<(), KernelError> {
        let folder = Self::folder(pins);
        let info = match sys::get_pinned(&folder.join(INFO)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && !folder.exists() => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            other => {
                let map = other.doing(|| format!("open {}", folder.join(INFO).display()))?;
                // A map of another form has no such element.
                sys::map_lookup(map.as_fd(), 0).unwrap_or_default()
            }
        };
        if info == info_bytes() {
            return Ok(());
        }
        Err(KernelError::Missing {
            feature: format!(
                "the quarantine in {} is of another version of smc-policy; nothing was changed",
                folder.display()
            ),
            next: "use that version, or `smc-policy detach` and apply again (the quarantine begins anew)"
                .into(),
        })
    }

    /// Opens them; makes them first if there are none. Under the lock.
    ///
    /// # Errors
    /// As [`Self::check`]; [`KernelError::Io`].
    pub fn ensure(pins: &Path) -> Result<Self, KernelError> {
        if let Some(shared) = Self::open(pins)? {
            return Ok(shared);
        }
        let beside = pins.join(BESIDE);
        remove_folder(&beside)?;
        fs::create_dir_all(&beside).doing(|| format!("make the folder {}", beside.display()))?;
        let made = Self::make(&beside).and_then(|()| {
            let folder = Self::folder(pins);
            fs::rename(&beside, &folder).doing(|| format!("rename {} to {FOLDER}", beside.display()))
        });
        if made.is_err() {
            // The error in hand says more than one of the clean-up could.
            let _ = pinned::remove_dir(&beside);
        }
        made?;
        Self::open(pins)?.ok_or_else(|| KernelError::Io {
            doing: format!("open {}", Self::folder(pins).display()),
            error: io::ErrorKind::NotFound.into(),
        })
    }

    fn make(folder: &Path) -> Result<(), KernelError> {
        let info = sys::map_create(&MapSpec {
            name: "smcpol_qinfo",
            kind: bpf_map_type::BPF_MAP_TYPE_ARRAY as u32,
            key_size: 4,
            value_size: INFO_BYTES as u32,
            max_entries: 1,
            flags: 0,
        })
        .doing(|| "create the map smcpol_qinfo".into())?;
        sys::map_update(info.as_fd(), 0, &info_bytes()).doing(|| "fill the map smcpol_qinfo".into())?;
        pin(&info, folder, INFO)?;
        // The other maps that the object has are small then.
        let mut prepared = Prepared::new(Sizes { cells: 1, slots: 1 }, None)?;
        MAPS.iter().try_for_each(|(map, name)| pin(&prepared.take_map(map)?, folder, name))
    }

    /// Opens them. `None`: there are none.
    ///
    /// # Errors
    /// As [`Self::check`]; [`KernelError::Io`].
    pub fn open(pins: &Path) -> Result<Option<Self>, KernelError> {
        let folder = Self::folder(pins);
        if !folder.exists() {
            return Ok(None);
        }
        Self::check(pins)?;
        let maps = MAPS.iter().map(|(map, name)| Ok((*map, get_pin(&folder, name)?)));
        Ok(Some(Self { maps: maps.collect::<Result<_, KernelError>>()? }))
    }

    /// The maps by their names in the object.
    pub fn into_maps(self) -> impl Iterator<Item = (String, OwnedFd)> {
        self.maps.into_iter().map(|(name, map)| (name.to_owned(), map))
    }

    /// One of them.
    ///
    /// # Errors
    /// [`KernelError::Object`] when there is none of that name.
    pub fn map(&self, name: &str) -> Result<BorrowedFd<'_>, KernelError> {
        let map = self.maps.iter().find(|(map, _)| *map == name);
        map.map(|(_, fd)| fd.as_fd()).ok_or_else(|| KernelError::Object(format!("it has no map {name}")))
    }

    /// Hands one over.
    ///
    /// # Errors
    /// [`KernelError::Object`] when there is none of that name.
    pub fn take(&mut self, name: &str) -> Result<OwnedFd, KernelError> {
        let at = self.maps.iter().position(|(map, _)| *map == name);
        let at = at.ok_or_else(|| KernelError::Object(format!("it has no map {name}")))?;
        Ok(self.maps.swap_remove(at).1)
    }

    /// Unpins all of them, of whatever version they are.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn remove(pins: &Path) -> Result<(), KernelError> {
        remove_folder(&pins.join(BESIDE))?;
        remove_folder(&Self::folder(pins))
    }
}

fn remove_folder(folder: &Path) -> Result<(), KernelError> {
    match pinned::remove_dir(folder) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(e).doing(|| format!("remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

fn info_bytes() -> [u8; INFO_BYTES] {
    let words = [INFO_MAGIC, LAYOUT, size_of::<Key>() as u32, size_of::<Entry>() as u32];
    let mut bytes = [0; INFO_BYTES];
    for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}
