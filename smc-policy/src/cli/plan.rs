//! `plan`: what an `apply` of these files would change.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::{
    check, in_force,
    outcome::{Done, Exit},
    output::{Output, Style, columns},
    sources,
    words::count,
};
use crate::{
    kernel::capability,
    paths::Paths,
    policy::{
        Action, Change, Policy,
        address::AddrSet,
        compile::{Flip, FlipsError, flips},
        diff,
        model::direction_name,
        ranges::RangeSet,
    },
};

#[derive(Debug, Args)]
pub(super) struct PlanArguments {
    /// Files, or folders of *.toml; without any: the vendor's and the administrator's policy.d.
    paths: Vec<PathBuf>,
    /// Show at most so many regions whose verdict changes.
    #[arg(long, value_name = "N", default_value_t = 10)]
    regions: usize,
}

/// So many address ranges of a region are printed.
const SHOWN: usize = 8;

#[derive(Serialize)]
struct PlanDocument<'a> {
    /// The generation that the plan is compared with; `null`: nothing is in force, everything may negotiate.
    generation: Option<u64>,
    changes: &'a [Change],
    /// Regions of connections whose verdict changes, the largest first; `null`: the policies tell too much apart.
    regions: Option<Vec<RegionDocument>>,
    /// How many there are beyond those.
    more_regions: usize,
    /// Why regions are not told.
    note: Option<String>,
}

#[derive(Serialize)]
struct RegionDocument {
    direction: &'static str,
    /// Addresses, networks or `first-last`; empty: all of both families, if `family` is null.
    peers: Vec<String>,
    /// So many ranges of peers are not listed.
    more_peers: usize,
    /// This host's addresses; empty: all.
    local: Vec<String>,
    /// Service ports or `first-last`; empty: all.
    ports: Vec<String>,
    /// The share of all connections of the address family, by peers and ports, from 0 to 1.
    share: f64,
    before: DecisionDocument,
    now: DecisionDocument,
}

#[derive(Serialize)]
struct DecisionDocument {
    action: Action,
    /// `null`: the default.
    rule: Option<String>,
}

pub(super) fn run(paths: &Paths, arguments: &PlanArguments, out: &mut Output) -> Done {
    let (_, files) = sources::read_absolute(paths, &arguments.paths)?;
    let new = check::usable(&files, out)?;
    capability::require("plan")?;
    let in_force = in_force::read(paths)?;
    let generation = in_force.as_ref().map(|in_force| in_force.record.generation);
    let old = in_force.map(|in_force| in_force.policy).unwrap_or_default();
    let changes = diff(&old, &new);
    let (found, note) = match flips(&old, &new) {
        Ok(found) => (Some(found), None),
        // It is about to be refused by `apply` as well.
        Err(FlipsError::Compile(error)) => return Err(super::Failure::usage(error.to_string())),
        Err(error @ FlipsError::TooMany(_)) => (None, Some(error.to_string())),
    };
    let number = found.as_ref().map_or(0, Vec::len);
    let is_same = changes.is_empty() && number == 0;
    match generation {
        Some(generation) if is_same => {
            out.text(&format!("No change: generation {generation} decides alike by the same rules."));
        }
        Some(generation) => out.text(&format!("Compared with generation {generation}, which is in force:")),
        None => out.text("Nothing is in force: every connection may negotiate SMC."),
    }
    let lines: Vec<String> = changes.iter().map(|change| format!("  {change}")).collect();
    out.text(&lines.join("\n"));
    let regions: Option<Vec<RegionDocument>> = found.as_ref().map(|found| {
        found.iter().take(arguments.regions).map(|flip| RegionDocument::new(flip, &old, &new)).collect()
    });
    if let Some(note) = &note {
        out.text(&format!("Which verdicts change is not told: {note}."));
    }
    let more_regions = number.saturating_sub(arguments.regions);
    match regions.as_deref() {
        Some([]) if !changes.is_empty() && number == 0 => out.text("No verdict changes."),
        Some(regions) if !regions.is_empty() => {
            out.text("Verdicts that change, the largest part first:");
            out.text(&table(regions, out));
            if more_regions > 0 {
                out.text(&format!(
                    "  and {} more (--regions {number} shows all)",
                    count(more_regions, "region")
                ));
            }
        }
        _ => {}
    }
    out.json(&PlanDocument { generation, changes: &changes, regions, more_regions, note });
    Ok(if is_same { Exit::Ok } else { Exit::No })
}

impl RegionDocument {
    fn new(flip: &Flip, old: &Policy, new: &Policy) -> Self {
        let [before, now] = flip.rules(old, new).map(|rule| rule.map(|rule| rule.name.clone()));
        let all = AddrSet::full();
        let is_all = |set: &AddrSet| set.v4() == all.v4() || set.v6() == all.v6();
        let texts = |set: &AddrSet| set.ranges().map(|range| range.to_string()).collect::<Vec<_>>();
        Self {
            direction: direction_name(flip.direction),
            peers: flip.peers.ranges().take(SHOWN).map(|range| range.to_string()).collect(),
            more_peers: flip.peers.len().saturating_sub(SHOWN),
            local: if is_all(&flip.local) { Vec::new() } else { texts(&flip.local) },
            ports: ports(&flip.ports),
            share: flip.share(),
            before: DecisionDocument { action: flip.before.action, rule: before },
            now: DecisionDocument { action: flip.now.action, rule: now },
        }
    }
}

/// As texts; empty: all.
fn ports(ports: &RangeSet<u16>) -> Vec<String> {
    if ports.covers(1, u16::MAX) {
        return Vec::new();
    }
    let text = |(lo, hi): &(u16, u16)| if lo == hi { lo.to_string() } else { format!("{lo}-{hi}") };
    ports.ranges().iter().map(text).collect()
}

fn table(regions: &[RegionDocument], out: &Output) -> String {
    let by = |decision: &DecisionDocument| match &decision.rule {
        Some(rule) => format!("{} ({rule})", decision.action),
        None => format!("{} (default)", decision.action),
    };
    let rows: Vec<Vec<String>> = regions
        .iter()
        .map(|region| {
            let style = if region.now.action == Action::Allow { Style::Good } else { Style::Bad };
            let mut peers = region.peers.join(" ");
            if region.more_peers > 0 {
                peers.push_str(&format!(" and {} more", region.more_peers));
            }
            if !region.local.is_empty() {
                peers.push_str(&format!(" at local {}", region.local.join(" ")));
            }
            vec![
                format!("  {}", region.direction),
                peers,
                if region.ports.is_empty() {
                    "all ports".to_owned()
                } else {
                    format!("ports {}", region.ports.join(","))
                },
                format!("{} -> {}", by(&region.before), out.paint(style, &by(&region.now))),
            ]
        })
        .collect();
    columns(&rows, &[])
}
