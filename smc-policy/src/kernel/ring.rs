//! A BPF ring buffer in this process's memory, and waiting for what comes into it.
//!
//! The only file of the kernel layer beside `sys` with `unsafe` in it: the mapping is shared with the kernel's programs.

use std::{
    io, mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::{self, NonNull},
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use super::sys;

/// Bits of a record's first word, its length (`BPF_RINGBUF_*`, include/uapi/linux/bpf.h): it is being written.
const BUSY: u32 = 1 << 31;
/// It is to be skipped.
const DISCARDED: u32 = 1 << 30;
/// Bytes of a record before its data (`BPF_RINGBUF_HDR_SZ`): the length, and the distance in pages.
const HEADER: usize = 8;

/// A mapping that goes with it.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

impl Mapping {
    fn new(map: BorrowedFd<'_>, bytes: usize, protection: i32, offset: usize) -> io::Result<Self> {
        let offset = i64::try_from(offset).map_err(io::Error::other)?;
        // SAFETY: a fresh mapping chosen by the kernel, which refuses a length or protection that the map has not
        // (`ringbuf_map_mmap_user`, kernel/bpf/ringbuf.c).
        let p = unsafe {
            libc::mmap(ptr::null_mut(), bytes, protection, libc::MAP_SHARED, map.as_raw_fd(), offset)
        };
        match NonNull::new(p.cast()) {
            Some(start) if p != libc::MAP_FAILED => Ok(Self { start, bytes }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The 8 bytes at the start of the mapping.
    fn position(&self) -> &AtomicU64 {
        // SAFETY: the mapping is a page at least, begins at a page's start and lives as long as self; the kernel writes it
        // at any time, which atomics allow.
        unsafe { self.start.cast::<AtomicU64>().as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length and nothing refers to it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// A ring buffer, open for reading. Only one may be at a time: whoever reads moves the one position that says what was read.
#[derive(Debug)]
pub struct Ring {
    map: OwnedFd,
    /// A page with the reader's position, writable.
    consumer: Mapping,
    /// A page with the writers' position, and the data twice in a row, so that none is cut.
    producer: Mapping,
    page: usize,
    size: usize,
}

impl Ring {
    /// Maps the ring buffer.
    ///
    /// # Errors
    /// The system calls'.
    pub fn open(map: OwnedFd) -> io::Result<Self> {
        let size = sys::map_info(map.as_fd())?.max_entries as usize;
        // SAFETY: takes no pointer.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).map_err(io::Error::other)?;
        let consumer = Mapping::new(map.as_fd(), page, libc::PROT_READ | libc::PROT_WRITE, 0)?;
        let producer = Mapping::new(map.as_fd(), page + 2 * size, libc::PROT_READ, page)?;
        Ok(Self { map, consumer, producer, page, size })
    }

    /// Copies the next record's data to the start of `place`, as far as it has room. How long the data are; `None`: there is
    /// none, or it is still being written.
    pub fn take(&mut self, place: &mut [u8]) -> Option<usize> {
        loop {
            // Only we write it.
            let at = self.consumer.position().load(Ordering::Relaxed);
            if at >= self.producer.position().load(Ordering::Acquire) {
                return None;
            }
            let offset = self.page + (at as usize & (self.size - 1));
            // SAFETY: the offset is a multiple of 8, as positions are, and lies inside the first copy of the data; the
            // kernel writes the word when the record is complete, which atomics allow.
            let head = unsafe { self.producer.start.add(offset).cast::<AtomicU32>().as_ref() };
            let head = head.load(Ordering::Acquire);
            if head & BUSY != 0 {
                return None;
            }
            let length = (head & !(BUSY | DISCARDED)) as usize;
            // The kernel writes no longer ones.
            if length > self.size - HEADER {
                return None;
            }
            if head & DISCARDED == 0 {
                let copied = length.min(place.len());
                // SAFETY: a record that is complete is left alone until the position is moved behind it; it lies inside the
                // two copies of the data, as its start lies in the first and it is no longer than one.
                unsafe {
                    let data = self.producer.start.add(offset + HEADER);
                    ptr::copy_nonoverlapping(data.as_ptr(), place.as_mut_ptr(), copied);
                }
            }
            let next = at + (length + HEADER).next_multiple_of(8) as u64;
            self.consumer.position().store(next, Ordering::Release);
            if head & DISCARDED == 0 {
                return Some(length);
            }
        }
    }

    /// Bytes that were ever written.
    pub fn written(&self) -> u64 {
        self.producer.position().load(Ordering::Acquire)
    }
}

impl AsFd for Ring {
    /// Readable while there is something to read.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }
}

/// Waits until one of `readable` can be read, the other end of one of `open` has gone, or the time is over. Whether each of
/// `readable` can be read, and whether one of `open` has gone.
///
/// # Errors
/// The system call's.
pub fn wait(
    readable: &[BorrowedFd<'_>],
    open: &[BorrowedFd<'_>],
    time: Duration,
) -> io::Result<(Vec<bool>, bool)> {
    let entry = |fd: &BorrowedFd<'_>, events| libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    let mut all: Vec<libc::pollfd> = readable.iter().map(|fd| entry(fd, libc::POLLIN)).collect();
    // Errors are told unasked.
    all.extend(open.iter().map(|fd| entry(fd, 0)));
    let time = i32::try_from(time.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: the entries are as many as said and live over the call.
    let result = unsafe { libc::poll(all.as_mut_ptr(), all.len() as libc::nfds_t, time) };
    if result < 0 {
        let error = io::Error::last_os_error();
        // A stop and continuation.
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
        return Ok((vec![false; readable.len()], false));
    }
    let (inputs, outputs) = all.split_at(readable.len());
    let has_gone = outputs.iter().any(|entry| entry.revents & (libc::POLLERR | libc::POLLHUP) != 0);
    Ok((inputs.iter().map(|entry| entry.revents & libc::POLLIN != 0).collect(), has_gone))
}

/// From now on SIGINT and SIGTERM do not end the process but make the descriptor readable. Call it before threads are made.
///
/// # Errors
/// The system calls'.
pub fn termination() -> io::Result<OwnedFd> {
    // SAFETY: a set of signals is plain bits, which sigemptyset sets; the calls get pointers to it alone.
    unsafe {
        let mut signals: libc::sigset_t = mem::zeroed();
        libc::sigemptyset(&mut signals);
        for signal in [libc::SIGINT, libc::SIGTERM] {
            libc::sigaddset(&mut signals, signal);
        }
        let fd = libc::signalfd(-1, &signals, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // The call returned a new file descriptor that nothing else owns.
        let fd = OwnedFd::from_raw_fd(fd);
        match libc::pthread_sigmask(libc::SIG_BLOCK, &signals, ptr::null_mut()) {
            0 => Ok(fd),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}
