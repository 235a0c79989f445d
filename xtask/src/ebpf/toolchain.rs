//! The reference builder: one rustc, its library sources, one bpf-linker. Only these define the committed bytes.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

use super::lock::Builder;
use crate::{
    apt::Apt,
    error::{Error, Result},
    exec, files,
    paths::{self, Cache},
};

/// Release of the reference rustc.
pub(crate) const RELEASE: &str = "1.95.0";
/// Its commit: another build of the same release may give other bytes.
const COMMIT: &str = "59807616e1fa2540724bfbac14d7976d7e4a3860";
/// The linker and how to build it against the LLVM library that the rustc of this release brings.
const LINKER: &str = "0.13.0";
const LINKER_FEATURES: &str = "llvm-22,no-llvm-linking";
const LLVM: &str = "LLVM-22-rust-1.95.0-stable";
/// The library's sources, as they may lie in the shared folder.
const LIBRARY_ARCHIVE: &str = "toolchain/rust-library-1.95.0-trim.tar.xz";
const LIBRARY_SHA256: &str = "4f2abe97f8fa3ccf32e27adc28a1478753d716706a97c98b993de86c5671b62b";

/// Where rustup puts the library's sources.
const LIBRARY_IN_SYSROOT: &str = "lib/rustlib/src/rust/library";

/// The reference rustc as people name it.
pub(crate) fn wanted() -> String {
    format!("rustc {RELEASE} ({})", super::short(COMMIT))
}

/// A rustc on this machine.
struct Rustc {
    /// Put before `cargo` and `rustc`: empty, or `rustup run TOOLCHAIN`.
    prefix: Vec<OsString>,
    release: String,
    commit: String,
    host: String,
    sysroot: PathBuf,
}

impl Rustc {
    fn probe(prefix: Vec<OsString>) -> Result<Self> {
        let verbose = exec::capture(program(&prefix, "rustc").arg("-vV"))?;
        let field = |name: &str| {
            let value = verbose.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            value.trim().to_owned()
        };
        let sysroot = exec::capture(program(&prefix, "rustc").args(["--print", "sysroot"]))?;
        Ok(Self {
            release: field("release:"),
            commit: field("commit-hash:"),
            host: field("host:"),
            sysroot: PathBuf::from(sysroot.trim()),
            prefix,
        })
    }

    fn is_reference(&self) -> bool {
        self.commit == COMMIT
    }
}

fn program(prefix: &[OsString], name: &str) -> Command {
    match prefix {
        [] => Command::new(name),
        [first, rest @ ..] => {
            let mut command = Command::new(first);
            command.args(rest).arg(name);
            command
        }
    }
}

/// Everything the objects are built with.
pub(crate) struct Reference {
    rustc: Rustc,
    /// The `library` folder of the sources.
    library: PathBuf,
    linker: PathBuf,
}

impl Reference {
    /// Finds the reference builder or puts it together in the cache. The inner error names the compiler that is here
    /// instead.
    pub(crate) fn find(cache: &Cache) -> Result<std::result::Result<Self, String>> {
        let active = Rustc::probe(Vec::new())?;
        let rustc = if active.is_reference() {
            active
        } else {
            let by_rustup = ["rustup", "run", RELEASE].map(OsString::from).to_vec();
            match Rustc::probe(by_rustup) {
                Ok(other) if other.is_reference() => other,
                _ => return Ok(Err(format!("rustc {} ({})", active.release, super::short(&active.commit)))),
            }
        };
        let in_sysroot = rustc.sysroot.join(LIBRARY_IN_SYSROOT);
        let library =
            if in_sysroot.join("Cargo.lock").is_file() { in_sysroot } else { library_sources(cache)? };
        let linker = bpf_linker(cache, &rustc)?;
        Ok(Ok(Self { rustc, library, linker }))
    }

    /// bpf-linker's path.
    pub(crate) fn linker(&self) -> &Path {
        &self.linker
    }

    /// Removes the DWARF sections, which only bpf-linker needed (it makes BTF of them): a tenth remains. The tool is
    /// part of the rustc component.
    pub(crate) fn strip(&self, from: &Path, to: &Path) -> Result<()> {
        let lib = self.rustc.sysroot.join("lib");
        let tool = lib.join("rustlib").join(&self.rustc.host).join("bin/rust-objcopy");
        let mut command = Command::new(tool);
        exec::run(command.env("LD_LIBRARY_PATH", lib).arg("--strip-debug").arg(from).arg(to))
    }

    /// `cargo` of the reference toolchain, set up to compile `core` from source and deaf to the user's settings.
    pub(crate) fn cargo(&self) -> Result<Command> {
        let mut command = program(&self.rustc.prefix, "cargo");
        clean(&mut command);
        command.env("RUSTC", self.lay_sysroot()?).env("RUSTC_BOOTSTRAP", "1");
        command.current_dir(paths::workspace()).env("CARGO_TARGET_DIR", target_dir());
        Ok(command)
    }

    /// Cargo hashes the folder of every package into its symbols, for the library's crates relative to the sysroot. So
    /// that these hashes, and with them the objects, are the same wherever the library's sources are, the compiler
    /// gets a sysroot of links in which they are where rustup puts them. Returns the compiler that uses it.
    fn lay_sysroot(&self) -> Result<PathBuf> {
        let host = Path::new("lib/rustlib").join(&self.rustc.host);
        let links = [
            (self.library.clone(), sysroot().join(LIBRARY_IN_SYSROOT)),
            (self.rustc.sysroot.join(&host), sysroot().join(&host)),
        ];
        for (target, link) in links {
            if std::fs::read_link(&link).ok().as_ref() != Some(&target) {
                let _ = std::fs::remove_file(&link);
                if let Some(parent) = link.parent() {
                    files::create_dir(parent)?;
                }
                std::os::unix::fs::symlink(&target, &link).map_err(|e| Error::io("create", &link, &e))?;
            }
        }
        let rustc = sysroot().join("bin/rustc");
        let real = self.rustc.sysroot.join("bin/rustc");
        let script =
            format!("#!/bin/sh\nexec '{}' --sysroot '{}' \"$@\"\n", real.display(), sysroot().display());
        // Left alone where it is right: cargo looks at the compiler's time stamp.
        if !std::fs::read(&rustc).is_ok_and(|old| old == script.as_bytes()) {
            files::write_whole(&rustc, script.as_bytes())?;
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(&rustc, mode).map_err(|e| Error::io("make executable", &rustc, &e))?;
        }
        Ok(rustc)
    }

    /// Folders whose place differs between machines, and what they are called in the objects.
    pub(crate) fn folders(&self) -> Result<Vec<(PathBuf, &'static str)>> {
        let home = std::env::var_os("CARGO_HOME").map(PathBuf::from).or_else(|| {
            let home = std::env::var_os("HOME")?;
            Some(Path::new(&home).join(".cargo"))
        });
        let home = home.ok_or_else(|| Error::new("cargo's home is unknown").next("set CARGO_HOME"))?;
        // The last match wins: the sysroot is inside the workspace.
        let library = sysroot().join(LIBRARY_IN_SYSROOT);
        let mut folders = vec![(paths::workspace(), "/smc-policy"), (library, "/rust/library")];
        // One folder for each registry or mirror of it, with a hash of its address in the name.
        let sources = home.join("registry/src");
        for entry in std::fs::read_dir(&sources).map_err(|e| Error::io("read", &sources, &e))? {
            let entry = entry.map_err(|e| Error::io("read", &sources, &e))?;
            folders.push((entry.path(), "/registry"));
        }
        Ok(folders)
    }

    /// What goes into the lock file.
    pub(crate) fn record(&self) -> Result<Builder> {
        let core = self.library.join("core/src");
        let mut sources = files::PartsHash::default();
        for path in files::walk(&core)? {
            let relative = path.strip_prefix(&core).unwrap_or(&path).to_string_lossy().into_owned();
            if relative.ends_with(".rs") {
                sources.add(&relative, &files::read(&path)?);
            }
        }
        Ok(Builder {
            rustc: self.rustc.release.clone(),
            rustc_commit: self.rustc.commit.clone(),
            core_sources: sources.finish(),
            bpf_linker: LINKER.to_owned(),
        })
    }
}

/// Build folder of the eBPF crate: its own, so that it never waits for the cargo that runs us.
fn target_dir() -> PathBuf {
    paths::workspace().join("target/ebpf")
}

fn sysroot() -> PathBuf {
    target_dir().join("sysroot")
}

/// Takes away what the surrounding cargo and the user's environment would pass on.
fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let prefixes = ["CARGO_PROFILE_", "CARGO_BUILD_", "CARGO_TARGET_", "CARGO_UNSTABLE_", "CARGO_PKG_"];
        // CARGO_INCREMENTAL is part of what crates' symbols are made from.
        let names = [
            "RUSTFLAGS",
            "CARGO_ENCODED_RUSTFLAGS",
            "CARGO_INCREMENTAL",
            "RUSTC",
            "RUSTC_WRAPPER",
            "RUSTC_WORKSPACE_WRAPPER",
        ];
        if prefixes.iter().any(|prefix| text.starts_with(prefix)) || names.contains(&&*text) {
            command.env_remove(&name);
        }
    }
}

/// The library's sources where rustup has not installed them.
fn library_sources(cache: &Cache) -> Result<PathBuf> {
    let dir = cache.dir(&format!("rust-library-{RELEASE}"), |partial| {
        let archive = paths::shared().join(LIBRARY_ARCHIVE);
        if archive.is_file() {
            let found = files::sha256_file(&archive)?;
            if found != LIBRARY_SHA256 {
                return Err(Error::new(format!(
                    "{} is not the archive expected (sha256 {found})",
                    archive.display()
                )));
            }
            return exec::run(Command::new("tar").arg("-xJf").arg(&archive).arg("-C").arg(partial));
        }
        debian_library(cache, partial)
            .map_err(|e| e.next(format!("or run `rustup component add rust-src --toolchain {RELEASE}`")))
    })?;
    Ok(dir.join("library"))
}

/// The library's sources from Debian's package of the same rustc: a machine that reaches package registries only gets
/// them there.
fn debian_library(cache: &Cache, into: &Path) -> Result<()> {
    println!("fetching the library sources of rustc {RELEASE} from Debian (once)");
    let apt = Apt::open(cache, "trixie-backports")?;
    let versions = apt.versions("rust-src")?;
    let wanted = format!("{RELEASE}+");
    let version = versions.iter().find(|version| version.starts_with(&wanted)).ok_or_else(|| {
        Error::new(format!(
            "Debian's rust-src is there in the versions {}, not in {RELEASE}",
            versions.join(", ")
        ))
    })?;
    let whole = into.join("whole");
    apt.unpack(&format!("rust-src={version}"), &whole)?;
    files::rename(&whole.join("usr/src").join(format!("rustc-{RELEASE}/library")), &into.join("library"))?;
    files::remove_tree(&whole)
}

/// bpf-linker, built against the LLVM library inside the toolchain: no LLVM package is needed, and the LLVM is always
/// the one that wrote the bitcode.
fn bpf_linker(cache: &Cache, rustc: &Rustc) -> Result<PathBuf> {
    let lib = rustc.sysroot.join("lib");
    // The linker finds the library by the toolchain's path: another toolchain folder is another entry.
    let place = files::sha256(lib.as_os_str().as_encoded_bytes());
    let name = format!("bpf-linker-{LINKER}-{}", super::short(&place));
    let dir = cache.dir(&name, |partial| {
        println!("building bpf-linker {LINKER} (once, about two minutes)");
        let mut command = program(&rustc.prefix, "cargo");
        clean(&mut command);
        let lib = lib.to_string_lossy();
        let flags =
            [&format!("-Lnative={lib}"), &format!("-ldylib={LLVM}"), &format!("-Clink-arg=-Wl,-rpath,{lib}")];
        command.env("CARGO_ENCODED_RUSTFLAGS", flags.map(String::as_str).join("\x1f"));
        command.env("CARGO_TARGET_DIR", partial.join("target"));
        command.args(["install", "bpf-linker", "--version", LINKER, "--locked", "--no-track"]);
        command.args(["--no-default-features", "--features", LINKER_FEATURES, "--root"]).arg(partial);
        // Outside the workspace: its configuration is not for this build.
        exec::run(command.current_dir("/"))?;
        files::remove_tree(&partial.join("target"))
    })?;
    let linker = dir.join("bin/bpf-linker");
    let version = exec::capture(Command::new(&linker).arg("--version")).map_err(|e| {
        Error::new(format!("{} does not start: {e}", linker.display()))
            .next(format!("delete {} and try again", dir.display()))
    })?;
    if version.trim() == format!("bpf-linker {LINKER}") {
        Ok(linker)
    } else {
        Err(Error::new(format!("{} calls itself {:?}", linker.display(), version.trim()))
            .next(format!("delete {} and try again", dir.display())))
    }
}
