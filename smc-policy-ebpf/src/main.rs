//! The eBPF programs of smc-policy.
//!
//! | file | programs |
//! |---|---|
//! | `hs_ctrl.rs` | the two callbacks of the kernel's `smc_hs_ctrl` (struct_ops) |
//! | `tc.rs` | take the SMC option out of SYNs, and out of SYN-ACKs that return our mark (tc): `tc_packet.rs` finds the SYN, `tc_option.rs` the option, `tc_socket.rs` whose it is |
//! | `sock_ops.rs` | marks the SYNs that are allowed (sock_ops); `canary.rs` says with what |
//! | `learner.rs` | learn from how negotiations end (fexit and tracepoint of the smc module) |
//! | `quarantine.rs` | no program: the quarantine that the programs share |
//! | `events.rs` | no program: what is told to whoever reads |
//! | `query.rs` | judges the connections in a test run's packet: how user space asks the tables in force |
//!
//! Loaded by smc-policy/src/kernel/object.rs. aya-obj only knows the section names of aya's own program types, so
//! struct_ops programs stand in `fentry/` sections and the loader chooses their type by name.
#![no_std]
#![no_main]

mod canary;
mod decision;
mod events;
mod hs_ctrl;
mod learner;
mod maps;
mod quarantine;
mod query;
mod sock;
mod sock_ops;
mod tc;
mod tc_option;
mod tc_packet;
mod tc_socket;

/// The kernel refuses GPL-only helpers and struct_ops to programs without this.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";

/// Never reached: the verifier follows every path and accepts no endless loop.
#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
