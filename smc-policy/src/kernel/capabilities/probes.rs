//! The questions to the running kernel. None of them changes anything: no module is loaded, nothing is attached, and the
//! programs that are loaded for a moment do nothing.

use std::{
    ffi::CString,
    fs, io,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

use aya_obj::generated::{bpf_attach_type, bpf_insn, bpf_prog_type};

use super::{
    Answer, Facts, Has, bpf_loop,
    modules::{Module, Modules},
};
use crate::{
    kernel::{
        btf::{Btf, TypeId},
        capability, hs_ctrl, release,
        sys::{self, LoadError, ProgramSpec},
        tc,
    },
    paths::Paths,
};

/// BPF_FS_MAGIC (include/uapi/linux/magic.h).
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;
/// SECURITYFS_MAGIC.
const SECURITYFS_MAGIC: i64 = 0x7363_6673;
/// The client's and server's wait for the peer's words (net/smc/smc_clc.c).
const CLC_WAIT: &str = "smc_clc_wait_msg";
/// Where unmodified programs' sockets can be turned to another protocol (net/socket.c).
const SOCKET_PROTOCOL: &str = "update_socket_protocol";
/// What socket(AF_INET, SOCK_STREAM, IPPROTO_SMC) makes the kernel ask for.
const IPPROTO_SMC_ALIAS: &str = "net-pf-2-proto-256-type-1";

/// The kernel's own types, if it tells them.
pub(super) struct Kernel(Result<Btf<'static>, Answer>);

impl Kernel {
    fn read() -> Self {
        Self(
            read_btf("vmlinux")
                .and_then(|data| Btf::parse(data, None).map_err(|e| Answer::no(e.to_string()))),
        )
    }

    pub(super) fn has_types(&self) -> bool {
        self.0.is_ok()
    }

    pub(super) fn has_function(&self, name: &str) -> bool {
        self.function(name).is_some()
    }

    fn function(&self, name: &str) -> Option<TypeId> {
        self.0.as_ref().ok()?.function(name)
    }

    fn has_struct(&self, name: &str) -> bool {
        self.0.as_ref().is_ok_and(|btf| btf.structure(name).is_ok())
    }
}

fn read_btf(name: &str) -> Result<Vec<u8>, Answer> {
    let path = format!("/sys/kernel/btf/{name}");
    fs::read(&path).map_err(|e| {
        let has = if e.kind() == io::ErrorKind::NotFound { Has::No } else { Has::Unknown };
        Answer { has, detail: format!("{path}: {e}") }
    })
}

/// Asks everything.
pub(super) fn facts(paths: &Paths) -> Facts {
    let release = release();
    let kernel = Kernel::read();
    let modules = Modules::read(&release);
    let smc = smc(&modules, &kernel);
    Facts {
        smc_diag: modules.find("smc_diag", "smc_diag_dump", &kernel),
        hs_ctrl: hs_ctrl(&smc, &kernel),
        tcx: tcx(&kernel),
        clsact: clsact(&modules, &kernel),
        bpf_loop: bpf_loop(&kernel),
        btf: match &kernel.0 {
            Ok(_) => Answer::yes("/sys/kernel/btf/vmlinux"),
            Err(answer) => answer.clone(),
        },
        btf_smc: btf_smc(&smc, &kernel),
        fexit_modules: fexit(&smc, &kernel),
        fmod_ret: fmod_ret(&kernel),
        ipproto_smc: ipproto_smc(&smc, &modules),
        lockdown: lockdown(),
        cgroup2: cgroup2(),
        bpffs: bpffs(&paths.bpffs),
        release,
        smc,
    }
}

fn smc(modules: &Modules, kernel: &Kernel) -> Module {
    match modules.find("smc", "smc_listen", kernel) {
        // Without types and lists of files: whoever built it in has registered it.
        Module::Unknown(_) | Module::Absent if is_smc_registered() => Module::BuiltIn,
        found => found,
    }
}

/// Of the thread, not of the process's first one (/proc/net): any namespace will do, but it must be there.
fn is_smc_registered() -> bool {
    let protocols = fs::read_to_string("/proc/thread-self/net/protocols").unwrap_or_default();
    protocols.lines().any(|line| line.split_whitespace().next() == Some("SMC"))
}

fn is_present(smc: &Module) -> bool {
    matches!(smc, Module::Loaded | Module::BuiltIn)
}

fn hs_ctrl(smc: &Module, kernel: &Kernel) -> Answer {
    if Path::new(hs_ctrl::SYSCTL).exists() {
        Answer::yes("net.smc.hs_ctrl")
    } else if is_present(smc) {
        Answer::no("SMC is there, net.smc.hs_ctrl is not")
    } else if kernel.has_struct("smc_hs_ctrl") {
        Answer::no("the kernel is made for it, but smc is not loaded")
    } else {
        Answer::no("no net.smc.hs_ctrl")
    }
}

/// Without the privilege to ask, the kernel's functions tell.
fn by_function(kernel: &Kernel, function: &str) -> Answer {
    match (kernel.has_types(), kernel.has_function(function)) {
        (true, true) => Answer::yes(format!("by the kernel's types: {function}")),
        (true, false) => Answer::no(format!("no {function} in the kernel's types")),
        (false, _) => Answer::unknown(not_permitted()),
    }
}

fn tcx(kernel: &Kernel) -> Answer {
    match tc::has_tcx() {
        Ok(true) => Answer::yes("asked by bpf(2)"),
        Ok(false) => Answer::no("bpf(2) does not know it"),
        Err(e) if is_not_permitted(&e) => by_function(kernel, "tcx_prog_attach"),
        Err(e) => Answer::unknown(e.to_string()),
    }
}

fn clsact(modules: &Modules, kernel: &Kernel) -> Answer {
    let parts = [("sch_ingress", "clsact_init"), ("cls_bpf", "cls_bpf_classify")]
        .map(|(name, function)| (name, modules.find(name, function, kernel)));
    let has = if parts.iter().any(|(_, module)| *module == Module::Absent) {
        Has::No
    } else if parts.iter().any(|(_, module)| matches!(module, Module::Unknown(_))) {
        Has::Unknown
    } else {
        Has::Yes
    };
    Answer { has, detail: parts.map(|(name, module)| format!("{name}: {module}")).join("; ") }
}

fn bpf_loop(kernel: &Kernel) -> Answer {
    match bpf_loop::load() {
        Ok(()) => Answer::yes("a program that calls it was loaded"),
        Err(e) if is_not_permitted(&e.error) => by_function(kernel, "bpf_loop"),
        // A kernel may call it without having it for programs of this type.
        Err(e) if !kernel.has_types() || kernel.has_function("bpf_loop") => Answer::unknown(verdict(&e)),
        Err(e) => Answer::no(verdict(&e)),
    }
}

fn btf_smc(smc: &Module, kernel: &Kernel) -> Answer {
    match smc {
        Module::Loaded => match read_btf("smc") {
            Ok(_) => Answer::yes("/sys/kernel/btf/smc"),
            Err(answer) => answer,
        },
        Module::BuiltIn => match &kernel.0 {
            Ok(_) => Answer::yes("smc is built in: among the kernel's own"),
            Err(answer) => answer.clone(),
        },
        _ => Answer::unknown("smc is not loaded"),
    }
}

/// May a program be attached to the end of a function of the module smc? Loading it is as far as this goes.
fn fexit(smc: &Module, kernel: &Kernel) -> Answer {
    let types = match &kernel.0 {
        Ok(types) => types,
        Err(answer) => return answer.clone(),
    };
    let loaded = |id, module| {
        tracing(bpf_attach_type::BPF_TRACE_FEXIT, id, module, format!("a program for {CLC_WAIT} was loaded"))
    };
    match smc {
        Module::BuiltIn => match kernel.function(CLC_WAIT) {
            Some(id) => loaded(id, None),
            None => Answer::no(format!("smc is built in without a function {CLC_WAIT}")),
        },
        Module::Loaded => {
            let module = read_btf("smc")
                .and_then(|data| Btf::parse(data, Some(types)).map_err(|e| Answer::no(e.to_string())));
            let id = match module.map(|module| module.function(CLC_WAIT)) {
                Ok(Some(id)) => id,
                Ok(None) => return Answer::no(format!("the module smc has no function {CLC_WAIT}")),
                Err(answer) => return answer,
            };
            match sys::kernel_btf("smc") {
                Ok(Some(module)) => loaded(id, Some(module.as_fd())),
                Ok(None) => Answer::no("the module smc has no BTF"),
                Err(e) if is_not_permitted(&e) => {
                    Answer::unknown("not permitted here: needs CAP_SYS_ADMIN to open a module's BTF")
                }
                Err(e) => Answer::unknown(e.to_string()),
            }
        }
        _ => Answer::unknown("smc is not loaded"),
    }
}

fn fmod_ret(kernel: &Kernel) -> Answer {
    if let Err(answer) = &kernel.0 {
        return answer.clone();
    }
    match kernel.function(SOCKET_PROTOCOL) {
        Some(id) => {
            let detail = format!("a program for {SOCKET_PROTOCOL} was loaded");
            tracing(bpf_attach_type::BPF_MODIFY_RETURN, id, None, detail)
        }
        None => Answer::no(format!("no {SOCKET_PROTOCOL} in the kernel's types")),
    }
}

/// Loads a program that could be attached to `function`, and does nothing.
fn tracing(
    kind: bpf_attach_type,
    function: TypeId,
    module: Option<BorrowedFd<'_>>,
    detail: String,
) -> Answer {
    const MOVE: u8 = 0xb7;
    let license = CString::from(c"GPL");
    let spec = ProgramSpec {
        name: "smcpol_probe",
        kind: bpf_prog_type::BPF_PROG_TYPE_TRACING,
        instructions: &[instruction(MOVE, 0, 0, 0), end()],
        license: &license,
        btf: None,
        struct_ops: Some((function, kind as u32, module)),
    };
    match sys::prog_load(&spec) {
        Ok(_) => Answer::yes(detail),
        Err(e) if is_not_permitted(&e.error) => match capability::lockdown() {
            Some(mode) => Answer::no(format!("refused: kernel lockdown ({mode})")),
            None => Answer::unknown(not_permitted()),
        },
        Err(e) => Answer::no(verdict(&e)),
    }
}

pub(super) fn instruction(code: u8, to: u8, from: u8, immediate: i32) -> bpf_insn {
    bpf_insn {
        code,
        _bitfield_align_1: [],
        _bitfield_1: bpf_insn::new_bitfield_1(to, from),
        off: 0,
        imm: immediate,
    }
}

pub(super) fn end() -> bpf_insn {
    const EXIT: u8 = 0x95;
    instruction(EXIT, 0, 0, 0)
}

/// What the verifier said, in one line.
fn verdict(error: &LoadError) -> String {
    let said = error.log.lines().rev().find(|line| !line.starts_with("processed ") && !line.is_empty());
    said.map_or_else(|| error.error.to_string(), |line| format!("{} ({})", line.trim(), error.error))
}

/// Why bpf(2) said EPERM.
fn not_permitted() -> String {
    match capability::require("") {
        Err(_) => "not permitted here: needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN".into(),
        Ok(()) => "refused although this process has the capabilities: kernel lockdown, a security module, or a user \
                   namespace"
            .into(),
    }
}

fn is_not_permitted(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EPERM)
}

/// Asking for such a socket makes the kernel look for a module that brings it: only where SMC is there already, and the
/// module, if it is one, says that it does.
fn ipproto_smc(smc: &Module, modules: &Modules) -> Answer {
    match (smc, modules.has_alias(IPPROTO_SMC_ALIAS)) {
        (Module::Absent, _) => Answer::no("this kernel has no SMC"),
        (Module::Loaded | Module::File(_), Some(false)) => Answer::no("the module smc does not bring it"),
        (Module::Loaded | Module::BuiltIn, _) => {
            match sys::can_open_stream(libc::AF_INET, sys::IPPROTO_SMC) {
                Ok(()) => Answer::yes("a socket was opened"),
                Err(e) if e.raw_os_error() == Some(libc::EPROTONOSUPPORT) => Answer::no(e.to_string()),
                Err(e) => Answer::unknown(e.to_string()),
            }
        }
        (Module::File(_), Some(true)) => Answer::no("the module smc brings it, but is not loaded"),
        _ => Answer::unknown("smc is not loaded"),
    }
}

fn lockdown() -> Answer {
    if let Some(mode) = capability::lockdown() {
        return Answer::yes(mode);
    }
    if Path::new("/sys/kernel/security/lockdown").exists() {
        return Answer::no("none");
    }
    match sys::filesystem_magic(Path::new("/sys/kernel/security")) {
        Ok(SECURITYFS_MAGIC) => Answer::no("this kernel has none"),
        _ => Answer::unknown("securityfs is not mounted at /sys/kernel/security"),
    }
}

/// Where file systems of this kind are mounted, for this process.
fn mounted(kind: &str) -> io::Result<Vec<PathBuf>> {
    Ok(mounts_of(&fs::read_to_string("/proc/thread-self/mounts")?, kind))
}

/// Lines of fstab(5)'s form: what, where, kind, ...
fn mounts_of(table: &str, kind: &str) -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> = table
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let at = fields.next()?;
            (fields.next()? == kind).then(|| at.into())
        })
        .collect();
    places.dedup();
    places
}

fn listed(places: &[PathBuf]) -> String {
    places.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn cgroup2() -> Answer {
    match mounted("cgroup2") {
        Ok(places) if places.is_empty() => Answer::no("not mounted"),
        Ok(places) => Answer::yes(listed(&places)),
        Err(e) => Answer::unknown(format!("/proc/thread-self/mounts: {e}")),
    }
}

fn bpffs(wanted: &Path) -> Answer {
    let at = wanted.display();
    if sys::filesystem_magic(wanted).is_ok_and(|magic| magic == BPF_FS_MAGIC) {
        return Answer::yes(at.to_string());
    }
    match mounted("bpf") {
        Ok(places) if places.is_empty() => Answer::no(format!("not mounted at {at} nor elsewhere")),
        Ok(places) => Answer::no(format!("not mounted at {at}, but at {}", listed(&places))),
        Err(e) => Answer::unknown(format!("/proc/thread-self/mounts: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts() {
        let table = "bpf /sys/fs/bpf bpf rw 0 0\nbpf /a\\040b bpf rw 0 0\ncgroup2 /bpf cgroup2 rw 0 0\nbpf\n";
        assert_eq!(mounts_of(table, "bpf"), [PathBuf::from("/sys/fs/bpf"), "/a\\040b".into()]);
        assert_eq!(mounts_of(table, "cgroup2"), [PathBuf::from("/bpf")]);
        assert_eq!(mounts_of("", "bpf"), Vec::<PathBuf>::new());
    }

    #[test]
    fn the_verifiers_last_word() {
        let error =
            |log: &str| LoadError { error: io::Error::from_raw_os_error(libc::EINVAL), log: log.to_owned() };
        let log = "0: (85) call unknown#181\ninvalid func unknown#181\nprocessed 1 insns (limit 1000000)\n";
        assert_eq!(verdict(&error(log)), "invalid func unknown#181 (Invalid argument (os error 22))");
        assert_eq!(verdict(&error("")), "Invalid argument (os error 22)");
    }
}
