//! The system's own commands: ip, tc, nft and the like. They act in the calling thread's network namespace.

use std::io::Write;
use std::process::{Command, Stdio};

/// Runs it; what it printed, or what it complained about.
///
/// # Errors
/// Its complaint.
pub fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    run_with(program, arguments, "")
}

/// Runs it and returns what it printed.
///
/// # Panics
/// When it fails.
#[track_caller]
#[allow(clippy::must_use_candidate, reason = "what it printed may be nothing")]
pub fn output(program: &str, arguments: &[&str]) -> String {
    run(program, arguments).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs it with a standard input.
///
/// # Errors
/// Its complaint.
pub fn run_with(program: &str, arguments: &[&str], input: &str) -> Result<String, String> {
    let shown = || format!("{program} {}", arguments.join(" "));
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("{}: {error}", shown()))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A command that does not read says so by its exit code.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(|error| format!("{}: {error}", shown()))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        let complaint = String::from_utf8_lossy(&output.stderr);
        Err(format!("{}: {}\n{input}", shown(), complaint.trim()))
    }
}
