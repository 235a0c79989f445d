//! What is in force, as files: `<run>/gen-N` for each generation N. The kernel's generation number selects one; the
//! others are leftovers.
//!
//! The same form keeps the last good policy for the next boot and the one before it for `rollback`.

use std::{
    fs, io,
    io::Write as _,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    apply::Request,
    error::{Doing, KernelError},
    hook::Hook,
};
use crate::policy::{
    Config, Loaded, Moment, Policy, Slots, SourceFile, SourceKind, config::HookChoice, load,
};

/// Version of the file's form.
const VERSION: u32 = 2;

/// One policy file as it was applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Where it was read from.
    pub path: PathBuf,
    /// Its whole text.
    pub text: String,
    /// What it is to the policy.
    #[serde(default)]
    pub kind: SourceKind,
}

impl From<&SourceFile> for Source {
    fn from(file: &SourceFile) -> Self {
        Self { path: file.path.clone(), text: file.text.clone(), kind: file.kind }
    }
}

impl From<&Source> for SourceFile {
    fn from(source: &Source) -> Self {
        Self { path: source.path.clone(), text: source.text.clone(), kind: source.kind }
    }
}

/// The counter slot of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleSlot {
    /// The rule's file.
    pub file: PathBuf,
    /// The rule's name.
    pub name: String,
    /// Its slot.
    pub slot: u32,
}

/// What the command line says instead of config.toml.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overrides {
    /// The hook.
    pub hook: Option<HookChoice>,
    /// To observe, or not to.
    pub observe: Option<bool>,
}

impl Overrides {
    /// What holds, given what config.toml says.
    pub fn over(self, file: Config) -> Config {
        Config { hook: self.hook.unwrap_or(file.hook), observe: self.observe.unwrap_or(file.observe), ..file }
    }
}

/// A policy as it was put in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this form.
    pub version: u32,
    /// Version of the tool that wrote it.
    pub tool: String,
    /// The kernel's generation number.
    pub generation: u64,
    /// Random: tells this apply from every other, also where generation numbers begin anew.
    pub token: String,
    /// When, seconds since 1970.
    pub applied_at: u64,
    /// The hook that enforces it.
    pub hook: Hook,
    /// How it is enforced, with what the command line said instead of config.toml.
    pub config: Config,
    /// What the command line said.
    pub overrides: Overrides,
    /// The file read instead of config.toml.
    pub config_file: Option<PathBuf>,
    /// It took over from a foreign smc_hs_ctrl, as it may when it returns.
    #[serde(default)]
    pub replace_foreign: bool,
    /// SHA-256 over paths and texts, hexadecimal.
    pub digest: String,
    /// The files and folders that `apply` was given; empty: the two policy folders.
    pub origin: Vec<PathBuf>,
    /// The files in order.
    pub sources: Vec<Source>,
    /// Slots of `[default]` outbound and inbound.
    pub default_slots: [u32; 2],
    /// Slots of the rules, in their order.
    pub rule_slots: Vec<RuleSlot>,
}

impl Record {
    /// The record of what `request` puts in force.
    pub fn new(generation: u64, request: &Request<'_>, hook: Hook, slots: &Slots) -> Self {
        let Request { sources, policy, config, overrides, config_file, origin, token, .. } = *request;
        Self {
            version: VERSION,
            tool: env!("CARGO_PKG_VERSION").to_owned(),
            generation,
            token: token.to_owned(),
            applied_at: unix_now(),
            hook,
            config: config.clone(),
            overrides,
            config_file: config_file.map(Path::to_owned),
            replace_foreign: false,
            digest: digest(sources),
            origin: origin.to_owned(),
            sources: sources.iter().map(Source::from).collect(),
            default_slots: [slots.default_outbound, slots.default_inbound],
            rule_slots: policy
                .rules
                .iter()
                .zip(&slots.rules)
                .map(|(rule, slot)| RuleSlot {
                    file: policy.file(rule.place).to_owned(),
                    name: rule.name.clone(),
                    slot: *slot,
                })
                .collect(),
        }
    }

    /// The texts.
    pub fn source_files(&self) -> Vec<SourceFile> {
        self.sources.iter().map(SourceFile::from).collect()
    }

    /// The policy, read again from the recorded texts as they were when it was applied, and its slots. `None`: this version of the tool does not accept
    /// the texts, or they and the slots do not fit together.
    pub fn policy(&self) -> Option<(Policy, Slots)> {
        let Loaded { policy, .. } = load(&self.source_files(), Moment::from_unix(self.applied_at)).ok()?;
        let rules: Vec<u32> = policy
            .rules
            .iter()
            .map(|rule| self.slot_of(policy.file(rule.place), &rule.name))
            .collect::<Option<_>>()?;
        let [default_outbound, default_inbound] = self.default_slots;
        Some((policy, Slots { rules, default_outbound, default_inbound }))
    }

    fn slot_of(&self, file: &Path, name: &str) -> Option<u32> {
        self.rule_slots.iter().find(|r| r.name == name && r.file == file).map(|r| r.slot)
    }

    /// All slots in use.
    pub fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        self.default_slots.iter().copied().chain(self.rule_slots.iter().map(|r| r.slot))
    }
}

/// Seconds since 1970.
pub fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// The moment that rules' `expires` are compared with.
pub fn now() -> Moment {
    Moment::from_unix(unix_now())
}

/// SHA-256 over paths and texts, hexadecimal.
pub fn digest(sources: &[SourceFile]) -> String {
    let mut hash = Sha256::new();
    for source in sources {
        let path = source.path.as_os_str().as_encoded_bytes();
        if source.kind != SourceKind::Policy {
            // No length is as large.
            hash.update([0xff; 8]);
        }
        for part in [path, source.text.as_bytes()] {
            // Lengths keep the boundary between two parts.
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// Counter slots for a policy: a rule of the same file and name keeps its slot, others get the smallest that nothing in
/// force uses. Second: the slots that begin anew.
pub fn assign_slots(policy: &Policy, in_force: Option<&Record>) -> (Slots, Vec<u32>) {
    let mut taken: std::collections::HashSet<u32> =
        in_force.map_or_else(|| [0, 1].into(), |r| r.slots().collect());
    let mut fresh = if in_force.is_none() { vec![0, 1] } else { Vec::new() };
    let known: std::collections::HashMap<(&Path, &str), u32> = in_force
        .iter()
        .flat_map(|r| &r.rule_slots)
        .map(|r| ((r.file.as_path(), r.name.as_str()), r.slot))
        .collect();
    let mut next = 0;
    let rules = policy
        .rules
        .iter()
        .map(|rule| {
            if let Some(slot) = known.get(&(policy.file(rule.place), rule.name.as_str())) {
                return *slot;
            }
            while !taken.insert(next) {
                next += 1;
            }
            fresh.push(next);
            next
        })
        .collect();
    let [default_outbound, default_inbound] = in_force.map_or([0, 1], |r| r.default_slots);
    (Slots { rules, default_outbound, default_inbound }, fresh)
}

/// Where generation `n` is recorded.
pub fn path_of(run: &Path, n: u64) -> PathBuf {
    run.join(format!("gen-{n}"))
}

/// Writes a record beside its place, syncs and renames it: a reader finds the old file or the new one, whole.
///
/// # Errors
/// [`KernelError::Io`].
pub fn write(path: &Path, record: &Record) -> Result<(), KernelError> {
    let json = serde_json::to_vec(record)
        .map_err(|e| KernelError::Record { path: path.to_owned(), what: e.to_string() })?;
    write_beside(path, &json).doing(|| format!("write {}", path.display()))
}

/// Replaces a file whole: written beside, synced, renamed.
///
/// # Errors
/// Of any step.
pub fn write_beside(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(dir)?;
    let beside = path.with_extension(BESIDE);
    let written = fs::File::create(&beside)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&beside, path));
    if let Err(e) = written {
        // Half a file is of no use, and may be what filled the disk.
        let _ = fs::remove_file(&beside);
        return Err(e);
    }
    fs::File::open(dir)?.sync_all()
}

/// Ending of files that are being written.
const BESIDE: &str = "tmp";

/// Reads a record. `None`: there is none.
///
/// # Errors
/// [`KernelError::Record`] when it cannot be used, [`KernelError::Io`].
pub fn read(path: &Path) -> Result<Option<Record>, KernelError> {
    let bytes = match fs::read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.doing(|| format!("read {}", path.display()))?,
    };
    let damaged = |what: String| KernelError::Record { path: path.to_owned(), what };
    let record: Record = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
    if record.version != VERSION {
        return Err(damaged(format!("written in form {} by smc-policy {}", record.version, record.tool)));
    }
    if digest(&record.source_files()) != record.digest {
        return Err(damaged("its texts were changed after they were recorded".into()));
    }
    Ok(Some(record))
}

/// No kernel gets that far; a file of a higher number is none of ours.
const LAST_GENERATION: u64 = 1 << 62;

fn files(run: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(run).into_iter().flatten().flatten().map(|entry| entry.path())
}

fn generation_of(path: &Path) -> Option<u64> {
    let n = path.file_name()?.to_str()?.strip_prefix("gen-")?.parse().ok()?;
    (n <= LAST_GENERATION).then_some(n)
}

/// The highest generation that is recorded.
fn highest(run: &Path) -> Option<u64> {
    files(run).filter_map(|path| generation_of(&path)).max()
}

/// A number above every one that is or was in force, so that no record is taken for that of another generation; and of the
/// other table than `in_force`.
pub fn unused(run: &Path, in_force: u64) -> u64 {
    let next = highest(run).unwrap_or(0).max(in_force) + 1;
    next + u64::from(next & 1 == in_force & 1)
}

/// Removes the records of all generations but `keep`, and half-written ones.
pub fn prune(run: &Path, keep: Option<u64>) {
    for path in files(run) {
        let half = path.extension().is_some_and(|e| e == BESIDE);
        let other = generation_of(&path).is_some_and(|n| keep != Some(n));
        if half || other {
            // A leftover record is ignored: nothing depends on its removal.
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::arbitrary;

    fn record(text: &str) -> Record {
        let sources = [SourceFile::policy("a.toml", text)];
        let policy = load(&sources, arbitrary::NOW).unwrap().policy;
        let request = Request {
            sources: &sources,
            policy: &policy,
            origin: &[],
            config: &Config::default(),
            overrides: Overrides::default(),
            config_file: None,
            replace_foreign: false,
            token: "00",
            unconfirmed_until: None,
        };
        Record::new(7, &request, Hook::HsCtrl, &assign_slots(&policy, None).0)
    }

    const RULE: &str = "version = 1\n[[rule]]\nname = \"a\"\naction = \"deny\"\n";

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = path_of(dir.path(), 7);
        assert_eq!(read(&path).unwrap(), None);
        let record = record(RULE);
        write(&path, &record).unwrap();
        assert_eq!(read(&path).unwrap().as_ref(), Some(&record));
        let (policy, slots) = record.policy().unwrap();
        assert_eq!((policy.rules.len(), slots.rules), (1, vec![2]));
    }

    #[test]
    fn changed_texts_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = path_of(dir.path(), 7);
        write(&path, &record(RULE)).unwrap();
        let changed = fs::read_to_string(&path).unwrap().replace("deny", "allow");
        fs::write(&path, changed).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("changed after"));
        fs::write(&path, "{").unwrap();
        assert!(read(&path).is_err());
    }

    #[test]
    fn leftovers_are_pruned_and_absurd_numbers_ignored() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["gen-1", "gen-2", "gen-3.tmp", "gen-18446744073709551615", "gen-x", "lock"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(highest(dir.path()), Some(2));
        assert_eq!([0, 1, 2, 3, 8].map(|n| unused(dir.path(), n)), [3, 4, 3, 4, 9], "of the other table");
        prune(dir.path(), Some(2));
        let mut left: Vec<_> =
            files(dir.path()).map(|p| p.file_name().unwrap().to_str().unwrap().to_owned()).collect();
        left.sort();
        assert_eq!(left, ["gen-18446744073709551615", "gen-2", "gen-x", "lock"]);
    }

    #[test]
    fn a_rule_keeps_its_slot_and_new_ones_take_free_ones() {
        let old =
            record(&format!("{RULE}[[rule]]\nname = \"b\"\naction = \"deny\"\npeers = [\"10.0.0.1\"]\n"));
        let text = format!("version = 1\n[[rule]]\nname = \"new\"\naction = \"allow\"\n{}", &RULE[12..]);
        let policy = load(&[SourceFile::policy("a.toml", text)], arbitrary::NOW).unwrap().policy;
        let (slots, fresh) = assign_slots(&policy, Some(&old));
        assert_eq!(slots.rules, [4, 2], "the removed rule's slot 3 is in force until the switch");
        assert_eq!(fresh, [4]);
    }
}
