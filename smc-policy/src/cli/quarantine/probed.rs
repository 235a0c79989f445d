//! Puts what a probe found into the quarantine: `probe --quarantine`.

use super::{Place, lock};
use crate::{
    cli::{outcome::Failure, output::Output},
    guard::{probe::Report, quarantine::Record, recheck},
    paths::Paths,
};

/// What was recorded.
#[derive(Debug)]
pub(in crate::cli) struct Recorded {
    /// "kernel", or "file" when no policy is in force.
    pub(in crate::cli) source: &'static str,
    /// Seconds since 1970.
    pub(in crate::cli) now: u64,
    /// The entries, in the order of the reports; none where nothing echoes.
    pub(in crate::cli) entries: Vec<Option<Record>>,
}

/// Makes entries by command of those that echo.
pub(in crate::cli) fn record(paths: &Paths, reports: &[Report], out: &Output) -> Result<Recorded, Failure> {
    let _lock = lock(paths, out)?;
    let place = Place::open(paths)?;
    let now = place.now();
    let entries = reports.iter().map(|report| {
        let address = report.target.address;
        let before = place.commanded(address.ip(), address.port())?;
        Ok(recheck::recorded(report, before.as_ref(), now))
    });
    let entries = entries.collect::<Result<Vec<Option<Record>>, Failure>>()?;
    let new: Vec<Record> = entries.iter().flatten().cloned().collect();
    if !new.is_empty() {
        place.put(&new, out)?;
    }
    Ok(Recorded { source: place.source(), now, entries })
}
