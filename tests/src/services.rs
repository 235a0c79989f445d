//! Services that tell policies apart by what connections to them become.

use serde_json::Value;

use crate::connection::{Kind, Listener, exchange_sized};
use crate::lab::{Lab, is_smc, listen};
use crate::tool::Run;

/// Four services; policy number `n` (0 to 15) denies those whose bit is set in `n`, each by a rule of its own.
#[derive(Debug)]
pub struct Services(pub [Listener; 4]);

impl Default for Services {
    fn default() -> Self {
        Self::open()
    }
}

impl Services {
    /// Opens them in the calling thread's network namespace.
    ///
    /// # Panics
    /// When that is not possible.
    #[must_use]
    pub fn open() -> Self {
        Self([(); 4].map(|()| listen(Kind::AfSmc, "127.0.0.2")))
    }

    /// The text of policy `number`: connections that this host makes to them.
    #[must_use]
    pub fn policy(&self, number: u64) -> String {
        self.policy_by(number, |_| "outbound")
    }

    /// The text of policy `number`; two of the services are denied as connections made, two as connections accepted.
    #[must_use]
    pub fn policy_both_ways(&self, number: u64) -> String {
        self.policy_by(number, |bit| if bit % 2 == 0 { "outbound" } else { "inbound" })
    }

    fn policy_by(&self, number: u64, direction: impl Fn(usize) -> &'static str) -> String {
        let mut text = format!("version = 1\n# policy {number}\n");
        for (bit, listener) in self.0.iter().enumerate() {
            if number >> bit & 1 == 1 {
                let (port, direction) = (listener.port(), direction(bit));
                text += &format!(
                    "[[rule]]\nname = \"service-{bit}\"\naction = \"deny\"\ndirection = \"{direction}\"\nports = [{port}]\n"
                );
            }
        }
        text
    }

    /// A file with policy `number`.
    ///
    /// # Panics
    /// When it cannot be written.
    #[must_use]
    pub fn file(&self, lab: &Lab, number: u64) -> String {
        let path = lab.home.write(&format!("policy-{number}.toml"), &self.policy(number));
        path.into_os_string().into_string().expect("a path in UTF-8")
    }

    /// Applies policy `number` and expects that to succeed.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn apply(&self, lab: &Lab, number: u64) -> Run {
        lab.home.run(["apply", &self.file(lab, number)]).ok()
    }

    /// The number of the policy that the kernel enforces now.
    ///
    /// # Panics
    /// When a connection fails or is neither SMC nor denied.
    #[must_use]
    pub fn enforced(&self) -> u64 {
        let mut number = 0;
        for (bit, listener) in self.0.iter().enumerate() {
            let outcome = exchange_sized(Kind::AfSmc, None, listener, &[1, 100]).expect("a connection");
            assert_ne!(is_smc(&outcome), outcome.is_denied(), "{outcome}");
            number |= u64::from(outcome.is_denied()) << bit;
        }
        number
    }

    /// The number of the policy that `explain` speaks of.
    ///
    /// # Panics
    /// When it does not say.
    #[must_use]
    pub fn explained(&self, lab: &Lab) -> u64 {
        self.explained_by(lab, "--outbound")
    }

    /// As [`Self::explained`], for policies of [`Self::policy_both_ways`].
    ///
    /// # Panics
    /// When it does not say.
    #[must_use]
    pub fn explained_both_ways(&self, lab: &Lab) -> u64 {
        self.explained_by(lab, "--outbound") & 0b0101 | self.explained_by(lab, "--inbound") & 0b1010
    }

    fn explained_by(&self, lab: &Lab, direction: &str) -> u64 {
        // One question for all: without a port, the answer lists what holds for which ports.
        let answer = lab.explain(&[direction, "127.0.0.2"]);
        let regions = answer["regions"].as_array().expect("regions");
        let mut number = 0;
        for (bit, listener) in self.0.iter().enumerate() {
            let region = regions.iter().find(|region| has_port(region, listener.port()));
            let region = region.unwrap_or_else(|| panic!("no answer for {listener:?}: {answer:#}"));
            number |= u64::from(region["action"] == "deny") << bit;
        }
        number
    }
}

/// Whether a region of `explain --json` is about this port; without ports it is about all.
fn has_port(region: &Value, port: u16) -> bool {
    let ports = region["ports"].as_array().expect("ports");
    let is_in = |text: &str| {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let bound = |text: &str| text.parse::<u16>().expect("a port");
        (bound(first)..=bound(last)).contains(&port)
    };
    ports.is_empty() || ports.iter().any(|text| is_in(text.as_str().expect("a port or range")))
}
