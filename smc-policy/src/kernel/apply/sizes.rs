//! A compiled policy, and the size of tables that hold it.

use super::Request;
use crate::{
    kernel::{
        object::Sizes,
        record::{self, Record},
    },
    policy::{CompileError, Slots, Tables, compile},
};

/// A compiled policy with the slots it counts in.
pub(in crate::kernel) struct Compiled {
    /// What the programs look up.
    pub(super) tables: Tables,
    /// Where its rules count.
    pub(super) slots: Slots,
    /// Those of them that begin anew.
    pub(super) fresh: Vec<u32>,
}

impl Compiled {
    /// Compiles it. `in_force`: the record of the policy that it follows.
    pub(super) fn new(request: &Request<'_>, in_force: Option<&Record>) -> Result<Self, CompileError> {
        let (slots, fresh) = record::assign_slots(request.policy, in_force);
        Ok(Self { tables: compile(request.policy, &slots, &request.config.settings())?, slots, fresh })
    }

    /// What its instance must hold.
    pub(super) fn needs(&self) -> Sizes {
        Sizes { cells: self.tables.cells.len() as u32, slots: self.slots.all().max().unwrap_or(0) + 1 }
    }
}

/// Cells and slots of a new instance that is to hold a policy which needs `needs`: room to grow, and no less than a
/// page.
pub fn room_for(needs: Sizes) -> Sizes {
    Sizes {
        cells: needs.cells.next_power_of_two().max(512),
        slots: (needs.slots + needs.slots / 4).next_power_of_two().max(64),
    }
}

/// Tables this much larger than needed are replaced by smaller ones: 4 MiB and eight times too large.
const WASTEFUL_CELLS: u32 = 1 << 19;

/// Is so little needed that smaller tables are worth making?
pub(super) fn is_wasteful(have: Sizes, needs: Sizes) -> bool {
    have.cells >= WASTEFUL_CELLS && have.cells / 8 > needs.cells
}

/// Is there room for it?
pub(super) fn fits(have: Sizes, needs: Sizes) -> bool {
    have.cells >= needs.cells && have.slots >= needs.slots
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_policies_stay_small_and_large_ones_have_room() {
        assert_eq!(room_for(Sizes { cells: 100, slots: 5 }), Sizes { cells: 512, slots: 64 });
        assert_eq!(room_for(Sizes { cells: 600, slots: 120 }), Sizes { cells: 1024, slots: 256 });
    }

    #[test]
    fn when_tables_are_replaced() {
        let have = Sizes { cells: 512, slots: 64 };
        assert!(fits(have, Sizes { cells: 1, slots: 64 }));
        assert!(!fits(have, Sizes { cells: 513, slots: 1 }));
        assert!(!fits(have, Sizes { cells: 1, slots: 65 }));
        assert!(!is_wasteful(have, Sizes { cells: 1, slots: 1 }));
        let large = Sizes { cells: 1 << 20, slots: 64 };
        assert!(is_wasteful(large, Sizes { cells: 100, slots: 1 }), "8 MiB for a page");
        assert!(!is_wasteful(large, Sizes { cells: 1 << 19, slots: 1 }));
    }
}
