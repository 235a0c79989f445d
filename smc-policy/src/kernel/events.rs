//! Reads what the programs tell: one reader at a time, which holds a lock that goes when it dies, and a lease that it moves
//! on while it lives, so that nothing is written for one that has died.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::Duration,
};

use smc_policy_common::{
    event::{self, Event, KINDS, Kind, Told},
    query::Addr,
};

use super::{
    error::{Doing, KernelError},
    guard::{Shared, now},
    lock::{self, Lock},
    ring::Ring,
    sys::{self, SharedCells},
};
use crate::paths::Paths;

/// How long a lease holds.
pub const LEASE: Duration = Duration::from_secs(3);
/// How often it is to be moved on.
pub const RENEWAL: Duration = Duration::from_secs(1);

/// What a reader wants to hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Connections that are denied.
    pub denies: bool,
    /// Connections that are allowed.
    pub allows: bool,
    /// Echoes, the quarantine, resets.
    pub guard: bool,
    /// One of so many decisions.
    pub one_in: u32,
}

impl Wanted {
    fn to_word(self) -> u64 {
        let bits = [
            (self.denies, event::WANTS_DENIES),
            (self.allows, event::WANTS_ALLOWS),
            (self.guard, event::WANTS_GUARD),
        ];
        let bits = bits.into_iter().filter(|(is_wanted, _)| *is_wanted).fold(0, |all, (_, bit)| all | bit);
        bits | u64::from(self.one_in) << 32
    }
}

/// The one reader. When it goes, programs write nothing any more.
#[derive(Debug)]
pub struct Reader {
    _lock: Lock,
    folder: PathBuf,
    ring: Ring,
    who: SharedCells,
    map_id: u32,
    told: OwnedFd,
    /// Before it, events were for somebody else.
    since: u64,
    lost_before: [u64; KINDS],
}

impl Reader {
    /// Begins to read. `None`: nothing was applied.
    ///
    /// # Errors
    /// [`KernelError::Missing`] when somebody reads already, or another version made the maps; [`KernelError::Io`].
    pub fn open(paths: &Paths, wanted: Wanted) -> Result<Option<Self>, KernelError> {
        let pins = paths.pins();
        let Some(mut shared) = Shared::open(&pins)? else { return Ok(None) };
        let lock = match lock::try_take(&paths.run.join("monitor"))? {
            Ok(lock) => lock,
            Err(holder) => {
                let holder = holder.map(|pid| format!(" (process {pid})")).unwrap_or_default();
                return Err(KernelError::Missing {
                    feature: format!(
                        "another `smc-policy monitor`{holder} reads the events, and only one can"
                    ),
                    next: "end it, or use what it prints".into(),
                });
            }
        };
        let who = shared.take("smcpol_reader")?;
        let map_id = sys::map_info(who.as_fd()).doing(|| "ask for the reader's map".into())?.id;
        let who = SharedCells::map(who.as_fd()).doing(|| "map who reads".into())?;
        let ring = Ring::open(shared.take("smcpol_events")?).doing(|| "map the ring buffer".into())?;
        let told = shared.take("smcpol_told")?;
        let lost_before = told_by(told.as_fd())?.lost;
        let mut reader = Self {
            _lock: lock,
            folder: Shared::folder(&pins),
            ring,
            who,
            map_id,
            told,
            since: 0,
            lost_before,
        };
        // What one that died has left.
        let mut place = [0; Event::BYTES];
        while reader.ring.take(&mut place).is_some() {}
        reader.since = now();
        reader.who.store(event::WANTS as usize, wanted.to_word());
        reader.renew();
        Ok(Some(reader))
    }

    /// Moves the lease on. To be called every [`RENEWAL`].
    pub fn renew(&self) {
        self.who.store(event::UNTIL as usize, now().saturating_add(LEASE.as_nanos() as u64));
    }

    /// Are these still the maps that programs write to? Not after `detach`.
    pub fn is_current(&self) -> bool {
        let pinned = sys::get_pinned(&self.folder.join("reader")).and_then(|map| sys::map_info(map.as_fd()));
        pinned.is_ok_and(|info| info.id == self.map_id)
    }

    /// The next event; `None`: there is none now.
    pub fn take(&mut self) -> Option<Event> {
        let mut place = [0; Event::BYTES];
        loop {
            let length = self.ring.take(&mut place)?;
            if let Some(event) = event_of(&place[..length.min(Event::BYTES)]).filter(|e| e.at >= self.since) {
                return Some(event);
            }
        }
    }

    /// How many events were lost since it began, by kind.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn lost(&self) -> Result<[u64; KINDS], KernelError> {
        let mut lost = told_by(self.told.as_fd())?.lost;
        for (lost, before) in lost.iter_mut().zip(self.lost_before) {
            *lost = lost.wrapping_sub(before);
        }
        Ok(lost)
    }
}

impl AsFd for Reader {
    /// Readable while there is something to read.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.who.store(event::UNTIL as usize, 0);
    }
}

/// What the programs tell, seen from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Telling {
    /// Somebody reads.
    pub reader: event::Reader,
    /// Events written and lost since the maps were made.
    pub told: Told,
}

/// Whether somebody reads, and what was lost. `None`: nothing was applied.
///
/// # Errors
/// As [`Shared::open`].
pub fn telling(pins: &Path) -> Result<Option<Telling>, KernelError> {
    let Some(shared) = Shared::open(pins)? else { return Ok(None) };
    let until = sys::map_lookup(shared.map("smcpol_reader")?, event::UNTIL)
        .doing(|| "read who reads events".into())?;
    let until = until.try_into().map_or(0, u64::from_ne_bytes);
    let told = told_by(shared.map("smcpol_told")?)?;
    Ok(Some(Telling { reader: event::Reader::at(until, now()), told }))
}

fn told_by(map: BorrowedFd<'_>) -> Result<Told, KernelError> {
    let bytes = sys::map_lookup(map, 0).doing(|| "read how many events were lost".into())?;
    let mut told = Told::default();
    for cpu in bytes.chunks_exact(size_of::<Told>()) {
        let (written, lost) = cpu.split_at(8 * KINDS);
        for (counters, bytes) in [(&mut told.written, written), (&mut told.lost, lost)] {
            for (counter, bytes) in counters.iter_mut().zip(bytes.chunks_exact(8)) {
                *counter = counter.wrapping_add(bytes.try_into().map_or(0, u64::from_ne_bytes));
            }
        }
    }
    Ok(told)
}

/// An event as a program has it in memory. `None`: of another version, or a kind that this one does not know.
fn event_of(bytes: &[u8]) -> Option<Event> {
    let half = |at: usize| bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes);
    let word = |at: usize| bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
    let double = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes);
    let address = |at: usize| Some(Addr { hi: double(at)?, lo: double(at + 8)? });
    let event = Event {
        version: half(0)?,
        kind: *bytes.get(2)?,
        flags: *bytes.get(3)?,
        slot: word(4)?,
        at: double(8)?,
        generation: double(16)?,
        peer: address(24)?,
        local: address(40)?,
        port: half(56)?,
        local_port: half(58)?,
        cause: *bytes.get(60)?,
        evidence_length: *bytes.get(61)?,
        reserved: half(62)?,
        until: double(64)?,
        count: word(72)?,
        span: word(76)?,
        evidence: bytes.get(80..96)?.try_into().ok()?,
    };
    (event.version == event::VERSION && Kind::from_u8(event.kind).is_some()).then_some(event)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_as_programs_write_them() {
        let mut bytes: Vec<u8> = (0..Event::BYTES as u8).collect();
        bytes[..3].copy_from_slice(&[1, 0, Kind::Quarantine as u8]);
        let event = event_of(&bytes).unwrap();
        assert_eq!((event.flags, event.slot, event.at), (3, u32::from_ne_bytes([4, 5, 6, 7]), double(8)));
        assert_eq!((event.generation, event.peer.hi, event.local.lo), (double(16), double(24), double(48)));
        assert_eq!((event.port, event.cause), (u16::from_ne_bytes([56, 57]), 60));
        assert_eq!((event.until, event.span), (double(64), u32::from_ne_bytes([76, 77, 78, 79])));
        assert_eq!(event.evidence[..], bytes[80..]);
        assert_eq!(event_of(&bytes[..Event::BYTES - 1]), None);
        bytes[2] = KINDS as u8;
        assert_eq!(event_of(&bytes), None, "a later version's kind");
        bytes[..3].copy_from_slice(&[2, 0, 0]);
        assert_eq!(event_of(&bytes), None, "another version");
    }

    fn double(at: u8) -> u64 {
        u64::from_ne_bytes(std::array::from_fn(|i| at + i as u8))
    }

    #[test]
    fn what_is_wanted_is_one_word() {
        let wanted = Wanted { denies: true, allows: false, guard: true, one_in: 10 };
        assert_eq!(wanted.to_word(), 10 << 32 | event::WANTS_DENIES | event::WANTS_GUARD);
    }
}
