//! Random names and numbers.

use std::{fs::File, io::Read};

use super::error::{Doing, KernelError};

/// Two hexadecimal digits for each of `bytes` random bytes.
///
/// # Errors
/// Of reading /dev/urandom.
pub fn hex(bytes: usize) -> Result<String, KernelError> {
    let mut buffer = vec![0u8; bytes];
    fill(&mut buffer)?;
    Ok(buffer.iter().map(|b| format!("{b:02x}")).collect())
}

/// A random number.
///
/// # Errors
/// Of reading /dev/urandom.
pub fn number() -> Result<u64, KernelError> {
    let mut bytes = [0; 8];
    fill(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

fn fill(buffer: &mut [u8]) -> Result<(), KernelError> {
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(buffer))
        .doing(|| "read /dev/urandom".into())
}
