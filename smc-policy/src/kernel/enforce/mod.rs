//! Makes an instance decide where it is to, by the hook it is to, and nowhere else.
//!
//! The new way stands before the old one is taken away: in between both decide, alike or one of them as the new policy
//! says, so that no connection goes unjudged and none is judged by a mixture.

mod devices;
mod establish;
mod guarding;
mod inspect;
mod release;

pub use self::{
    devices::has_programs_here,
    establish::{Established, establish},
    guarding::{Guarded, inspect_guard},
    inspect::{Coverage, DeviceCoverage, NamespaceCoverage, inspect},
    release::{Released, release},
};

use super::{
    error::KernelError,
    hook::Hook,
    namespace::{self, Namespace},
};
use crate::{
    paths::Paths,
    policy::config::{Config, Namespaces},
};

/// Where and how a policy is enforced.
#[derive(Clone, Copy, Debug)]
pub struct Scope<'a> {
    /// The folders.
    pub paths: &'a Paths,
    /// The hook.
    pub hook: Hook,
    /// Namespaces and devices.
    pub config: &'a Config,
}

/// The name of this tool's own namespace among names.
const HOST: &str = "host";

/// The namespaces that the policy is to be enforced in, and those that there are not.
fn wanted(config: &Config) -> Result<(Vec<Namespace>, Vec<String>), KernelError> {
    match &config.namespaces {
        Namespaces::Host => Ok((vec![namespace::own()?], Vec::new())),
        Namespaces::All => {
            let (all, unreached) = namespace::all()?;
            Ok((all, unreached.iter().map(ToString::to_string).collect()))
        }
        Namespaces::Named(names) => {
            let (mut found, mut gaps) = (Vec::new(), Vec::new());
            for name in names {
                let namespace = if name == HOST { namespace::own() } else { namespace::named(name) };
                match namespace {
                    Ok(namespace) => found.push(namespace),
                    Err(e @ KernelError::Missing { .. }) => gaps.push(e.to_string()),
                    Err(e) => return Err(e),
                }
            }
            Ok((found, gaps))
        }
    }
}
