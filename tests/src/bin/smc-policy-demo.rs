//! The main job, shown on a real kernel: what `cargo xtask demo` runs inside the lab.
//!
//! Two services speak SMC; a policy keeps one of them on plain TCP, which `explain` explains; `detach` brings SMC back.
//! Everything printed is the output of the commands and connections that it names; a surprise is a failure (exit code 1).

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::{Command, ExitCode},
};

use smc_policy_tests::{Kind, Listener, Outcome, Transport, connection::exchange, netns, ueid};

/// In the VPC of the example policy, and outside of it.
const SERVICES: [(Ipv4Addr, u16); 2] =
    [(Ipv4Addr::new(10, 1, 0, 5), 6379), (Ipv4Addr::new(203, 0, 113, 7), 443)];

fn main() -> ExitCode {
    let Some(policy) = std::env::args().nth(1) else {
        eprintln!("usage: smc-policy-demo POLICY-FILE");
        return ExitCode::from(2);
    };
    if let Err(error) = ueid::ensure() {
        eprintln!("no SMC here: cannot add a UEID: {error}");
        return ExitCode::from(3);
    }
    let addresses = SERVICES.map(|(ip, _)| IpAddr::V4(ip));
    match netns::in_new_namespace(&addresses, || story(&policy)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(surprise) => {
            eprintln!("\nThis is not what should have happened: {surprise}");
            ExitCode::FAILURE
        }
    }
}

fn story(policy: &str) -> Result<(), String> {
    let services = SERVICES.map(|(ip, port)| Listener::bind(Kind::AfSmc, SocketAddr::new(ip.into(), port)));
    title("Two services, no policy: both connections are SMC");
    connect(&services, [true, true])?;

    title("A policy: SMC only inside our own networks");
    smc_policy(&["check", policy], 0)?;
    smc_policy(&["apply", policy], 0)?;

    title("At once, the one outside is plain TCP, the other stays SMC");
    connect(&services, [true, false])?;

    title("Why?");
    smc_policy(&["explain", "203.0.113.7:443"], 1)?;
    smc_policy(&["explain", "0x03010000"], 0)?;
    smc_policy(&["status"], 0)?;

    title("Off again: both are SMC");
    smc_policy(&["detach"], 0)?;
    connect(&services, [true, true])?;

    println!(
        "\nSeen: without a policy both services spoke SMC; under the policy {} stayed plain TCP and {} kept SMC; \
         after detach both speak SMC again.",
        services[1].address(),
        services[0].address()
    );
    Ok(())
}

fn title(text: &str) {
    println!("\n== {text}");
}

/// Connects to each service, exchanges data both ways, and says what SMC_DIAG says of both ends.
fn connect(services: &[Listener; 2], smc: [bool; 2]) -> Result<(), String> {
    for (service, smc) in services.iter().zip(smc) {
        let outcome = exchange(Kind::AfSmc, None, service).map_err(|failure| failure.to_string())?;
        println!(
            "  {:<18}{:<26}connected in {:>6.1?}, data intact both ways",
            service.address().to_string(),
            both_ends(&outcome),
            outcome.connect_time
        );
        if outcome.is_smc() != smc {
            return Err(format!("{outcome}"));
        }
    }
    Ok(())
}

/// What carries the connection, in few words.
fn both_ends(outcome: &Outcome) -> String {
    let word = |transport: Transport| match transport {
        Transport::Fallback(reason, _) => format!("TCP, reason {reason:#010x}"),
        other => other.to_string(),
    };
    let (client, server) = (word(outcome.client.transport), word(outcome.server.transport));
    if client == server { client } else { format!("{client} / {server}") }
}

/// Runs the real command and shows it as it would stand on a terminal.
fn smc_policy(arguments: &[&str], expected: i32) -> Result<(), String> {
    println!("$ smc-policy {}", arguments.join(" "));
    let program = std::env::var_os("SMC_POLICY_BIN").unwrap_or_else(|| "smc-policy".into());
    let status =
        Command::new(program).args(arguments).status().map_err(|e| format!("cannot run smc-policy: {e}"))?;
    match status.code() {
        Some(code) if code == expected => Ok(()),
        _ => Err(format!("smc-policy {} ended with {status}", arguments.join(" "))),
    }
}
