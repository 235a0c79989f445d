//! Random names.

use std::{fs::File, io::Read};

use super::error::{Doing, KernelError};

/// Two hexadecimal digits for each of `bytes` random bytes.
///
/// # Errors
/// Of reading /dev/urandom.
pub fn hex(bytes: usize) -> Result<String, KernelError> {
    let mut buffer = vec![0u8; bytes];
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut buffer))
        .doing(|| "read /dev/urandom".into())?;
    Ok(buffer.iter().map(|b| format!("{b:02x}")).collect())
}
