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

/// Makes a struct of `u64` counters that can also be taken as numbers in their order, with names.
macro_rules! counters {
    ($(#[$about:meta])* $type:ident { $($(#[$doc:meta])* $name:ident,)* }) => {
        $(#[$about])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $type {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl $type {
            /// Their names, in their order.
            pub const NAMES: [&str; Self::COUNT] = [$(stringify!($name)),*];
            /// How many there are.
            pub const COUNT: usize = [$(stringify!($name)),*].len();

            /// In their order.
            #[must_use]
            pub const fn to_array(self) -> [u64; Self::COUNT] {
                [$(self.$name),*]
            }

            /// From numbers in their order.
            #[must_use]
            pub const fn from_array(numbers: [u64; Self::COUNT]) -> Self {
                let [$($name),*] = numbers;
                Self { $($name),* }
            }
        }
    };
}

counters! {
/// Counters of the whole instance; one element of the per-CPU array `smcpol_stat`.
InstanceCounters {
    /// Decisions taken by a table, both directions.
    decisions,
    /// Connections that met no usable table and were allowed: nothing applied yet, or a damaged table.
    undecided,
    /// Connections that observe mode allowed although a rule denies them.
    observed_denies,
    /// SYNs sent again that went without the SMC option although the policy allows it (`retransmit = "plain"`). With
    /// smc_hs_ctrl one a connection: the kernel does not ask again.
    plain_retransmissions,
    /// tc: SYNs with the SMC option that came in for no listener of this namespace, and passed.
    no_listener,
    /// tc: SYNs with the SMC option that went out for no connecting socket of this namespace, and passed.
    no_socket,
    /// tc: SYNs with the SMC option that passed because TCP-AO signs their options.
    signed,
    /// tc: SYNs that kept the SMC option against the verdict because the kernel refused the change (out of memory).
    unchanged,
    /// Connections that the rules allow and that went without SMC because the peer is in quarantine.
    quarantined,
    /// Connections that observe mode allowed although the peer is in quarantine.
    observed_quarantined,
    /// SYNs sent with our canary.
    marked,
    /// SYNs sent with the short canary, as there was no room for the long one.
    marked_short,
    /// SYNs of allowed connections that had room for neither.
    unmarked,
    /// SYN-ACKs that returned our canary and lost the SMC option.
    echoes,
    /// SYN-ACKs with the SMC option and a canary that this host did not send, untouched.
    unproven,
    /// SYN-ACKs that returned the short canary and lost the SMC option, but nothing was learned as no connection
    /// waited for them.
    unlearned,
    /// SYN-ACKs that returned our canary and kept the SMC option: `on_echo = "learn-only"`, or a policy that only observes.
    kept_echoes,
    /// Connections whose SYN-ACK lost the SMC option and that the peer reset before it had sent anything.
    reset_blanked,
    /// Allowed connections of this host that got something else than a CLC message for an answer.
    no_clc,
    /// Those that got none in time.
    silences,
    /// Those that the peer reset or closed instead.
    resets,
    /// Allowed connections, both directions, that fell back to TCP because RDMA did not work.
    rdma_failures,
    /// Silences and resets that put no known peer into quarantine because too large a share of them is in it.
    storm_reports,
    /// Failures that observe mode only counted: they would have put a peer into quarantine, or led to it.
    observed_failures,
}
}

const _: () = {
    assert!(size_of::<RuleCounters>() == 16);
    assert!(size_of::<InstanceCounters>() == 8 * InstanceCounters::COUNT);
};
