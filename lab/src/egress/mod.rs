//! `bench egress`: what passes the rules of `fulmar run`, what does not, and what they cost.
//!
//! Ordinary clients run under an allow list of one name, attacks under rules that should refuse them and, as a control,
//! without. Then the cost of rules is measured. sandbox-runtime, if `scripts/setup egress` has installed it, runs the
//! same clients and carries the same transfers.

mod attacks;
mod clients;
pub(crate) mod numbers;
mod world;

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};
use std::{fs, thread};

use serde_json::{Value, json};

use crate::gateway::program::Programs;
use crate::harness::options::Common;
use crate::harness::report::{Column, Report, Shape, Table, label, words};
use crate::harness::{self, Figure, Pace, Plan, Ratio, Stop};
use attacks::{Attack, Control, KINDS, Special};
use clients::{CLIENTS, Client};
use world::{ALLOWED, As, Inside, World};

/// How long a client or an attack may take, in seconds.
const PATIENCE: u32 = 25;
/// Programs that run at a time: most of them wait.
const AT_A_TIME: usize = 4;

/// Clients and attacks under the rules of `fulmar run`, and the cost of rules
#[derive(clap::Args, Clone, Debug)]
#[command(
    override_usage = "fulmar-lab bench egress [OPTIONS]",
    after_help = "30 ordinary clients under an allow list of one name, attacks on the rules with a
control run each, and the cost of rules: start, connections, throughput.
`scripts/setup egress` installs the clients, and sandbox-runtime to compare with.
The servers are programs of Python in a network namespace of their own."
)]
pub struct Options {
    #[command(flatten)]
    #[expect(missing_docs, reason = "flattened: its own documentation is shown")]
    pub common: Common,
    /// Only clients and attacks whose name contains one of these; `numbers`: the cost of rules
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    only: Vec<String>,
    /// The program fulmar [default: beside this program, else in PATH]
    #[arg(long, value_name = "FILE")]
    fulmar: Option<PathBuf>,
}

impl Options {
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}

/// Runs the bench.
///
/// # Errors
/// No namespaces, no fulmar, no Python.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    isolated?;
    let started = Instant::now();
    let given = options.fulmar.iter().map(|file| ("fulmar".to_owned(), file.clone())).collect();
    let world = World::new(Programs { given }.find("fulmar")?.canonicalize()?)?;
    check_start(&world)?;
    let mut report = Report {
        name: "egress".to_owned(),
        title: "What passes the rules of fulmar run".to_owned(),
        lead: "Ordinary clients under an allow list of one name, attacks on the rules, and the cost of rules.".to_owned(),
        legend: LEGEND.to_owned(),
        ..Report::default()
    };
    add_clients(&mut report, options, &world)?;
    add_attacks(&mut report, options, &world)?;
    report.ended = Some((Stop::Runs, started.elapsed()));
    if options.wants("numbers") {
        add_numbers(&mut report, options, &world)?;
    }
    Ok(report)
}

/// A run that does not start would refuse every attack.
fn check_start(world: &World) -> io::Result<()> {
    let options = ["--rules", "/dev/null", "--allow", ALLOWED].map(str::to_owned);
    for as_user in [As::User, As::Capable, As::AmongOwnProcesses, As::Heir] {
        let words = world.words(&Inside::Fulmar(&options), as_user, "echo egress-ok")?;
        let said = world.run(&words, PATIENCE, "", None)?;
        if !said.output.contains("egress-ok") {
            let why = last_line(&said.output);
            return Err(io::Error::other(format!("`fulmar run` does not start here: {why}")));
        }
    }
    Ok(())
}

/// Does `work` for each of `all` on a few threads; the results are in the order of `all`.
fn side_by_side<T: Sync, R: Send>(all: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let some = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(one) = all.get(at) else { return done };
            done.push((at, work(one)));
        }
    };
    let mut done: Vec<(usize, R)> = thread::scope(|scope| {
        let threads: Vec<_> = (0..AT_A_TIME).map(|_| scope.spawn(some)).collect();
        threads.into_iter().flat_map(|t| t.join().expect("no work panics")).collect()
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

/// `tk` and twelve hexadecimal digits, different each time.
fn new_mark() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(1);
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let count = COUNT.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!("tk{:012x}", (since.as_nanos() as u64).wrapping_add(count) & 0xffff_ffff_ffff)
}

/// The first program of `needs` that is missing.
fn missing(world: &World, needs: &[&'static str]) -> Option<&'static str> {
    needs.iter().find(|program| !world.has(program)).copied()
}

/// The line of an output that tells most, shortened: the last one about an error, or the last one.
fn last_line(output: &str) -> String {
    const TELLING: [&str; 7] =
        ["rror", "denied", "refused", "ailed", "cannot", "Could not", "status"];
    // The notices of a run's start do not tell the reason.
    let is_said = |line: &&str| !line.trim().is_empty() && !line.contains("the rules do not cover");
    let lines: Vec<&str> = output.lines().filter(is_said).collect();
    let telling = lines.iter().rfind(|line| TELLING.iter().any(|word| line.contains(word)));
    let line = telling.or(lines.last()).copied().unwrap_or("no output");
    line.trim().chars().take(100).collect()
}

// ---- clients ----

const WORKS: &str = "works";

const CLIENT_COLUMNS: [Column; 3] =
    [label("client", "client"), words("fulmar", "fulmar run"), words("srt", "sandbox-runtime")];

fn add_clients(report: &mut Report, options: &Options, world: &World) -> io::Result<()> {
    let wanted: Vec<&Client> = CLIENTS.iter().filter(|c| options.wants(c.name)).collect();
    let version = world.srt_version().filter(|_| !options.common.quick);
    let rows = side_by_side(&wanted, |client| client_row(world, client, version.is_some()));
    let rows: Vec<Value> = rows.into_iter().collect::<io::Result<_>>()?;
    let count = |key: &str, word: &str| {
        rows.iter()
            .filter(|row| row[key].as_str().is_some_and(|said| said.starts_with(word)))
            .count() as f64
    };
    let there = rows.len() as f64 - count("fulmar", "absent");
    if rows.is_empty() {
        return Ok(());
    }
    report.notes.push(format!(
        "Clients: {} of {} that are here work under `fulmar run --allow {ALLOWED}` ({} of 30 are here).",
        count("fulmar", WORKS),
        there,
        there
    ));
    if let Some(version) = &version {
        let with = count("srt", WORKS);
        report.notes.push(format!(
            "Under sandbox-runtime {version} with the same name allowed: {with} of {there}."
        ));
        report.figures.push(Figure::of(
            plain("egress.clients.srt", "the same under sandbox-runtime"),
            &[with],
        ));
    }
    let ratio = plain(
        "egress.clients",
        "of 30 ordinary clients, those that work under an allow list of one name",
    );
    report
        .figures
        .push(Figure::of(ratio.goals(30.0, 30.0).more_is_better(), &[count("fulmar", WORKS)]));
    report.tables.push(Table::of("Clients under an allow list of one name", CLIENT_COLUMNS, rows));
    Ok(())
}

/// A figure that is a count.
fn plain(name: &str, sentence: &str) -> Ratio {
    Ratio::value(name, sentence, "count", name).exact()
}

fn client_row(world: &World, client: &Client, has_srt: bool) -> io::Result<Value> {
    if let Some(program) = missing(world, client.needs) {
        let why = format!("absent: no {program}");
        return Ok(
            json!({ "name": client.name, "client": client.name, "fulmar": why, "srt": null }),
        );
    }
    let rules = ["--rules", "/dev/null", "--allow", ALLOWED].map(str::to_owned);
    let with_fulmar = client_run(world, client, &Inside::Fulmar(&rules))?;
    let with_srt = match has_srt {
        true => Some(client_run(world, client, &Inside::Srt(&[ALLOWED.to_owned()]))?),
        false => None,
    };
    let said = match with_fulmar {
        Err(why) => match client_run(world, client, &Inside::Host)? {
            Ok(()) => format!("fails: {why}"),
            Err(why) => format!("absent: fails on the host, too: {why}"),
        },
        Ok(()) => WORKS.to_owned(),
    };
    let of_srt =
        with_srt.map(|r| r.map_or_else(|why| format!("fails: {why}"), |()| WORKS.to_owned()));
    Ok(json!({ "name": client.name, "client": client.name, "fulmar": said, "srt": of_srt }))
}

/// Why the client failed, if it did.
fn client_run(
    world: &World,
    client: &Client,
    inside: &Inside<'_>,
) -> io::Result<Result<(), String>> {
    let words = world.words(inside, As::User, client.script)?;
    let said = world.run(&words, PATIENCE, "", None)?;
    Ok(match said.is_success && said.output.contains("egress-ok") {
        true => Ok(()),
        false => Err(last_line(&said.output)),
    })
}

// ---- numbers ----

/// Time for the rounds.
const FULL: Duration = Duration::from_secs(150);
/// The same with --quick: one round of the main figures.
const QUICK: Duration = Duration::from_secs(4);

const SHAPE: Shape = Shape {
    name: "egress",
    title: "",
    lead: "",
    columns: numbers::COLUMNS,
    across: None,
    chart: None,
    legend: "",
};

fn add_numbers(report: &mut Report, options: &Options, world: &World) -> io::Result<()> {
    numbers::start_server(world)?;
    let scenarios = numbers::scenarios(world, options.common.quick);
    let ratios = numbers::ratios(&scenarios);
    let (budget, max_runs) = (options.common.budget(QUICK, FULL), options.common.runs);
    let outcome = harness::run(Plan { scenarios, ratios, budget, max_runs, pace: Pace::Programs });
    let measured = Report::of(&SHAPE, outcome);
    report.tables.extend(measured.tables);
    report.figures.extend(measured.figures);
    report.notes.extend(measured.notes);
    report.ended = measured.ended;
    Ok(())
}

// ---- attacks ----

const ATTACK_COLUMNS: [Column; 5] = [
    label("attack", "attack"),
    words("result", "what happens"),
    words("real", "with\n--names real"),
    words("control", "without rules"),
    words("source", "issue"),
];

fn add_attacks(report: &mut Report, options: &Options, world: &World) -> io::Result<()> {
    let is_strict = world.knows("--strict");
    let mut counts = Counts::default();
    let wanted: Vec<(&str, &Attack)> = KINDS
        .iter()
        .flat_map(|(kind, all)| all.iter().map(move |attack| (*kind, attack)))
        .filter(|(_, attack)| options.wants(attack.name))
        .collect();
    let has_real = !options.common.quick && world.knows("--names");
    let rows = side_by_side(&wanted, |(_, attack)| attack_row(world, attack, is_strict, has_real));
    let rows: Vec<Value> = rows.into_iter().collect::<io::Result<_>>()?;
    if rows.is_empty() {
        return Ok(());
    }
    for (row, (_, attack)) in rows.iter().zip(&wanted) {
        counts.add(row, attack);
    }
    for (kind, _) in &KINDS {
        let of_kind =
            rows.iter().zip(&wanted).filter(|(_, (k, _))| k == kind).map(|(row, _)| row.clone());
        let table = Table::of(format!("Attacks: {kind}"), ATTACK_COLUMNS, of_kind);
        if !table.rows.is_empty() {
            report.tables.push(table);
        }
    }
    let bypasses = plain(
        "egress.bypasses",
        "attacks that succeed, without those that the documentation says rules do not cover",
    );
    report.figures.push(Figure::of(bypasses.goals(0.0, 0.0), &[counts.succeeded]));
    let documented =
        plain("egress.bypasses.documented", "attacks that succeed as the documentation says");
    report.figures.push(Figure::of(documented, &[counts.documented]));
    if has_real {
        let real = plain("egress.bypasses.real", "the same with --names real");
        report.figures.push(Figure::of(real.goals(0.0, 0.0), &[counts.real]));
    }
    report.notes.push(format!(
        "Attacks: {} tried with a control run that succeeds, {} refused, {} succeed, {} more succeed as the documentation \
         says, {} not tried or not shown.",
        counts.tried, counts.refused, counts.succeeded, counts.documented, counts.not_shown
    ));
    Ok(())
}

#[derive(Default)]
struct Counts {
    tried: f64,
    refused: f64,
    succeeded: f64,
    documented: f64,
    not_shown: f64,
    /// With `--names real`, documented ones left out.
    real: f64,
}

impl Counts {
    fn add(&mut self, row: &Value, attack: &Attack) {
        let said = row["result"].as_str().unwrap_or_default();
        let has_control = row["control"].as_str().is_some_and(|c| c.starts_with(SUCCEEDS));
        let is_success = said.starts_with(SUCCEEDS);
        self.tried += f64::from(u8::from(has_control));
        let is_real = row["real"].as_str().is_some_and(|said| said.starts_with(SUCCEEDS));
        self.real += f64::from(u8::from(is_real && !attack.is_documented()));
        match (is_success, has_control) {
            (true, _) if attack.is_documented() => self.documented += 1.0,
            (true, _) => self.succeeded += 1.0,
            (false, true) => self.refused += 1.0,
            (false, false) => self.not_shown += 1.0,
        }
    }
}

const SUCCEEDS: &str = "succeeds";

fn attack_row(
    world: &World,
    attack: &Attack,
    is_strict: bool,
    has_real: bool,
) -> io::Result<Value> {
    let source = match attack.source {
        "" => String::new(),
        source => format!("https://github.com/{source}"),
    };
    let row = |result: &str, real: Option<String>, control: &str| {
        json!({
            "name": attack.name, "attack": format!("{}: {}", attack.name, attack.what), "result": result,
            "real": real, "control": control, "source": source, "is_documented": attack.is_documented(),
        })
    };
    if let Some(program) = missing(world, attack.needs) {
        return Ok(row(&format!("not tried: no {program}"), None, ""));
    }
    let mut rules = attack.rules.to_vec();
    if attack.rules.contains(&"--policy") && !world.knows("--policy") {
        return Ok(row("not tried: this fulmar has no --policy", None, ""));
    }
    // A policy and a file of rules exclude each other.
    if !rules.contains(&"--rules") && !rules.contains(&"--policy") {
        rules.extend(["--rules", "/dev/null"]);
    }
    if is_strict && matches!(attack.special, Special::Strict | Special::Inherits) {
        rules.push("--strict");
    }
    let result = attempt(world, attack, Some(&rules))?;
    let real = match has_real && attack.rules.contains(&"--allow") {
        true => Some(attempt(world, attack, Some(&[&rules[..], &["--names", "real"]].concat()))?),
        false => None,
    };
    let control = match attack.control {
        Control::Open => attempt(world, attack, Some(&["--rules", "/dev/null"]))?,
        Control::Host => attempt(world, attack, None)?,
    };
    let control = match control.starts_with(SUCCEEDS) {
        true => SUCCEEDS.to_owned(),
        false => format!("no control: {control}"),
    };
    Ok(row(&result, real, &control))
}

/// Files of rules for the attacks on them.
fn write_rules(world: &World, id: &str) -> io::Result<()> {
    fs::write(world.path(&format!("rules-{id}")), format!("allow {ALLOWED}\n"))?;
    let folder = world.path(&format!("policy-{id}"));
    fs::create_dir(&folder)?;
    fs::write(folder.join("real.toml"), format!("allow = [\"{ALLOWED}\"]\n"))?;
    std::os::unix::fs::symlink("real.toml", folder.join("link.toml"))
}

/// On the host there is no gateway: the control run attacks a process of the same user by that name.
const VICTIM: &str = "cp \"$(command -v sleep)\" fulmar-victim; unshare --user --map-root-user --net ./fulmar-victim 5 & \
     sleep 0.3; ";

/// Runs an attack with these options, or on the host, and says what came of it.
fn attempt(world: &World, attack: &Attack, options: Option<&[&str]>) -> io::Result<String> {
    let mark = new_mark();
    let id = &mark[2..8];
    let folder = world.path("").display().to_string();
    let filled = |text: &&str| text.replace("{id}", id).replace("{folder}/", &folder);
    let options: Option<Vec<String>> = options.map(|all| all.iter().map(filled).collect());
    write_rules(world, id)?;
    let inside = options.as_deref().map_or(Inside::Host, Inside::Fulmar);
    let as_user = match attack.special {
        Special::Capabilities => As::Capable,
        Special::Processes => As::AmongOwnProcesses,
        Special::Inherits => As::Heir,
        Special::No | Special::Strict | Special::Unseen => As::User,
    };
    let script = match (&inside, as_user) {
        (Inside::Host, As::AmongOwnProcesses) => format!("{VICTIM}{}", attack.script),
        _ => attack.script.to_owned(),
    };
    let words = world.words(&inside, as_user, &script)?;
    let name = attack.rules.get(1).copied();
    let said = world.run(&words, PATIENCE, &mark, name)?;
    let mut places = world.reached(&mark);
    if said.output.contains(&format!("reached {mark}")) {
        places.push("the program".to_owned());
    }
    places.dedup();
    if places.is_empty() {
        return Ok(format!("refused ({})", last_line(&said.output)));
    }
    Ok(format!("{SUCCEEDS}: {}", places.join(", ")))
}

const LEGEND: &str = "\
Each attack carries a mark. It succeeds if the mark arrives at a place that the rules do not allow, as the servers see it;
  what the program itself says counts only where something is taken instead of reached. The control run is the same
  attack without rules, or on the host for what fulmar refuses without a rule; an attack without a successful control
  run shows nothing and is not counted as refused.
Clients and attacks run as a user without capabilities. Those with frames of their own have all capabilities over the
  namespaces of the program.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attacks_have_names_of_their_own_and_at_least_forty_are_counted() {
        let all: Vec<&Attack> = KINDS.iter().flat_map(|(_, all)| *all).collect();
        let mut names: Vec<&str> = all.iter().map(|a| a.name).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(all.iter().filter(|a| !a.is_documented()).count() >= 40, "{count}");
    }

    #[test]
    fn results_are_in_the_order_of_the_work() {
        let all: Vec<u64> = (0..50).collect();
        assert_eq!(side_by_side(&all, |n| n * 2), all.iter().map(|n| n * 2).collect::<Vec<_>>());
    }

    #[test]
    fn marks_differ() {
        let (one, other) = (new_mark(), new_mark());
        assert!(one != other && one.len() == 14, "{one} {other}");
    }
}
