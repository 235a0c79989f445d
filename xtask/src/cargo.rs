//! Running cargo on this workspace and learning from its messages what it built.

use std::{
    io::BufRead as _,
    path::PathBuf,
    process::{Command, Stdio},
};

use crate::{
    error::{Error, Result},
    exec, paths,
};

/// An executable that cargo built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Executable {
    /// Package it belongs to.
    pub(crate) package: String,
    /// Name of the target: a crate, a binary or a file in tests/.
    pub(crate) target: String,
    /// Whether it is a test harness.
    pub(crate) test: bool,
    /// Where it is.
    pub(crate) path: PathBuf,
}

/// What cargo said in JSON.
#[derive(Debug, Default)]
pub(crate) struct Messages {
    /// Executables built or found up to date.
    pub(crate) executables: Vec<Executable>,
    /// Compiler warnings that name a place in the source.
    pub(crate) warnings: usize,
}

impl Messages {
    /// Takes one line in; returns text to show to the user, if any.
    fn take(&mut self, line: &str) -> Option<String> {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else {
            return Some(format!("{line}\n"));
        };
        match message["reason"].as_str() {
            Some("compiler-artifact") => {
                if let Some(path) = message["executable"].as_str() {
                    // "path+file:///folder#name@version", or without the name where the folder is called the same.
                    let id = message["package_id"].as_str().unwrap_or_default();
                    let (folder, fragment) = id.rsplit_once('#').unwrap_or((id, ""));
                    let package = match fragment.split_once('@') {
                        Some((name, _)) => name,
                        None => folder.rsplit('/').next().unwrap_or(folder),
                    };
                    self.executables.push(Executable {
                        package: package.to_owned(),
                        target: message["target"]["name"].as_str().unwrap_or_default().to_owned(),
                        test: message["profile"]["test"].as_bool().unwrap_or(false),
                        path: PathBuf::from(path),
                    });
                }
                None
            }
            Some("compiler-message") => {
                // Dependencies' warnings are capped by cargo; what arrives is about the workspace's own crates. The
                // closing "N warnings emitted" names no place.
                if message["message"]["level"] == "warning" && !message["message"]["spans"][0].is_null() {
                    self.warnings += 1;
                }
                message["message"]["rendered"].as_str().map(str::to_owned)
            }
            _ => None,
        }
    }
}

/// cargo as it runs us, in the workspace.
pub(crate) fn command() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(paths::workspace());
    command
}

/// Runs a cargo command that got `--message-format=json`; compilers' messages go to standard error.
pub(crate) fn messages(command: &mut Command) -> Result<Messages> {
    command.arg("--message-format=json").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|e| exec::cannot_start(command, &e))?;
    let mut seen = Messages::default();
    if let Some(stdout) = child.stdout.take() {
        for line in std::io::BufReader::new(stdout).lines() {
            let line = line.map_err(|e| Error::new(format!("cannot read cargo's messages: {e}")))?;
            if let Some(text) = seen.take(&line) {
                eprint!("{text}");
            }
        }
    }
    let status = child.wait().map_err(|e| Error::new(format!("cargo: {e}")))?;
    if status.success() { Ok(seen) } else { Err(Error::new(format!("`{}` failed", exec::describe(command)))) }
}

/// Builds a program of the workspace and returns its path.
pub(crate) fn build(package: &str, program: &str) -> Result<PathBuf> {
    let seen = messages(command().args(["build", "--quiet", "--package", package, "--bin", program]))?;
    let found = seen.executables.into_iter().find(|executable| executable.target == program);
    found.map(|executable| executable.path).ok_or_else(|| Error::new(format!("cargo built no {program}")))
}

/// Builds the project's own program.
pub(crate) fn build_program() -> Result<PathBuf> {
    build("smc-policy", "smc-policy")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_and_warnings_are_taken_from_cargos_messages() {
        let mut seen = Messages::default();
        assert_eq!(seen.take(r#"{"reason":"compiler-artifact","executable":null}"#), None);
        let artifact = r#"{"reason":"compiler-artifact","package_id":"path+file:///x/tests#smc-policy-tests@0.1.0",
            "target":{"name":"apply"},"profile":{"test":true},"executable":"/t/apply-1"}"#;
        assert_eq!(seen.take(&artifact.replace('\n', "")), None);
        let artifact = r#"{"reason":"compiler-artifact","package_id":"path+file:///x/smc-policy#0.1.0",
            "target":{"name":"smc-policy"},"profile":{"test":false},"executable":"/t/smc-policy"}"#;
        assert_eq!(seen.take(&artifact.replace('\n', "")), None);
        let warning = r#"{"reason":"compiler-message","message":{"level":"warning","spans":[{}],"rendered":"unused\n"}}"#;
        assert_eq!(seen.take(warning).as_deref(), Some("unused\n"));
        let closing = r#"{"reason":"compiler-message","message":{"level":"warning","spans":[],"rendered":"1 warning"}}"#;
        assert!(seen.take(closing).is_some());
        assert_eq!(seen.take("plain text").as_deref(), Some("plain text\n"));
        assert_eq!(seen.warnings, 1);
        let built: Vec<(&str, &str, bool)> =
            seen.executables.iter().map(|e| (e.package.as_str(), e.target.as_str(), e.test)).collect();
        assert_eq!(built, [("smc-policy-tests", "apply", true), ("smc-policy", "smc-policy", false)]);
    }
}
