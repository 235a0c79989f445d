//! Keeps the quarantine in a file of the state folder, for the next boot, and takes entries from files.
//!
//! While a policy is in force the kernel's maps are the truth; the file adds what they have no room for: comments, and when
//! something was seen before the boot.

use std::{
    collections::BTreeMap,
    fs, io,
    net::IpAddr,
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

use smc_policy_common::{
    quarantine::{COMMANDED_ENTRIES, Entry, Key},
    query::Addr,
};

use super::{Quarantine, Store, now};
use crate::{
    guard::quarantine::{Clock, Counts, File, Record, key, merged, sort},
    kernel::{
        error::{Doing, KernelError},
        record::write_beside,
    },
    paths::Paths,
    policy::address,
};

/// Both clocks now.
pub fn clock() -> Clock {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    Clock { boot: now(), wall: u64::try_from(wall).unwrap_or(u64::MAX) }
}

/// The file.
pub fn path(paths: &Paths) -> PathBuf {
    paths.state.join("quarantine.json")
}

/// What is saved; nothing if there is no file.
///
/// # Errors
/// [`KernelError::Missing`] when it cannot be used, [`KernelError::Io`].
pub fn saved(paths: &Paths) -> Result<File, KernelError> {
    let path = path(paths);
    let text = match fs::read_to_string(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(File::default()),
        other => other.doing(|| format!("read {}", path.display()))?,
    };
    File::parse(&text).map_err(|e| KernelError::Missing {
        feature: format!("{} cannot be used: {e}", path.display()),
        next: "`smc-policy quarantine save` writes it anew while a policy is in force, or remove it".into(),
    })
}

/// Writes the file: beside, synced, renamed.
///
/// # Errors
/// [`KernelError::Io`].
pub fn write(paths: &Paths, file: &File) -> Result<(), KernelError> {
    let path = path(paths);
    let text = file.to_text().map_err(io::Error::other).doing(|| format!("write {}", path.display()))?;
    write_beside(&path, text.as_bytes()).doing(|| format!("write {}", path.display()))
}

/// Everything in the kernel, expired entries too, with what the file adds. Sorted.
///
/// # Errors
/// [`KernelError::Io`]; a file that cannot be used adds nothing.
pub fn snapshot(paths: &Paths, quarantine: &Quarantine, clock: &Clock) -> Result<Vec<Record>, KernelError> {
    let mut all = Vec::new();
    for store in [Store::Learned, Store::Commanded] {
        all.extend(records(store, quarantine.list(store)?, clock));
    }
    Ok(complete(paths, all))
}

/// The entry of exactly this key, expired or not, with what the file adds.
///
/// # Errors
/// [`KernelError::Io`].
pub fn one(
    paths: &Paths,
    quarantine: &Quarantine,
    (ip, port, store): (IpAddr, u16, Store),
    clock: &Clock,
) -> Result<Option<Record>, KernelError> {
    let key = Key::new(address::from_ip(ip), port);
    let Some(entry) = quarantine.get(store, key)? else { return Ok(None) };
    Ok(complete(paths, records(store, [(key, entry)], clock).collect()).pop())
}

/// The entries in force about a peer, with what the file adds. `port`: about that service only, and the whole address.
///
/// # Errors
/// [`KernelError::Io`].
pub fn about(
    paths: &Paths,
    quarantine: &Quarantine,
    peer: Addr,
    port: Option<u16>,
    clock: &Clock,
) -> Result<Vec<Record>, KernelError> {
    let mut all = Vec::new();
    for store in [Store::Learned, Store::Commanded] {
        let found = match port {
            Some(port) => {
                let keys = [Key::new(peer, port), Key::new(peer, 0)];
                let get = |key: Key| Ok(quarantine.get(store, key)?.map(|entry| (key, entry)));
                keys.into_iter()
                    .filter_map(|key| get(key).transpose())
                    .collect::<Result<Vec<_>, KernelError>>()?
            }
            None => quarantine.list(store)?.into_iter().filter(|(key, _)| key.peer == peer).collect(),
        };
        all.extend(records(store, found.into_iter().filter(|(_, entry)| clock.boot < entry.until), clock));
    }
    Ok(if all.is_empty() { all } else { complete(paths, all) })
}

fn records(
    store: Store,
    entries: impl IntoIterator<Item = (Key, Entry)>,
    clock: &Clock,
) -> impl Iterator<Item = Record> {
    entries.into_iter().filter_map(move |(key, entry)| clock.record(store, key, &entry))
}

/// Adds comments, and first times before the boot.
fn complete(paths: &Paths, mut all: Vec<Record>) -> Vec<Record> {
    let known: BTreeMap<_, _> =
        saved(paths).unwrap_or_default().entries.into_iter().map(|record| (key(&record), record)).collect();
    for record in &mut all {
        if let Some(known) = known.get(&key(record)) {
            record.comment.clone_from(&known.comment);
            record.first_seen = record.first_seen.min(known.first_seen);
        }
    }
    sort(&mut all);
    all
}

/// Saves what is in the kernel and has not expired; `adds` has comments and first
/// times that the file has not. How many; `None`: nothing was applied, and the
/// file is as it was. Under the lock.
///
/// # Errors
/// [`KernelError`]; then the file is as it was.
pub fn save(paths: &Paths, adds: &[Record]) -> Result<Option<usize>, KernelError> {
    let Some(quarantine) = Quarantine::open(&paths.pins())? else { return Ok(None) };
    let clock = clock();
    let mut entries = snapshot(paths, &quarantine, &clock)?;
    entries.retain(|record| record.holds(clock.now()));
    let adds: BTreeMap<_, _> = adds.iter().map(|record| (key(record), record)).collect();
    for record in &mut entries {
        if let Some(new) = adds.get(&key(record)) {
            record.comment = new.comment.clone().or_else(|| record.comment.take());
            record.first_seen = record.first_seen.min(new.first_seen);
        }
    }
    let number = entries.len();
    if number > 0 || path(paths).exists() {
        write(paths, &File { saved: clock.now(), entries })?;
    }
    Ok(Some(number))
}

/// Puts the saved entries into the kernel that have not expired. How many. Under the lock.
///
/// # Errors
/// [`KernelError`].
pub fn restore(paths: &Paths) -> Result<usize, KernelError> {
    let Some(quarantine) = Quarantine::open(&paths.pins())? else { return Ok(0) };
    let file = saved(paths)?;
    if file.entries.is_empty() {
        return Ok(0);
    }
    put(&quarantine, file.entries, file.saved, Counts::Larger, &clock())
}

/// Puts entries of a file, written at `saved`, into the kernel; what is there is merged. How many had not expired. Under the
/// lock.
///
/// # Errors
/// [`KernelError::Missing`] when those by command do not fit, and nothing was changed; [`KernelError::Io`].
pub fn put(
    quarantine: &Quarantine,
    mut records: Vec<Record>,
    saved: u64,
    counts: Counts,
    clock: &Clock,
) -> Result<usize, KernelError> {
    records.retain(|record| clock.entry(record, saved).is_some());
    let number = records.len();
    for store in [Store::Commanded, Store::Learned] {
        let new: Vec<&Record> = records.iter().filter(|record| record.store == store).collect();
        if new.is_empty() {
            continue;
        }
        let there: BTreeMap<Key, Entry> = quarantine.list(store)?.into_iter().collect();
        if store == Store::Commanded {
            make_room(quarantine, &there, &new, clock)?;
        }
        let entries = new.iter().filter_map(|record| {
            let key = record.kernel_key();
            // By this host's clock from here on.
            let record = clock.record(store, key, &clock.entry(record, saved)?)?;
            let before = there.get(&key).and_then(|entry| clock.record(store, key, entry));
            let one = before.map_or_else(|| record.clone(), |before| merged(&before, &record, counts));
            Some((key, clock.entry(&one, clock.now())?))
        });
        quarantine.put_all(store, &entries.collect::<Vec<_>>())?;
    }
    Ok(number)
}

/// Puts an entry in the place of the one that is there. Under the lock.
///
/// # Errors
/// As [`put`].
pub fn replace(quarantine: &Quarantine, record: &Record, clock: &Clock) -> Result<(), KernelError> {
    let Some(entry) = clock.entry(record, clock.now()) else { return Ok(()) };
    let key = record.kernel_key();
    match quarantine.put(record.store, key, &entry) {
        Err(KernelError::Missing { .. }) if record.store == Store::Commanded => {
            let there = quarantine.list(Store::Commanded)?.into_iter().collect();
            make_room(quarantine, &there, &[record], clock)?;
            quarantine.put(Store::Commanded, key, &entry)
        }
        other => other,
    }
}

/// Entries of a file written at `saved`, by this host's clock; those that have not expired.
pub fn by_clock(records: Vec<Record>, saved: u64, clock: &Clock) -> Vec<Record> {
    let convert = |record: Record| {
        let until = clock.record(record.store, record.kernel_key(), &clock.entry(&record, saved)?)?.until;
        Some(Record { until, ..record })
    };
    records.into_iter().filter_map(convert).collect()
}

/// Entries that have expired go if there is no other room.
fn make_room(
    quarantine: &Quarantine,
    there: &BTreeMap<Key, Entry>,
    new: &[&Record],
    clock: &Clock,
) -> Result<(), KernelError> {
    let room = COMMANDED_ENTRIES as usize;
    let wanted: std::collections::BTreeSet<Key> = new.iter().map(|record| record.kernel_key()).collect();
    let added = wanted.iter().filter(|key| !there.contains_key(key)).count();
    if there.len() + added <= room {
        return Ok(());
    }
    let expired = there.iter().filter(|(key, entry)| entry.until <= clock.boot && !wanted.contains(key));
    let expired: Vec<Key> = expired.map(|(key, _)| *key).collect();
    if there.len() - expired.len() + added > room {
        return Err(full(there.len() - expired.len(), added));
    }
    expired.into_iter().try_for_each(|key| quarantine.remove(Store::Commanded, key).map(drop))
}

/// That entries by command do not fit.
pub fn full(there: usize, added: usize) -> KernelError {
    KernelError::Missing {
        feature: format!(
            "the quarantine is full: it holds {there} of at most {COMMANDED_ENTRIES} entries by command, and {added} more do \
             not fit; nothing was changed"
        ),
        next: "`smc-policy quarantine remove` those that are no longer needed, or deny networks by a rule"
            .into(),
    }
}
