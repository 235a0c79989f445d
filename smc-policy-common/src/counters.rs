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
    /// SYNs sent again that went without the SMC option although the policy allows it (`retransmit = "plain"`). With
    /// smc_hs_ctrl one a connection: the kernel does not ask again.
    pub plain_retransmissions: u64,
    /// tc: SYNs with the SMC option that came in for no listener of this namespace, and passed.
    pub no_listener: u64,
    /// tc: SYNs with the SMC option that went out for no connecting socket of this namespace, and passed.
    pub no_socket: u64,
    /// tc: SYNs with the SMC option that passed because TCP-AO signs their options.
    pub signed: u64,
    /// tc: SYNs that kept the SMC option against the verdict because the kernel refused the change (out of memory).
    pub unchanged: u64,
    /// Connections that the rules allow and that went without SMC because the peer is in quarantine.
    pub quarantined: u64,
    /// Connections that observe mode allowed although the peer is in quarantine.
    pub observed_quarantined: u64,
    /// SYNs sent with our canary.
    pub marked: u64,
    /// SYNs sent with the short canary, as there was no room for the long one.
    pub marked_short: u64,
    /// SYNs of allowed connections that had room for neither.
    pub unmarked: u64,
    /// SYN-ACKs that returned our canary and lost the SMC option.
    pub echoes: u64,
    /// SYN-ACKs with the SMC option and a canary that this host did not send, untouched.
    pub unproven: u64,
    /// SYN-ACKs that returned the short canary and lost the SMC option, but nothing was learned as no connection
    /// waited for them.
    pub unlearned: u64,
}

impl InstanceCounters {
    /// How many there are.
    pub const COUNT: usize = 16;

    /// In their order.
    pub const fn to_array(self) -> [u64; Self::COUNT] {
        [
            self.decisions,
            self.undecided,
            self.observed_denies,
            self.plain_retransmissions,
            self.no_listener,
            self.no_socket,
            self.signed,
            self.unchanged,
            self.quarantined,
            self.observed_quarantined,
            self.marked,
            self.marked_short,
            self.unmarked,
            self.echoes,
            self.unproven,
            self.unlearned,
        ]
    }

    /// From numbers in their order.
    pub const fn from_array(numbers: [u64; Self::COUNT]) -> Self {
        let [
            decisions,
            undecided,
            observed_denies,
            plain_retransmissions,
            no_listener,
            no_socket,
            signed,
            unchanged,
            quarantined,
            observed_quarantined,
            marked,
            marked_short,
            unmarked,
            echoes,
            unproven,
            unlearned,
        ] = numbers;
        Self {
            decisions,
            undecided,
            observed_denies,
            plain_retransmissions,
            no_listener,
            no_socket,
            signed,
            unchanged,
            quarantined,
            observed_quarantined,
            marked,
            marked_short,
            unmarked,
            echoes,
            unproven,
            unlearned,
        }
    }
}

const _: () = {
    assert!(size_of::<RuleCounters>() == 16);
    assert!(size_of::<InstanceCounters>() == 8 * InstanceCounters::COUNT);
};
