//! `<bpffs>/smc-policy/current`: a symbolic link that names the instance in force where no `net.smc.hs_ctrl` of this
//! namespace does: with the tc hook, or when this namespace is not among those that the policy is enforced in.

use std::{fs, io, path::Path};

use super::{
    error::{Doing, KernelError, remove_if_there},
    hs_ctrl,
};

const LINK: &str = "current";
/// bpffs takes no dots in names.
const BESIDE: &str = "new-current";

/// The instance named, if any.
///
/// # Errors
/// [`KernelError::NotPermitted`] when bpffs may not be read, [`KernelError::Io`].
pub fn get(pins: &Path) -> Result<Option<String>, KernelError> {
    let link = pins.join(LINK);
    match fs::read_link(&link) {
        Ok(target) => Ok(target.to_str().filter(|id| hs_ctrl::is_instance_id(id)).map(str::to_owned)),
        // EINVAL: no link.
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput) => Ok(None),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Err(KernelError::NotPermitted {
            doing: format!("reading which policy is in force ({})", link.display()),
            capability: "CAP_DAC_READ_SEARCH".into(),
        }),
        Err(e) => Err(e).doing(|| format!("read the link {}", link.display())),
    }
}

/// Names the instance: one rename.
///
/// # Errors
/// [`KernelError::Io`].
pub fn set(pins: &Path, id: &str) -> Result<(), KernelError> {
    let (beside, link) = (pins.join(BESIDE), pins.join(LINK));
    remove_if_there(&beside)?;
    std::os::unix::fs::symlink(id, &beside)
        .and_then(|()| fs::rename(&beside, &link))
        .doing(|| format!("make the link {}", link.display()))
}

/// Names none.
///
/// # Errors
/// [`KernelError::Io`].
pub fn clear(pins: &Path) -> Result<(), KernelError> {
    remove_if_there(&pins.join(BESIDE))?;
    remove_if_there(&pins.join(LINK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_name_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(get(dir.path()).unwrap(), None);
        set(dir.path(), "0123abcd").unwrap();
        set(dir.path(), "89abcdef").unwrap();
        assert_eq!(get(dir.path()).unwrap().as_deref(), Some("89abcdef"));
        clear(dir.path()).unwrap();
        clear(dir.path()).unwrap();
        assert_eq!(get(dir.path()).unwrap(), None);
        set(dir.path(), "../elsewhere").unwrap();
        assert_eq!(get(dir.path()).unwrap(), None, "no instance's name");
    }
}
