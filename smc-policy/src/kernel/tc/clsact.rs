//! The way of filters: a clsact qdisc (net/sched/sch_ingress.c) and one filter of kind bpf a side (net/sched/cls_bpf.c).
//!
//! Whether the qdisc is ours is kept in the kernel, as part of our filters' names: so it cannot be wrong about a device
//! that got the index of another, and a foreign qdisc is never removed.

use std::{io, os::fd::BorrowedFd};

use super::{
    Attached, Device, Done, IsOurs, Side, Way,
    filters::{CLSACT, Filter, Filters},
    is_gone,
};
use crate::kernel::{
    error::{Doing, KernelError},
    sys,
};

/// Ends the name of our filters in a qdisc that we made.
const MADE_QDISC: &str = "+clsact";

/// Our filters' handles are this and the next ones: "SMC". The low ones are what others name when they replace theirs.
const FIRST_HANDLE: u32 = 0x0053_4d43;

/// What packets meet, in this order.
///
/// # Errors
/// The system calls'; ENODEV: no such device.
pub fn list(device: u32, side: Side) -> io::Result<Vec<Attached>> {
    let mut filters = Filters::of(device)?;
    let met = match filters.qdisc()?.as_deref() {
        Some(CLSACT) => filters.list(side)?,
        // A qdisc of kind ingress has the one side only, and would say the same filters of the other.
        Some(_) if side == Side::Ingress => filters.list(side)?,
        _ => Vec::new(),
    };
    let met = met.into_iter().filter(|f| f.chain == 0);
    Ok(met
        .map(|f| Attached {
            program: f.program,
            name: if f.program == 0 { f.kind } else { f.program_name },
            way: Way::Clsact,
        })
        .collect())
}

/// See [`super::attach`].
///
/// # Errors
/// [`KernelError::Missing`], [`KernelError::Io`].
pub fn attach(
    device: &Device,
    side: Side,
    program: BorrowedFd<'_>,
    is_ours: IsOurs<'_>,
) -> Result<Done, KernelError> {
    let doing = || format!("attach a filter to {}", device.name);
    let mut filters = Filters::of(device.index).doing(doing)?;
    let made = ensure_qdisc(&mut filters, device)?;
    let attached = put(&mut filters, made, device, side, program, is_ours);
    if made && attached.is_err() {
        // The error in hand says more than one of the clean-up could.
        let _ = remove_if_empty(&mut filters);
    }
    attached
}

/// See [`super::detach`].
///
/// # Errors
/// [`KernelError::Io`].
pub fn detach(device: &Device, side: Side, is_ours: IsOurs<'_>) -> Result<bool, KernelError> {
    let detached = || -> io::Result<bool> {
        let mut filters = Filters::of(device.index)?;
        if filters.qdisc()?.as_deref() != Some(CLSACT) {
            return Ok(false);
        }
        let all = both_sides(&mut filters)?;
        let made = have_made_qdisc(&all, is_ours);
        let [(_, here), (_, there)] = match side {
            Side::Egress => all,
            Side::Ingress => {
                let [egress, ingress] = all;
                [ingress, egress]
            }
        };
        let (ours, others): (Vec<_>, Vec<_>) = here.into_iter().partition(|f| is_of_ours(f, is_ours));
        if made && !ours.is_empty() && others.is_empty() && there.is_empty() {
            // Both at once, so that a qdisc without our filter in it, which tells that it is ours, is never left.
            filters.delete_qdisc()?;
        } else {
            for filter in &ours {
                filters.delete(side, filter)?;
            }
        }
        Ok(!ours.is_empty())
    };
    match detached() {
        Err(error) if is_gone(&error) => Ok(false),
        other => other.doing(|| format!("detach filters from {}", device.name)),
    }
}

/// Sees to it that the device has a clsact qdisc. Whether it was made now.
fn ensure_qdisc(filters: &mut Filters, device: &Device) -> Result<bool, KernelError> {
    let doing = || format!("make a clsact qdisc for {}", device.name);
    let mut kind = filters.qdisc().doing(doing)?;
    if kind.is_none() {
        match filters.add_qdisc() {
            Ok(()) => return Ok(true),
            // Somebody else was faster.
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                kind = filters.qdisc().doing(doing)?;
            }
            Err(error) => return Err(refused_qdisc(error, device)),
        }
    }
    match kind {
        Some(kind) if kind == CLSACT => Ok(false),
        Some(kind) => Err(taken(&kind, device)),
        None => Err(io::Error::from(io::ErrorKind::ResourceBusy)).doing(doing),
    }
}

/// See [`super::obstacle`].
pub fn obstacle(device: &Device) -> Option<KernelError> {
    let kind = Filters::of(device.index).and_then(|mut filters| filters.qdisc()).ok()??;
    (kind != CLSACT).then(|| taken(&kind, device))
}

/// Another kind of qdisc is in clsact's place.
fn taken(kind: &str, device: &Device) -> KernelError {
    KernelError::Missing {
        feature: format!(
            "the device {} has a qdisc of kind '{kind}' in the place of clsact, and so no place for programs at its egress",
            device.name
        ),
        next: format!(
            "remove it (`tc qdisc del dev {0} {kind}`) or have its owner make it clsact, or exclude {0} under \
             [interfaces] in config.toml",
            device.name
        ),
    }
}

/// Puts the program into the device's qdisc; `made`: that was made just now.
fn put(
    filters: &mut Filters,
    made: bool,
    device: &Device,
    side: Side,
    program: BorrowedFd<'_>,
    is_ours: IsOurs<'_>,
) -> Result<Done, KernelError> {
    let wanted = sys::program_info(program).doing(|| "ask what a tc program is".into())?;
    let doing = || format!("attach {} to {}", wanted.name, device.name);
    let all = both_sides(filters).doing(doing)?;
    let made = made || have_made_qdisc(&all, is_ours);
    let here: Vec<Filter> = all.into_iter().filter(|(s, _)| *s == side).flat_map(|(_, list)| list).collect();
    let (ours, others): (Vec<_>, Vec<_>) = here.into_iter().partition(|f| is_of_ours(f, is_ours));
    let name = format!("{}{}", wanted.name, if made { MADE_QDISC } else { "" });
    let kept = ours.iter().position(|f| f.meets_all() && f.is_direct);
    let done = match kept.map(|at| &ours[at]) {
        Some(kept) if kept.program == wanted.id => Done::Unchanged,
        Some(kept) => {
            filters.replace(side, kept, program, &name).doing(doing)?;
            Done::Replaced
        }
        None => {
            let (priority, handle) = first_place(&others);
            let added = filters.add(side, priority, handle, program, &name);
            added.map_err(|error| refused_filter(error, device, &wanted.name))?;
            Done::Attached
        }
    };
    for (at, filter) in ours.iter().enumerate() {
        if Some(at) != kept {
            filters.delete(side, filter).doing(doing)?;
        }
    }
    Ok(done)
}

/// Where a filter comes before as many of the others as it can: priority and handle.
fn first_place(others: &[Filter]) -> (u16, u32) {
    let at = |priority: u16| others.iter().filter(move |f| f.chain == 0 && f.priority == priority);
    // In a priority of programs for all packets it goes ahead of them; others' kinds take no more.
    let priority = (1..=u16::MAX).find(|p| at(*p).all(Filter::meets_all)).unwrap_or(u16::MAX);
    let is_free = |handle: &u32| at(priority).all(|f| f.handle != *handle);
    (priority, (FIRST_HANDLE..).find(is_free).unwrap_or(FIRST_HANDLE))
}

fn both_sides(filters: &mut Filters) -> io::Result<[(Side, Vec<Filter>); 2]> {
    Ok([(Side::Egress, filters.list(Side::Egress)?), (Side::Ingress, filters.list(Side::Ingress)?)])
}

fn is_of_ours(filter: &Filter, is_ours: IsOurs<'_>) -> bool {
    filter.program != 0 && is_ours(filter.program, &filter.program_name)
}

fn have_made_qdisc(all: &[(Side, Vec<Filter>); 2], is_ours: IsOurs<'_>) -> bool {
    let mut filters = all.iter().flat_map(|(_, list)| list);
    filters.any(|f| f.name.ends_with(MADE_QDISC) && is_of_ours(f, is_ours))
}

fn remove_if_empty(filters: &mut Filters) -> io::Result<()> {
    if both_sides(filters)?.iter().all(|(_, list)| list.is_empty()) { filters.delete_qdisc() } else { Ok(()) }
}

fn refused_qdisc(error: io::Error, device: &Device) -> KernelError {
    match error.raw_os_error() {
        Some(libc::ENOENT) => no_module("clsact qdiscs", "sch_ingress", "CONFIG_NET_SCH_INGRESS"),
        _ => KernelError::Io { doing: format!("make a clsact qdisc for {}", device.name), error },
    }
}

fn refused_filter(error: io::Error, device: &Device, program: &str) -> KernelError {
    match error.raw_os_error() {
        Some(libc::ENOENT) => no_module("BPF filters", "cls_bpf", "CONFIG_NET_CLS_BPF"),
        Some(libc::EOPNOTSUPP) => KernelError::Missing {
            feature: format!(
                "the clsact qdisc of {} shares its filters with other devices (a block)",
                device.name
            ),
            next: format!(
                "exclude {} under [interfaces] in config.toml, or take the block away",
                device.name
            ),
        },
        _ => KernelError::Io { doing: format!("attach {program} to {}", device.name), error },
    }
}

/// The kernel has tried to load the module itself.
fn no_module(what: &str, module: &str, option: &str) -> KernelError {
    KernelError::Missing {
        feature: format!("this kernel ({}) has no {what}, nor tcx", crate::kernel::release()),
        next: format!("load the module with `modprobe {module}`; a kernel without {option} cannot do it"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(priority: u16, kind: &str, protocol: u16, handle: u32) -> Filter {
        Filter {
            priority,
            chain: 0,
            protocol,
            handle,
            kind: kind.into(),
            program: 1,
            program_name: "p".into(),
            name: String::new(),
            is_direct: true,
        }
    }

    #[test]
    fn ahead_of_all_that_can_be() {
        let all = 3;
        assert_eq!(first_place(&[]), (1, FIRST_HANDLE));
        assert_eq!(first_place(&[filter(49152, "u32", 0x800, 1)]), (1, FIRST_HANDLE));
        let theirs = [filter(1, "bpf", all, FIRST_HANDLE), filter(2, "u32", all, 1)];
        assert_eq!(first_place(&theirs), (1, FIRST_HANDLE + 1), "ahead of a program of the same priority");
        let theirs = [filter(1, "u32", all, 1), filter(2, "bpf", 0x800, 1), filter(4, "bpf", all, 1)];
        assert_eq!(first_place(&theirs), (3, FIRST_HANDLE));
        let elsewhere = Filter { chain: 5, ..filter(1, "u32", all, 1) };
        assert_eq!(first_place(&[elsewhere]), (1, FIRST_HANDLE));
    }

    #[test]
    fn the_qdisc_is_ours_if_a_filter_of_ours_says_so() {
        let named = |name: &str, program| Filter { name: name.into(), program, ..filter(1, "bpf", 3, 1) };
        let is_ours = |id: u32, _: &str| id == 1;
        let made = |filters| have_made_qdisc(&[(Side::Egress, vec![]), (Side::Ingress, filters)], &is_ours);
        assert!(made(vec![named("x", 2), named("smcpol_in_eth+clsact", 1)]));
        assert!(!made(vec![named("x+clsact", 2), named("smcpol_in_eth", 1)]));
        assert!(!made(vec![]));
    }

    #[test]
    fn what_is_missing_is_named() {
        let device =
            Device { index: 2, name: "eth0".into(), hardware: 1, link_layer: None, has_address: false };
        let of = io::Error::from_raw_os_error;
        let said = |error: KernelError| error.to_string();
        assert!(said(refused_qdisc(of(libc::ENOENT), &device)).contains("modprobe sch_ingress"));
        assert!(said(refused_filter(of(libc::ENOENT), &device, "p")).contains("modprobe cls_bpf"));
        assert!(said(refused_filter(of(libc::EOPNOTSUPP), &device, "p")).contains("exclude eth0"));
        let other = said(refused_filter(of(libc::EPERM), &device, "p"));
        assert!(other.starts_with("cannot attach p to eth0: "), "{other}");
    }
}
