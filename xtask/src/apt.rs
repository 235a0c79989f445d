//! Debian's archive through a private apt configuration: own list of sources, own state and cache. The system's mirror
//! and keys are used, the system's apt is left as it is; signatures are verified as always.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    error::{Error, Result},
    exec, files,
    paths::Cache,
};

/// Keys of all Debian releases, from the package debian-archive-keyring.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Suites whose entry in the system's sources names a Debian mirror.
const KNOWN_SUITES: [&str; 10] = [
    "bullseye",
    "bookworm",
    "trixie",
    "forky",
    "sid",
    "oldoldstable",
    "oldstable",
    "stable",
    "testing",
    "unstable",
];

/// One release of Debian, as this host can reach it.
pub(crate) struct Apt {
    dir: PathBuf,
    suite: String,
}

impl Apt {
    /// Prepares the configuration for a suite, such as "trixie", and fetches its signed index.
    pub(crate) fn open(cache: &Cache, suite: &str) -> Result<Self> {
        if exec::find_program("apt-get").is_none() {
            return Err(Error::new(format!(
                "Debian's {suite} needs apt-get, which this system does not have"
            )));
        }
        if !Path::new(KEYRING).is_file() {
            return Err(Error::new(format!("{KEYRING} is missing")).next("install debian-archive-keyring"));
        }
        let mirrors = Mirrors::of_this_system()?;
        let apt = Self { dir: cache.join("apt").join(suite), suite: suite.to_owned() };
        for part in ["state/lists/partial", "cache/archives/partial"] {
            files::create_dir(&apt.dir.join(part))?;
        }
        files::write_whole(&apt.dir.join("status"), b"")?;
        files::write_whole(&apt.dir.join("sources.list"), mirrors.sources(suite).as_bytes())?;
        exec::capture(apt.command("apt-get").args(["update", "-q", "--error-on=any"]))
            .map_err(|e| Error::new(format!("Debian's {suite} cannot be read: {e}")))?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let dir = |option: &str, value: &str| format!("{option}={}", self.dir.join(value).display());
        let options = [
            dir("Dir::Etc::sourcelist", "sources.list"),
            "Dir::Etc::sourceparts=/dev/null".to_owned(),
            "Dir::Etc::preferences=/dev/null".to_owned(),
            "Dir::Etc::preferencesparts=/dev/null".to_owned(),
            dir("Dir::State", "state"),
            dir("Dir::State::status", "status"),
            dir("Dir::Cache", "cache"),
            // The cache is in a home directory, where apt's own user cannot write; our user is as good.
            format!("APT::Sandbox::User={}", if crate::packages::is_root() { "root" } else { "" }),
        ];
        for option in options {
            command.arg("-o").arg(option);
        }
        command.env("LC_ALL", "C");
        command
    }

    /// The version of a package that the suite offers.
    pub(crate) fn version(&self, package: &str) -> Result<String> {
        let text = exec::capture(self.command("apt-cache").args(["show", "--no-all-versions", package]))
            .map_err(|_| Error::new(format!("Debian's {} has no package {package}", self.suite)))?;
        field(&text, "Version").ok_or_else(|| Error::new(format!("package {package} has no version")))
    }

    /// The packages that a package depends on, by name.
    pub(crate) fn depends(&self, package: &str) -> Result<Vec<String>> {
        let text = exec::capture(self.command("apt-cache").args(["show", "--no-all-versions", package]))?;
        let depends = field(&text, "Depends").unwrap_or_default();
        let name = |entry: &str| entry.split_whitespace().next().map(str::to_owned);
        Ok(depends.split(',').filter_map(name).collect())
    }

    /// All versions of a package that the suite offers.
    pub(crate) fn versions(&self, package: &str) -> Result<Vec<String>> {
        let text = exec::capture(self.command("apt-cache").args(["madison", package]))?;
        Ok(text
            .lines()
            .filter_map(|line| line.split('|').nth(1))
            .map(|version| version.trim().to_owned())
            .collect())
    }

    /// Downloads a binary package (a name, or "name=version") and unpacks it into a folder.
    pub(crate) fn unpack(&self, package: &str, into: &Path) -> Result<()> {
        let downloads = self.dir.join("downloads");
        files::remove_tree(&downloads)?;
        files::create_dir(&downloads)?;
        exec::capture(self.command("apt-get").args(["download", "-q", package]).current_dir(&downloads))?;
        let entries = fs::read_dir(&downloads).map_err(|e| Error::io("read", &downloads, &e))?;
        let found = entries
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|e| e == "deb"));
        let archive = found.ok_or_else(|| Error::new(format!("apt-get downloaded nothing for {package}")))?;
        exec::run(Command::new("dpkg-deb").arg("-x").arg(archive).arg(into))?;
        files::remove_tree(&downloads)
    }
}

/// A field of the first stanza of a package listing.
fn field(text: &str, name: &str) -> Option<String> {
    let first = text.split("\n\n").next()?;
    first
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map(|value| value.trim().to_owned())
}

/// Where this system gets Debian from.
#[derive(Debug, PartialEq, Eq)]
struct Mirrors {
    archive: String,
    security: Option<String>,
}

impl Mirrors {
    fn of_this_system() -> Result<Self> {
        let mut texts = Vec::new();
        let main = Path::new("/etc/apt/sources.list").to_owned();
        let parts =
            fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|entry| entry.path());
        for path in parts.chain([main]) {
            if let Ok(text) = fs::read_to_string(&path) {
                texts.push((path.extension().is_some_and(|extension| extension == "sources"), text));
            }
        }
        let entries: Vec<(String, String)> = texts
            .iter()
            .flat_map(|(stanzas, text)| if *stanzas { parse_stanzas(text) } else { parse_lines(text) })
            .collect();
        Self::choose(&entries).ok_or_else(|| {
            Error::new("this system's apt names no mirror of Debian")
                .next("the Debian kernels need one; others run")
        })
    }

    /// From pairs of address and suite.
    fn choose(entries: &[(String, String)]) -> Option<Self> {
        let base = |suite: &str| suite.split(['-', '/']).next().unwrap_or_default().to_owned();
        let known = |suite: &str| KNOWN_SUITES.contains(&base(suite).as_str());
        let find = |security: bool| {
            entries
                .iter()
                .find(|(_, suite)| known(suite) && suite.contains("security") == security)
                .map(|(address, _)| address.clone())
        };
        Some(Self { archive: find(false)?, security: find(true) })
    }

    /// The text of a sources.list for one suite with its updates. Only what is needed of the index is fetched.
    fn sources(&self, suite: &str) -> String {
        let base = suite.split('-').next().unwrap_or(suite);
        let binary = format!("deb [arch=amd64 lang=none target=Packages signed-by={KEYRING}]");
        let mut lines = vec![format!("{binary} {} {suite} main", self.archive)];
        if let (Some(security), true) = (&self.security, base == suite) {
            lines.push(format!("{binary} {security} {suite}-security main"));
        }
        lines.join("\n") + "\n"
    }
}

/// Entries of the one-line format: "deb [options] address suite component...".
fn parse_lines(text: &str) -> Vec<(String, String)> {
    let entry = |line: &str| {
        let rest = line.trim().strip_prefix("deb ")?.trim_start();
        let rest = if rest.starts_with('[') { rest.split_once(']')?.1 } else { rest };
        let mut words = rest.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.to_owned()))
    };
    text.lines().filter_map(entry).collect()
}

/// Entries of the deb822 format.
fn parse_stanzas(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let without_comments: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    for stanza in without_comments.split(|line| line.trim().is_empty()) {
        let get = |name: &str| {
            stanza
                .iter()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .unwrap_or_default()
                .split_whitespace()
        };
        let disabled = get("Enabled").any(|word| word == "no");
        if get("Types").any(|word| word == "deb") && !disabled {
            for address in get("URIs") {
                found.extend(get("Suites").map(|suite| (address.to_owned(), suite.to_owned())));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANZAS: &str = "Types: deb\n# a comment\nURIs: http://mirror.example/debian\n\
        Suites: bookworm bookworm-updates\nComponents: main\n\nTypes: deb\n\
        URIs: http://mirror.example/debian-security\nSuites: bookworm-security\n\n\
        Types: deb\nURIs: http://other.example/\nSuites: nodistro\n\n\
        Types: deb\nEnabled: no\nURIs: http://off.example/\nSuites: sid\n";
    const LINES: &str = "# deb http://off.example/ sid main\n\
        deb http://other.example/apt cloud-bookworm main\n\
        deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian trixie main contrib\n\
        deb-src http://mirror.example/src trixie main\n";

    #[test]
    fn the_mirror_is_found_in_both_formats() {
        let mirrors = Mirrors::choose(&parse_stanzas(STANZAS)).unwrap();
        assert_eq!(mirrors.archive, "http://mirror.example/debian");
        assert_eq!(mirrors.security.as_deref(), Some("http://mirror.example/debian-security"));
        let mirrors = Mirrors::choose(&parse_lines(LINES)).unwrap();
        assert_eq!(mirrors, Mirrors { archive: "http://mirror.example/debian".into(), security: None });
        assert_eq!(Mirrors::choose(&parse_lines("deb http://other.example jammy main")), None);
    }

    #[test]
    fn backports_have_no_security_suite() {
        let mirrors = Mirrors { archive: "http://a".into(), security: Some("http://s".into()) };
        let text = mirrors.sources("trixie-backports");
        assert!(text.contains("http://a trixie-backports main") && !text.contains("http://s"), "{text}");
        assert!(mirrors.sources("trixie").contains("http://s trixie-security main"));
    }

    #[test]
    fn fields_are_those_of_the_first_stanza() {
        let text = "Package: a\nVersion: 1.2-3\nDepends: b (= 1), c\n\nPackage: a\nVersion: 9\n";
        assert_eq!(field(text, "Version").as_deref(), Some("1.2-3"));
        assert_eq!(field(text, "Vers"), None);
    }
}
