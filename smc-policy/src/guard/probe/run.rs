//! Probes many targets: so many at a time, so many packets a second.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read},
    net::IpAddr,
    sync::mpsc::RecvTimeoutError,
    time::{Duration, Instant},
};

use super::{
    classify::{Finding, classify},
    conversation::{Conversation, Observations, Packet, Ports, Settings, unwanted},
    target::Target,
    wire::{self, Heard, ReservedPorts, What, Wire},
};

/// How often progress is told, at most.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// How to go about it.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Targets at a time, at least 1.
    pub concurrency: usize,
    /// Packets a second, at least 1; answers that end connections are not counted.
    pub rate: u32,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Targets that are done.
    pub done: usize,
    /// All targets.
    pub total: usize,
}

/// What was found about one target.
#[derive(Clone, Debug)]
pub struct Report {
    /// Which.
    pub target: Target,
    /// What was seen.
    pub seen: Observations,
    /// What it means.
    pub finding: Finding,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// Raw sockets are not permitted.
    #[error(
        "not permitted: probing sends raw SYNs, which needs CAP_NET_RAW; run as root, or grant the capability"
    )]
    NotPermitted,
    /// The sockets that keep the kernel silent are not permitted.
    #[error(
        "not permitted: completing a handshake takes CAP_NET_ADMIN besides CAP_NET_RAW; run as root, grant it, or say \
         --options-only to do without"
    )]
    NotPermittedToNegotiate,
    /// A socket could not be made or used.
    #[error("cannot open the sockets to probe with: {0}")]
    Io(#[from] io::Error),
}

/// Probes `targets`; the reports are in their order.
///
/// # Errors
/// [`ProbeError`]; what concerns one target only is in its report.
pub fn run(
    targets: &[Target],
    settings: Settings,
    pace: Pace,
    mut tell: impl FnMut(Progress),
) -> Result<Vec<Report>, ProbeError> {
    wire::check_permission().map_err(permission(ProbeError::NotPermitted))?;
    let reserved =
        ReservedPorts::new(settings.negotiate).map_err(permission(ProbeError::NotPermittedToNegotiate))?;
    let is_needed = |v4| targets.iter().any(|target| target.address.is_ipv4() == v4);
    let wire = Wire::open(is_needed(true), is_needed(false), &reserved.ports)?;
    let mut random = Random::open()?;
    let mut probing = Probing {
        targets,
        settings,
        ports: reserved.ports,
        wire,
        open: HashMap::new(),
        seen: targets.iter().map(|_| None).collect(),
        next: 0,
    };
    let interval = Duration::from_secs(1) / pace.rate.max(1);
    let mut slot = Instant::now();
    let mut told = slot;
    loop {
        let now = Instant::now();
        while probing.open.len() < pace.concurrency.max(1) && probing.next < targets.len() {
            probing.begin(now, &mut random);
        }
        let Some(due) = probing.due() else { break };
        // The first slot that is free; a pause does not save up for a burst.
        let at = due.max(slot);
        if at <= now && probing.act(now) {
            slot = slot.max(now) + interval;
        }
        if now.duration_since(told) >= TELL_EVERY {
            told = now;
            tell(Progress { done: probing.done(), total: targets.len() });
        }
        let wait = if at <= now { Duration::ZERO } else { (at - now).min(TELL_EVERY) };
        match probing.wire.heard.recv_timeout(wait) {
            Ok(heard) => {
                probing.hear(&heard);
                while let Ok(heard) = probing.wire.heard.try_recv() {
                    probing.hear(&heard);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("a receiving thread has ended").into());
            }
        }
        probing.collect();
    }
    tell(Progress { done: targets.len(), total: targets.len() });
    let reports = targets.iter().zip(probing.seen).map(|(target, seen)| {
        let seen = seen.unwrap_or_default();
        Report { target: target.clone(), finding: classify(&seen), seen }
    });
    Ok(reports.collect())
}

/// Makes `refused` of a refusal.
fn permission(refused: ProbeError) -> impl FnOnce(io::Error) -> ProbeError {
    move |error| if error.kind() == io::ErrorKind::PermissionDenied { refused } else { error.into() }
}

struct Probing<'a> {
    targets: &'a [Target],
    settings: Settings,
    ports: Ports,
    wire: Wire,
    /// By the target's index.
    open: HashMap<usize, (IpAddr, Conversation)>,
    seen: Vec<Option<Observations>>,
    next: usize,
}

impl Probing<'_> {
    fn begin(&mut self, now: Instant, random: &mut Random) {
        let index = self.next;
        self.next += 1;
        let Some(target) = self.targets.get(index) else { return };
        let mut conversation =
            Conversation::new(target.address, self.ports, self.settings, now, || random.number());
        let source = match wire::source(target.address) {
            Ok(source) => source,
            Err(error) => {
                conversation.fail(&error.to_string());
                target.address.ip()
            }
        };
        self.open.insert(index, (source, conversation));
        self.collect();
    }

    fn done(&self) -> usize {
        self.next - self.open.len()
    }

    fn due(&self) -> Option<Instant> {
        self.open.values().filter_map(|(_, conversation)| conversation.due()).min()
    }

    /// Lets the one whose turn it is act. Whether a packet was sent.
    fn act(&mut self, now: Instant) -> bool {
        let first =
            self.open.iter_mut().filter(|(_, (_, c))| c.due().is_some()).min_by_key(|(_, (_, c))| c.due());
        let Some((_, (source, conversation))) = first else { return false };
        let packets = conversation.act(now);
        send(&self.wire, *source, conversation, &packets);
        !packets.is_empty()
    }

    fn hear(&mut self, heard: &Heard) {
        match &heard.what {
            What::Icmp(message) => {
                for (_, conversation) in self.open.values_mut() {
                    conversation.hear_icmp(heard.at, heard.from, message);
                }
            }
            What::Tcp(segment) => {
                let is_meant = |conversation: &Conversation| {
                    let target = conversation.target();
                    (target.ip(), target.port()) == (heard.from, segment.source_port)
                };
                if let Some((source, conversation)) = self.open.values_mut().find(|(_, c)| is_meant(c)) {
                    let packets = conversation.hear_tcp(heard.at, segment);
                    send(&self.wire, *source, conversation, &packets);
                } else if let Some(reset) = unwanted(&self.ports, segment)
                    && let Some(target) =
                        self.targets.iter().map(|target| target.address).find(|address| {
                            (address.ip(), address.port()) == (heard.from, segment.source_port)
                        })
                    && let Ok(source) = wire::source(target)
                {
                    // As good as lost if it cannot be sent.
                    let _ = self.wire.send(source, target, &Packet::Tcp(reset));
                }
            }
        }
    }

    /// Takes what is over out.
    fn collect(&mut self) {
        for (index, (_, conversation)) in self.open.extract_if(|_, (_, c)| c.due().is_none()) {
            if let Some(place) = self.seen.get_mut(index) {
                *place = Some(conversation.into_observations());
            }
        }
    }
}

/// Sends packets of a conversation, and tells it when that fails.
fn send(wire: &Wire, source: IpAddr, conversation: &mut Conversation, packets: &[Packet]) {
    for packet in packets {
        match wire.send(source, conversation.target(), packet) {
            Ok(()) => {}
            // The queue is full: as if lost on the way.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
            Err(error) => conversation.fail(&error.to_string()),
        }
    }
}

/// Random numbers that a peer cannot guess.
struct Random(File);

impl Random {
    fn open() -> io::Result<Self> {
        File::open("/dev/urandom").map(Self)
    }

    fn number(&mut self) -> u32 {
        let mut bytes = [0; 4];
        // Reading it does not fail once it is open; a guessable number costs only the certainty that no one spoofs.
        let _ = self.0.read_exact(&mut bytes);
        u32::from_ne_bytes(bytes)
    }
}
