//! The kernel's `smc_hs_ctrl` (net/smc/smc_hs_bpf.c, include/net/smc.h; Linux 6.19 and later with
//! CONFIG_SMC_HS_CTRL_BPF): a struct_ops registered under a name, selected for a network namespace by writing that
//! name to `net.smc.hs_ctrl`.
//!
//! The kernel keeps a registration without its maker: key 0 of the struct_ops map registers on update and unregisters
//! on delete (no link: EOPNOTSUPP; no update in place). A namespace that still selects a deleted one goes on with it
//! until its sysctl is written, so a removal clears the sysctl first.

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya_obj::generated::bpf_map_type;

use super::{
    btf::{Btf, BtfError},
    error::{Doing, KernelError},
    object::{Callback, Prepared},
    offsets::Offsets,
    sys::{self, MapInfo},
};

/// Names a namespace's choice; of the namespace that the process is in.
pub const SYSCTL: &str = "/proc/sys/net/smc/hs_ctrl";
/// Exists while SMC is there, whatever the kernel's version.
pub const SMC_SYSCTLS: &str = "/proc/sys/net/smc";
/// Every registration of ours, and its map, is called this and eight hexadecimal digits. The kernel takes at most 15
/// letters, digits, `_` and `.` (`bpf_obj_name_cpy`, kernel/bpf/syscall.c); a hyphen is EINVAL.
const PREFIX: &str = "smcpol_";

const KERNEL_STRUCT: &str = "smc_hs_ctrl";
const VALUE_STRUCT: &str = "bpf_struct_ops_smc_hs_ctrl";

/// What `net.smc.hs_ctrl` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selected {
    /// Nothing: every connection negotiates.
    None,
    /// Instance `0` of this tool.
    Ours(String),
    /// Somebody else's.
    Foreign(String),
}

impl std::fmt::Display for Selected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("nothing"),
            Self::Ours(id) => write!(f, "'{}'", name(id)),
            Self::Foreign(name) => write!(f, "'{name}'"),
        }
    }
}

impl Selected {
    fn parse(text: &str) -> Self {
        match text.trim_end_matches(['\n', '\0']) {
            "" => Self::None,
            name => match name.strip_prefix(PREFIX) {
                Some(id) if is_instance_id(id) => Self::Ours(id.to_owned()),
                _ => Self::Foreign(name.to_owned()),
            },
        }
    }
}

/// Eight lower-case hexadecimal digits.
pub fn is_instance_id(id: &str) -> bool {
    id.len() == 8 && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// The name instance `id` is registered under.
pub fn name(id: &str) -> String {
    format!("{PREFIX}{id}")
}

/// Reads this namespace's choice.
///
/// # Errors
/// [`KernelError::Missing`] when SMC or the hook is not there, [`KernelError::Io`].
pub fn selected() -> Result<Selected, KernelError> {
    match fs::read_to_string(SYSCTL) {
        Ok(text) => Ok(Selected::parse(&text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(missing()),
        Err(error) => Err(KernelError::Io { doing: format!("read {SYSCTL}"), error }),
    }
}

/// Whether the kernel has the hook now: not before the module `smc` is loaded.
pub fn is_there() -> bool {
    Path::new(SYSCTL).exists()
}

/// As [`selected`]; without SMC or the hook nothing can be selected.
///
/// # Errors
/// [`KernelError::Io`].
pub fn selected_if_there() -> Result<Selected, KernelError> {
    match selected() {
        Err(KernelError::Missing { .. }) => Ok(Selected::None),
        other => other,
    }
}

/// Why there is no `net.smc.hs_ctrl`.
fn missing() -> KernelError {
    if Path::new(SMC_SYSCTLS).exists() {
        KernelError::Missing {
            feature: format!("this kernel ({}) has SMC but not its hook smc_hs_ctrl", super::release()),
            next: "it comes with Linux 6.19 and CONFIG_SMC_HS_CTRL_BPF=y".into(),
        }
    } else {
        KernelError::Missing {
            feature: "SMC is not there (no net.smc sysctls)".into(),
            next: "load it with `modprobe smc`, and at every boot with a line `smc` in /etc/modules-load.d/smc.conf; \
                   a kernel without CONFIG_SMC cannot speak it"
                .into(),
        }
    }
}

/// Can this namespace's choice be written at all? Asked before anything is done.
///
/// # Errors
/// As [`select`].
pub fn check_writable() -> Result<(), KernelError> {
    fs::File::options().write(true).open(SYSCTL).map(drop).map_err(|e| unwritable(e, "open it"))
}

/// As [`select`], but only if the choice still is what it was when the work for it began: somebody else's choice made
/// meanwhile is not overwritten.
///
/// # Errors
/// [`KernelError::Missing`] when it changed; as [`select`].
pub fn select_if_unchanged(name: &str, before: &Selected) -> Result<(), KernelError> {
    let now = selected()?;
    if now != *before {
        return Err(KernelError::Missing {
            feature: format!(
                "net.smc.hs_ctrl was changed meanwhile, from {before} to {now}; nothing was changed"
            ),
            next: "see who does that, then try again".into(),
        });
    }
    select(name)
}

/// Makes `name` this namespace's choice; empty: none. One atomic exchange in the kernel.
///
/// # Errors
/// [`KernelError::Missing`] when /proc/sys is read-only, [`KernelError::Io`] (EINVAL: no such registration).
pub fn select(name: &str) -> Result<(), KernelError> {
    // An empty write would not reach the kernel: a newline clears.
    fs::write(SYSCTL, format!("{name}\n")).map_err(|e| unwritable(e, &format!("write '{name}'")))
}

fn unwritable(error: io::Error, doing: &str) -> KernelError {
    match error.raw_os_error() {
        Some(libc::EROFS) => KernelError::Missing {
            feature: "/proc/sys is mounted read-only here, net.smc.hs_ctrl cannot be written".into(),
            next: "run smc-policy on the host, or mount /proc/sys writable in this container".into(),
        },
        _ => KernelError::Io { doing: format!("set {SYSCTL} ({doing})"), error },
    }
}

/// `SMC_HS_CTRL_FLAG_INHERITABLE` (include/net/smc.h): a namespace that is created later begins with the initial
/// namespace's choice (smc_sysctl_net_init, net/smc/smc_sysctl.c).
const INHERITABLE: i32 = 1;

/// Registers the programs under [`name`]`(id)`. The registration stays when this process ends, until
/// [`unregister`]; the returned map is its handle. `inheritable`: namespaces created later take over the initial one's
/// choice.
///
/// # Errors
/// [`KernelError::Missing`] without BTF of SMC, [`KernelError::Refused`], [`KernelError::Io`].
pub fn register(
    prepared: &Prepared,
    types: &KernelTypes,
    id: &str,
    inheritable: bool,
) -> Result<OwnedFd, KernelError> {
    let module = types.module.as_ref().map(AsFd::as_fd);
    let mut value = vec![0u8; types.value_size as usize];
    let data = types.data_offset as usize;
    put(&mut value, data + types.name_offset as usize, name(id).as_bytes())?;
    if inheritable {
        put(&mut value, data + types.flags_offset as usize, &INHERITABLE.to_ne_bytes())?;
    }
    let programs = types.load_callbacks(prepared)?;
    for ((_, program), (_, member)) in programs.iter().zip(&types.callbacks) {
        // The function pointer's place takes the program's descriptor.
        put(&mut value, data + member.offset as usize, &(program.as_raw_fd() as u64).to_ne_bytes())?;
    }
    let map =
        sys::map_create_struct_ops(&name(id), types.value_size, types.value_id, prepared.btf()?, module)
            .doing(|| "create the map that registers smc_hs_ctrl".into())?;
    sys::map_update(map.as_fd(), 0, &value).doing(|| format!("register {} as smc_hs_ctrl", name(id)))?;
    Ok(map)
}

fn put(value: &mut [u8], at: usize, bytes: &[u8]) -> Result<(), KernelError> {
    value
        .get_mut(at..at + bytes.len())
        .map(|place| place.copy_from_slice(bytes))
        .ok_or_else(|| KernelError::Object("the kernel's smc_hs_ctrl is smaller than its members".into()))
}

/// Removes a registration. Done already is done: the kernel then says EINPROGRESS as long as somebody holds the map, and
/// ENOENT if it never was registered (`bpf_struct_ops_map_delete_elem`, kernel/bpf/bpf_struct_ops.c).
///
/// # Errors
/// [`KernelError::Io`].
pub fn unregister(map: BorrowedFd<'_>) -> Result<(), KernelError> {
    match sys::map_delete(map, 0) {
        Err(e) if !matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EINPROGRESS)) => {
            Err(e).doing(|| "unregister the old smc_hs_ctrl".into())
        }
        _ => Ok(()),
    }
}

/// Where a struct_ops map's value says what became of it (`struct bpf_struct_ops_common_value`, include/linux/bpf.h).
const STATE: std::ops::Range<usize> = 4..8;
/// Registered (`BPF_STRUCT_OPS_STATE_INUSE`).
const IN_USE: [u8; 4] = 1u32.to_ne_bytes();

/// Is the map's struct registered? A map may be there before it is and after it was.
pub fn is_registered(map: BorrowedFd<'_>) -> bool {
    sys::map_lookup(map, 0).is_ok_and(|value| value.get(STATE) == Some(&IN_USE))
}

/// The registration of instance `id`, wherever its map is.
///
/// # Errors
/// [`KernelError::Io`].
pub fn registered(id: &str) -> Result<Option<OwnedFd>, KernelError> {
    let found = registrations()?.into_iter().find(|(found, map)| found == id && is_registered(map.as_fd()));
    Ok(found.map(|(_, map)| map))
}

/// Removes the registration of instance `id`, wherever its map is.
///
/// # Errors
/// [`KernelError::Io`].
pub fn unregister_by_id(id: &str) -> Result<(), KernelError> {
    for (found, registration) in registrations()? {
        if found == id {
            unregister(registration.as_fd())?;
        }
    }
    Ok(())
}

/// Every registration map of this tool in the kernel, with its instance id.
///
/// # Errors
/// [`KernelError::Io`].
pub fn registrations() -> Result<Vec<(String, OwnedFd)>, KernelError> {
    let id = |info: &MapInfo| {
        let id = info.name.strip_prefix(PREFIX).filter(|id| is_instance_id(id))?;
        (info.kind == bpf_map_type::BPF_MAP_TYPE_STRUCT_OPS as u32).then(|| id.to_owned())
    };
    let maps = sys::maps(|info| id(info).is_some()).doing(|| "list the kernel's BPF maps".into())?;
    Ok(maps.into_iter().filter_map(|(info, fd)| Some((id(&info)?, fd))).collect())
}

#[derive(Clone, Copy, Debug)]
struct CallbackMember {
    index: u32,
    /// Bytes from the start of the struct.
    offset: u32,
}

/// What the running kernel's BTF says of `smc_hs_ctrl` and of the sockets handed to it.
#[derive(Debug)]
pub struct KernelTypes {
    /// The smc module's BTF object; none when SMC is built in.
    module: Option<OwnedFd>,
    struct_id: u32,
    value_id: u32,
    value_size: u32,
    data_offset: u32,
    name_offset: u32,
    flags_offset: u32,
    callbacks: Vec<(Callback, CallbackMember)>,
    /// Where the socket fields are.
    pub offsets: Offsets,
}

impl KernelTypes {
    /// Reads them from /sys/kernel/btf.
    ///
    /// # Errors
    /// [`KernelError::Missing`] when the kernel has no BTF, [`KernelError::Btf`], [`KernelError::Io`].
    pub fn read() -> Result<Self, KernelError> {
        let vmlinux = Btf::parse(read_btf("vmlinux")?, None)?;
        let offsets = Offsets::find(&vmlinux)?;
        // Built in, the value's type is in vmlinux; else in the module's BTF.
        if vmlinux.structure(VALUE_STRUCT).is_ok() {
            return Ok(Self::find(&vmlinux, None, offsets)?);
        }
        let module = Btf::parse(read_btf("smc")?, Some(&vmlinux))?;
        let object = sys::kernel_btf("smc")
            .doing(|| "open the BTF of the module smc".into())?
            .ok_or_else(|| no_btf("smc"))?;
        Ok(Self::find(&module, Some(object), offsets)?)
    }

    /// Loads the callbacks, in the order of the struct's members looked up; each with its program's name.
    ///
    /// # Errors
    /// [`KernelError::Refused`], [`KernelError::Object`].
    pub fn load_callbacks(&self, prepared: &Prepared) -> Result<Vec<(&'static str, OwnedFd)>, KernelError> {
        let module = self.module.as_ref().map(AsFd::as_fd);
        self.callbacks
            .iter()
            .map(|(callback, member)| {
                let program = prepared.load_callback(*callback, self.struct_id, member.index, module)?;
                Ok((callback.program(), program))
            })
            .collect()
    }

    fn find(btf: &Btf<'_>, module: Option<OwnedFd>, offsets: Offsets) -> Result<Self, BtfError> {
        let value_id = btf.structure(VALUE_STRUCT)?;
        let missing = |name: &str| BtfError::NoMember(VALUE_STRUCT.into(), name.into());
        let data =
            btf.members(value_id).into_iter().find(|m| m.name == "data").ok_or_else(|| missing("data"))?;
        // A module may carry its own copy of the struct: the one the value holds counts.
        let struct_id = btf.resolve(data.type_id);
        let members = btf.members(struct_id);
        let member = |name: &str| {
            members
                .iter()
                .position(|m| m.name == name)
                .map(|i| CallbackMember { index: i as u32, offset: members[i].bits / 8 })
                .ok_or_else(|| BtfError::NoMember(KERNEL_STRUCT.into(), name.into()))
        };
        Ok(Self {
            value_size: btf.size(value_id).ok_or_else(|| missing("size"))?,
            data_offset: data.bits / 8,
            name_offset: member("name")?.offset,
            flags_offset: member("flags")?.offset,
            callbacks: [Callback::Syn, Callback::SynAck]
                .into_iter()
                .map(|c| Ok((c, member(c.member())?)))
                .collect::<Result<_, BtfError>>()?,
            module,
            struct_id,
            value_id,
            offsets,
        })
    }
}

/// Where the socket fields are, of this kernel.
///
/// # Errors
/// As [`KernelTypes::read`].
pub fn read_offsets() -> Result<Offsets, KernelError> {
    Ok(Offsets::find(&Btf::parse(read_btf("vmlinux")?, None)?)?)
}

/// Is the type information there that [`KernelTypes::read`] reads? Costs nothing, where reading it takes a while.
///
/// # Errors
/// [`KernelError::Missing`].
pub fn check_types() -> Result<(), KernelError> {
    // Only a module that was loaded has a state.
    let smc = Path::new("/sys/module/smc/initstate").exists().then_some("smc");
    match ["vmlinux"].into_iter().chain(smc).find(|name| !btf_path(name).exists()) {
        None => Ok(()),
        Some(name) => Err(no_btf(name)),
    }
}

fn btf_path(name: &str) -> PathBuf {
    Path::new("/sys/kernel/btf").join(name)
}

/// That the kernel does not describe its types.
pub(super) fn no_btf(name: &str) -> KernelError {
    KernelError::Missing {
        feature: format!("the kernel has no type information /sys/kernel/btf/{name}"),
        next: "it needs CONFIG_DEBUG_INFO_BTF=y (and CONFIG_DEBUG_INFO_BTF_MODULES=y when smc is a module)"
            .into(),
    }
}

/// The type information of the kernel (`vmlinux`) or of a module.
///
/// # Errors
/// [`KernelError::Missing`], [`KernelError::Io`].
pub(super) fn read_btf(name: &str) -> Result<Vec<u8>, KernelError> {
    let path = btf_path(name);
    match fs::read(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(no_btf(name)),
        other => other.doing(|| format!("read {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whose_name_is_it() {
        assert_eq!(Selected::parse(""), Selected::None);
        assert_eq!(Selected::parse("\n"), Selected::None);
        assert_eq!(Selected::parse("smcpol_0123abcd\n"), Selected::Ours("0123abcd".into()));
        assert_eq!(Selected::parse("smcpol_0123ABCD\n"), Selected::Foreign("smcpol_0123ABCD".into()));
        assert_eq!(Selected::parse("smcpol_1\n"), Selected::Foreign("smcpol_1".into()));
        assert_eq!(Selected::parse("linkcheck\n"), Selected::Foreign("linkcheck".into()));
    }

    #[test]
    fn names_fit_the_kernel() {
        assert_eq!(name("0123abcd").len(), sys::NAME_MAX);
    }
}
