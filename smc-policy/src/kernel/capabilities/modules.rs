//! Is a module loaded, built in, or at hand as a file? Nothing is loaded to find out.

use std::{fmt, fs, io, path::PathBuf};

use super::probes::Kernel;

/// Where a part of the kernel is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Module {
    /// Loaded.
    Loaded,
    /// Built into the kernel.
    BuiltIn,
    /// Not loaded; its file, below /lib/modules/RELEASE.
    File(String),
    /// The kernel was built without it, or its file is not there.
    Absent,
    /// Not loaded; what there is cannot be told, and why.
    Unknown(String),
}

impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loaded => f.write_str("module, loaded"),
            Self::BuiltIn => f.write_str("built in"),
            Self::File(path) => write!(f, "module, not loaded ({path})"),
            Self::Absent => f.write_str("neither built in nor there as a module"),
            Self::Unknown(why) => write!(f, "not loaded; is it there? {why}"),
        }
    }
}

/// The running kernel's modules.
pub(super) struct Modules {
    /// /proc/modules; none: this kernel takes no modules.
    loaded: Option<String>,
    folder: PathBuf,
    /// modules.dep and modules.builtin (depmod(8)), or why they cannot be read.
    files: Result<(String, String), String>,
}

impl Modules {
    pub(super) fn read(release: &str) -> Self {
        let loaded = match fs::read_to_string("/proc/modules") {
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            other => Some(other.unwrap_or_default()),
        };
        let folder = PathBuf::from("/lib/modules").join(release);
        let read = |name| {
            let path = folder.join(name);
            fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))
        };
        let files = read("modules.dep").and_then(|dep| Ok((dep, read("modules.builtin")?)));
        Self { loaded, folder, files }
    }

    /// Where the module `name` is. `function` is one of its functions that no compiler can leave out.
    pub(super) fn find(&self, name: &str, function: &str, kernel: &Kernel) -> Module {
        let is_loaded = |table: &String| table.lines().any(|line| line.split(' ').next() == Some(name));
        if self.loaded.as_ref().is_some_and(is_loaded) {
            return Module::Loaded;
        }
        if kernel.has_function(function) {
            return Module::BuiltIn;
        }
        match &self.files {
            Ok((_, builtin)) if file(builtin, name).is_some() => Module::BuiltIn,
            Ok((dep, _)) => file(dep, name)
                .filter(|path| self.folder.join(path).exists())
                .map_or(Module::Absent, |path| Module::File(path.to_owned())),
            // What is built in was seen above.
            Err(_) if self.loaded.is_none() && kernel.has_types() => Module::Absent,
            Err(why) => Module::Unknown(why.clone()),
        }
    }

    /// Does a module say that it brings what is asked for by `alias`? `None`: that cannot be told.
    pub(super) fn has_alias(&self, alias: &str) -> Option<bool> {
        let text = fs::read_to_string(self.folder.join("modules.alias")).ok()?;
        Some(text.lines().any(|line| line.split(' ').nth(1) == Some(alias)))
    }
}

/// The file of the module `name` in a table of depmod's: a path at the start of each line, up to a colon or the end.
fn file<'a>(table: &'a str, name: &str) -> Option<&'a str> {
    table.lines().filter_map(|line| line.split(':').next()).find(|path| {
        let file = path.rsplit('/').next().unwrap_or(path);
        let stem = file.split_once(".ko").map_or(file, |(stem, _)| stem);
        // Names of files may have hyphens where the module's has underscores.
        stem.len() == name.len()
            && stem.bytes().zip(name.bytes()).all(|(s, n)| s == n || (s == b'-' && n == b'_'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_modules() {
        let table = "kernel/net/smc/smc.ko.xz: kernel/drivers/infiniband/core/ib_core.ko.xz\n\
            kernel/net/smc/smc_diag.ko.zst: kernel/net/smc/smc.ko.xz\nkernel/net/sched/sch-ingress.ko\n";
        assert_eq!(file(table, "smc"), Some("kernel/net/smc/smc.ko.xz"));
        assert_eq!(file(table, "smc_diag"), Some("kernel/net/smc/smc_diag.ko.zst"));
        assert_eq!(file(table, "sch_ingress"), Some("kernel/net/sched/sch-ingress.ko"));
        assert_eq!(file(table, "ib_core"), None, "only depended on");
        assert_eq!(file("", "smc"), None);
    }
}
