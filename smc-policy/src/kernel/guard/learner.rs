//! Who learns from how negotiations end: programs at a function and at a tracepoint of the module smc, attached by links that
//! are pinned beside the shared maps as `learn-*`.
//!
//! Links and programs hold the module: it cannot be unloaded while they are there.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use smc_policy_common::learner::Storm;

use super::{Shared, now};
use crate::kernel::{
    btf::{Btf, TypeId},
    capability,
    error::{Doing, KernelError, remove_if_there},
    hs_ctrl::{self, read_btf},
    instance::Instance,
    object::LearnProgram,
    offsets::Offsets,
    pinned::pin,
    sys,
};

/// The function in which a client waits for the server's CLC accept (net/smc/smc_clc.c).
const CLC_WAIT: &str = "smc_clc_wait_msg";
/// The type of the tracepoint `smc_switch_to_fallback` (net/smc/smc_tracepoint.h).
const FALLBACK: &str = "btf_trace_smc_switch_to_fallback";
/// Global of the object: whether it may read the kernel's memory, which the bytes that came are in.
const MAY_READ: &str = "MAY_READ_MEMORY";

/// Whether negotiations are learned from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Learning {
    /// They are.
    On,
    /// The module smc is not loaded: the next apply after it is attaches the programs.
    Waits,
    /// They are not, or not all of them, and why.
    Off(String),
}

/// Attaches the programs of this instance, in the place of another's, unless they are. What could not be attached, and why;
/// without SMC there is nothing to attach to.
///
/// # Errors
/// [`KernelError`].
pub fn attach(pins: &Path, instance: &Instance) -> Result<Vec<String>, KernelError> {
    if !is_smc_there() {
        return Ok(Vec::new());
    }
    let mut targets = None;
    let mut problems = Vec::new();
    for program in LearnProgram::ALL {
        if let Err(e) = attach_one(pins, instance, program, &mut targets) {
            problems.push(format!("{}: {}", purpose(program), capability::explain_refusal(e)));
        }
    }
    Ok(problems)
}

fn attach_one(
    pins: &Path,
    instance: &Instance,
    program: LearnProgram,
    targets: &mut Option<Targets>,
) -> Result<(), KernelError> {
    let loaded = match instance.learn_program(program)? {
        Some(loaded) => loaded,
        None => {
            let targets = match targets {
                Some(targets) => targets,
                None => targets.insert(Targets::read()?),
            };
            targets.load(instance, program)?
        }
    };
    let path = link_path(pins, program);
    let id = sys::program_info(loaded.as_fd()).doing(|| format!("ask for {}", program.program()))?.id;
    if attached(&path)? == Some(id) {
        return Ok(());
    }
    // The kernel puts no other program into such a link, and with two of them for a moment one failure would count twice:
    // rather none is counted for a moment.
    remove_if_there(&path)?;
    let link = sys::tracing_link_create(loaded.as_fd(), program.attach_type())
        .doing(|| format!("attach {}", program.program()))?;
    pin(&link, &Shared::folder(pins), link_name(program))
}

/// Learns no more.
///
/// # Errors
/// [`KernelError::Io`].
pub fn detach(pins: &Path) -> Result<(), KernelError> {
    LearnProgram::ALL.into_iter().try_for_each(|program| remove_if_there(&link_path(pins, program)))
}

/// Whether negotiations are learned from by this instance.
///
/// # Errors
/// [`KernelError::Io`].
pub fn inspect(pins: &Path, instance: &Instance) -> Result<Learning, KernelError> {
    let mut missing = Vec::new();
    for program in LearnProgram::ALL {
        let wanted = match instance.learn_program(program)? {
            Some(loaded) => {
                Some(sys::program_info(loaded.as_fd()).doing(|| format!("ask for {}", program.program()))?.id)
            }
            None => None,
        };
        if wanted.is_none() || attached(&link_path(pins, program))? != wanted {
            missing.push(purpose(program));
        }
    }
    if missing.is_empty() {
        return Ok(Learning::On);
    }
    if !is_smc_there() {
        return Ok(Learning::Waits);
    }
    let why = if let Err(e) = hs_ctrl::check_types() {
        e.to_string()
    } else if let Some(mode) = capability::lockdown() {
        format!("kernel lockdown ({mode}) may forbid it; `smc-policy apply` says what the kernel minds")
    } else {
        "`smc-policy apply` attaches the programs, or says why it cannot".to_owned()
    };
    Ok(Learning::Off(format!("{}: {why}", missing.join(", "))))
}

/// How many peers are known to speak SMC, how many of them are held by suspicion, and how many may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stormed {
    /// Known peers.
    pub known: u32,
    /// Those held, counted over the last one or two minutes.
    pub held: u32,
    /// At most.
    pub at_most: u32,
}

/// As the programs count them now.
///
/// # Errors
/// [`KernelError::Io`].
pub fn stormed(pins: &Path) -> Result<Stormed, KernelError> {
    let Some(shared) = Shared::open(pins)? else { return Ok(Stormed::default()) };
    let bytes =
        sys::map_lookup(shared.map("smcpol_storm")?, 0).doing(|| "read how many peers are known".into())?;
    let storm = bytes.try_into().map(Storm::from_bytes).unwrap_or_default();
    let now = now();
    Ok(Stormed { known: storm.known(now), held: storm.held(now), at_most: storm.at_most(now) })
}

/// Where its sysctls are SMC is, as a module or built in.
fn is_smc_there() -> bool {
    Path::new(hs_ctrl::SMC_SYSCTLS).exists()
}

/// What is not noticed without the program.
fn purpose(program: LearnProgram) -> &'static str {
    match program {
        LearnProgram::Clc => "what peers answer instead of CLC is not noticed",
        LearnProgram::Fallback => "RDMA that does not work is not noticed",
    }
}

fn link_name(program: LearnProgram) -> &'static str {
    match program {
        LearnProgram::Clc => "learn-clc",
        LearnProgram::Fallback => "learn-fallback",
    }
}

fn link_path(pins: &Path, program: LearnProgram) -> PathBuf {
    Shared::folder(pins).join(link_name(program))
}

/// The program of a pinned link. `None`: there is none.
fn attached(path: &Path) -> Result<Option<u32>, KernelError> {
    match sys::get_pinned(path).and_then(|link| sys::link_program(link.as_fd())) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some).doing(|| format!("open {}", path.display())),
    }
}

/// Where the programs are attached, and where the fields are that they read.
struct Targets {
    /// The module's BTF object; none when SMC is built in.
    module: Option<OwnedFd>,
    offsets: Offsets,
    clc: Result<TypeId, &'static str>,
    fallback: Result<TypeId, &'static str>,
}

impl Targets {
    fn read() -> Result<Self, KernelError> {
        let vmlinux = Btf::parse(read_btf("vmlinux")?, None)?;
        let offsets = Offsets::find(&vmlinux)?;
        if vmlinux.function(CLC_WAIT).is_some() {
            return Self::find(&vmlinux, None, offsets);
        }
        let module = Btf::parse(read_btf("smc")?, Some(&vmlinux))?;
        let object = sys::kernel_btf("smc")
            .doing(|| "open the BTF of the module smc".into())?
            .ok_or_else(|| hs_ctrl::no_btf("smc"))?;
        Self::find(&module, Some(object), offsets)
    }

    fn find(btf: &Btf<'_>, module: Option<OwnedFd>, offsets: Offsets) -> Result<Self, KernelError> {
        Ok(Self { module, offsets: offsets.with_smc(btf)?, clc: clc(btf), fallback: fallback(btf) })
    }

    fn load(&self, instance: &Instance, program: LearnProgram) -> Result<OwnedFd, KernelError> {
        let target = match program {
            LearnProgram::Clc => self.clc,
            LearnProgram::Fallback => self.fallback,
        };
        let target = target.map_err(|what| KernelError::Missing {
            feature: format!("this kernel ({}) {what}", crate::kernel::release()),
            next: "please report it; the rest of the guard works without".into(),
        })?;
        let load = |may_read: bool| {
            let offsets = self.offsets.clone().with(MAY_READ, may_read.into());
            let module = self.module.as_ref().map(AsFd::as_fd);
            instance.load_learn_program(program, &offsets, target, module)
        };
        // Under lockdown the kernel takes no program that reads its memory: then there is no evidence.
        let may_read = program == LearnProgram::Clc && capability::lockdown().is_none();
        match load(may_read) {
            Err(KernelError::Refused { .. }) if may_read => load(false),
            other => other,
        }
    }
}

/// The function, if it takes and returns what the program reads: `int (struct smc_sock *, void *, int, u8, unsigned long)`.
fn clc(btf: &Btf<'_>) -> Result<TypeId, &'static str> {
    let function = btf.function(CLC_WAIT).ok_or("has no function smc_clc_wait_msg in SMC")?;
    match btf.parameters(function).as_deref() {
        Some([smc, _, length, expected, timeout])
            if btf.is_pointer_to(*smc, "smc_sock")
                && btf.is_integer(*length, 4)
                && btf.is_integer(*expected, 1)
                && btf.is_integer(*timeout, size_of::<usize>() as u32) =>
        {
            Ok(function)
        }
        _ => Err("has a function smc_clc_wait_msg that takes something else than known kernels' do"),
    }
}

/// The tracepoint's type, if it hands over what the program reads: `void (void *, const struct smc_sock *, int)`.
fn fallback(btf: &Btf<'_>) -> Result<TypeId, &'static str> {
    let tracepoint = btf.typedef(FALLBACK).ok_or("has no tracepoint smc_switch_to_fallback")?;
    match btf.parameters(tracepoint).as_deref() {
        Some([_, smc, reason]) if btf.is_pointer_to(*smc, "smc_sock") && btf.is_integer(*reason, 4) => {
            Ok(tracepoint)
        }
        _ => Err("has a tracepoint smc_switch_to_fallback that says something else than known kernels' do"),
    }
}
