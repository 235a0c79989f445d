//! Running other programs: output captured or passed on, failures as one line.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use crate::error::{Error, Result};

/// Where a program is, looked up like a shell does, with the administrator's directories added: Debian leaves
/// /sbin out of an ordinary user's PATH, but modprobe and bpftool live there.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|candidate| is_executable(candidate))
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Standard output of a program that must succeed; its standard error is part of the error otherwise.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let output = output(command)?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let reason = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
        return Err(Error::new(format!(
            "`{}` failed ({}): {}",
            describe(command),
            output.status,
            reason.trim()
        )));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Everything a program printed and how it ended.
pub(crate) fn output(command: &mut Command) -> Result<Output> {
    command.stdin(Stdio::null()).output().map_err(|e| cannot_start(command, &e))
}

/// Runs a program with its output going where ours goes; a failure is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.stdin(Stdio::null()).status().map_err(|e| cannot_start(command, &e))?;
    if status.success() {
        Ok(())
    } else {
        Err(Error::new(format!("`{}` failed ({status})", describe(command))))
    }
}

/// The error of a program that could not be started at all.
pub(crate) fn cannot_start(command: &Command, error: &std::io::Error) -> Error {
    Error::new(format!("cannot run `{}`: {error}", describe(command)))
        .next("`cargo xtask setup` says what is missing")
}

/// A command as a person would type it, cut where it gets long.
pub(crate) fn describe(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
    }
    if text.chars().count() > 200 {
        text = text.chars().take(200).collect::<String>() + " ...";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line_with_the_last_message() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo first >&2; echo second >&2; exit 3"]);
        let error = capture(&mut command).unwrap_err().to_string();
        assert!(error.ends_with("(exit status: 3): second"), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }

    #[test]
    fn a_missing_program_points_at_setup() {
        let error = run(&mut Command::new("no-such-program-here")).unwrap_err().to_string();
        assert!(error.contains("cargo xtask setup"), "{error}");
        assert_eq!(find_program("no-such-program-here"), None);
        assert!(find_program("sh").is_some());
    }
}
