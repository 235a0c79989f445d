//! Somebody else's smc_hs_ctrl.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};

use smc_policy::kernel::hs_ctrl::{self, KernelTypes};
use smc_policy::kernel::object::{Prepared, Sizes};

/// Made of this project's programs without a table, which allow everything, but under a name that is no instance's.
/// Unregistered, and deselected in the calling thread's network namespace, when it goes.
#[derive(Debug)]
pub struct Foreign(Option<OwnedFd>);

impl Foreign {
    /// The name that it is registered under.
    pub const NAME: &str = "smcpol_foreign";

    /// Registers it.
    ///
    /// # Panics
    /// When the kernel refuses it: say `needs_hook!()` first.
    #[must_use]
    pub fn register() -> Self {
        let types = KernelTypes::read().expect("the kernel's types");
        let prepared = Prepared::new(Sizes { cells: 1, slots: 1 }, Some(&types.offsets)).expect("maps");
        Self(Some(hs_ctrl::register(&prepared, &types, "foreign", false).expect("a registration")))
    }

    /// Makes it this network namespace's choice, as its administrator would.
    ///
    /// # Panics
    /// When the kernel refuses.
    pub fn select(&self) {
        select(Self::NAME);
    }

    /// Takes it away, whoever has selected it.
    ///
    /// # Panics
    /// When the kernel refuses.
    pub fn unregister(&mut self) {
        if let Some(map) = self.0.take() {
            hs_ctrl::unregister(map.as_fd()).expect("unregistered");
        }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // Deselected first, or it would go on as an orphan.
        if crate::lab::selected() == Self::NAME {
            select("");
        }
        self.unregister();
    }
}

/// Writes `net.smc.hs_ctrl` past the tool; empty: nothing is selected.
///
/// # Panics
/// When the kernel refuses.
pub fn select(name: &str) {
    fs::write("/proc/sys/net/smc/hs_ctrl", format!("{name}\n")).expect("net.smc.hs_ctrl");
}
