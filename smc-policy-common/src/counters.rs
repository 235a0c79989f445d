//! What the programs count, per CPU.

/// Counters of one rule (or of one `[default]` line). One element of the per-CPU array `smcpol_hits`; the index is
/// the rule's [`Verdict::slot`](crate::table::Verdict::slot).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleCounters {
    /// Connections this rule decided: first transmissions of a SYN or SYN-ACK only.
    pub hits: u64,
    /// Transmissions after the first that this rule decided as well.
    pub retransmissions: u64,
}

/// Counters of the whole instance; one element of the per-CPU array `smcpol_stat`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstanceCounters {
    /// Decisions taken by a table, both directions.
    pub decisions: u64,
    /// Connections that met no usable table and were allowed: nothing applied yet, or a damaged table.
    pub undecided: u64,
    /// Connections that observe mode allowed although a rule denies them.
    pub observed_denies: u64,
    /// Reserved, zero.
    pub reserved: u64,
}

const _: () = {
    assert!(size_of::<RuleCounters>() == 16);
    assert!(size_of::<InstanceCounters>() == 32);
};
