//! All verdicts of a policy, with equal columns merged.

use std::collections::HashMap;

use super::{
    CompileError, MAX_VERDICTS,
    classes::{Classes, Classifier, DEFAULT, Stretches, push},
    sweep::words,
};
use crate::policy::ranges::Key;

/// Every verdict of a policy, and which column and row a connection finds it in.
#[derive(Debug)]
pub(super) struct Matrix {
    /// `[direction][local][peer][port]`: index of the deciding rule in the policy, or [`DEFAULT`].
    pub(super) verdicts: Vec<u32>,
    /// Peer classes.
    pub(super) peers: usize,
    /// Port classes.
    pub(super) port_classes: usize,
    /// Service ports.
    pub(super) ports: Stretches<u16>,
    /// This host's IPv4 addresses.
    pub(super) local4: Stretches<u32>,
    /// This host's IPv6 addresses.
    pub(super) local6: Stretches<u128>,
    /// Do local addresses matter at all?
    pub(super) uses_local: bool,
}

impl Classifier<'_> {
    /// Every verdict. Port and local columns that are equal for all peers are merged.
    pub(super) fn matrix(self, classes: &Classes) -> Result<Matrix, CompileError> {
        let (locals, peers, columns) = (self.local_families.len(), classes.rows.len(), self.port_columns);
        let mut verdicts = vec![DEFAULT; 2 * locals * peers * columns];
        let mut left = Vec::new();
        let all = self.all_columns();
        for (peer, row) in classes.rows.iter().enumerate() {
            left.clone_from(&all);
            for rule in row.iter() {
                let rule = *rule as usize;
                for (at, _) in self.stretches(rule) {
                    // `at` counts words of port bits: its number of stretches before is (direction, local).
                    let stretch = at / words(columns);
                    let first = (stretch * peers + peer) * columns;
                    for (word, ports) in self.ports_of[rule].iter().enumerate() {
                        let mut won = left[at + word] & ports;
                        left[at + word] &= !ports;
                        while won != 0 {
                            let column = word * 64 + won.trailing_zeros() as usize;
                            verdicts[first + column] = self.rules[rule] as u32;
                            won &= won - 1;
                        }
                    }
                }
            }
        }
        let column = |at: usize| verdicts.iter().skip(at).step_by(columns);
        let port_class = group(columns, |at| hash(column(at)), |a, b| column(a).eq(column(b)));
        let verdicts: Vec<u32> = verdicts
            .chunks_exact(columns)
            .flat_map(|row| port_class.representatives.iter().map(|column| row[*column]))
            .collect();
        let columns = port_class.representatives.len();
        let block = peers * columns;
        let blocks = |local: usize| {
            [local, locals + local].into_iter().flat_map(|at| &verdicts[at * block..(at + 1) * block])
        };
        let local_class = group(locals, |at| hash(blocks(at)), |a, b| blocks(a).eq(blocks(b)));
        let kept = local_class.representatives.len();
        let starts = [0, locals]
            .into_iter()
            .flat_map(|start| local_class.representatives.iter().map(move |local| (start + local) * block));
        let verdicts: Vec<u32> = starts.flat_map(|start| &verdicts[start..start + block]).copied().collect();
        if verdicts.len() > MAX_VERDICTS {
            return Err(CompileError::TooManyVerdicts { peers, locals: kept, ports: columns });
        }
        Ok(Matrix {
            verdicts,
            peers,
            port_classes: columns,
            ports: port_class.relabel(&self.ports),
            local4: local_class.relabel(&self.local4),
            local6: local_class.relabel(&self.local6),
            uses_local: self.uses_local && kept > 1,
        })
    }
}

/// Equal columns, merged.
struct Groups {
    /// The new class of each old one.
    class: Vec<u32>,
    /// An old class for each new one.
    representatives: Vec<usize>,
}

impl Groups {
    fn relabel<K: Key>(&self, stretches: &Stretches<K>) -> Stretches<K> {
        let mut merged = Vec::new();
        for (start, class) in stretches {
            push(&mut merged, *start, self.class[*class as usize]);
        }
        merged
    }
}

fn group(count: usize, hash: impl Fn(usize) -> u64, same: impl Fn(usize, usize) -> bool) -> Groups {
    let mut known: HashMap<u64, Vec<u32>> = HashMap::new();
    let mut groups = Groups { class: Vec::with_capacity(count), representatives: Vec::new() };
    for at in 0..count {
        let alike = known.entry(hash(at)).or_default();
        let class = alike.iter().copied().find(|class| same(groups.representatives[*class as usize], at));
        let class = class.unwrap_or_else(|| {
            groups.representatives.push(at);
            alike.push(groups.representatives.len() as u32 - 1);
            groups.representatives.len() as u32 - 1
        });
        groups.class.push(class);
    }
    groups
}

fn hash<'a>(numbers: impl Iterator<Item = &'a u32>) -> u64 {
    numbers.fold(0, |hash: u64, number| {
        (hash.rotate_left(5) ^ u64::from(*number)).wrapping_mul(0x517c_c1b7_2722_0a95)
    })
}
