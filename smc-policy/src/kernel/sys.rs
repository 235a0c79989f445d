//! bpf(2), memory-mapped arrays, membarrier(2), namespaces: of the kernel layer, only this file and `ring` have `unsafe` in them.
//!
//! Everything here is a thin, safe wrapper: lengths are taken from slices and from what the kernel says of a map, file
//! descriptors are owned.

use std::{
    ffi::CString,
    io, mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    os::unix::ffi::OsStrExt,
    path::Path,
    ptr::{self, NonNull},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use aya_obj::generated::{
    BPF_F_BEFORE, BPF_F_NO_PREALLOC, bpf_attach_type, bpf_attr, bpf_btf_info, bpf_cmd, bpf_insn,
    bpf_link_info, bpf_link_type, bpf_map_info, bpf_map_type, bpf_prog_info, bpf_prog_type,
};

/// The value's type is in a module's BTF (`BPF_F_VTYPE_BTF_OBJ_FD`, include/uapi/linux/bpf.h, Linux 6.9).
const BPF_F_VTYPE_BTF_OBJ_FD: u32 = 1 << 15;
/// Longest name the kernel keeps, without the final NUL (BPF_OBJ_NAME_LEN).
pub const NAME_MAX: usize = 15;

fn attr() -> bpf_attr {
    // SAFETY: bpf_attr is a union of plain integers; the kernel takes zero for every field that is not meant.
    unsafe { mem::zeroed() }
}

fn bpf(cmd: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i64> {
    // SAFETY: the kernel reads and writes at most the given size of `attr`; pointers inside it are the callers'
    // business: each caller below keeps what they point to alive over the call.
    let r = unsafe {
        libc::syscall(libc::SYS_bpf, cmd as libc::c_long, ptr::from_mut(attr), size_of::<bpf_attr>())
    };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(r) }
}

fn bpf_fd(cmd: bpf_cmd, attr: &mut bpf_attr) -> io::Result<OwnedFd> {
    let fd = bpf(cmd, attr)?;
    // SAFETY: the command returned a new file descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn object_name(name: &str) -> [libc::c_char; 16] {
    let mut out = [0; 16];
    for (o, b) in out.iter_mut().zip(name.bytes().take(NAME_MAX)) {
        *o = b as libc::c_char;
    }
    out
}

fn name_of(raw: &[libc::c_char]) -> String {
    let bytes: Vec<u8> = raw.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn path_arg(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a path with a NUL byte"))
}

/// What a map is to be.
#[derive(Clone, Copy, Debug)]
pub struct MapSpec<'a> {
    /// At most [`NAME_MAX`] characters; longer ones are cut.
    pub name: &'a str,
    /// `BPF_MAP_TYPE_*`.
    pub kind: u32,
    /// Bytes a key.
    pub key_size: u32,
    /// Bytes a value.
    pub value_size: u32,
    /// Elements.
    pub max_entries: u32,
    /// `BPF_F_*`.
    pub flags: u32,
}

/// What the kernel says of a map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapInfo {
    /// The kernel's id.
    pub id: u32,
    /// `BPF_MAP_TYPE_*`.
    pub kind: u32,
    /// Bytes a key.
    pub key_size: u32,
    /// Bytes a value.
    pub value_size: u32,
    /// Elements.
    pub max_entries: u32,
    /// Name, at most [`NAME_MAX`] characters.
    pub name: String,
}

/// Creates a map.
///
/// # Errors
/// The system call's: EPERM (no CAP_BPF), ENOMEM, EINVAL (a kernel without this type or flag), ...
pub fn map_create(spec: &MapSpec<'_>) -> io::Result<OwnedFd> {
    let mut a = attr();
    a.__bindgen_anon_1.map_type = spec.kind;
    a.__bindgen_anon_1.key_size = spec.key_size;
    a.__bindgen_anon_1.value_size = spec.value_size;
    a.__bindgen_anon_1.max_entries = spec.max_entries;
    a.__bindgen_anon_1.map_flags = spec.flags;
    a.__bindgen_anon_1.map_name = object_name(spec.name);
    bpf_fd(bpf_cmd::BPF_MAP_CREATE, &mut a)
}

/// Creates an array of maps with one element, which is `inner`.
///
/// # Errors
/// The system call's.
pub fn map_create_outer(name: &str, inner: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut a = attr();
    a.__bindgen_anon_1.map_type = bpf_map_type::BPF_MAP_TYPE_ARRAY_OF_MAPS as u32;
    a.__bindgen_anon_1.key_size = 4;
    a.__bindgen_anon_1.value_size = 4;
    a.__bindgen_anon_1.max_entries = 1;
    a.__bindgen_anon_1.inner_map_fd = inner.as_raw_fd() as u32;
    a.__bindgen_anon_1.map_name = object_name(name);
    bpf_fd(bpf_cmd::BPF_MAP_CREATE, &mut a)
}

/// Creates a struct_ops map whose value is the kernel's type `value_type`; `module` is the BTF object it lives in, none
/// for vmlinux. The kernel also wants a BTF of the caller's (`own_btf`), whatever is in it.
///
/// # Errors
/// The system call's.
pub fn map_create_struct_ops(
    name: &str,
    value_size: u32,
    value_type: u32,
    own_btf: BorrowedFd<'_>,
    module: Option<BorrowedFd<'_>>,
) -> io::Result<OwnedFd> {
    let mut a = attr();
    a.__bindgen_anon_1.map_type = bpf_map_type::BPF_MAP_TYPE_STRUCT_OPS as u32;
    a.__bindgen_anon_1.key_size = 4;
    a.__bindgen_anon_1.value_size = value_size;
    a.__bindgen_anon_1.max_entries = 1;
    a.__bindgen_anon_1.map_name = object_name(name);
    a.__bindgen_anon_1.btf_fd = own_btf.as_raw_fd() as u32;
    a.__bindgen_anon_1.btf_vmlinux_value_type_id = value_type;
    if let Some(module) = module {
        a.__bindgen_anon_1.map_flags = BPF_F_VTYPE_BTF_OBJ_FD;
        a.__bindgen_anon_1.value_type_btf_obj_fd = module.as_raw_fd();
    }
    bpf_fd(bpf_cmd::BPF_MAP_CREATE, &mut a)
}

/// Creates a map of socket storage with values of 4 bytes. The kernel wants to know the types of keys and values, which
/// are a socket's descriptor and a number: the BTF of one integer says both.
///
/// # Errors
/// The system calls'.
pub fn map_create_socket_storage(name: &str) -> io::Result<OwnedFd> {
    const HEADER: u32 = 24;
    const INT: [u32; 4] = [1, 1 << 24, 4, 32];
    const STRINGS: &[u8] = b"\0u32\0";
    let mut btf = 0xeb9f_u16.to_ne_bytes().to_vec();
    btf.extend([1, 0]);
    for word in [HEADER, 0, 16, 16, STRINGS.len() as u32].into_iter().chain(INT) {
        btf.extend(word.to_ne_bytes());
    }
    btf.extend(STRINGS);
    let btf = btf_load(&btf)?;
    let mut a = attr();
    a.__bindgen_anon_1.map_type = bpf_map_type::BPF_MAP_TYPE_SK_STORAGE as u32;
    a.__bindgen_anon_1.key_size = 4;
    a.__bindgen_anon_1.value_size = 4;
    a.__bindgen_anon_1.map_flags = BPF_F_NO_PREALLOC;
    a.__bindgen_anon_1.map_name = object_name(name);
    a.__bindgen_anon_1.btf_fd = btf.as_raw_fd() as u32;
    a.__bindgen_anon_1.btf_key_type_id = 1;
    a.__bindgen_anon_1.btf_value_type_id = 1;
    bpf_fd(bpf_cmd::BPF_MAP_CREATE, &mut a)
}

/// What the kernel says of a map.
///
/// # Errors
/// The system call's.
pub fn map_info(map: BorrowedFd<'_>) -> io::Result<MapInfo> {
    // SAFETY: plain integers.
    let mut info: bpf_map_info = unsafe { mem::zeroed() };
    object_info(map, &mut info)?;
    Ok(MapInfo {
        id: info.id,
        kind: info.type_,
        key_size: info.key_size,
        value_size: info.value_size,
        max_entries: info.max_entries,
        name: name_of(&info.name),
    })
}

fn object_info<T>(fd: BorrowedFd<'_>, info: &mut T) -> io::Result<()> {
    let mut a = attr();
    a.info.bpf_fd = fd.as_raw_fd() as u32;
    a.info.info_len = size_of::<T>() as u32;
    a.info.info = ptr::from_mut(info) as u64;
    bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut a).map(drop)
}

/// Bytes that the kernel copies for one value: per-CPU maps have one of `value_size`, rounded up to 8, for every
/// possible CPU (`bpf_map_value_size`, kernel/bpf/syscall.c).
fn user_value_size(info: &MapInfo) -> io::Result<usize> {
    let per_cpu = [
        bpf_map_type::BPF_MAP_TYPE_PERCPU_ARRAY as u32,
        bpf_map_type::BPF_MAP_TYPE_PERCPU_HASH as u32,
        bpf_map_type::BPF_MAP_TYPE_LRU_PERCPU_HASH as u32,
        bpf_map_type::BPF_MAP_TYPE_PERCPU_CGROUP_STORAGE as u32,
    ];
    Ok(if per_cpu.contains(&info.kind) {
        (info.value_size as usize).next_multiple_of(8) * super::cpus::possible()?
    } else {
        info.value_size as usize
    })
}

/// As [`user_value_size`], for a map whose keys are 32-bit numbers: the kernel reads as many bytes as the map's keys have.
fn value_size_by_number(map: BorrowedFd<'_>) -> io::Result<usize> {
    let info = map_info(map)?;
    if info.key_size == 4 { user_value_size(&info) } else { Err(wrong_size()) }
}

fn wrong_size() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "a buffer of another size than the map's key or value")
}

/// Stores `value` under the 32-bit `key`. A struct_ops map with key 0 registers its struct.
///
/// # Errors
/// `InvalidInput` when the map's keys are of another size or `value` is not exactly one value of the map; the system
/// call's.
pub fn map_update(map: BorrowedFd<'_>, key: u32, value: &[u8]) -> io::Result<()> {
    if value.len() != value_size_by_number(map)? {
        return Err(wrong_size());
    }
    let mut a = attr();
    a.__bindgen_anon_2.map_fd = map.as_raw_fd() as u32;
    a.__bindgen_anon_2.key = ptr::from_ref(&key) as u64;
    a.__bindgen_anon_2.__bindgen_anon_1.value = value.as_ptr() as u64;
    bpf(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut a).map(drop)
}

/// Stores many elements: `keys` one after the other, and their `values`. The tries that the benchmarks compare with are
/// filled so (Linux 5.6).
///
/// # Errors
/// `InvalidInput` when the two are not whole elements of the map, as many of the one as of the other, or more than
/// `u32::MAX`; the system call's, and then the first elements may be stored.
pub fn map_update_batch(map: BorrowedFd<'_>, keys: &[u8], values: &[u8]) -> io::Result<()> {
    let info = map_info(map)?;
    let (key_size, value_size) = (info.key_size as usize, user_value_size(&info)?);
    let count = keys.len().checked_div(key_size).and_then(|count| u32::try_from(count).ok());
    let count = count.filter(|count| {
        let count = *count as usize;
        Some(keys.len()) == count.checked_mul(key_size) && Some(values.len()) == count.checked_mul(value_size)
    });
    let mut a = attr();
    a.batch.map_fd = map.as_raw_fd() as u32;
    a.batch.count = count.ok_or_else(wrong_size)?;
    a.batch.keys = keys.as_ptr() as u64;
    a.batch.values = values.as_ptr() as u64;
    bpf(bpf_cmd::BPF_MAP_UPDATE_BATCH, &mut a).map(drop)
}

/// Puts `inner` into element 0 of an array of maps, which waits for an RCU grace period
/// (`maybe_wait_bpf_programs`, kernel/bpf/syscall.c).
///
/// # Errors
/// The system call's.
pub fn map_update_outer(outer: BorrowedFd<'_>, inner: BorrowedFd<'_>) -> io::Result<()> {
    map_update(outer, 0, &(inner.as_raw_fd() as u32).to_ne_bytes())
}

/// Reads the value under the 32-bit `key`.
///
/// # Errors
/// ENOENT, `InvalidInput` when the map's keys are of another size, or the system call's.
pub fn map_lookup(map: BorrowedFd<'_>, key: u32) -> io::Result<Vec<u8>> {
    let mut value = vec![0u8; value_size_by_number(map)?];
    let mut a = attr();
    a.__bindgen_anon_2.map_fd = map.as_raw_fd() as u32;
    a.__bindgen_anon_2.key = ptr::from_ref(&key) as u64;
    a.__bindgen_anon_2.__bindgen_anon_1.value = value.as_mut_ptr() as u64;
    bpf(bpf_cmd::BPF_MAP_LOOKUP_ELEM, &mut a)?;
    Ok(value)
}

/// Deletes the 32-bit `key`. A struct_ops map with key 0 unregisters its struct.
///
/// # Errors
/// ENOENT, `InvalidInput` when the map's keys are of another size, or the system call's.
pub fn map_delete(map: BorrowedFd<'_>, key: u32) -> io::Result<()> {
    value_size_by_number(map)?;
    let mut a = attr();
    a.__bindgen_anon_2.map_fd = map.as_raw_fd() as u32;
    a.__bindgen_anon_2.key = ptr::from_ref(&key) as u64;
    bpf(bpf_cmd::BPF_MAP_DELETE_ELEM, &mut a).map(drop)
}

/// Checks that a key, and a value if there is one, are of the map's sizes.
fn check_element(map: BorrowedFd<'_>, key: &[u8], value: Option<&[u8]>) -> io::Result<usize> {
    let info = map_info(map)?;
    let size = user_value_size(&info)?;
    if key.len() == info.key_size as usize && value.is_none_or(|value| value.len() == size) {
        Ok(size)
    } else {
        Err(wrong_size())
    }
}

/// Stores `value` under `key`, of any size.
///
/// # Errors
/// `InvalidInput` when they are not of the map's sizes; E2BIG: it is full; the system call's.
pub fn element_update(map: BorrowedFd<'_>, key: &[u8], value: &[u8]) -> io::Result<()> {
    check_element(map, key, Some(value))?;
    let mut a = attr();
    a.__bindgen_anon_2.map_fd = map.as_raw_fd() as u32;
    a.__bindgen_anon_2.key = key.as_ptr() as u64;
    a.__bindgen_anon_2.__bindgen_anon_1.value = value.as_ptr() as u64;
    bpf(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut a).map(drop)
}

/// The value under `key`, of any size. `None`: there is none.
///
/// # Errors
/// `InvalidInput` when the key is not of the map's size; the system call's.
pub fn element_lookup(map: BorrowedFd<'_>, key: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let mut value = vec![0u8; check_element(map, key, None)?];
    let mut a = attr();
    a.__bindgen_anon_2.map_fd = map.as_raw_fd() as u32;
    a.__bindgen_anon_2.key = key.as_ptr() as u64;
    a.__bindgen_anon_2.__bindgen_anon_1.value = value.as_mut_ptr() as u64;
    match bpf(bpf_cmd::BPF_MAP_LOOKUP_ELEM, &mut a) {
        Ok(_) => Ok(Some(value)),
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Removes `key`, of any size. Whether it was there.
///
/// # Errors
/// `InvalidInput` when the key is not of the map's size; the system call's.
pub fn element_delete(map: BorrowedFd<'_>, key: &[u8]) -> io::Result<bool> {
    check_element(map, key, None)?;
    let mut a = attr();
    a.__bindgen_anon_2.map_fd = map.as_raw_fd() as u32;
    a.__bindgen_anon_2.key = key.as_ptr() as u64;
    match bpf(bpf_cmd::BPF_MAP_DELETE_ELEM, &mut a) {
        Ok(_) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(e) => Err(e),
    }
}

/// All keys of a hash map, of any size. What comes and goes meanwhile may be there or not, or twice.
///
/// # Errors
/// The system call's.
pub fn keys(map: BorrowedFd<'_>) -> io::Result<Vec<Vec<u8>>> {
    let info = map_info(map)?;
    let size = info.key_size as usize;
    let mut keys: Vec<Vec<u8>> = Vec::new();
    // A key that went away begins the walk anew (`htab_map_get_next_key`, kernel/bpf/hashtab.c): bounded, so that it ends.
    for _ in 0..info.max_entries {
        let mut next = vec![0u8; size];
        let mut a = attr();
        a.__bindgen_anon_2.map_fd = map.as_raw_fd() as u32;
        a.__bindgen_anon_2.key = keys.last().map_or(0, |key| key.as_ptr() as u64);
        a.__bindgen_anon_2.__bindgen_anon_1.next_key = next.as_mut_ptr() as u64;
        match bpf(bpf_cmd::BPF_MAP_GET_NEXT_KEY, &mut a) {
            Ok(_) => keys.push(next),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => break,
            Err(e) => return Err(e),
        }
    }
    Ok(keys)
}

/// All elements of a hash map, key and value of any size, many with each system call (Linux 5.6). What comes and goes meanwhile
/// may be there or not.
///
/// # Errors
/// The system call's.
pub fn elements(map: BorrowedFd<'_>) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let info = map_info(map)?;
    let (key_size, value_size) = (info.key_size as usize, user_value_size(&info)?);
    let mut elements = Vec::new();
    let mut room = 4096.min(info.max_entries);
    // Where the next batch begins: a bucket's number (`__htab_map_lookup_and_delete_batch`, kernel/bpf/hashtab.c).
    let mut from: Option<u32> = None;
    loop {
        let (mut keys, mut values) =
            (vec![0u8; room as usize * key_size], vec![0u8; room as usize * value_size]);
        let mut next = 0u32;
        let mut a = attr();
        a.batch.map_fd = map.as_raw_fd() as u32;
        a.batch.in_batch = from.as_ref().map_or(0, |from| ptr::from_ref(from) as u64);
        a.batch.out_batch = (&raw mut next) as u64;
        a.batch.keys = keys.as_mut_ptr() as u64;
        a.batch.values = values.as_mut_ptr() as u64;
        a.batch.count = room;
        let read = bpf(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut a);
        let is_last = match read {
            Ok(_) => false,
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => true,
            // One bucket has more: it is read whole or not at all.
            Err(e) if e.raw_os_error() == Some(libc::ENOSPC) && room < info.max_entries => {
                room = room.saturating_mul(2).min(info.max_entries);
                continue;
            }
            Err(e) => return Err(e),
        };
        // SAFETY: the kernel stored the number of elements in this field of the union, which was initialized before.
        let count = unsafe { a.batch.count }.min(room) as usize;
        let pairs = keys.chunks_exact(key_size).zip(values.chunks_exact(value_size));
        elements.extend(pairs.take(count).map(|(key, value)| (key.to_vec(), value.to_vec())));
        if is_last {
            return Ok(elements);
        }
        from = Some(next);
    }
}

/// Makes a map read-only for user space; the verifier then takes its values as constants.
///
/// # Errors
/// The system call's.
pub fn map_freeze(map: BorrowedFd<'_>) -> io::Result<()> {
    let mut a = attr();
    a.__bindgen_anon_2.map_fd = map.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_MAP_FREEZE, &mut a).map(drop)
}

/// The maps of the system that `wanted` wants, by id (CAP_SYS_ADMIN). Maps that go away meanwhile or that a security
/// module keeps closed are left out; no more than one that is not wanted is open at a time.
///
/// # Errors
/// The system call's.
pub fn maps(wanted: impl Fn(&MapInfo) -> bool) -> io::Result<Vec<(MapInfo, OwnedFd)>> {
    let mut out = Vec::new();
    let mut id = 0;
    loop {
        let mut a = attr();
        a.__bindgen_anon_6.__bindgen_anon_1.start_id = id;
        match bpf(bpf_cmd::BPF_MAP_GET_NEXT_ID, &mut a) {
            Ok(_) => {}
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(out),
            Err(e) => return Err(e),
        }
        // SAFETY: the kernel wrote next_id; all of the union is integers.
        id = unsafe { a.__bindgen_anon_6.next_id };
        let mut a = attr();
        a.__bindgen_anon_6.__bindgen_anon_1.map_id = id;
        match bpf_fd(bpf_cmd::BPF_MAP_GET_FD_BY_ID, &mut a) {
            Ok(fd) => {
                let info = map_info(fd.as_fd())?;
                if wanted(&info) {
                    out.push((info, fd));
                }
            }
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EACCES)) => {}
            Err(e) => return Err(e),
        }
    }
}

/// Pins a map, program or link; the path must be on bpffs.
///
/// # Errors
/// EPERM also when the path is not on bpffs; EEXIST; the system call's.
pub fn pin(fd: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = path_arg(path)?;
    let mut a = attr();
    a.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    a.__bindgen_anon_4.bpf_fd = fd.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_OBJ_PIN, &mut a).map(drop)
}

/// Opens a pinned map, program or link.
///
/// # Errors
/// ENOENT, EPERM, or the system call's.
pub fn get_pinned(path: &Path) -> io::Result<OwnedFd> {
    let path = path_arg(path)?;
    let mut a = attr();
    a.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    bpf_fd(bpf_cmd::BPF_OBJ_GET, &mut a)
}

/// Hands a BTF to the kernel.
///
/// # Errors
/// The system call's.
pub fn btf_load(btf: &[u8]) -> io::Result<OwnedFd> {
    let mut a = attr();
    a.__bindgen_anon_7.btf = btf.as_ptr() as u64;
    a.__bindgen_anon_7.btf_size = btf.len() as u32;
    bpf_fd(bpf_cmd::BPF_BTF_LOAD, &mut a)
}

/// The kernel's BTF object called `name` ("vmlinux" or a module). `None`: there is none.
///
/// # Errors
/// The system call's (EPERM without CAP_SYS_ADMIN).
pub fn kernel_btf(name: &str) -> io::Result<Option<OwnedFd>> {
    let mut id = 0;
    loop {
        let mut a = attr();
        a.__bindgen_anon_6.__bindgen_anon_1.start_id = id;
        match bpf(bpf_cmd::BPF_BTF_GET_NEXT_ID, &mut a) {
            Ok(_) => {}
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            Err(e) => return Err(e),
        }
        // SAFETY: the kernel wrote next_id; all of the union is integers.
        id = unsafe { a.__bindgen_anon_6.next_id };
        let mut a = attr();
        a.__bindgen_anon_6.__bindgen_anon_1.btf_id = id;
        let fd = match bpf_fd(bpf_cmd::BPF_BTF_GET_FD_BY_ID, &mut a) {
            Ok(fd) => fd,
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => continue,
            Err(e) => return Err(e),
        };
        let mut text = [0u8; 64];
        // SAFETY: plain integers.
        let mut info: bpf_btf_info = unsafe { mem::zeroed() };
        info.name = text.as_mut_ptr() as u64;
        info.name_len = text.len() as u32;
        object_info(fd.as_fd(), &mut info)?;
        let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
        if info.kernel_btf != 0 && &text[..end] == name.as_bytes() {
            return Ok(Some(fd));
        }
    }
}

/// A program to load.
#[derive(Clone, Copy)]
pub struct ProgramSpec<'a> {
    /// At most [`NAME_MAX`] characters; longer ones are cut.
    pub name: &'a str,
    /// Program type.
    pub kind: bpf_prog_type,
    /// Instructions, relocated.
    pub instructions: &'a [bpf_insn],
    /// Licence, which opens GPL-only helpers.
    pub license: &'a CString,
    /// The object's BTF with its function records (bytes, bytes a record).
    pub btf: Option<(BorrowedFd<'a>, &'a [u8], usize)>,
    /// struct_ops: the kernel struct's BTF id, the member's index, the module's BTF object (none: vmlinux). Tracing
    /// programs: the function's BTF id, the type of attachment, and the same.
    pub struct_ops: Option<(u32, u32, Option<BorrowedFd<'a>>)>,
}

/// Why the kernel refused a program.
#[derive(Debug)]
pub struct LoadError {
    /// The system call's error.
    pub error: io::Error,
    /// The verifier's log, empty when it said nothing.
    pub log: String,
}

/// Loads a program.
///
/// # Errors
/// The system call's with the verifier's log.
pub fn prog_load(spec: &ProgramSpec<'_>) -> Result<OwnedFd, LoadError> {
    let attempt = |log: &mut [u8]| {
        let mut a = attr();
        // Writing Copy fields of a union of integers is safe; the pointers all outlive the call.
        a.__bindgen_anon_3.prog_type = spec.kind as u32;
        a.__bindgen_anon_3.prog_name = object_name(spec.name);
        a.__bindgen_anon_3.insns = spec.instructions.as_ptr() as u64;
        a.__bindgen_anon_3.insn_cnt = spec.instructions.len() as u32;
        a.__bindgen_anon_3.license = spec.license.as_ptr() as u64;
        if let Some((btf, records, record_size)) = spec.btf {
            a.__bindgen_anon_3.prog_btf_fd = btf.as_raw_fd() as u32;
            a.__bindgen_anon_3.func_info_rec_size = record_size as u32;
            a.__bindgen_anon_3.func_info = records.as_ptr() as u64;
            a.__bindgen_anon_3.func_info_cnt = (records.len() / record_size.max(1)) as u32;
        }
        if let Some((id, member, module)) = spec.struct_ops {
            a.__bindgen_anon_3.attach_btf_id = id;
            a.__bindgen_anon_3.expected_attach_type = member;
            if let Some(module) = module {
                a.__bindgen_anon_3.__bindgen_anon_1.attach_btf_obj_fd = module.as_raw_fd() as u32;
            }
        }
        if !log.is_empty() {
            a.__bindgen_anon_3.log_level = 1;
            a.__bindgen_anon_3.log_buf = log.as_mut_ptr() as u64;
            a.__bindgen_anon_3.log_size = log.len() as u32;
        }
        bpf_fd(bpf_cmd::BPF_PROG_LOAD, &mut a)
    };
    attempt(&mut []).or_else(|error| {
        // Only a refusal by the verifier is worth its log.
        if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOMEM)) {
            return Err(LoadError { error, log: String::new() });
        }
        let mut log = vec![0u8; 1 << 20];
        attempt(&mut log).map_err(|error| {
            let end = log.iter().position(|b| *b == 0).unwrap_or(log.len());
            LoadError { error, log: String::from_utf8_lossy(&log[..end]).trim_end().to_owned() }
        })
    })
}

/// What the kernel says of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramInfo {
    /// The kernel's id.
    pub id: u32,
    /// Name, at most [`NAME_MAX`] characters.
    pub name: String,
}

/// What the kernel says of a program.
///
/// # Errors
/// The system call's.
pub fn program_info(prog: BorrowedFd<'_>) -> io::Result<ProgramInfo> {
    // SAFETY: plain integers.
    let mut info: bpf_prog_info = unsafe { mem::zeroed() };
    object_info(prog, &mut info)?;
    Ok(ProgramInfo { id: info.id, name: name_of(&info.name) })
}

/// Instructions the verifier followed for a program (Linux 5.16).
///
/// # Errors
/// The system call's.
pub fn verified_instructions(prog: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: plain integers.
    let mut info: bpf_prog_info = unsafe { mem::zeroed() };
    object_info(prog, &mut info)?;
    Ok(info.verified_insns)
}

/// Opens a program by the kernel's id (CAP_SYS_ADMIN).
///
/// # Errors
/// ENOENT: there is none, or no more; the system call's.
pub fn program_by_id(id: u32) -> io::Result<OwnedFd> {
    let mut a = attr();
    a.__bindgen_anon_6.__bindgen_anon_1.prog_id = id;
    bpf_fd(bpf_cmd::BPF_PROG_GET_FD_BY_ID, &mut a)
}

/// What the kernel says of a tcx link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcxLinkInfo {
    /// The kernel's id.
    pub id: u32,
    /// The program's.
    pub program: u32,
    /// The device's index in its own network namespace; 0: it is gone, and nothing revives the link.
    pub device: u32,
}

/// Attaches a tc program to a device of the calling thread's network namespace, ahead of all others there (Linux 6.6);
/// `at` is `BPF_TCX_EGRESS` or `BPF_TCX_INGRESS`. The attachment ends with the last descriptor and pin of what is returned.
///
/// # Errors
/// ENODEV: no such device; EEXIST: the program is there; EINVAL: no tcx; the system call's.
pub fn tcx_link_create(device: u32, at: bpf_attach_type, prog: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut a = attr();
    a.link_create.__bindgen_anon_1.prog_fd = prog.as_raw_fd() as u32;
    a.link_create.__bindgen_anon_2.target_ifindex = device;
    a.link_create.attach_type = at as u32;
    a.link_create.flags = BPF_F_BEFORE;
    bpf_fd(bpf_cmd::BPF_LINK_CREATE, &mut a)
}

/// Attaches a sock_ops program to a cgroup, for all sockets in it and below (Linux 5.7). The attachment ends with the last
/// descriptor and pin of what is returned, or with the cgroup.
///
/// # Errors
/// EBADF: not a folder of cgroup2; EPERM: another's program there admits none below; the system call's.
pub fn cgroup_link_create(cgroup: BorrowedFd<'_>, prog: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut a = attr();
    a.link_create.__bindgen_anon_1.prog_fd = prog.as_raw_fd() as u32;
    a.link_create.__bindgen_anon_2.target_fd = cgroup.as_raw_fd() as u32;
    a.link_create.attach_type = bpf_attach_type::BPF_CGROUP_SOCK_OPS as u32;
    bpf_fd(bpf_cmd::BPF_LINK_CREATE, &mut a)
}

/// What the kernel says of a link to a cgroup: the program's id and the cgroup's, 0 when it is gone. `None`: it is another
/// kind of link.
///
/// # Errors
/// The system call's; EINVAL: it is not a link at all.
pub fn cgroup_link_info(link: BorrowedFd<'_>) -> io::Result<Option<(u32, u64)>> {
    // SAFETY: plain integers.
    let mut info: bpf_link_info = unsafe { mem::zeroed() };
    object_info(link, &mut info)?;
    if info.type_ != bpf_link_type::BPF_LINK_TYPE_CGROUP as u32 {
        return Ok(None);
    }
    // SAFETY: the kernel wrote this member of the union, whose members are all integers.
    let cgroup = unsafe { info.__bindgen_anon_1.cgroup.cgroup_id };
    Ok(Some((info.prog_id, cgroup)))
}

/// Attaches a tracing program where it was loaded for (Linux 5.19 for all types of attachment); `at` is the type that it was
/// loaded with. The attachment ends with the last descriptor and pin of what is returned.
///
/// # Errors
/// EBUSY: the function has too many programs; the system call's.
pub fn tracing_link_create(prog: BorrowedFd<'_>, at: bpf_attach_type) -> io::Result<OwnedFd> {
    let mut a = attr();
    a.link_create.__bindgen_anon_1.prog_fd = prog.as_raw_fd() as u32;
    a.link_create.attach_type = at as u32;
    bpf_fd(bpf_cmd::BPF_LINK_CREATE, &mut a)
}

/// The kernel's id of a link's program.
///
/// # Errors
/// The system call's; EINVAL: it is no link.
pub fn link_program(link: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: plain integers.
    let mut info: bpf_link_info = unsafe { mem::zeroed() };
    object_info(link, &mut info)?;
    Ok(info.prog_id)
}

/// The cookie of the calling thread's network namespace, unique since boot (Linux 5.14).
///
/// # Errors
/// socket(2)'s and getsockopt(2)'s.
pub fn network_cookie() -> io::Result<u64> {
    // SAFETY: no pointers.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call returned a new file descriptor that nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let (mut cookie, mut length) = (0u64, size_of::<u64>() as libc::socklen_t);
    // SAFETY: pointers to a live u64 and to its size.
    let r = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(cookie) }
}

/// Puts another program into a link, in place: every packet meets the old one or the new one.
///
/// # Errors
/// ENOLINK: the device is gone; the system call's.
pub fn link_update(link: BorrowedFd<'_>, prog: BorrowedFd<'_>) -> io::Result<()> {
    let mut a = attr();
    a.link_update.link_fd = link.as_raw_fd() as u32;
    a.link_update.__bindgen_anon_1.new_prog_fd = prog.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_LINK_UPDATE, &mut a).map(drop)
}

/// Ends a link's attachment, whoever else holds the link.
///
/// # Errors
/// The system call's.
pub fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut a = attr();
    a.link_detach.link_fd = link.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_LINK_DETACH, &mut a).map(drop)
}

/// Opens a link by the kernel's id (CAP_SYS_ADMIN).
///
/// # Errors
/// ENOENT: there is none, or no more; the system call's.
pub fn link_by_id(id: u32) -> io::Result<OwnedFd> {
    let mut a = attr();
    a.__bindgen_anon_6.__bindgen_anon_1.link_id = id;
    bpf_fd(bpf_cmd::BPF_LINK_GET_FD_BY_ID, &mut a)
}

/// What the kernel says of a link. `None`: it is no tcx link.
///
/// # Errors
/// The system call's; EINVAL: it is not a link at all.
pub fn tcx_link_info(link: BorrowedFd<'_>) -> io::Result<Option<TcxLinkInfo>> {
    // SAFETY: plain integers.
    let mut info: bpf_link_info = unsafe { mem::zeroed() };
    object_info(link, &mut info)?;
    if info.type_ != bpf_link_type::BPF_LINK_TYPE_TCX as u32 {
        return Ok(None);
    }
    // SAFETY: the kernel wrote this member of the union, whose members are all integers.
    let device = unsafe { info.__bindgen_anon_1.tcx.ifindex };
    Ok(Some(TcxLinkInfo { id: info.id, program: info.prog_id, device }))
}

/// The programs attached by tcx to a device of the calling thread's network namespace, in the order in which packets
/// meet them: ids of program and link; link 0: attached without one.
///
/// # Errors
/// ENODEV: no such device; EINVAL: no tcx; the system call's.
pub fn tcx_query(device: u32, at: bpf_attach_type) -> io::Result<Vec<(u32, u32)>> {
    /// BPF_MPROG_MAX (include/linux/bpf_mprog.h): there are no more.
    const MOST: usize = 64;
    let (mut programs, mut links) = ([0u32; MOST], [0u32; MOST]);
    let mut a = attr();
    a.query.__bindgen_anon_1.target_ifindex = device;
    a.query.attach_type = at as u32;
    a.query.__bindgen_anon_2.prog_cnt = MOST as u32;
    a.query.prog_ids = programs.as_mut_ptr() as u64;
    a.query.link_ids = links.as_mut_ptr() as u64;
    bpf(bpf_cmd::BPF_PROG_QUERY, &mut a)?;
    // SAFETY: the kernel wrote the count; all of the union is integers.
    let count = unsafe { a.query.__bindgen_anon_2.count } as usize;
    Ok(programs.into_iter().zip(links).take(count).collect())
}

/// Result of a test run.
#[derive(Clone, Copy, Debug)]
pub struct TestRun {
    /// What the program returned.
    pub returned: u32,
    /// Mean duration of one repetition, ns.
    pub nanoseconds: u32,
}

/// Runs a program on `packet`, which is overwritten by what the program made of it.
///
/// # Errors
/// The system call's; ENOSPC when the program made the packet longer.
pub fn test_run(prog: BorrowedFd<'_>, packet: &mut [u8], repeat: u32) -> io::Result<TestRun> {
    let input = packet.to_vec();
    let mut a = attr();
    a.test.prog_fd = prog.as_raw_fd() as u32;
    a.test.data_in = input.as_ptr() as u64;
    a.test.data_size_in = input.len() as u32;
    a.test.data_out = packet.as_mut_ptr() as u64;
    a.test.data_size_out = packet.len() as u32;
    a.test.repeat = repeat;
    bpf(bpf_cmd::BPF_PROG_TEST_RUN, &mut a)?;
    // SAFETY: the kernel wrote the results into `test`; all of the union is integers.
    unsafe { Ok(TestRun { returned: a.test.retval, nanoseconds: a.test.duration }) }
}

/// An array map of 8-byte elements (created with BPF_F_MMAPABLE) in this process's memory, shared with the kernel's
/// programs.
#[derive(Debug)]
pub struct SharedCells {
    cells: NonNull<AtomicU64>,
    len: usize,
    bytes: usize,
}

// SAFETY: it owns the mapping, and every access goes through atomics.
unsafe impl Send for SharedCells {}

impl SharedCells {
    /// Maps the array for reading and writing.
    ///
    /// # Errors
    /// `InvalidInput` when the elements are not of 8 bytes; mmap(2)'s.
    pub fn map(map: BorrowedFd<'_>) -> io::Result<Self> {
        let info = map_info(map)?;
        if info.value_size != 8
            || info.kind != bpf_map_type::BPF_MAP_TYPE_ARRAY as u32
            || info.max_entries == 0
        {
            return Err(wrong_size());
        }
        let len = info.max_entries as usize;
        let bytes = len * 8;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping chosen by the kernel; the fd is a map of at least `bytes` bytes, rounded up to pages
        // (`array_map_mmap`, kernel/bpf/arraymap.c).
        let p =
            unsafe { libc::mmap(ptr::null_mut(), bytes, protection, libc::MAP_SHARED, map.as_raw_fd(), 0) };
        match NonNull::new(p.cast()) {
            Some(cells) if p != libc::MAP_FAILED => Ok(Self { cells, len, bytes }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The elements.
    fn cells(&self) -> &[AtomicU64] {
        // SAFETY: the mapping holds `len` aligned 8-byte elements as long as self lives; other processes and the
        // kernel may write them at any time, which atomics allow.
        unsafe { std::slice::from_raw_parts(self.cells.as_ptr(), self.len) }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a map has at least one element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Element `index`.
    pub fn load(&self, index: usize) -> Option<u64> {
        self.cells().get(index).map(|c| c.load(Ordering::Acquire))
    }

    /// Stores one element; everything written before is visible before it.
    pub fn store(&self, index: usize, value: u64) -> bool {
        match self.cells().get(index) {
            Some(c) => {
                c.store(value, Ordering::Release);
                true
            }
            None => false,
        }
    }

    /// Writes `values` from the start and zeroes nothing behind them.
    pub fn fill(&self, values: &[u64]) -> bool {
        if values.len() > self.len {
            return false;
        }
        for (cell, value) in self.cells().iter().zip(values) {
            cell.store(*value, Ordering::Relaxed);
        }
        true
    }
}

impl Drop for SharedCells {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length and nothing refers to it any more.
        unsafe { libc::munmap(self.cells.as_ptr().cast(), self.bytes) };
    }
}

/// Waits for an RCU grace period: `membarrier(MEMBARRIER_CMD_GLOBAL)` (kernel/sched/membarrier.c). On a machine with
/// one CPU the kernel returns at once, and with nohz_full CPUs it refuses.
///
/// # Errors
/// EINVAL, ENOSYS, or another of the system call's.
pub fn membarrier_global() -> io::Result<()> {
    const MEMBARRIER_CMD_GLOBAL: libc::c_long = 1;
    // SAFETY: no pointers.
    let r = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Time since boot, time spent suspended included (`CLOCK_BOOTTIME`).
pub fn boot_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live timespec. Every kernel has this clock; a failure would leave zero.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The magic number of the file system that `path` is on.
///
/// # Errors
/// statfs(2)'s.
pub fn filesystem_magic(path: &Path) -> io::Result<i64> {
    let path = path_arg(path)?;
    // SAFETY: plain integers.
    let mut answer: libc::statfs = unsafe { mem::zeroed() };
    // SAFETY: the path ends with a NUL, `answer` is a valid place for the answer.
    if unsafe { libc::statfs(path.as_ptr(), &mut answer) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // Its width and sign differ between targets.
    #[allow(clippy::unnecessary_cast, reason = "not on every target")]
    Ok(answer.f_type as i64)
}

/// Moves the calling thread into the network namespace that `namespace` is an open file of.
///
/// # Errors
/// setns(2)'s: EPERM without CAP_SYS_ADMIN, EINVAL when it is something else.
pub fn enter_network(namespace: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no pointers; nothing that std relies on depends on a thread's network namespace.
    let r = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Is `file`, which must be one of nsfs, a network namespace's?
///
/// # Errors
/// ioctl(2)'s.
pub fn is_network_namespace(file: BorrowedFd<'_>) -> io::Result<bool> {
    /// `NS_GET_NSTYPE` is `_IO(NSIO, 0x3)` (include/uapi/linux/nsfs.h), and `_IO` is not the same on every machine.
    const NS_GET_NSTYPE: libc::Ioctl = libc::_IO(0xb7, 3);
    // SAFETY: this request takes no argument.
    let r = unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_NSTYPE) };
    if r < 0 { Err(io::Error::last_os_error()) } else { Ok(r == libc::CLONE_NEWNET) }
}

/// Finds the file `path`, taken as if `root` were the root folder, without opening it (`O_PATH`): no symbolic link is
/// followed, and no file system is asked for anything that the kernel does not remember, so it cannot hang.
///
/// # Errors
/// openat2(2)'s: EAGAIN when a file system would have to be asked, ELOOP for a symbolic link.
pub fn find_remembered(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    let path = path_arg(path)?;
    // SAFETY: plain integers.
    let mut how: libc::open_how = unsafe { mem::zeroed() };
    how.flags = (libc::O_PATH | libc::O_CLOEXEC) as u64;
    how.resolve = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_SYMLINKS | libc::RESOLVE_CACHED;
    // SAFETY: the path ends with a NUL; pointer and length describe `how`.
    let r = unsafe {
        libc::syscall(libc::SYS_openat2, root.as_raw_fd(), path.as_ptr(), &raw const how, size_of_val(&how))
    };
    if r < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call returned a new file descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(r as i32) })
}

/// `IPPROTO_SMC` (Linux 6.11).
pub const IPPROTO_SMC: i32 = 256;

/// Opens a stream socket and closes it. The kernel may load a module for it.
///
/// # Errors
/// socket(2)'s; EPROTONOSUPPORT: there is no such protocol.
pub fn can_open_stream(family: i32, protocol: i32) -> io::Result<()> {
    // SAFETY: no pointers.
    let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, protocol) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call returned a new file descriptor that nothing else owns.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    Ok(())
}

/// Lets this process open as many files as its hard limit allows, if that can be done.
pub fn raise_file_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a live rlimit.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } < 0 || limit.rlim_cur >= limit.rlim_max
    {
        return;
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: as above. A refusal leaves the limit as it was.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
}

const _: () = assert!(bpf_attach_type::BPF_STRUCT_OPS as u32 == 44);
