//! Puts two lists of entries together.

use std::collections::BTreeMap;

use super::record::{Record, key};

/// What happens to the counts of two entries about the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// Both hosts met the peer: they add up.
    Add,
    /// Both are this host's: the larger one has the smaller one in it.
    Larger,
}

/// One entry out of two about the same: the one that holds longer, seen since whichever saw it first.
pub fn merged(a: &Record, b: &Record, counts: Counts) -> Record {
    let (longer, other) = if b.until > a.until { (b, a) } else { (a, b) };
    let evidence = if longer.evidence.is_empty() { &other.evidence } else { &longer.evidence };
    Record {
        count: match counts {
            Counts::Add => a.count.saturating_add(b.count),
            Counts::Larger => a.count.max(b.count),
        },
        resets: match counts {
            Counts::Add => a.resets.saturating_add(b.resets),
            Counts::Larger => a.resets.max(b.resets),
        },
        first_seen: a.first_seen.min(b.first_seen),
        last_seen: a.last_seen.max(b.last_seen),
        evidence: evidence.clone(),
        comment: longer.comment.clone().or_else(|| other.comment.clone()),
        ..longer.clone()
    }
}

/// Both lists as one, sorted; whatever is in both is [`merged`].
pub fn merge(a: Vec<Record>, b: Vec<Record>, counts: Counts) -> Vec<Record> {
    let mut all = BTreeMap::new();
    for record in a.into_iter().chain(b) {
        let place = all.entry(key(&record));
        place.and_modify(|there| *there = merged(there, &record, counts)).or_insert(record);
    }
    all.into_values().collect()
}

#[cfg(test)]
mod tests {
    use smc_policy_common::quarantine::Cause;

    use super::super::record::tests::record;
    use super::*;

    #[test]
    fn the_later_end_wins_and_counts_add_up() {
        let early = Record { comment: Some("lb".into()), ..record("192.0.2.1", 443, Cause::Operator, 1000) };
        let late = Record { count: 4, evidence: vec![0xfe], ..record("192.0.2.1", 443, Cause::Probe, 2000) };
        for (a, b) in [(&early, &late), (&late, &early)] {
            let one = merged(a, b, Counts::Add);
            assert_eq!((one.until, one.cause, one.count), (late.until, Cause::Probe, 5));
            assert_eq!((one.first_seen, one.last_seen), (1000, 2000));
            assert_eq!((one.comment.as_deref(), one.evidence.as_slice()), (Some("lb"), [0xfe].as_slice()));
            assert_eq!(merged(a, b, Counts::Larger).count, 4);
        }
    }

    #[test]
    fn what_is_in_one_list_stays() {
        let [a, b] = ["192.0.2.2", "192.0.2.1"].map(|peer| record(peer, 0, Cause::Operator, 1));
        let other_port = record("192.0.2.1", 443, Cause::Operator, 1);
        let learned = Record { store: super::super::Store::Learned, ..a.clone() };
        let all = merge(vec![a.clone(), b.clone()], vec![learned.clone(), other_port.clone()], Counts::Add);
        assert_eq!(all, [b, other_port, learned, a]);
    }
}
