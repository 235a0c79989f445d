//! The network namespaces of a host are found, all of them, and work can be done inside each.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test fails")]

use std::collections::HashSet;
use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::chroot;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use smc_policy::kernel::error::KernelError;
use smc_policy::kernel::namespace::{self, Found, Namespace, NamespaceId, Unreached};
use smc_policy_tests::{eventually, needs, netns, sys};
use tempfile::TempDir;

/// A thread that has prepared something and keeps it until this goes.
struct Held<T> {
    value: T,
    _end: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Held<T> {
    /// `prepare` runs in a new thread.
    fn by(prepare: impl FnOnce() -> T + Send + 'static) -> Self {
        let (end, ended): (_, Receiver<()>) = channel();
        let (value_in, value) = channel();
        let thread = thread::spawn(move || {
            value_in.send(prepare()).unwrap();
            let _ = ended.recv();
        });
        Self { value: value.recv().unwrap(), _end: end, thread: Some(thread) }
    }

    /// Ends the thread and waits until it has.
    fn end(self) {
        let Self { _end: end, mut thread, .. } = self;
        drop(end);
        thread.take().unwrap().join().unwrap();
    }
}

/// A process that sleeps in a network namespace of its own.
struct Sleeper {
    child: Child,
    namespace: NamespaceId,
}

impl Sleeper {
    fn start() -> Self {
        let child = netns::in_new_namespace(&[], || Command::new("sleep").arg("600").spawn().unwrap());
        let namespace = id_of(format!("/proc/{}/ns/net", child.id()));
        Self { child, namespace }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Says that it is over, also when a test fails.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn id_of(path: impl AsRef<Path>) -> NamespaceId {
    std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap())
}

fn all() -> (Vec<Namespace>, Vec<Unreached>) {
    namespace::all().unwrap()
}

fn found(id: NamespaceId) -> Option<Found> {
    let (namespaces, _) = all();
    assert_eq!(namespace::exists(id), namespaces.iter().any(|n| n.id == id));
    namespaces.into_iter().find(|n| n.id == id).map(|n| n.found)
}

fn c(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

/// It is found no more. A thread that was waited for is still there for a moment.
fn vanishes(id: NamespaceId) {
    eventually("the namespace is gone", || !namespace::exists(id));
    assert_eq!(found(id), None);
}

/// Mounts a new network namespace, in which nobody is, over the file `at`, which is made. In the calling thread's mount
/// namespace.
fn mount_new(at: &Path) -> NamespaceId {
    File::create(at).unwrap();
    let at_text = c(at);
    netns_path(|own| sys::bind_mount(own, &at_text).unwrap());
    id_of(at)
}

/// Calls `with` with the path of a network namespace that is there at least as long.
fn netns_path(with: impl FnOnce(&std::ffi::CStr)) {
    let holder = Sleeper::start();
    with(&CString::new(format!("/proc/{}/ns/net", holder.pid())).unwrap());
}

/// A private mount namespace for the calling thread, with a /run of its own that has a folder netns.
fn own_run() {
    sys::unshare_mounts().unwrap();
    sys::mount_tmpfs(c"/run", c"size=64k").unwrap();
    fs::create_dir("/run/netns").unwrap();
}

#[test]
fn our_namespace_comes_first_then_the_initial_one_each_once() {
    needs!(Root, Netns);
    netns::in_new_namespace(&[], || {
        let others: Vec<_> = (0..3).map(|_| Sleeper::start()).collect();
        let (namespaces, _) = all();
        assert_eq!((namespaces[0].id, &namespaces[0].found), (namespace::current().unwrap(), &Found::Own));
        assert!(namespace::is_initial(namespaces[1].id), "{:?}", namespaces[1]);
        assert!(!namespace::is_initial(namespaces[0].id));
        let ids: HashSet<_> = namespaces.iter().map(|n| n.id).collect();
        assert_eq!(ids.len(), namespaces.len(), "{namespaces:?}");
        assert!(others.iter().all(|o| ids.contains(&o.namespace)), "{namespaces:?}");
    });
}

#[test]
fn a_process_in_a_namespace_without_a_name_is_found() {
    needs!(Root, Netns);
    let sleeper = Sleeper::start();
    let expected = Found::Process { pid: sleeper.pid(), command: "sleep".to_owned() };
    // Until it has become sleep, it is called as this program.
    eventually("found by its name", || found(sleeper.namespace).as_ref() == Some(&expected));
    let id = sleeper.namespace;
    drop(sleeper);
    assert_eq!(found(id), None);
}

#[test]
fn a_thread_in_a_namespace_of_its_own_is_found() {
    needs!(Root, Netns);
    let thread = Held::by(|| {
        sys::unshare_network().unwrap();
        let folder = fs::read_link("/proc/thread-self").unwrap();
        let tid: u32 = folder.file_name().unwrap().to_str().unwrap().parse().unwrap();
        fs::write("/proc/thread-self/comm", "odd one").unwrap();
        (namespace::current().unwrap(), tid)
    });
    let (id, tid) = thread.value;
    let pid = std::process::id();
    assert_eq!(found(id), Some(Found::Thread { pid, tid, command: "odd one".into() }));
    thread.end();
    vanishes(id);
}

#[test]
fn a_mounted_namespace_is_found_by_its_path() {
    needs!(Root, Netns);
    let folder = TempDir::new().unwrap();
    let at = folder.path().join("a b\\n");
    thread::scope(|scope| {
        scope.spawn(|| {
            own_run();
            let id = mount_new(&at);
            assert_eq!(found(id), Some(Found::Mounted(at.clone())));
            // Under a name it is found by that, whatever else leads to it.
            File::create("/run/netns/blue").unwrap();
            sys::bind_mount(&c(&at), c"/run/netns/blue").unwrap();
            assert_eq!(found(id), Some(Found::Mounted("/run/netns/blue".into())));
            let blue = namespace::named("blue").unwrap();
            assert_eq!((blue.id, blue.found.to_string()), (id, "/run/netns/blue".to_owned()));
            let sleep = blue.run(|| Command::new("sleep").arg("600").spawn().unwrap()).unwrap();
            let mut sleeper = Sleeper { child: sleep, namespace: id };
            assert_eq!(found(id), Some(Found::Mounted("/run/netns/blue".into())));
            sys::unmount(c"/run/netns/blue").unwrap();
            assert!(matches!(found(id), Some(Found::Process { .. })));
            sys::unmount(&c(&at)).unwrap();
            sleeper.child.kill().unwrap();
            sleeper.child.wait().unwrap();
            assert_eq!(found(id), None);
            assert_eq!(blue.run(namespace::current).unwrap().unwrap(), id, "it lives as long as its handle");
        });
    });
}

#[test]
fn what_is_no_namespace_has_no_name() {
    needs!(Root, Netns);
    thread::scope(|scope| {
        scope.spawn(|| {
            own_run();
            fs::write("/run/netns/plain", "").unwrap();
            sys::make_fifo(c"/run/netns/fifo").unwrap();
            File::create("/run/netns/mounts").unwrap();
            sys::bind_mount(c"/proc/self/ns/uts", c"/run/netns/mounts").unwrap();
            for name in ["plain", "fifo", "mounts", "missing"] {
                let error = namespace::named(name).unwrap_err();
                assert!(matches!(error, KernelError::Missing { .. }), "{error:?}");
                assert!(error.to_string().contains("ip netns add"), "{error}");
            }
            assert!(all().1.iter().all(|u| !u.place.contains("/run/netns")), "{:?}", all().1);
        });
    });
}

#[test]
fn a_namespace_that_only_another_mount_namespace_shows_is_found() {
    needs!(Root, Netns);
    let folder = TempDir::new().unwrap();
    let at = folder.path().join("hidden");
    let inner = at.clone();
    let holder = Held::by(move || {
        sys::unshare_mounts().unwrap();
        mount_new(&inner)
    });
    let id = holder.value;
    assert_ne!(id_of(&at), id, "it cannot be seen from here");
    let Some(Found::Mounted(path)) = found(id) else { panic!("{:?}", found(id)) };
    assert!(path.starts_with(format!("/proc/{}/task", std::process::id())), "{path:?}");
    assert!(path.ends_with(at.strip_prefix("/").unwrap()), "{path:?}");
    assert_eq!(id_of(&path), id, "the path works from here");
    holder.end();
    vanishes(id);
}

#[test]
fn a_namespace_that_only_a_process_outside_a_chroot_shows_is_found() {
    needs!(Root, Netns);
    let folder = TempDir::new().unwrap();
    let at = folder.path().join("hidden");
    let jail = folder.path().join("jail");
    fs::create_dir(&jail).unwrap();
    let holder = Held::by(move || {
        sys::unshare_mounts().unwrap();
        let id = mount_new(&at);
        let outside = Command::new("sleep").arg("600").spawn().unwrap();
        // This thread is met first, and its mount table is empty.
        chroot(&jail).unwrap();
        (id, Sleeper { child: outside, namespace: 0 })
    });
    let (id, outside) = &holder.value;
    let Some(Found::Mounted(path)) = found(*id) else { panic!("{:?}", found(*id)) };
    assert!(path.starts_with(format!("/proc/{}/root", outside.pid())), "{path:?}");
}

#[test]
fn a_namespace_that_cannot_be_opened_is_named_with_the_reason() {
    needs!(Root, Netns);
    let folder = TempDir::new().unwrap();
    let at = folder.path().join("covered");
    thread::scope(|scope| {
        scope.spawn(|| {
            sys::unshare_mounts().unwrap();
            let covered = mount_new(&at);
            File::create(folder.path().join("cover")).unwrap();
            sys::bind_mount(&c(&folder.path().join("cover")), &c(&at)).unwrap();
            // /proc/sys never answers from memory (`proc_sys_revalidate`, fs/proc/proc_sysctl.c), as FUSE may not.
            let asking = Path::new("/proc/sys/kernel/random/boot_id");
            netns_path(|own| sys::bind_mount(own, &c(asking)).unwrap());
            let asking_id = id_of(asking);

            let (namespaces, unreached) = all();
            for (id, place, why) in [
                (covered, at.as_path(), "something else is mounted over it"),
                (asking_id, asking, "its path leads through a file system that may have to be waited for"),
            ] {
                assert!(namespaces.iter().all(|n| n.id != id), "{namespaces:?}");
                let found = unreached.iter().find(|u| u.id == Some(id)).unwrap();
                assert_eq!(found.place, place.display().to_string());
                assert!(found.why.starts_with(why), "{found}");
            }
            // Another way leads to it: then nothing is amiss.
            let other = folder.path().join("other");
            File::create(&other).unwrap();
            sys::unmount(&c(&at)).unwrap();
            sys::bind_mount(&c(&at), &c(&other)).unwrap();
            sys::bind_mount(&c(&folder.path().join("cover")), &c(&at)).unwrap();
            let (namespaces, unreached) = all();
            assert!(namespaces.iter().any(|n| n.id == covered));
            assert!(unreached.iter().all(|u| u.id != Some(covered)), "{unreached:?}");
        });
    });
}

#[test]
fn namespaces_that_come_and_go_during_the_walk_are_no_error() {
    needs!(Root, Netns);
    let folder = TempDir::new().unwrap();
    let before = all().1;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let unrest: Vec<_> = (0..2)
            .map(|number| {
                let at = folder.path().join(number.to_string());
                let is_over = &is_over;
                scope.spawn(move || {
                    sys::unshare_mounts().unwrap();
                    let mut rounds = 0;
                    while !is_over.load(Ordering::Relaxed) {
                        mount_new(&at);
                        let status = netns::in_new_namespace(&[], || Command::new("true").status()).unwrap();
                        assert!(status.success());
                        sys::unmount(&c(&at)).unwrap();
                        rounds += 1;
                    }
                    rounds
                })
            })
            .collect();
        // A failure must end the threads too, or the scope waits for them for ever.
        let end = EndOnDrop(&is_over);
        for _ in 0..smc_policy_tests::scaled(1000) {
            let (namespaces, unreached) = all();
            for namespace in namespaces {
                assert_eq!(namespace.run(namespace::current).unwrap().unwrap(), namespace.id);
            }
            assert_eq!(unreached, before);
        }
        drop(end);
        let rounds: u32 = unrest.into_iter().map(|thread| thread.join().unwrap()).sum();
        println!("{rounds} namespaces came and went");
        assert!(rounds > 0);
    });
}

#[test]
fn work_inside_sees_that_namespaces_devices_and_settings() {
    needs!(Root, Netns);
    const TTL: &str = "/proc/sys/net/ipv4/ip_default_ttl";
    let read = |path: &str| fs::read_to_string(path).unwrap().trim().to_owned();
    netns::in_new_namespace(&[], || {
        // Looked up here first: what the kernel remembers of this path must not be used there.
        let here = read(TTL);
        let sleeper = Sleeper::start();
        let (namespaces, _) = all();
        let other = namespaces.iter().find(|n| n.id == sleeper.namespace).unwrap();
        other.run(|| fs::write(TTL, "77").unwrap()).unwrap();
        assert_eq!((read(TTL), other.run(|| read(TTL)).unwrap()), (here.clone(), "77".to_owned()));

        // A new namespace's loopback has no address until it is up.
        let addresses = || read("/proc/thread-self/net/if_inet6").lines().count();
        let fresh = Held::by(|| {
            sys::unshare_network().unwrap();
            namespace::own().unwrap()
        });
        let fresh = &fresh.value;
        assert_eq!((addresses(), fresh.run(addresses).unwrap()), (1, 0));
        fresh.run(|| netns::set_loopback_up().unwrap()).unwrap();
        assert_eq!(fresh.run(addresses).unwrap(), 1);
        assert_eq!(namespace::current().unwrap(), namespaces[0].id, "this thread stayed");

        // From inside one into another and back.
        let round = fresh.run(|| other.run(|| fresh.run(namespace::current))).unwrap().unwrap().unwrap();
        assert_eq!(round.unwrap(), fresh.id);
    });
}

#[test]
fn a_panic_inside_a_namespace_is_the_callers() {
    needs!(Root, Netns);
    let sleeper = Sleeper::start();
    let (namespaces, _) = all();
    let other = namespaces.iter().find(|n| n.id == sleeper.namespace).unwrap();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        other.run(|| -> u32 { std::panic::resume_unwind(Box::new("inside")) })
    }));
    assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"inside"));
}
