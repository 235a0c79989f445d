//! cargo-deny: licences, sources and bans of the dependencies.

use std::process::Command;

use crate::{
    cargo,
    error::Result,
    exec,
    paths::{self, Cache},
};

/// Version that is built into the cache.
const VERSION: &str = "0.20.2";

/// Checks all dependencies against deny.toml. The database of advisories is a git repository, which not every machine
/// can reach: it is left to `cargo deny check advisories`.
pub(crate) fn check(cache: &Cache) -> Result<()> {
    let dir = cache.dir(&format!("cargo-deny-{VERSION}"), |partial| {
        println!("building cargo-deny {VERSION} (once, some minutes)");
        let mut command = Command::new("cargo");
        // Unoptimised: it runs for a second, and an optimised build takes three times as long.
        command.args([
            "install",
            "cargo-deny",
            "--version",
            VERSION,
            "--locked",
            "--no-track",
            "--debug",
            "--quiet",
        ]);
        command.arg("--no-default-features").arg("--root").arg(partial);
        command.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_TARGET_DIR", partial.join("target"));
        exec::run(command.current_dir("/"))?;
        crate::files::remove_tree(&partial.join("target"))
    })?;
    // Packages of all platforms: cargo-deny looks at them without the network.
    exec::run(cargo::command().args(["fetch", "--quiet", "--locked"]))?;
    let mut command = Command::new(dir.join("bin/cargo-deny"));
    command.args(["--offline", "--log-level", "error", "check", "bans", "licenses", "sources"]);
    exec::run(command.current_dir(paths::workspace()))
}
