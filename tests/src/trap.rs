//! Stops a command at a chosen moment: where it opens a certain file.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::tool::{Run, Running};
use crate::{eventually, sys};

/// A FIFO in the place of a file: the command that opens the file waits there. What was in the place returns when the
/// trap goes.
#[derive(Debug)]
pub struct Trap {
    path: PathBuf,
    was: Option<Vec<u8>>,
}

impl Trap {
    /// Puts it in the place of `path`.
    ///
    /// # Panics
    /// When that is not possible.
    #[must_use]
    pub fn set(path: &Path) -> Self {
        let was = match fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            other => Some(other.expect("a readable file")),
        };
        if was.is_some() {
            fs::remove_file(path).expect("removed");
        }
        let name = CString::new(path.as_os_str().as_bytes()).expect("no NUL in a path");
        sys::make_fifo(&name).expect("a FIFO");
        Self { path: path.to_owned(), was }
    }

    /// Waits until the command has come to it, and kills it there with SIGKILL.
    ///
    /// # Panics
    /// When the command ends, or does not come.
    pub fn kill(self, mut command: Running) -> Run {
        eventually("it is caught", || {
            assert!(command.is_running(), "it passed by");
            // What a process sleeps in (/proc/PID/wchan) is the FIFO's wait for its other end, fs/pipe.c.
            let sleeps_in = fs::read_to_string(format!("/proc/{}/wchan", command.pid()));
            sleeps_in.is_ok_and(|name| name.contains("wait_for_partner") || name.contains("fifo_open"))
        });
        std::thread::sleep(Duration::from_millis(10));
        let run = command.kill();
        assert_eq!(run.code(), None, "{run:#?}");
        run
    }
}

impl Drop for Trap {
    fn drop(&mut self) {
        fs::remove_file(&self.path).expect("removed");
        if let Some(bytes) = &self.was {
            fs::write(&self.path, bytes).expect("put back");
        }
    }
}
