//! A wire between two TUN devices.

use std::fs::File;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::{Host, sys};

/// Carries packets from each of two TUN devices to the other, until it goes.
#[derive(Debug)]
pub struct Relay {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Relay {
    /// Makes a TUN device of this name at each host and joins them. They are down and have no address.
    ///
    /// # Panics
    /// When that is not possible.
    #[must_use]
    pub fn between(one: &Host, two: &Host, name: &str) -> Self {
        let [first, second] = [one, two].map(|host| host.run(|| sys::open_tun(name)).expect("a TUN device"));
        let copies = [(&first, &second), (&second, &first)]
            .map(|(from, to)| (from.try_clone().expect("a copy"), to.try_clone().expect("a copy")));
        let is_over = Arc::new(AtomicBool::new(false));
        let carry = |(from, to): (File, File)| {
            let is_over = is_over.clone();
            thread::spawn(move || carry(&from, &to, &is_over))
        };
        Self { threads: copies.map(carry).into(), is_over }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn carry(mut from: &File, mut to: &File, is_over: &AtomicBool) {
    let mut packet = vec![0; 1 << 16];
    while !is_over.load(Ordering::Acquire) {
        if !sys::is_readable(from, Duration::from_millis(50)).is_ok_and(|readable| readable) {
            continue;
        }
        // A device that is down refuses both: the packet is lost, as on any wire.
        if let Ok(length) = from.read(&mut packet) {
            let _ = to.write_all(&packet[..length]);
        }
    }
}
