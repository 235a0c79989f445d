//! The quarantine in the kernel: reads and writes its two maps.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use smc_policy_common::{
    quarantine::{Entry, FLAG_COMMANDED, FLAG_LEARNED, Key, Learned, REMOVED},
    query::Addr,
};

use super::{Shared, Store};
use crate::kernel::{
    error::{Doing, KernelError},
    sys,
};

/// How full the quarantine is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Learned entries, expired ones included.
    pub learned: u64,
    /// Entries by command, expired ones included.
    pub commanded: u64,
    /// Learned entries that had to go for others, as far as can be known: those made, less those that are there and those
    /// that were removed.
    pub evicted: u64,
    /// Entries that could not be learned for want of memory.
    pub refused: u64,
}

/// The quarantine, open.
#[derive(Debug)]
pub struct Quarantine {
    learned: OwnedFd,
    commanded: OwnedFd,
    flags: OwnedFd,
    count: OwnedFd,
}

impl Quarantine {
    /// Opens it. `None`: nothing was applied yet.
    ///
    /// # Errors
    /// [`KernelError::Missing`] when another version made it, [`KernelError::Io`].
    pub fn open(pins: &Path) -> Result<Option<Self>, KernelError> {
        let Some(mut shared) = Shared::open(pins)? else { return Ok(None) };
        Ok(Some(Self {
            learned: shared.take("smcpol_learned")?,
            commanded: shared.take("smcpol_entries")?,
            flags: shared.take("smcpol_qflags")?,
            count: shared.take("smcpol_qcount")?,
        }))
    }

    fn map(&self, store: Store) -> BorrowedFd<'_> {
        match store {
            Store::Learned => self.learned.as_fd(),
            Store::Commanded => self.commanded.as_fd(),
        }
    }

    /// Puts an entry in, or in the place of one of the same key.
    ///
    /// # Errors
    /// [`KernelError::Missing`] when the entries by command are full, [`KernelError::Io`].
    pub fn put(&self, store: Store, key: Key, entry: &Entry) -> Result<(), KernelError> {
        written(sys::element_update(self.map(store), &key_bytes(key), &entry_bytes(entry)))?;
        // After the entry: a program that sees the flag finds it.
        self.set_flag(flag_of(store), 1)
    }

    /// Puts many entries in, as [`Self::put`] does one.
    ///
    /// # Errors
    /// As [`Self::put`]; then the first of them may be in.
    pub fn put_all(&self, store: Store, entries: &[(Key, Entry)]) -> Result<(), KernelError> {
        let mut keys = Vec::with_capacity(entries.len() * size_of::<Key>());
        let mut values = Vec::with_capacity(entries.len() * size_of::<Entry>());
        for (key, entry) in entries {
            keys.extend_from_slice(&key_bytes(*key));
            values.extend_from_slice(&entry_bytes(entry));
        }
        written(sys::map_update_batch(self.map(store), &keys, &values))?;
        self.set_flag(flag_of(store), 1)
    }

    /// The entry of exactly this key, expired or not.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn get(&self, store: Store, key: Key) -> Result<Option<Entry>, KernelError> {
        let bytes = sys::element_lookup(self.map(store), &key_bytes(key));
        let bytes = bytes.doing(|| "read the quarantine".into())?;
        Ok(bytes.and_then(|bytes| entry_of(&bytes)))
    }

    /// Removes the entry of exactly this key. Whether there was one.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn remove(&self, store: Store, key: Key) -> Result<bool, KernelError> {
        let removed = sys::element_delete(self.map(store), &key_bytes(key));
        let removed = removed.doing(|| "remove an entry from the quarantine".into())?;
        if removed && store == Store::Learned {
            let before = self.flag(REMOVED)?;
            self.set_flag(REMOVED, before.wrapping_add(1))?;
        }
        Ok(removed)
    }

    /// All entries, expired ones included, in the order of their keys.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn list(&self, store: Store) -> Result<Vec<(Key, Entry)>, KernelError> {
        let elements = sys::elements(self.map(store)).doing(|| "list the quarantine".into())?;
        let mut entries: Vec<(Key, Entry)> =
            elements.iter().filter_map(|(key, value)| Some((key_of(key)?, entry_of(value)?))).collect();
        entries.sort_by_key(|(key, _)| *key);
        entries.dedup_by_key(|(key, _)| *key);
        Ok(entries)
    }

    fn keys(&self, store: Store) -> Result<Vec<Vec<u8>>, KernelError> {
        sys::keys(self.map(store)).doing(|| "list the quarantine".into())
    }

    /// Removes all entries of one map. How many.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn flush(&self, store: Store) -> Result<usize, KernelError> {
        // First: a program that learns meanwhile raises it again.
        self.set_flag(flag_of(store), 0)?;
        let mut removed = 0;
        for key in self.keys(store)?.iter().filter_map(|bytes| key_of(bytes)) {
            removed += usize::from(self.remove(store, key)?);
        }
        if !self.keys(store)?.is_empty() {
            self.set_flag(flag_of(store), 1)?;
        }
        Ok(removed)
    }

    /// How full it is.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn counted(&self) -> Result<Counted, KernelError> {
        let bytes = sys::map_lookup(self.count.as_fd(), 0).doing(|| "read what was learned".into())?;
        let mut sums = [0u64; size_of::<Learned>() / 8];
        for (at, word) in words(&bytes).enumerate() {
            let place = at % sums.len();
            sums[place] = sums[place].wrapping_add(word);
        }
        let [inserted, _, refused] = sums;
        let learned = self.keys(Store::Learned)?.len() as u64;
        let gone = learned.saturating_add(self.flag(REMOVED)?);
        Ok(Counted {
            learned,
            commanded: self.keys(Store::Commanded)?.len() as u64,
            evicted: inserted.saturating_sub(gone),
            refused,
        })
    }

    fn flag(&self, element: u32) -> Result<u64, KernelError> {
        let bytes =
            sys::map_lookup(self.flags.as_fd(), element).doing(|| "read the map smcpol_qflags".into())?;
        Ok(words(&bytes).next().unwrap_or(0))
    }

    fn set_flag(&self, element: u32, value: u64) -> Result<(), KernelError> {
        sys::map_update(self.flags.as_fd(), element, &value.to_ne_bytes())
            .doing(|| "write the map smcpol_qflags".into())
    }
}

fn written(result: io::Result<()>) -> Result<(), KernelError> {
    match result {
        Err(e) if e.raw_os_error() == Some(libc::E2BIG) => Err(KernelError::Missing {
            feature: "the quarantine is full".into(),
            next: "remove entries that are no longer needed".into(),
        }),
        other => other.doing(|| "write to the quarantine".into()),
    }
}

fn flag_of(store: Store) -> u32 {
    match store {
        Store::Learned => FLAG_LEARNED,
        Store::Commanded => FLAG_COMMANDED,
    }
}

/// Nanoseconds since boot, as the entries have them (`CLOCK_BOOTTIME`).
pub fn now() -> u64 {
    sys::boot_time().as_nanos() as u64
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.chunks_exact(8).map(|chunk| {
        let mut word = [0; 8];
        word.copy_from_slice(chunk);
        u64::from_ne_bytes(word)
    })
}

// Whole arrays: there may be 65,536 of them.

fn key_bytes(key: Key) -> [u8; size_of::<Key>()] {
    let mut bytes = [0; size_of::<Key>()];
    bytes[..8].copy_from_slice(&key.peer.hi.to_ne_bytes());
    bytes[8..16].copy_from_slice(&key.peer.lo.to_ne_bytes());
    bytes[16..20].copy_from_slice(&key.port.to_ne_bytes());
    bytes[20..].copy_from_slice(&key.reserved.to_ne_bytes());
    bytes
}

fn key_of(bytes: &[u8]) -> Option<Key> {
    let peer = Addr { hi: long(bytes, 0)?, lo: long(bytes, 8)? };
    Some(Key { peer, port: half(bytes, 16)?, reserved: half(bytes, 20)? })
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes)
}

fn half(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

fn entry_bytes(entry: &Entry) -> [u8; size_of::<Entry>()] {
    let Entry { until, first_seen, last_seen, count, span, .. } = *entry;
    let mut bytes = [0; size_of::<Entry>()];
    for (at, word) in [until, first_seen, last_seen].into_iter().enumerate() {
        bytes[at * 8..at * 8 + 8].copy_from_slice(&word.to_ne_bytes());
    }
    bytes[24..28].copy_from_slice(&count.to_ne_bytes());
    bytes[28..32].copy_from_slice(&span.to_ne_bytes());
    bytes[32..36].copy_from_slice(&[entry.cause, entry.directions, entry.evidence_length, entry.resets]);
    bytes[36..40].copy_from_slice(&entry.reserved);
    bytes[40..].copy_from_slice(&entry.evidence);
    bytes
}

fn entry_of(bytes: &[u8]) -> Option<Entry> {
    Some(Entry {
        until: long(bytes, 0)?,
        first_seen: long(bytes, 8)?,
        last_seen: long(bytes, 16)?,
        count: half(bytes, 24)?,
        span: half(bytes, 28)?,
        cause: *bytes.get(32)?,
        directions: *bytes.get(33)?,
        evidence_length: *bytes.get(34)?,
        resets: *bytes.get(35)?,
        reserved: bytes.get(36..40)?.try_into().ok()?,
        evidence: bytes.get(40..56)?.try_into().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes_are_the_structs(
            hi: u64, lo: u64, port: u16, until: u64, first_seen: u64, last_seen: u64, count: u32, span: u32,
            small: [u8; 3], evidence: [u8; 16],
        ) {
            let key = Key::new(Addr { hi, lo }, port);
            prop_assert_eq!(key_bytes(key).len(), size_of::<Key>());
            prop_assert_eq!(key_of(&key_bytes(key)), Some(key));
            let [cause, directions, evidence_length] = small;
            let entry = Entry {
                until, first_seen, last_seen, count, span, cause, directions, evidence_length, evidence,
                resets: count as u8, reserved: [0; 4],
            };
            let bytes = entry_bytes(&entry);
            prop_assert_eq!(bytes.len(), size_of::<Entry>());
            prop_assert_eq!(entry_of(&bytes), Some(entry));
            // As a program of this machine has it in memory.
            prop_assert_eq!(bytes[32], entry.cause);
            prop_assert_eq!(&bytes[24..28], &count.to_ne_bytes());
        }
    }
}
