//! How a policy is enforced: settings that travel in its tables and so change with the same store.

use serde::{Deserialize, Serialize};
use smc_policy_common::table::{
    EXTRA_MAGICS, FLAG_CANARY, FLAG_FORWARDED, FLAG_LEARN_ONLY, FLAG_OBSERVE, FLAG_PLAIN_RETRANSMISSIONS,
    pack,
};

/// The magic of an SMC option that a vendor's kernel uses beside the standard one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Magic {
    /// In a SYN: the four bytes after kind and length as a big-endian number.
    pub syn: u32,
    /// In a SYN-ACK.
    pub syn_ack: u32,
}

/// How the tables are enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Decide and count, and let every connection negotiate.
    pub observe: bool,
    /// A SYN that is sent again goes without the SMC option: a path that swallows SYNs with unknown options then costs
    /// a second, not the connection.
    pub plain_retransmissions: bool,
    /// Judge SYNs that only pass through this host too, as outbound (tc only).
    pub forwarded: bool,
    /// Mark allowed SYNs, and take the SMC option out of answers that return the mark.
    pub canary: bool,
    /// Leave such answers as they are, and only learn from them.
    pub learn_only: bool,
    /// Further magics of the SMC option (tc only).
    pub magics: [Option<Magic>; EXTRA_MAGICS],
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            observe: false,
            plain_retransmissions: true,
            forwarded: false,
            canary: false,
            learn_only: false,
            magics: [None; EXTRA_MAGICS],
        }
    }
}

impl Settings {
    /// The flags of cell 0.
    pub(super) fn flags(&self) -> u16 {
        [
            (self.observe, FLAG_OBSERVE),
            (self.plain_retransmissions, FLAG_PLAIN_RETRANSMISSIONS),
            (self.forwarded, FLAG_FORWARDED),
            (self.canary, FLAG_CANARY),
            (self.learn_only, FLAG_LEARN_ONLY),
        ]
        .into_iter()
        .fold(0, |flags, (set, flag)| if set { flags | flag } else { flags })
    }

    /// The cells from `H_MAGICS` on.
    pub(super) fn magic_cells(&self) -> [u64; EXTRA_MAGICS] {
        self.magics.map(|magic| magic.map_or(0, |m| pack(m.syn, m.syn_ack)))
    }
}
