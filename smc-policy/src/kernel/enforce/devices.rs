//! Which devices are to have programs, and which.

use super::Scope;
use crate::{
    kernel::{
        error::KernelError,
        hook::Hook,
        object::TcProgram,
        tc::{self, Device, LinkLayer, Side},
    },
    policy::config::{Guard, Interfaces},
};

/// The devices of the calling thread's namespace that are to have programs.
pub(super) fn wanted_devices(scope: &Scope<'_>) -> Result<Vec<Device>, KernelError> {
    let mut devices = tc::devices()?;
    devices.retain(|device| is_wanted(&scope.config.interfaces, device));
    Ok(devices)
}

pub(super) fn is_wanted(interfaces: &Interfaces, device: &Device) -> bool {
    interfaces.wants(&device.name, device.has_address)
}

pub(super) fn link_layer(device: &Device) -> Result<LinkLayer, KernelError> {
    device.link_layer.ok_or_else(|| KernelError::Missing {
        feature: format!(
            "its packets begin with a header that is not known (hardware type {})",
            device.hardware
        ),
        next: "name it in `exclude` of config.toml if no SMC is used over it".into(),
    })
}

/// What a device that is to be covered gets at this side.
pub(super) fn program_for(
    scope: &Scope<'_>,
    device: &Device,
    side: Side,
) -> Result<Option<TcProgram>, KernelError> {
    let guard = scope.config.guard == Guard::Canary;
    let link_layer = link_layer(device)?;
    Ok(match (scope.hook, side, link_layer) {
        (Hook::Tc, Side::Egress, LinkLayer::Ethernet) => Some(TcProgram::EgressEthernet),
        (Hook::Tc, Side::Egress, LinkLayer::Ip) => Some(TcProgram::EgressIp),
        (Hook::Tc, Side::Ingress, LinkLayer::Ethernet) => Some(TcProgram::IngressEthernet),
        (Hook::Tc, Side::Ingress, LinkLayer::Ip) => Some(TcProgram::IngressIp),
        (Hook::HsCtrl, Side::Ingress, LinkLayer::Ethernet) if guard => Some(TcProgram::AnswersEthernet),
        (Hook::HsCtrl, Side::Ingress, LinkLayer::Ip) if guard => Some(TcProgram::AnswersIp),
        (Hook::HsCtrl, ..) => None,
    })
}

pub(super) fn is_our_name(name: &str) -> bool {
    TcProgram::ALL.iter().any(|program| program.program() == name)
}

/// Do devices of this namespace have programs of this tool, whichever instance they belong to?
///
/// # Errors
/// [`KernelError::Io`].
pub fn has_programs_here() -> Result<bool, KernelError> {
    for device in tc::devices()? {
        for side in Side::ALL {
            if tc::chain(&device, side)?.iter().any(|a| is_our_name(&a.name)) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}
