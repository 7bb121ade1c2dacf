//! `bench route`: look-ups in forwarding tables, full and empty, alone and while they change.
//!
//! Every way runs once per round for a short slice, so that ways which are compared are measured
//! moments apart. Addresses are drawn within installed prefixes beforehand and read in order; tables
//! give the same answers on all of them, or the bench stops. Rates are by the clock on the wall,
//! because a thread that waits for a lock costs time and no CPU.

pub mod internet;
pub mod rivals;

use crate::cpu;
use crate::harness::options::Common;
use crate::harness::report::{Chart, Report, Shape, Table, label, number};
use crate::harness::{self, Pace, Plan, Progress, Ratio, Sample, Scenario};
use fulmar_cli::bounds::within;
use fulmar_stack::route::{Fib, FibReader, Key};
use internet::{Prefix, Random};
use rivals::{Locked, Rival};
use serde_json::{Map, Value, json};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

/// Time for the rounds.
const FULL: Duration = Duration::from_secs(60);
/// The same with --quick: with the making of the tables, about 20 seconds.
const QUICK: Duration = Duration::from_secs(8);
/// Several times the Internet's; 300 bytes of memory each, in all tables together.
const MOST_PREFIXES: usize = 4_000_000;
/// Prefixes of the table that the ratios are about.
const FULL_TABLE: usize = 1_000_000;
/// Addresses that are looked up in turn: more than caches that matter hold answers for.
const PROBES: usize = 1 << 20;
/// Look-ups between two looks at the clock.
const PIECE: usize = 4096;
/// Changes per second of a disturbed table.
const CHANGES_PER_SECOND: u32 = 10_000;

/// Look-ups in forwarding tables: fulmar's, other crates', one behind a lock
#[derive(clap::Args, Clone, Debug)]
#[command(
    override_usage = "fulmar-lab bench route [OPTIONS]",
    after_help = "Full tables have a realistic distribution of prefix lengths and are made from
a seed; addresses are drawn within installed prefixes. Every table must give the
same answers. Needs about 300 MB of memory for a million prefixes, and a minute."
)]
pub struct Options {
    #[command(flatten)]
    #[expect(missing_docs, reason = "flattened: its own documentation is shown")]
    pub common: Common,
    /// IPv4 prefixes of the full table
    #[arg(long, default_value_t = FULL_TABLE, value_parser = within(1, MOST_PREFIXES))]
    pub ipv4: usize,
    /// IPv6 prefixes of the full table
    #[arg(long, default_value_t = 250_000, value_parser = within(1, MOST_PREFIXES))]
    pub ipv6: usize,
    /// Threads that look up at once, at most
    #[arg(long, default_value_t = 2, value_parser = within(1usize, 64))]
    pub threads: usize,
    /// What tables and addresses are drawn from
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Look-ups per µs of each thread.
const RATE: &str = "lookups_per_us";
const CHANGES: &str = "changes_per_second";

const SHAPE: Shape = Shape {
    name: "route",
    title: "Look-ups in forwarding tables",
    lead: "fulmar's tables, other crates' and one behind a lock: full and empty, alone and while they change.",
    columns: &[
        label("name", "way"),
        number(RATE, "look-ups\nper µs", 1, "of each thread, by the clock").with_interval(),
        number("ns_per_lookup", "ns", 1, "the same as a time"),
        number(CHANGES, "changes\nper s", 0, "what the other thread changed meanwhile"),
        number("runs", "runs", 0, "how often it was measured"),
    ],
    across: None,
    chart: Some(Chart {
        unit: "look-ups per µs",
        parts: &[RATE],
        group: &["ip_version", "table", "how"],
        x: None,
    }),
    legend: "\
way       IP version, table, whose table, how, threads; rates are of each thread, by the clock.
          one_lock is fulmar's table behind one mutex; bursts are of 64 addresses.
MB        of the other crates by how much the process grew; theirs serves look-ups and changes.
disturbed while another thread withdraws and announces prefixes.",
};

/// A row of the table of memory: what one table takes, and what making it cost.
struct Memory {
    name: &'static str,
    /// What look-ups read, where the table knows; else by how much the process grew.
    bytes: usize,
    /// What only changes read.
    control_bytes: Option<usize>,
    /// Time to insert every prefix, each of them visible at once.
    built_in: Duration,
}

/// Makes another crate's table of these prefixes.
type Builder<K> = fn(&[Prefix<K>]) -> Box<dyn Rival<K>>;

/// The tables of one IP version.
struct Tables<K: Key> {
    probes: Vec<K>,
    prefixes: Vec<Prefix<K>>,
    fib: Mutex<Fib<K>>,
    reader: FibReader<K>,
    locked: Locked<K>,
    others: Vec<(&'static str, Box<dyn Rival<K>>)>,
}

impl<K: Key + Send + Sync> Tables<K> {
    fn new(
        names: [&'static str; 3],
        prefixes: Vec<Prefix<K>>,
        probes: Vec<K>,
        others: [Builder<K>; 2],
        memory: &mut Vec<Memory>,
    ) -> io::Result<Tables<K>> {
        let start = Instant::now();
        let fib = rivals::fib(&prefixes);
        let bytes = fib.bytes();
        memory.push(Memory {
            name: names[0],
            bytes: bytes.lookup,
            control_bytes: Some(bytes.control),
            built_in: start.elapsed(),
        });
        let mut made = Vec::new();
        for (name, make) in names.into_iter().skip(1).zip(others) {
            let (start, before) = (Instant::now(), cpu::resident_bytes(std::process::id())?);
            let table = make(&prefixes);
            let bytes = cpu::resident_bytes(std::process::id())?.saturating_sub(before);
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            memory.push(Memory { name, bytes, control_bytes: None, built_in: start.elapsed() });
            made.push((name, table));
        }
        let (reader, locked) = (fib.reader(), Locked(Mutex::new(fib.reader())));
        let fib = Mutex::new(fib);
        let tables = Tables { probes, prefixes, fib, reader, locked, others: made };
        tables.agree()?;
        Ok(tables)
    }

    /// Every table gives the same answers.
    fn agree(&self) -> io::Result<()> {
        for address in self.probes.iter().step_by(7) {
            let answer = self.reader.lookup(*address);
            if let Some((name, _)) = self.others.iter().find(|(_, t)| t.lookup(*address) != answer)
            {
                return Err(io::Error::other(format!(
                    "{name} gives another answer for {address:?} than fulmar; please report this"
                )));
            }
        }
        Ok(())
    }
}

/// Look-ups per µs of each of `threads` threads.
fn rate<K: Copy + Sync>(
    table: &dyn Rival<K>,
    probes: &[K],
    how: How,
    threads: usize,
    slice: Duration,
) -> io::Result<f64> {
    let cpus = &cpu::allowed_cpus()?;
    let barrier = Barrier::new(threads);
    let one = |number: usize| {
        pin(cpus, number);
        let pieces = probes.chunks(PIECE).cycle().skip(number * 37);
        barrier.wait();
        let (start, mut done) = (Instant::now(), 0);
        for piece in pieces {
            match how {
                How::Scalar => table.scalar(piece),
                How::Bursts => table.bursts(piece),
            }
            done += piece.len();
            if start.elapsed() >= slice {
                break;
            }
        }
        done as f64 / (start.elapsed().as_nanos() as f64 / 1000.0)
    };
    let rates: Vec<f64> = std::thread::scope(|s| {
        let one = &one;
        let all: Vec<_> = (0..threads).map(|n| s.spawn(move || one(n))).collect();
        all.into_iter().filter_map(|t| t.join().ok()).collect()
    });
    Ok(rates.iter().sum::<f64>() / rates.len().max(1) as f64)
}

/// How addresses are looked up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum How {
    /// One at a time.
    Scalar,
    /// 64 in a call.
    Bursts,
}

fn pin(cpus: &[usize], number: usize) {
    if let Some(cpu) = cpus.get(number % cpus.len().max(1)) {
        // Unpinned the figures are wider, not wrong.
        let _ = cpu::pin_to(*cpu);
    }
}

/// Look-ups per µs of one thread while another changes the table; how many changes per second it
/// made.
fn disturbed_rate<K: Key + Send + Sync>(
    t: &Tables<K>,
    seed: u64,
    slice: Duration,
) -> io::Result<(f64, f64)> {
    let (stop, cpus) = (AtomicBool::new(false), cpu::allowed_cpus()?);
    std::thread::scope(|s| {
        let changes = s.spawn(|| {
            pin(&cpus, 1);
            change_until(t, &stop, seed)
        });
        let rate = rate(&t.reader, &t.probes, How::Scalar, 1, slice);
        stop.store(true, Ordering::Relaxed);
        Ok((rate?, changes.join().unwrap_or(0.0)))
    })
}

/// Withdraws prefixes and announces them again, at the rate that was asked for; changes per second.
fn change_until<K: Key>(t: &Tables<K>, stop: &AtomicBool, seed: u64) -> f64 {
    let Ok(mut fib) = t.fib.lock() else { return 0.0 };
    let (start, mut done, mut random) = (Instant::now(), 0u32, Random(seed));
    while !stop.load(Ordering::Relaxed) {
        while start.elapsed() < Duration::from_secs(1) / CHANGES_PER_SECOND * done {
            std::thread::sleep(Duration::from_micros(50));
        }
        let (address, len, answer) = t.prefixes[random.below(t.prefixes.len())];
        let changed = fib.remove(address, len).is_ok() && fib.insert(address, len, answer).is_ok();
        assert!(changed, "a table that held a prefix has room for it");
        done += 2;
    }
    f64::from(done) / start.elapsed().as_secs_f64()
}

/// Measures.
///
/// # Errors
/// What the system refuses; tables that disagree.
pub fn run(options: &Options) -> io::Result<Report> {
    let mut memory = Vec::new();
    let progress = Progress::new(2);
    progress.show("IPv4 tables", 0, 2);
    let v4 = full_v4(options, &mut memory)?;
    progress.show("IPv6 tables", 1, 2);
    let v6 = full_v6(options, &mut memory)?;
    drop(progress);
    let empty = Fib::<u32>::new();
    let (empty, locked) = (empty.reader(), Locked(Mutex::new(empty.reader())));
    let mut scenarios = of_full_table("ipv4.full", &v4, options.threads);
    scenarios.extend(of_full_table("ipv6.full", &v6, options.threads));
    for threads in 1..=options.threads {
        for (name, table) in [("fulmar", &empty as &dyn Rival<u32>), ("one_lock", &locked)] {
            let name = format!("ipv4.empty.{name}.scalar.{threads}");
            scenarios.push(scenario(name, table, &v4.probes, How::Scalar, threads));
        }
    }
    scenarios.push(disturbed(&v4, options.seed));
    let bytes = memory.first().map_or(f64::NAN, |m| m.bytes as f64);
    let table = || Sample::of("bytes", bytes);
    scenarios.push(Scenario::new(TABLE, "memory", move |_| Ok(table())).at_most(1));
    let mut ratios = ratios();
    ratios.retain(|r| options.ipv4 >= FULL_TABLE || !r.name.starts_with("route.1m."));
    let (budget, max_runs) = (options.common.budget(QUICK, FULL), options.common.runs);
    let mut outcome = harness::run(Plan { scenarios, ratios, budget, max_runs, pace: Pace::Calls });
    outcome.rows.retain(|row| row.name != TABLE);
    let mut report = Report::of(&SHAPE, outcome);
    let Options { ipv4, ipv6, seed, .. } = options;
    report.facts.push(("tables", format!("{ipv4} IPv4 and {ipv6} IPv6 prefixes from seed {seed}")));
    report.tables.push(memory_table(&memory));
    Ok(report)
}

/// The row that holds the bytes of the full IPv4 table.
const TABLE: &str = "ipv4.full.fulmar";

fn scenario<'a, K: Key + Send + Sync>(
    name: String,
    table: &'a dyn Rival<K>,
    probes: &'a [K],
    how: How,
    threads: usize,
) -> Scenario<'a> {
    let labels: Vec<String> = name.split('.').map(str::to_owned).collect();
    let run = move |slice| {
        let rate = rate(table, probes, how, threads, slice)?;
        Ok(Sample::of(RATE, rate).with("ns_per_lookup", 1000.0 / rate))
    };
    let mut scenario = Scenario::new(name.clone(), name, run).in_table("Look-ups");
    for (key, label) in ["ip_version", "table", "whose", "how"].into_iter().zip(labels) {
        scenario = scenario.label(key, label);
    }
    scenario.label("threads", threads)
}

/// Every way over one full table.
fn of_full_table<'a, K: Key + Send + Sync>(
    table: &str,
    t: &'a Tables<K>,
    threads: usize,
) -> Vec<Scenario<'a>> {
    let mut all = Vec::new();
    for threads in 1..=threads {
        for (how, word) in [(How::Scalar, "scalar"), (How::Bursts, "bursts")] {
            let ours: [(&str, &dyn Rival<K>); 2] = [("fulmar", &t.reader), ("one_lock", &t.locked)];
            all.extend(ours.map(|(name, way)| {
                scenario(format!("{table}.{name}.{word}.{threads}"), way, &t.probes, how, threads)
            }));
        }
        all.extend(t.others.iter().map(|(name, way)| {
            scenario(format!("{name}.scalar.{threads}"), &**way, &t.probes, How::Scalar, threads)
        }));
    }
    all
}

fn disturbed(t: &Tables<u32>, seed: u64) -> Scenario<'_> {
    let name = "ipv4.full.fulmar.disturbed.1";
    let mut seed = seed;
    let run = move |slice| {
        seed += 1;
        let (rate, changes) = disturbed_rate(t, seed, slice)?;
        Ok(Sample::of(RATE, rate).with("ns_per_lookup", 1000.0 / rate).with(CHANGES, changes))
    };
    Scenario::new(name, name, run).in_table("Look-ups")
}

fn full_v4(options: &Options, memory: &mut Vec<Memory>) -> io::Result<Tables<u32>> {
    let prefixes = internet::ipv4(options.ipv4, options.seed);
    let probes = internet::probes(&prefixes, PROBES, options.seed + 1, internet::within_v4);
    let names = ["ipv4.full.fulmar", "ipv4.full.prefix_trie", "ipv4.full.treebitmap"];
    let others: [Builder<u32>; 2] =
        [|p| Box::new(rivals::trie_v4(p)), |p| Box::new(rivals::bitmap_v4(p))];
    Tables::new(names, prefixes, probes, others, memory)
}

fn full_v6(options: &Options, memory: &mut Vec<Memory>) -> io::Result<Tables<u128>> {
    let prefixes = internet::ipv6(options.ipv6, options.seed);
    let probes = internet::probes(&prefixes, PROBES, options.seed + 1, internet::within_v6);
    let names = ["ipv6.full.fulmar", "ipv6.full.prefix_trie", "ipv6.full.treebitmap"];
    let others: [Builder<u128>; 2] =
        [|p| Box::new(rivals::trie_v6(p)), |p| Box::new(rivals::bitmap_v6(p))];
    Tables::new(names, prefixes, probes, others, memory)
}

fn ratios() -> Vec<Ratio> {
    // Time per look-up of each thread: the rate of one over the rate of two.
    let two = |name, sentence, whose: &str| {
        let way = |threads| format!("ipv4.empty.{whose}.scalar.{threads}");
        Ratio::over(name, sentence, RATE, [way(1), way(2)]).published(7.4)
    };
    let full = "ipv4.full.fulmar.scalar.1";
    vec![
        two(
            "route.empty.two_threads_vs_one",
            "ns per look-up and thread, empty table, two threads over one",
            "fulmar",
        )
        .goals(1.1, 1.0),
        two(
            "route.empty.two_threads_vs_one.one_lock",
            "the same with one lock around the table",
            "one_lock",
        ),
        Ratio::value(
            "route.1m.lookups_per_us",
            "look-ups per µs, full IPv4 table, one thread, one at a time",
            RATE,
            full,
        )
        .goals(50.0, 150.0)
        .more_is_better(),
        Ratio::over(
            "route.1m.disturbed_vs_quiet",
            "the same rate while another thread changes the table 10,000 times a second, over it",
            RATE,
            ["ipv4.full.fulmar.disturbed.1", full],
        )
        .goals(0.8, 0.95)
        .more_is_better(),
        Ratio::value(
            "route.1m.bytes",
            "bytes that look-ups in the full IPv4 table read",
            "bytes",
            TABLE,
        )
        .goals(12e6, 6e6),
    ]
}

fn memory_table(memory: &[Memory]) -> Table {
    let row = |m: &Memory| -> Map<String, Value> {
        let mb = |bytes: usize| bytes as f64 / 1e6;
        let row = json!({
            "name": m.name, "lookup_mb": mb(m.bytes), "control_mb": m.control_bytes.map(mb),
            "built_in_ms": m.built_in.as_secs_f64() * 1e3,
        });
        row.as_object().cloned().unwrap_or_default()
    };
    Table {
        title: "Memory".to_owned(),
        columns: vec![
            label("name", "table"),
            number("lookup_mb", "MB for\nlook-ups", 1, "what look-ups read"),
            number("control_mb", "MB for\nchanges", 1, "what only changes read"),
            number("built_in_ms", "made in\nms", 0, "every prefix, one by one"),
        ],
        rows: memory.iter().map(row).collect(),
        ..Table::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::options::parsed;

    #[test]
    fn a_small_bench_measures_every_way_and_its_tables_agree() {
        let options = parsed("--seconds 0.001 --runs 1 --ipv4 3000 --ipv6 2000 --seed 5");
        let found = run(&options.expect("sound options")).expect("it runs");
        let rows = &found.tables[0].rows;
        assert_eq!(rows.len(), 2 * 2 * (4 + 2) + 4 + 1);
        assert!(rows.iter().all(|r| r[RATE].as_f64() > Some(0.0)));
        assert!(found.value("ipv6.full.treebitmap.scalar.2", RATE).is_some());
        assert!(found.value("ipv4.full.prefix_trie", "lookup_mb").is_some());
        assert!(found.figure("route.empty.two_threads_vs_one").is_some());
        assert!(found.figure("route.1m.lookups_per_us").is_none(), "of a small table");
    }
}
