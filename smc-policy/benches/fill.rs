//! From networks in a text file to a policy in force, beside `nft -f` with an interval set and `ipset restore` with the
//! same networks. Each is a program of its own, whose CPU time the kernel counts; the peers run in a network namespace
//! that goes with them.

mod support;

use std::{
    env, fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use smc_policy::{
    kernel::{
        apply::{Request, room_for},
        barrier::wait_for_programs,
        hook::Hook,
        instance::Instance,
        object::Sizes,
        record::{self, Overrides, Record},
    },
    policy::{
        Config, Moment, Settings, SourceFile,
        address::{from_ip, to_ip},
        compile, load, run_tests,
    },
};
use smc_policy_common::query::{Addr, Direction, Query};

use support::{
    Options, Result,
    figures::{self, Figure},
    median,
    networks::{Family, Mix, Network, address, generate, name},
    pins::Pins,
    short,
    usage::{self, Usage, cpu_time},
};

/// The first argument of this program when it is to be measured itself.
const CHILD: &str = "--measured";
/// The first argument of this program when it is to write the files. In a process of its own as well: the most memory that
/// the kernel says a program had is never less than what its parent had when it was started.
const WRITER: &str = "--write";

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().collect();
    if let [_, first, form, file, run, pins, peer] = arguments.as_slice()
        && first == CHILD
    {
        return put_in_force(Form::of(form), Path::new(file), Path::new(run), Path::new(pins), peer);
    }
    if let [_, first, label, count, seed, folder] = arguments.as_slice()
        && first == WRITER
    {
        return Files::write(label, count.parse()?, seed.parse()?, Path::new(folder));
    }
    let Some(options) = Options::read("fill") else { return Ok(()) };
    let pins = Pins::new("smc-policy-bench-fill")?;
    // The record of what is in force is kept in /run, a file system in memory.
    let folder = tempfile::tempdir_in("/run").or_else(|_| tempfile::tempdir())?;
    let peers = Peers::find();
    println!("CPU seconds (wall seconds, most MiB of the program itself), median of the runs\n");
    println!(
        "| networks | smc-policy, TOML | smc-policy, lines | nft -f | ipset restore | nft : TOML | nft : lines | ipset : TOML | ipset : lines |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let sizes: &[usize] = if options.quick { &[10_000] } else { &[100_000, 1_000_000] };
    let (mut reached, mut parts) = (Vec::new(), Vec::new());
    for family in [Family::V4, Family::V6] {
        for mix in [Mix::Routes, Mix::Hosts] {
            for count in sizes {
                let label = format!("{} {}", short(*count), name(family, mix));
                if !options.wants(&label) {
                    continue;
                }
                let files = Files::new(family, mix, *count, folder.path())?;
                let row = Row::measure(&files, *count, options.quick, &peers, &pins)?;
                println!("| {label} | {row} |");
                if *count == 1_000_000 {
                    reached.extend(row.figures(family, mix));
                }
                parts.push((label, row.parts));
            }
        }
    }
    print_parts(&parts);
    peers.explain();
    figures::print(&reached);
    Ok(())
}

/// The same networks as each program wants them.
struct Files {
    toml: PathBuf,
    lines: PathBuf,
    nft: PathBuf,
    ipset: PathBuf,
    /// Where records are written.
    run: PathBuf,
    /// An address in one of the networks.
    peer: String,
}

impl Files {
    fn paths(folder: &Path) -> Self {
        let path = |name: &str| folder.join(name);
        Self {
            toml: path("policy.toml"),
            lines: path("list.txt"),
            nft: path("nft.txt"),
            ipset: path("ipset.txt"),
            run: path("run"),
            peer: String::new(),
        }
    }

    fn new(family: Family, mix: Mix, count: usize, folder: &Path) -> Result<Self> {
        let mut writer = Command::new(env::current_exe()?);
        writer.args([WRITER, name(family, mix), &count.to_string(), &Options::seed().to_string()]);
        let peer = successful(writer.arg(folder))?.stdout.trim().to_owned();
        Ok(Self { peer, ..Self::paths(folder) })
    }

    /// Writes them, and prints the address.
    fn write(label: &str, count: usize, seed: u64, folder: &Path) -> Result<()> {
        let mut kinds = [Family::V4, Family::V6]
            .into_iter()
            .flat_map(|family| [Mix::Routes, Mix::Hosts].map(|mix| (family, mix)));
        let kind = kinds.find(|(family, mix)| name(*family, *mix) == label);
        let (family, mix) = kind.ok_or_else(|| format!("no networks are called {label}"))?;
        let networks = generate(family, mix, count, seed);
        let files = Self::paths(folder);
        fs::write(files.toml, toml_text(&networks))?;
        fs::write(files.lines, joined(&networks, "\n") + "\n")?;
        fs::write(files.nft, nft_text(family, mix, &networks))?;
        fs::write(files.ipset, ipset_text(family, &networks))?;
        let first = networks.first().ok_or("no networks")?;
        println!("{}", to_ip(address(family, first.first)));
        Ok(())
    }
}

/// How the networks are written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// A policy file with all networks in one rule's `peers`.
    Toml,
    /// A network a line, as in a list to download.
    Lines,
}

impl Form {
    fn of(word: &str) -> Self {
        if word == Self::Toml.word() { Self::Toml } else { Self::Lines }
    }

    fn word(self) -> &'static str {
        if self == Self::Toml { "toml" } else { "lines" }
    }
}

// ---- what is measured of this tool: the steps of `apply`, in a process of its own

/// CPU and wall time of each step.
struct Steps {
    cpu: Duration,
    wall: Instant,
    done: Vec<(&'static str, Duration, Duration)>,
}

impl Steps {
    fn new() -> Self {
        Self { cpu: cpu_time(), wall: Instant::now(), done: Vec::new() }
    }

    fn done(&mut self, name: &'static str) {
        let (cpu, wall) = (cpu_time(), Instant::now());
        self.done.push((name, cpu - self.cpu, wall - self.wall));
        (self.cpu, self.wall) = (cpu, wall);
    }

    fn print(&self) {
        for (name, cpu, wall) in &self.done {
            println!("{name}={}={}", cpu.as_secs_f64(), wall.as_secs_f64());
        }
    }
}

/// The path of `apply` on an instance that is not registered, which needs no SMC in the kernel.
fn put_in_force(form: Form, file: &Path, run: &Path, pins: &Path, peer: &str) -> Result<()> {
    let mut steps = Steps::new();
    let text = fs::read_to_string(file)?;
    let sources = match form {
        Form::Toml => vec![SourceFile::policy(file, text)],
        Form::Lines => {
            let name = file.display();
            let policy = format!(
                "version = 1\n[[rule]]\nname = \"listed\"\naction = \"deny\"\npeers_file = \"{name}\"\n"
            );
            vec![SourceFile::policy("listed.toml", policy), SourceFile::list(file, text)]
        }
    };
    steps.done("read");
    let policy =
        load(&sources, Moment::default()).map_err(|found| format!("{} findings", found.len()))?.policy;
    steps.done("load");
    if !run_tests(&policy).is_empty() {
        return Err("a test failed".into());
    }
    let (slots, fresh) = record::assign_slots(&policy, None);
    let tables = compile(&policy, &slots, &Settings::default())?;
    steps.done("compile");
    let needs = Sizes {
        cells: u32::try_from(tables.cells.len())?,
        slots: slots.rules.iter().copied().max().unwrap_or(1) + 1,
    };
    let instance = Instance::create(pins, room_for(needs), false)?;
    for slot in fresh {
        instance.clear_slot(slot)?;
    }
    steps.done("create");
    instance.fill(1, &tables.cells)?;
    steps.done("fill");
    let request = Request {
        sources: &sources,
        policy: &policy,
        origin: &[],
        config: &Config::default(),
        overrides: Overrides::default(),
        config_file: None,
        replace_foreign: false,
        token: "benchmark",
        unconfirmed_until: None,
    };
    let record = Record::new(1, &request, Hook::HsCtrl, &slots);
    record::write(&record::path_of(run, 1), &record)?;
    // What is kept for the next boot is written a second time.
    record::write(&run.join("next.json"), &record)?;
    steps.done("record");
    wait_for_programs()?;
    instance.switch(1);
    steps.done("switch");
    // In force?
    let peer = from_ip(peer.parse()?);
    let local = if peer.as_v4().is_some() { Addr::v4(0x0a00_0001) } else { address(Family::V6, 1) };
    let query = Query { peer, local, port: 443, direction: Direction::Outbound };
    let rule = slots.rules.first().copied();
    match instance.query().ask(&[query])?.as_slice() {
        [Some((false, slot))] if Some(*slot) == rule => {}
        other => return Err(format!("the kernel says {other:?}").into()),
    }
    steps.print();
    Ok(())
}

// ---- the peers

/// The programs to compare with, or why not.
struct Peers {
    nft: std::result::Result<(), String>,
    ipset: std::result::Result<(), String>,
}

impl Peers {
    fn find() -> Self {
        let try_out = |program: &str, text: &str, arguments: &[&str]| {
            let mut file = tempfile::NamedTempFile::new().map_err(|e| e.to_string())?;
            file.write_all(text.as_bytes()).map_err(|e| e.to_string())?;
            let output = isolated(program)
                .args(arguments)
                .arg(file.path())
                .output()
                .map_err(|e| format!("{program} cannot be run: {e}"))?;
            let said = String::from_utf8_lossy(&output.stderr);
            let line = said.lines().next().unwrap_or("no message").to_owned();
            if output.status.success() { Ok(()) } else { Err(format!("{program}: {line}")) }
        };
        let one = [Network { family: Family::V4, first: 0x0a00_0000, bits: 8 }];
        Self {
            nft: try_out("nft", &nft_text(Family::V4, Mix::Hosts, &one), &["-f"])
                .map_err(|why| format!("{why} (nf_tables)")),
            ipset: try_out("ipset", &ipset_text(Family::V4, &one), &["restore", "-file"])
                .map_err(|why| format!("{why} (ip_set_hash_net)")),
        }
    }

    fn explain(&self) {
        for why in [&self.nft, &self.ipset].into_iter().filter_map(|peer| peer.as_ref().err()) {
            println!("\nskipped: {why}");
        }
    }
}

/// A program in a network namespace of its own, which ends with it.
fn isolated(program: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--net", "--", program]);
    command
}

fn joined(networks: &[Network], separator: &str) -> String {
    networks.iter().map(Network::text).collect::<Vec<_>>().join(separator)
}

fn nft_text(family: Family, mix: Mix, networks: &[Network]) -> String {
    let kind = if family == Family::V4 { "ipv4_addr" } else { "ipv6_addr" };
    // nft refuses networks within networks otherwise.
    let merge = if mix == Mix::Routes { "auto-merge\n" } else { "" };
    format!(
        "table inet bench {{\nset peers {{\ntype {kind}\nflags interval\n{merge}elements = {{\n{}\n}}\n}}\n}}\n",
        joined(networks, ",\n")
    )
}

fn ipset_text(family: Family, networks: &[Network]) -> String {
    let (name, count) = (if family == Family::V4 { "inet" } else { "inet6" }, networks.len());
    let create = format!("create peers hash:net family {name} hashsize {} maxelem {count}", count / 4 + 64);
    networks.iter().fold(create, |mut text, network| {
        text.push_str("\nadd peers ");
        text.push_str(&network.text());
        text
    }) + "\n"
}

fn toml_text(networks: &[Network]) -> String {
    format!(
        "version = 1\n\n[[rule]]\nname = \"listed\"\naction = \"deny\"\npeers = [\n    \"{}\",\n]\n",
        joined(networks, "\",\n    \"")
    )
}

// ---- a row of the results

#[derive(Clone, Copy)]
struct Cost {
    cpu: f64,
    wall: f64,
    mib: f64,
}

impl Cost {
    fn of(runs: &[Usage]) -> Self {
        let middle = |value: fn(&Usage) -> f64| median(runs.iter().map(value).collect());
        Self {
            cpu: middle(|run| run.cpu.as_secs_f64()),
            wall: middle(|run| run.wall.as_secs_f64()),
            mib: middle(|run| run.mib),
        }
    }
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} ({:.2}, {:.0})", self.cpu, self.wall, self.mib)
    }
}

/// Median CPU and wall seconds of each step.
type Parts = Vec<(String, f64, f64)>;

struct Row {
    toml: Cost,
    lines: Cost,
    nft: Option<Cost>,
    ipset: Option<Cost>,
    parts: [Parts; 2],
}

impl Row {
    fn measure(files: &Files, count: usize, quick: bool, peers: &Peers, pins: &Pins) -> Result<Self> {
        let (ours, ipsets, nfts) = match (quick, count) {
            (true, _) => (1, 1, 1),
            (false, ..1_000_000) => (7, 5, 3),
            (false, _) => (7, 3, 1),
        };
        let mut measured: [Vec<Usage>; 2] = Default::default();
        let (mut ipset, mut nft) = (Vec::new(), Vec::new());
        for turn in 0..ours {
            for ((form, file), runs) in
                [(Form::Toml, &files.toml), (Form::Lines, &files.lines)].into_iter().zip(&mut measured)
            {
                let mut command = Command::new(env::current_exe()?);
                command.args([CHILD, form.word()]).args([file, &files.run, pins.path()]).arg(&files.peer);
                runs.push(successful(&mut command)?);
                pins.clear()?;
            }
            if turn < ipsets && peers.ipset.is_ok() {
                ipset.push(successful(isolated("ipset").args(["restore", "-file"]).arg(&files.ipset))?);
            }
            if turn < nfts && peers.nft.is_ok() {
                nft.push(successful(isolated("nft").arg("-f").arg(&files.nft))?);
            }
        }
        let some = |runs: &[Usage]| (!runs.is_empty()).then(|| Cost::of(runs));
        Ok(Self {
            toml: Cost::of(&measured[0]),
            lines: Cost::of(&measured[1]),
            nft: some(&nft),
            ipset: some(&ipset),
            parts: [steps(&measured[0]), steps(&measured[1])],
        })
    }

    /// The figures to reach for a million networks.
    fn figures(&self, family: Family, mix: Mix) -> Vec<Figure> {
        let what = |text: &str| format!("1M {}, {text}", name(family, mix));
        let seconds = if family == Family::V4 { 1.0 } else { 1.5 };
        let mut figures = Vec::new();
        for (form, cost) in [("TOML", self.toml), ("lines", self.lines)] {
            figures.push(Figure::at_most(what(&format!("{form} to active, wall")), cost.wall, seconds, "s"));
            if let Some(nft) = self.nft {
                let text = what(&format!("CPU of nft -f by that of {form}"));
                figures.push(Figure::at_least(text, nft.cpu / cost.cpu, 5.0, "times"));
            }
            if let Some(ipset) = self.ipset {
                let text = what(&format!("CPU of ipset restore by that of {form}"));
                figures.push(Figure::at_least(text, ipset.cpu / cost.cpu, 1.0, "times"));
            }
        }
        figures
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { toml, lines, nft, ipset, .. } = self;
        let cost = |cost: &Option<Cost>| cost.map_or("skipped".to_owned(), |cost| cost.to_string());
        let ratio = |cost: &Option<Cost>, to: &Cost| {
            cost.map_or("-".to_owned(), |cost| format!("{:.1}", cost.cpu / to.cpu))
        };
        write!(f, "{toml} | {lines} | {} | {} | ", cost(nft), cost(ipset))?;
        write!(f, "{} | {} | ", ratio(nft, toml), ratio(nft, lines))?;
        write!(f, "{} | {}", ratio(ipset, toml), ratio(ipset, lines))
    }
}

fn successful(command: &mut Command) -> Result<Usage> {
    let usage = usage::run(command)?;
    if usage.success { Ok(usage) } else { Err(format!("{command:?} failed").into()) }
}

/// Reads what the measured processes printed.
fn steps(runs: &[Usage]) -> Parts {
    let lines = |run: &'_ Usage| -> Parts {
        let numbers = run.stdout.lines().filter_map(|line| {
            let mut fields = line.split('=');
            Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
        });
        numbers.collect()
    };
    let runs: Vec<Parts> = runs.iter().map(lines).collect();
    let Some(first) = runs.first() else { return Vec::new() };
    let names = first.iter().enumerate();
    let middle = |at: usize, which: fn(&(String, f64, f64)) -> f64| {
        median(runs.iter().filter_map(|run| run.get(at)).map(which).collect())
    };
    names
        .map(|(at, (name, ..))| (name.clone(), middle(at, |part| part.1), middle(at, |part| part.2)))
        .collect()
}

fn print_parts(parts: &[(String, [Parts; 2])]) {
    println!("\nThe steps of smc-policy, CPU ms (wall ms)\n");
    let Some((_, [first, _])) = parts.first() else { return };
    let names: Vec<&str> = first.iter().map(|(name, ..)| name.as_str()).collect();
    println!("| networks | written as | {} |", names.join(" | "));
    println!("|---|---|{}", "---|".repeat(names.len()));
    for (name, forms) in parts {
        for (form, parts) in [Form::Toml, Form::Lines].iter().zip(forms) {
            let columns: Vec<String> =
                parts.iter().map(|(_, cpu, wall)| format!("{:.0} ({:.0})", cpu * 1e3, wall * 1e3)).collect();
            println!("| {name} | {} | {} |", form.word(), columns.join(" | "));
        }
    }
}
