//! Reads config.toml: the administrator's, or the file given by `--config`.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{
    check,
    outcome::{Exit, Failure},
    output::Output,
    sources,
};
use crate::{
    paths::Paths,
    policy::{
        Config, SourceFile,
        config::{Parsed, parse},
    },
};

/// The text of the file `given`, or without one of the administrator's; `None`: there is none of his.
pub(super) fn source(paths: &Paths, given: Option<&Path>) -> Result<Option<SourceFile>, Failure> {
    match given {
        Some(path) => sources::read_one(path.to_owned()).map(Some),
        None => sources::read_if_there(paths.etc_config()),
    }
}

/// What config.toml says, for verbs that need it: the file `given`, else the administrator's, else the default. Findings
/// are printed.
pub(super) fn read(paths: &Paths, given: Option<&Path>, out: &Output) -> Result<Config, Failure> {
    let Some(file) = source(paths, given)? else { return Ok(Config::default()) };
    let files = [file];
    let (findings, config) = match parse(0, &files[0].text) {
        Ok(Parsed { config, warnings }) => (warnings, Some(config)),
        Err(errors) => (errors, None),
    };
    check::report(&findings, &files, out);
    config.ok_or_else(|| Failure {
        exit: Exit::Usage,
        message: format!("{} has errors; nothing was changed", files[0].path.display()),
        findings: findings.iter().map(|finding| finding.record(&files)).collect(),
    })
}

/// As [`read`], for verbs that only compare: nothing is printed.
pub(super) fn read_quietly(paths: &Paths, given: Option<&Path>) -> Result<Config, Failure> {
    let Some(file) = source(paths, given)? else { return Ok(Config::default()) };
    match parse(0, &file.text) {
        Ok(Parsed { config, .. }) => Ok(config),
        Err(_) => Err(Failure::usage(format!("{} has errors: `smc-policy check`", file.path.display()))),
    }
}

/// What `check` says about a config.toml.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    file: PathBuf,
    hook: &'static str,
    mode: &'static str,
}

impl Summary {
    pub(super) fn new(file: &Path, config: &Config) -> Self {
        Self {
            file: file.to_owned(),
            hook: config.hook.word(),
            mode: super::apply::mode_name(config.observe),
        }
    }

    /// For people: `config.toml: hook auto, mode enforce`.
    pub(super) fn line(&self) -> String {
        let name = self.file.file_name().unwrap_or(self.file.as_os_str());
        format!("{}: hook {}, mode {}", name.display(), self.hook, self.mode)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::policy::config::HookChoice;

    fn paths(root: &Path) -> Paths {
        Paths {
            etc: root.join("etc"),
            usr: root.join("usr"),
            run: root.join("run"),
            state: root.join("state"),
            bpffs: root.join("bpf"),
        }
    }

    #[test]
    fn the_file_given_or_the_administrators_or_the_default() {
        let root = tempfile::tempdir().unwrap();
        let (paths, out) = (paths(root.path()), Output::new(true));
        assert_eq!(read(&paths, None, &out).unwrap(), Config::default());
        fs::create_dir_all(&paths.etc).unwrap();
        fs::write(paths.etc_config(), "hook = \"tc\"\n").unwrap();
        assert_eq!(read(&paths, None, &out).unwrap().hook, HookChoice::Tc);
        let given = root.path().join("other.toml");
        let refused = read(&paths, Some(&given), &out).unwrap_err();
        assert_eq!(refused.exit, Exit::Usage);
        assert!(refused.message.contains("other.toml: no such file"), "{}", refused.message);
        fs::write(&given, "hook = \"hs_ctrl\"\n").unwrap();
        assert_eq!(read(&paths, Some(&given), &out).unwrap().hook, HookChoice::HsCtrl);
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place() {
        let root = tempfile::tempdir().unwrap();
        let paths = paths(root.path());
        fs::create_dir_all(&paths.etc).unwrap();
        fs::write(paths.etc_config(), "mode = \"enforce\"\nhook = \"tcp\"\n").unwrap();
        let refused = read(&paths, None, &Output::new(true)).unwrap_err();
        assert_eq!(refused.exit, Exit::Usage);
        assert!(refused.message.contains("config.toml has errors"), "{}", refused.message);
        let [finding] = refused.findings.as_slice() else { panic!("{refused:?}") };
        assert_eq!((finding.file.as_path(), finding.line, finding.column), (&*paths.etc_config(), 2, 8));
        fs::write(paths.etc_config(), [b'a', 0xff]).unwrap();
        let refused = read(&paths, None, &Output::new(true)).unwrap_err();
        assert!(refused.message.contains("not UTF-8 at byte 1"), "{}", refused.message);
    }
}
