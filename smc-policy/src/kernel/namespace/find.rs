//! The walk: every process, every thread, every mount table.
//!
//! What a process's links in /proc/PID/ns say is read without opening anything, so that a namespace shared by thousands
//! of processes costs two short reads each. Whoever ends meanwhile was not there.

use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
    fmt, fs,
    fs::File,
    io,
    ops::ControlFlow,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            fs::{MetadataExt, OpenOptionsExt},
        },
    },
    path::{Path, PathBuf},
    process, thread,
    time::Duration,
};

use super::{
    Found, Namespace, NamespaceId, is_initial,
    mountinfo::{self, Mounted},
    open, open_found, own, printable,
};
use crate::kernel::{
    error::{Doing, KernelError},
    sys,
};

/// Something that may be or lead to a namespace and could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreached {
    /// The namespace's number, if that much is known.
    pub id: Option<NamespaceId>,
    /// Where it was met: "the namespace of process 123 (nginx)", "/run/netns/blue", "3 processes, first process 1 (init)".
    pub place: String,
    /// Why it could not be opened.
    pub why: String,
}

impl fmt::Display for Unreached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.why)
    }
}

/// All network namespaces that a thread is in or that are mounted, in other mount namespaces too; each once, the calling
/// thread's first, then the initial one. Beside them what could not be reached, unless another way led to it.
///
/// # Errors
/// [`KernelError::Io`] without /proc, [`KernelError::Missing`] when there are more than this process may open.
pub fn all() -> Result<(Vec<Namespace>, Vec<Unreached>), KernelError> {
    // Every namespace stays open, and whoever asked will open more for each.
    sys::raise_file_limit();
    let mut seen = Seen::default();
    seen.add(own()?);
    let mut failed = Ok(());
    let hidden = walk(|id, place| match seen.meet(id, place) {
        Ok(()) => ControlFlow::Continue(()),
        Err(e) => {
            failed = Err(e);
            ControlFlow::Break(())
        }
    })?;
    failed?;
    // The sort is stable.
    seen.namespaces.sort_by_key(|n| (n.found != Found::Own, !is_initial(n.id)));
    let mut unreached: Vec<_> = seen.unreached.into_values().collect();
    unreached.sort_by_key(|u| u.id);
    unreached.extend(hidden);
    Ok((seen.namespaces, unreached))
}

/// Is some thread in it, or is it mounted somewhere?
pub fn exists(id: NamespaceId) -> bool {
    let mut is_found = false;
    let walked = walk(|met, _| {
        is_found = met == id;
        if is_found { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    walked.is_ok() && is_found
}

/// What was met so far.
#[derive(Default)]
struct Seen {
    namespaces: Vec<Namespace>,
    /// Where in `namespaces`.
    index: HashMap<NamespaceId, usize>,
    unreached: HashMap<NamespaceId, Unreached>,
}

impl Seen {
    fn add(&mut self, namespace: Namespace) {
        self.unreached.remove(&namespace.id);
        self.index.insert(namespace.id, self.namespaces.len());
        self.namespaces.push(namespace);
    }

    /// Opens the namespace, if it is new; otherwise only takes the better way to find it.
    fn meet(&mut self, id: NamespaceId, place: &Place<'_>) -> Result<(), KernelError> {
        if let Some(known) = self.index.get(&id).and_then(|at| self.namespaces.get_mut(*at)) {
            if place.rank() < rank(&known.found) {
                known.found = place.found();
            }
            return Ok(());
        }
        match place.open(id) {
            Ok(fd) => self.add(Namespace { id, found: place.found(), fd }),
            Err(e) if is_gone(&e) => {}
            Err(e) if e.raw_os_error() == Some(libc::EMFILE) => {
                return Err(KernelError::Missing {
                    feature: format!(
                        "there are more network namespaces than the {} that this process could open ({e})",
                        self.namespaces.len()
                    ),
                    next: "allow it more open files (`ulimit -Hn`, LimitNOFILE= of a systemd unit)".into(),
                });
            }
            Err(e) => {
                self.unreached.entry(id).or_insert_with(|| Unreached {
                    id: Some(id),
                    place: place.found().to_string(),
                    why: e.to_string(),
                });
            }
        }
        Ok(())
    }
}

/// What a person has the most use of comes first: a name, a process, a thread, some mount.
fn rank(found: &Found) -> u8 {
    match found {
        Found::Own => 0,
        Found::Mounted(at) if mountinfo::is_named(at) => 1,
        Found::Process { .. } => 2,
        Found::Thread { .. } => 3,
        Found::Mounted(_) => 4,
    }
}

/// It ended or was unmounted.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// `None` instead of the error of something that has ended.
fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if is_gone(&e) => Ok(None),
        Err(e) => Err(e),
    }
}

/// What the kernel says of links of a task that ended after its folder was looked up is EACCES (`proc_ns_readlink`,
/// fs/proc/namespaces.c; `proc_pid_readlink`, fs/proc/base.c): the error of `result`, but ENOENT if `file`, one of the task's, is
/// there no more.
fn unless_ended<T>(result: io::Result<T>, file: impl AsRef<Path>) -> io::Result<T> {
    let is_refused = result.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied);
    if is_refused && fs::symlink_metadata(file).is_err_and(|e| is_gone(&e)) { Err(gone()) } else { result }
}

fn gone() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOENT)
}

/// A thread, or the first thread of a process.
struct Task {
    pid: u32,
    /// None for the process.
    tid: Option<u32>,
    folder: String,
}

impl Task {
    fn process(pid: u32) -> Self {
        Self { pid, tid: None, folder: format!("/proc/{pid}") }
    }

    fn thread(pid: u32, tid: u32) -> Self {
        Self { pid, tid: Some(tid), folder: format!("/proc/{pid}/task/{tid}") }
    }

    fn link(&self, name: &str) -> io::Result<Option<OsString>> {
        let link = fs::read_link(format!("{}/{name}", self.folder));
        unless_gone(unless_ended(link.map(OsString::from), &self.folder))
    }

    /// None: it has ended.
    fn namespace(&self) -> io::Result<Option<NamespaceId>> {
        Ok(self.link("ns/net")?.and_then(|text| mountinfo::link(text.as_bytes())))
    }

    fn found(&self) -> Found {
        let command = fs::read(format!("{}/comm", self.folder)).unwrap_or_default();
        let command = String::from_utf8_lossy(command.trim_ascii_end()).into_owned();
        match self.tid {
            None => Found::Process { pid: self.pid, command },
            Some(tid) => Found::Thread { pid: self.pid, tid, command },
        }
    }
}

/// How often a path is looked up before its file system is taken for one that has to be asked: 5 ms.
const TRIES: u32 = 50;

/// A mount table, and the root folder that its paths begin at.
struct Table {
    file: PathBuf,
    root: PathBuf,
}

impl Table {
    fn read(&self) -> io::Result<Vec<Mounted>> {
        match fs::read(&self.file) {
            Ok(text) => Ok(mountinfo::namespaces(&text)),
            // It ended after its folder was looked up (`mounts_open_common`, fs/proc_namespace.c).
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Err(gone()),
            Err(e) => unless_ended(Err(e), &self.file),
        }
    }

    /// The path of a mount, as it can be used from here.
    fn path(&self, at: &Path) -> PathBuf {
        self.root.join(at.strip_prefix("/").unwrap_or(at))
    }

    fn open(&self, mounted: &Mounted) -> io::Result<OwnedFd> {
        let root = File::options().read(true).custom_flags(libc::O_PATH).open(&self.root);
        let root = unless_ended(root, &self.file)?;
        // A rename or a mount at the same moment looks like a file system that has to be asked.
        let mut found = sys::find_remembered(root.as_fd(), &mounted.at);
        for _ in 0..TRIES {
            if !found.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EAGAIN)) {
                break;
            }
            thread::sleep(Duration::from_micros(100));
            found = sys::find_remembered(root.as_fd(), &mounted.at);
        }
        let found = found.map_err(|e| match e.raw_os_error() {
            Some(libc::EAGAIN) => io::Error::other(
                "its path leads through a file system that may have to be waited for (FUSE, network)",
            ),
            _ => e,
        })?;
        match open_found(found.as_fd()) {
            Ok((id, fd)) if id == mounted.id => Ok(fd),
            Err(e) if e.kind() != io::ErrorKind::InvalidData => Err(e),
            // Unmounted meanwhile, or it cannot be seen.
            _ if !self.read()?.contains(mounted) => Err(gone()),
            _ => Err(io::Error::other("something else is mounted over it")),
        }
    }
}

/// Where a namespace was met.
enum Place<'a> {
    Task(&'a Task),
    Mount(&'a Table, &'a Mounted),
}

impl Place<'_> {
    /// Opens the namespace, if it still is the one with this number; if not, that one is gone.
    fn open(&self, id: NamespaceId) -> io::Result<OwnedFd> {
        match self {
            Self::Task(task) => {
                let opened = open(Path::new(&format!("{}/ns/net", task.folder)));
                match unless_ended(opened, &task.folder)? {
                    (now, fd) if now == id => Ok(fd),
                    _ => Err(gone()),
                }
            }
            Self::Mount(table, mounted) => table.open(mounted),
        }
    }

    fn found(&self) -> Found {
        match self {
            Self::Task(task) => task.found(),
            Self::Mount(table, mounted) => Found::Mounted(table.path(&mounted.at)),
        }
    }

    /// As [`rank`] of what [`Self::found`] returns, but cheap.
    fn rank(&self) -> u8 {
        match self {
            Self::Task(Task { tid: None, .. }) => 2,
            Self::Task(_) => 3,
            Self::Mount(table, mounted) => rank(&Found::Mounted(table.path(&mounted.at))),
        }
    }
}

/// Processes that could not be looked at: one line for all of them.
#[derive(Default)]
struct Hidden {
    processes: u32,
    first: Option<(u32, io::Error)>,
}

impl Hidden {
    fn add(&mut self, pid: u32, error: io::Error) {
        self.processes += 1;
        self.first.get_or_insert((pid, error));
    }

    fn report(self) -> Option<Unreached> {
        let (pid, error) = self.first?;
        let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let first = format!("process {pid} ({})", printable(command.trim_end()));
        let place = match self.processes {
            1 => format!("whatever {first} is in"),
            n => format!("whatever {n} processes are in, the first of them {first}"),
        };
        Some(Unreached { id: None, place, why: error.to_string() })
    }
}

/// Calls `each` for every place where a namespace is met, until it says stop; a namespace is met many times.
fn walk(
    mut each: impl FnMut(NamespaceId, &Place<'_>) -> ControlFlow<()>,
) -> Result<Option<Unreached>, KernelError> {
    let mut walk = Walk { each: &mut each, tables: HashMap::new(), hidden: Hidden::default() };
    let _ = walk.processes(numbers(Path::new("/proc")).doing(|| "list the processes in /proc".into())?);
    Ok(walk.hidden.report())
}

struct Walk<'w> {
    each: &'w mut dyn FnMut(NamespaceId, &Place<'_>) -> ControlFlow<()>,
    /// Mount namespaces (what their links say), and the root folders by which their tables were read: a process in a
    /// chroot sees a part of its table only.
    tables: HashMap<OsString, Vec<OsString>>,
    hidden: Hidden,
}

impl Walk<'_> {
    fn processes(&mut self, pids: Vec<u32>) -> ControlFlow<()> {
        let own = Table { file: "/proc/thread-self/mountinfo".into(), root: "/".into() };
        let own_links = |name| fs::read_link(format!("/proc/thread-self/{name}"));
        if let (Ok(namespace), Ok(root)) = (own_links("ns/mnt"), own_links("root"))
            && self.is_new_table(namespace.as_os_str(), || Some(root.into_os_string()))
        {
            match self.table(&own) {
                Ok(flow) => flow?,
                Err(e) => self.hidden.add(process::id(), e),
            }
        }
        for pid in pids {
            match self.process(pid) {
                Ok(flow) => flow?,
                Err(e) => self.hidden.add(pid, e),
            }
        }
        ControlFlow::Continue(())
    }

    fn process(&mut self, pid: u32) -> io::Result<ControlFlow<()>> {
        let first = Task::process(pid);
        // The first thread may have ended before the others.
        if self.task(&first)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        let folder = PathBuf::from(format!("{}/task", first.folder));
        // Two links, and one for each thread (`proc_task_getattr`, fs/proc/base.c).
        let Some(metadata) = unless_gone(fs::metadata(&folder))? else {
            return Ok(ControlFlow::Continue(()));
        };
        if metadata.nlink() == 3 {
            return Ok(ControlFlow::Continue(()));
        }
        for tid in unless_gone(numbers(&folder))?.unwrap_or_default() {
            if tid != pid && self.task(&Task::thread(pid, tid))?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn task(&mut self, task: &Task) -> io::Result<ControlFlow<()>> {
        let Some(id) = task.namespace()? else { return Ok(ControlFlow::Continue(())) };
        if (self.each)(id, &Place::Task(task)).is_break() {
            return Ok(ControlFlow::Break(()));
        }
        let Some(mounts) = task.link("ns/mnt")? else { return Ok(ControlFlow::Continue(())) };
        if !self.is_new_table(&mounts, || task.link("root").ok().flatten()) {
            return Ok(ControlFlow::Continue(()));
        }
        let in_folder = |name| PathBuf::from(format!("{}/{name}", task.folder));
        self.table(&Table { file: in_folder("mountinfo"), root: in_folder("root") })
    }

    /// Does a process whose root folder is `root` show more of this mount namespace than was read already?
    fn is_new_table(&mut self, namespace: &OsStr, root: impl FnOnce() -> Option<OsString>) -> bool {
        let known = self.tables.get(namespace).map(Vec::as_slice).unwrap_or_default();
        if known.iter().any(|root| root == "/") {
            return false;
        }
        // None: it has ended.
        match root() {
            Some(root) if !known.contains(&root) => {
                self.tables.entry(namespace.to_owned()).or_default().push(root);
                true
            }
            _ => false,
        }
    }

    fn table(&mut self, table: &Table) -> io::Result<ControlFlow<()>> {
        for mounted in unless_gone(table.read())?.unwrap_or_default() {
            if (self.each)(mounted.id, &Place::Mount(table, &mounted)).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// The entries of a folder that are numbers, ascending.
fn numbers(folder: &Path) -> io::Result<Vec<u32>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(folder)? {
        numbers.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}
