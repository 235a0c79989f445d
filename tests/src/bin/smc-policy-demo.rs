//! The main job, shown on a real kernel: what `cargo xtask demo` runs inside the lab.
//!
//! Two services speak SMC, and a server that echoes TCP options makes connections hang; a policy keeps one of the services on
//! plain TCP, which `explain` explains, and the echo guard that comes with it makes the first connection to that server work;
//! `detach` brings SMC back.
//! Everything printed is the output of the commands and connections that it names; a surprise is a failure (exit code 1).

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::{Command, ExitCode},
};

use smc_policy_tests::{
    Kind, Listener, Outcome, Transport,
    connection::exchange,
    echo_peer::{Behaviour, EchoPeer, Style},
    meeting::{HELLO, Meeting},
    netns, ueid,
};

/// In the VPC of the example policy, and outside of it.
const SERVICES: [(Ipv4Addr, u16); 2] =
    [(Ipv4Addr::new(10, 1, 0, 5), 6379), (Ipv4Addr::new(203, 0, 113, 7), 443)];

/// A server of ours behind a load balancer that sends back the options of a SYN.
const ECHOES: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 77, 0, 5), 8080);

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

    title("A server of ours that sends TCP options back: ping works, connections die");
    let echoes = EchoPeer::start("echo0");
    echoes.set(Style::All, Behaviour::Silent);
    let met = meet(&echoes);
    if met.result.is_ok() {
        return Err("it worked without the tool".to_owned());
    }

    title("A policy: SMC only inside our own networks");
    smc_policy(&["check", policy], 0)?;
    smc_policy(&["apply", policy], 0)?;

    title("At once, the one outside is plain TCP, the other stays SMC");
    connect(&services, [true, false])?;

    title("The server that echoes: its first connection works already, and it is remembered");
    let met = meet(&echoes);
    if met.reason() != Some(0x0301_0000) || met.got != HELLO {
        return Err(format!("{met}"));
    }
    smc_policy(&["quarantine", "list"], 0)?;

    title("Why?");
    smc_policy(&["explain", "203.0.113.7:443"], 1)?;
    smc_policy(&["explain", "0x03010000"], 0)?;
    smc_policy(&["status"], 0)?;

    title("Off again: both are SMC");
    smc_policy(&["detach"], 0)?;
    connect(&services, [true, true])?;

    println!(
        "\nSeen: without a policy both services spoke SMC, and connections to {0}:{1} died; under the policy {2} stayed plain TCP, \
         {3} kept SMC, and the first connection to {0}:{1} worked; after detach both speak SMC again.",
        ECHOES.0,
        ECHOES.1,
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

/// Connects to the server that echoes, and says what became of that at both ends.
fn meet(peer: &EchoPeer) -> Meeting {
    let to = SocketAddr::new(ECHOES.0.into(), ECHOES.1);
    let met = Meeting::arrange(peer, Kind::AfSmc, to, Behaviour::Silent);
    let got = match met.got.strip_suffix(HELLO) {
        Some([]) => "what was sent and nothing else".to_owned(),
        _ => format!("{} bytes of SMC in the place of its own protocol", met.got.len()),
    };
    let what = match &met.result {
        Ok(Transport::Fallback(reason, _)) => format!("TCP, reason {reason:#010x}"),
        Ok(other) => other.to_string(),
        // Without the number.
        Err(error) => error.to_string().split(" (os error").next().unwrap_or_default().to_lowercase(),
    };
    let word = if met.result.is_ok() { "connected in" } else { "failed after" };
    println!("  {:<18}{what:<26}{word} {:>6.1?}, the server got {got}", to.to_string(), met.time);
    met
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
