//! Converts times between the kernel (nanoseconds since boot) and files (seconds since 1970).

use smc_policy_common::quarantine::{Cause, Entry, Key};

use super::record::{Record, Store, longest};
use crate::policy::address;

const SECOND: u64 = 1_000_000_000;

/// Both clocks at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// Nanoseconds since boot, time spent suspended included.
    pub boot: u64,
    /// Nanoseconds since 1970.
    pub wall: u64,
}

impl Clock {
    /// Seconds since 1970; a part of one is one: entries end no earlier for being written down.
    pub fn now(&self) -> u64 {
        self.wall.div_ceil(SECOND)
    }

    /// A moment since boot as nanoseconds since 1970.
    pub fn wall_of(&self, boot: u64) -> u64 {
        let wall = i128::from(self.wall) + i128::from(boot) - i128::from(self.boot);
        u64::try_from(wall.max(0)).unwrap_or(u64::MAX)
    }

    /// A past moment as nanoseconds since boot; 0: before that, or before 1 ns after it.
    fn boot_of(&self, seconds: u64) -> u64 {
        let age = self.wall.saturating_sub(seconds.saturating_mul(SECOND));
        self.boot.saturating_sub(age)
    }

    /// An entry of the kernel as files have it. `None`: of a cause that this version does not know.
    pub fn record(&self, store: Store, key: Key, entry: &Entry) -> Option<Record> {
        let length = usize::from(entry.evidence_length).min(entry.evidence.len());
        Some(Record {
            peer: address::to_ip(key.peer),
            port: u16::try_from(key.port).ok()?,
            store,
            cause: Cause::from_u8(entry.cause)?,
            directions: entry.directions,
            count: entry.count.max(1),
            first_seen: self.wall_of(entry.first_seen) / SECOND,
            last_seen: self.wall_of(entry.last_seen) / SECOND,
            until: self.wall_of(entry.until).div_ceil(SECOND),
            span: entry.span,
            evidence: entry.evidence[..length].to_vec(),
            resets: entry.resets,
            comment: None,
        })
    }

    /// An entry of a file as the kernel has it. `saved`: when the file was written. `None`: it has expired, meanwhile or
    /// while the machine was off.
    ///
    /// It holds no longer than it would have from `saved` on, whatever the clock says (one that begins in 1970 after each
    /// boot would keep it for decades), and never more than 7 d.
    pub fn entry(&self, record: &Record, saved: u64) -> Option<Entry> {
        // Of less than a second nothing comes back: lists call that expired.
        let holds = record.until > self.now();
        let left = record.until.saturating_mul(SECOND).checked_sub(self.wall).filter(|_| holds)?;
        let left_then = record.until.saturating_sub(saved).saturating_mul(SECOND);
        let left = left.min(left_then).min(longest() * SECOND);
        let [first, last] = [record.first_seen, record.last_seen].map(|seen| self.boot_of(seen));
        (left > 0).then(|| record.entry(self.boot.saturating_add(left), first, last))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::record::tests::record;
    use super::*;

    /// A week after boot.
    const THEN: Clock = Clock { boot: 604_800 * SECOND, wall: 1_800_000_000 * SECOND };

    fn held(until: u64) -> Record {
        Record { until, ..record("192.0.2.1", 443, Cause::Echo, 1_799_999_000) }
    }

    #[test]
    fn an_entry_comes_back_after_a_reboot_with_the_time_that_is_left() {
        let saved = held(THEN.now() + 3600);
        let entry = THEN.entry(&saved, THEN.now()).unwrap();
        assert_eq!(entry.until, THEN.boot + 3600 * SECOND);
        assert_eq!(THEN.record(saved.store, saved.kernel_key(), &entry).unwrap(), saved);
        let after = Clock { boot: 30 * SECOND, wall: THEN.wall + 600 * SECOND };
        let entry = after.entry(&saved, THEN.now()).unwrap();
        assert_eq!((entry.until, entry.first_seen), ((30 + 3000) * SECOND, 0), "first seen before the boot");
    }

    #[test]
    fn what_expired_while_the_machine_was_off_is_gone() {
        let saved = held(THEN.now() + 3600);
        let [just, over] = [3599, 3600].map(|off| Clock { boot: SECOND, wall: THEN.wall + off * SECOND });
        assert_eq!(just.entry(&saved, THEN.now()).unwrap().until, 2 * SECOND);
        assert_eq!(over.entry(&saved, THEN.now()), None);
    }

    #[test]
    fn what_lists_call_expired_does_not_come_back() {
        let saved = held(THEN.now() + 3600);
        for (left, comes_back) in
            [(2 * SECOND, true), (SECOND + 1, true), (SECOND, true), (SECOND - 1, false), (1, false)]
        {
            let clock = Clock { boot: SECOND, wall: THEN.wall + 3600 * SECOND - left };
            let entry = clock.entry(&saved, THEN.now());
            assert_eq!((entry.is_some(), saved.until > clock.now()), (comes_back, comes_back), "{left}");
            assert!(
                entry.is_none_or(|entry| entry.until == SECOND + left),
                "no longer and no shorter than that"
            );
        }
    }

    #[test]
    fn a_clock_that_went_back_keeps_nobody_longer() {
        let saved = held(THEN.now() + 3600);
        for wall in [0, 1, THEN.wall - SECOND] {
            let entry = Clock { boot: SECOND, wall }.entry(&saved, THEN.now()).unwrap();
            assert_eq!(entry.until, 3601 * SECOND, "{wall}");
        }
        let far = held(u64::MAX);
        assert_eq!(
            THEN.entry(&far, THEN.now()).unwrap().until,
            THEN.boot + 604_800 * SECOND,
            "at most a week"
        );
        assert_eq!(THEN.entry(&held(5), 10), None, "expired when it was saved");
    }

    #[test]
    fn a_step_of_the_clock_moves_what_files_say_and_not_what_the_kernel_has() {
        let entry = THEN.entry(&held(THEN.now() + 3600), THEN.now()).unwrap();
        for step in [-86_400_i64, 86_400] {
            let wall = THEN.wall.saturating_add_signed(step * SECOND as i64);
            let later = Clock { boot: THEN.boot + 60 * SECOND, wall: wall + 60 * SECOND };
            let record =
                later.record(Store::Learned, Key::new(address::from_ip([192, 0, 2, 1].into()), 0), &entry);
            let record = record.unwrap();
            assert_eq!(record.until - later.now(), 3540);
            assert_eq!(later.entry(&record, later.now()).unwrap().until, entry.until);
        }
    }

    proptest! {
        #[test]
        fn any_times_are_converted_without_panic(boot: u64, wall: u64, until: u64, seen: u64, saved: u64) {
            let clock = Clock { boot, wall };
            let given = Record { until, first_seen: seen, last_seen: seen, ..held(0) };
            if let Some(entry) = clock.entry(&given, saved) {
                prop_assert!(entry.until >= boot && entry.first_seen <= boot);
                clock.record(Store::Learned, given.kernel_key(), &entry).unwrap();
            }
            let entry = Entry { until, first_seen: seen, last_seen: saved, cause: 1, ..Entry::default() };
            prop_assert!(clock.record(Store::Learned, given.kernel_key(), &entry).is_some());
        }
    }
}
