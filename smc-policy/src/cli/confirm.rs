//! `apply --confirm`: waits for Enter. A second process, which outlives this one and its terminal, returns to what was in
//! force when the time is over.

use std::{
    env,
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use super::{
    outcome::{Done, Exit, Failure},
    output::Output,
    words::duration,
};
use crate::{
    kernel::{
        rollback::{self, RolledBack},
        state::State,
    },
    paths::Paths,
};

/// The second process. Ended when this goes, unless it was waited for.
pub(super) struct Guard(Child);

impl Guard {
    /// Starts it, in a process group of its own: a terminal that goes away does not take it along.
    pub(super) fn spawn(token: &str, time: Duration) -> Result<Self, Failure> {
        let failed = |what: String| {
            Failure::new(
                Exit::Host,
                format!("cannot start the process that would return to the old policy: {what}"),
            )
        };
        let program = env::current_exe().map_err(|e| failed(e.to_string()))?;
        let child = Command::new(program)
            .args(["rollback", "--guard", token, "--after", &time.as_secs().to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|e| failed(e.to_string()))?;
        Ok(Self(child))
    }

    /// Waits for its end.
    fn finish(mut self) {
        // However it ended: what is in force tells.
        let _ = self.0.wait();
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // It may have ended already; otherwise there is nothing for it to do.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for Enter, and says what is in force at the end.
pub(super) fn wait(paths: &Paths, token: &str, time: Duration, guard: Guard, out: &Output) -> Done {
    out.note(&format!(
        "Keep this policy? Press Enter within {}; otherwise what was in force before returns.",
        duration(time.as_secs())
    ));
    if enter_within(time) {
        return if rollback::confirm(paths, token)? {
            out.note("Confirmed.");
            Ok(Exit::Ok)
        } else {
            out.note(&format!("Too late: {}.", in_force(paths, &State::read(paths)?)));
            Ok(Exit::No)
        };
    }
    guard.finish();
    // The guard may have been killed, or have failed: then it is for us to do, or to say why not.
    let done = rollback::revert(paths, token)?;
    let state = State::read(paths)?;
    let is_in_force = state.record.as_ref().is_some_and(|r| r.token == token);
    if matches!(done, RolledBack::NotWaiting) && is_in_force {
        out.note(&format!("Confirmed meanwhile: {}.", in_force(paths, &state)));
        return Ok(Exit::Ok);
    }
    out.note(&format!("Not confirmed: {}.", in_force(paths, &state)));
    Ok(Exit::No)
}

fn enter_within(time: Duration) -> bool {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        let mut line = String::new();
        // The end of input is no confirmation.
        if std::io::stdin().read_line(&mut line).is_ok_and(|n| n > 0) {
            // Nobody may be waiting any more.
            let _ = send.send(());
        } else {
            // Without input, hold the channel open until the time is over.
            thread::sleep(time + Duration::from_secs(1));
        }
    });
    receive.recv_timeout(time).is_ok()
}

/// What is in force now, in words.
fn in_force(paths: &Paths, state: &State) -> String {
    match (state.in_force(), state.trouble(paths)) {
        (Some((_, record)), _) => {
            let files: Vec<_> = record.sources.iter().map(|s| s.path.display().to_string()).collect();
            format!("generation {} is in force ({})", record.generation, files.join(", "))
        }
        (None, Some(trouble)) => trouble,
        (None, None) => "no policy is in force".to_owned(),
    }
}
