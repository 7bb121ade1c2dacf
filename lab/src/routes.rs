//! `bench route`: look-ups in forwarding tables, full and empty, alone and while they change.
//!
//! Every way runs once per round for a short slice, so that ways which are compared are measured
//! moments apart. Addresses are drawn within installed prefixes beforehand and read in order; tables
//! give the same answers on all of them, or the bench stops. Rates are by the clock on the wall,
//! because a thread that waits for a lock costs time and no CPU.

pub mod internet;
pub mod rivals;

use crate::bench::{Figure, Outcome, Ratio, Stop};
use crate::cpu;
use crate::report::{self, Machine};
use crate::stats::Estimate;
use fulmar_route::{Fib, FibReader, Key};
use internet::{Prefix, Random};
use rivals::{Locked, Rival};
use serde_json::{Value, json};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

/// Addresses that are looked up in turn: more than caches that matter hold answers for.
const PROBES: usize = 1 << 20;
/// Look-ups between two looks at the clock.
const PIECE: usize = 4096;
/// Changes per second of a disturbed table.
const CHANGES_PER_SECOND: u32 = 10_000;
/// A run of one way.
const SLICE: Duration = Duration::from_millis(40);

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Time for the rounds; making the tables comes on top.
    pub budget: Duration,
    /// Rounds at most.
    pub runs: usize,
    /// Prefixes of the full IPv4 table.
    pub ipv4: usize,
    /// Prefixes of the full IPv6 table.
    pub ipv6: usize,
    /// The most threads that look up at once.
    pub threads: usize,
    /// What tables and addresses are drawn from.
    pub seed: u64,
}

/// One way of looking up, and how fast it was.
pub struct Way {
    /// Stable dotted name: `ipv4.full.fulmar.scalar.1`.
    pub name: String,
    /// Look-ups per µs of each thread, one value per round.
    rates: Vec<f64>,
}

impl Way {
    /// Look-ups per µs of each thread.
    pub fn rate(&self) -> Option<Estimate> {
        Estimate::of(&self.rates)
    }
}

/// What one table takes, and what making it cost.
pub struct Memory {
    /// Stable dotted name: `ipv4.full.fulmar`.
    pub name: &'static str,
    /// What look-ups read, where the table knows; else by how much the process grew.
    pub bytes: usize,
    /// What only changes read.
    pub control_bytes: Option<usize>,
    /// Time to insert every prefix, each of them visible at once.
    pub built_in: Duration,
}

/// What was found.
pub struct Found {
    /// Rates.
    pub ways: Vec<Way>,
    /// Memory.
    pub memory: Vec<Memory>,
    /// The figures asked for, as every bench reports them.
    pub outcome: Outcome,
    options: Options,
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
            let (start, before) = (Instant::now(), resident_bytes()?);
            let table = make(&prefixes);
            let bytes = resident_bytes()?.saturating_sub(before);
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

/// Bytes of memory that the process has.
fn resident_bytes() -> io::Result<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages = statm.split_whitespace().nth(1).and_then(|n| n.parse::<usize>().ok());
    Ok(pages.unwrap_or(0) * 4096)
}

/// Look-ups per µs of each of `threads` threads.
fn rate<K: Copy + Sync>(
    table: &dyn Rival<K>,
    probes: &[K],
    bursts: bool,
    threads: usize,
    cpus: &[usize],
) -> f64 {
    let barrier = Barrier::new(threads);
    let one = |number: usize| {
        pin(cpus, number);
        let pieces = probes.chunks(PIECE).cycle().skip(number * 37);
        barrier.wait();
        let (start, mut done) = (Instant::now(), 0);
        for piece in pieces {
            if bursts {
                table.bursts(piece)
            } else {
                table.scalar(piece)
            }
            done += piece.len();
            if start.elapsed() >= SLICE {
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
    rates.iter().sum::<f64>() / rates.len().max(1) as f64
}

fn pin(cpus: &[usize], number: usize) {
    if let Some(cpu) = cpus.get(number % cpus.len().max(1)) {
        // Unpinned the figures are wider, not wrong.
        let _ = cpu::pin_to(*cpu);
    }
}

/// Look-ups per µs of one thread while another changes the table; how many changes per second it
/// made.
fn disturbed_rate<K: Key + Send + Sync>(t: &Tables<K>, cpus: &[usize], seed: u64) -> (f64, f64) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        let changes = s.spawn(|| {
            pin(cpus, 1);
            change_until(t, &stop, seed)
        });
        let rate = rate(&t.reader, &t.probes, false, 1, cpus);
        stop.store(true, Ordering::Relaxed);
        (rate, changes.join().unwrap_or(0.0))
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

/// Collects rates by name, in the order in which they first come.
#[derive(Default)]
struct Rates(Vec<Way>);

impl Rates {
    fn add(&mut self, name: String, rate: f64) {
        match self.0.iter_mut().find(|w| w.name == name) {
            Some(way) => way.rates.push(rate),
            None => self.0.push(Way { name, rates: vec![rate] }),
        }
    }

    fn values(&self, name: &str) -> &[f64] {
        self.0.iter().find(|w| w.name == name).map_or(&[], |w| &w.rates)
    }

    /// One way over another, round by round.
    fn ratio(&self, above: &str, below: &str) -> Option<Estimate> {
        let pairs = self.values(above).iter().zip(self.values(below));
        Estimate::of(&pairs.map(|(a, b)| a / b).collect::<Vec<_>>())
    }
}

/// Measures.
///
/// # Errors
/// What the system refuses; tables that disagree.
pub fn run(options: &Options) -> io::Result<Found> {
    let start = Instant::now();
    let cpus = cpu::allowed_cpus()?;
    let mut memory = Vec::new();
    let v4 = full_v4(options, &mut memory)?;
    let v6 = full_v6(options, &mut memory)?;
    let empty = Fib::<u32>::new();
    let (empty, empty_locked) = (empty.reader(), Locked(Mutex::new(empty.reader())));
    let (mut rates, began, mut rounds) = (Rates::default(), Instant::now(), 0);
    while rounds < options.runs && (rounds < 3 || began.elapsed() < options.budget) {
        round_of("ipv4.full", &v4, options.threads, &cpus, &mut rates);
        round_of("ipv6.full", &v6, options.threads, &cpus, &mut rates);
        for threads in 1..=options.threads {
            for (name, table) in
                [("fulmar", &empty as &dyn Rival<u32>), ("one_lock", &empty_locked)]
            {
                let rate = rate(table, &v4.probes, false, threads, &cpus);
                rates.add(format!("ipv4.empty.{name}.scalar.{threads}"), rate);
            }
        }
        let seed = options.seed + rounds as u64;
        let (rate, changes) = disturbed_rate(&v4, &cpus, seed);
        rates.add("ipv4.full.fulmar.disturbed.1".into(), rate);
        rates.add("changes_per_second".into(), changes);
        rounds += 1;
    }
    let stop = if rounds == options.runs { Stop::Runs } else { Stop::Budget };
    let figures = figures(&rates, &memory, options.ipv4);
    let outcome = Outcome { rows: Vec::new(), figures, stop, elapsed: start.elapsed() };
    Ok(Found { ways: rates.0, memory, outcome, options: *options })
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

/// Every way over one full table, once.
fn round_of<K: Key + Send + Sync>(
    table: &str,
    t: &Tables<K>,
    threads: usize,
    cpus: &[usize],
    rates: &mut Rates,
) {
    for threads in 1..=threads {
        for (bursts, how) in [(false, "scalar"), (true, "bursts")] {
            let ours: [(&str, &dyn Rival<K>); 2] = [("fulmar", &t.reader), ("one_lock", &t.locked)];
            for (name, way) in ours {
                let rate = rate(way, &t.probes, bursts, threads, cpus);
                rates.add(format!("{table}.{name}.{how}.{threads}"), rate);
            }
        }
        for (name, way) in &t.others {
            let rate = rate(&**way, &t.probes, false, threads, cpus);
            rates.add(format!("{name}.scalar.{threads}"), rate);
        }
    }
}

/// Prefixes of the table that the ratios are about.
const FULL: usize = 1_000_000;

fn figures(rates: &Rates, memory: &[Memory], prefixes: usize) -> Vec<Figure> {
    let full = "ipv4.full.fulmar.scalar.1";
    let bytes = memory.iter().find(|m| m.name == "ipv4.full.fulmar").map(|m| m.bytes as f64);
    // Time per look-up of each thread: the rate of one over the rate of two.
    let two = |name: &str| {
        let way = |threads| format!("ipv4.empty.{name}.scalar.{threads}");
        rates.ratio(&way(1), &way(2))
    };
    let lookups = Estimate::of(rates.values(full));
    let disturbed = rates.ratio("ipv4.full.fulmar.disturbed.1", full);
    let mut all = vec![
        figure(
            "route.empty.two_threads_vs_one",
            "ns per look-up and thread, empty table, two threads over one",
            two("fulmar"),
            (Some(7.4), Some((1.1, 1.0)), false),
        ),
        figure(
            "route.empty.two_threads_vs_one.one_lock",
            "the same with one lock around the table",
            two("one_lock"),
            (Some(7.4), None, false),
        ),
        figure(
            "route.1m.lookups_per_us",
            "look-ups per µs, full IPv4 table, one thread, one at a time",
            lookups,
            (None, Some((50.0, 150.0)), true),
        ),
        figure(
            "route.1m.disturbed_vs_quiet",
            "the same rate while another thread changes the table 10,000 times a second, over it",
            disturbed,
            (None, Some((0.8, 0.95)), true),
        ),
        figure(
            "route.1m.bytes",
            "bytes that look-ups in the full IPv4 table read",
            bytes.and_then(|b| Estimate::of(&[b])),
            (None, Some((12e6, 6e6)), false),
        ),
    ];
    all.retain(|f| prefixes >= FULL || !f.ratio.name.starts_with("route.1m."));
    all
}

fn figure(
    name: &str,
    sentence: &str,
    estimate: Option<Estimate>,
    (published, reach_and_aim, more_is_better): (Option<f64>, Option<(f64, f64)>, bool),
) -> Figure {
    let ratio = Ratio {
        name: name.into(),
        sentence: sentence.into(),
        way: String::new(),
        over: None,
        measure: |_| f64::NAN,
        reach_and_aim,
        more_is_better,
        published,
    };
    Figure { ratio, estimate }
}

impl Found {
    /// The whole report as JSON. `command` is the command line as given.
    pub fn json(&self, machine: &Machine, command: &[String]) -> Value {
        let mut json = report::json(machine, command, &self.outcome);
        let ways: Vec<Value> = self.ways.iter().map(way_json).collect();
        let memory: Vec<Value> = self.memory.iter().map(memory_json).collect();
        json["ways"] = ways.into();
        json["memory"] = memory.into();
        json["prefixes"] = json!({ "ipv4": self.options.ipv4, "ipv6": self.options.ipv6 });
        json["seed"] = self.options.seed.into();
        json
    }

    /// The whole report as text.
    pub fn text(&self, machine: &Machine) -> String {
        let Machine { cpu, cpus, kernel, fulmar } = machine;
        let Options { ipv4, ipv6, seed, .. } = self.options;
        let head = format!("fulmar {fulmar} on {cpus} CPUs, {cpu}, Linux {kernel}");
        let what = format!("{ipv4} IPv4 and {ipv6} IPv6 prefixes from seed {seed}");
        [head, what, self.rates_table(), self.memory_table()]
            .into_iter()
            .chain([report::figures_table(&self.outcome.figures), LEGEND.into()])
            .collect::<Vec<_>>()
            .join("\n\n")
    }

    fn rates_table(&self) -> String {
        let header = ["way", "look-ups\nper µs", "95 %", "ns", "runs"];
        let mut table = report::new_table(header, 1);
        for way in &self.ways {
            let Some(e) = way.rate() else { continue };
            let is_rate = way.name != "changes_per_second";
            table.add_row([
                way.name.clone(),
                format!("{:.1}", e.median),
                e.interval(1),
                if is_rate { format!("{:.1}", 1000.0 / e.median) } else { String::new() },
                e.runs.to_string(),
            ]);
        }
        table.to_string()
    }

    fn memory_table(&self) -> String {
        let header = ["table", "MB for\nlook-ups", "MB for\nchanges", "made in\nms"];
        let mut table = report::new_table(header, 1);
        for m in &self.memory {
            table.add_row([
                m.name.to_string(),
                format!("{:.1}", m.bytes as f64 / 1e6),
                m.control_bytes.map_or("–".into(), |b| format!("{:.1}", b as f64 / 1e6)),
                m.built_in.as_millis().to_string(),
            ]);
        }
        table.to_string()
    }
}

const LEGEND: &str = "\
way       IP version, table, whose table, how, threads; rates are of each thread, by the clock.
          one_lock is fulmar's table behind one mutex; bursts are of 64 addresses.
MB        of the other crates by how much the process grew; theirs serves look-ups and changes.
disturbed while another thread withdraws and announces prefixes (changes_per_second counts them).";

fn way_json(way: &Way) -> Value {
    let e = way.rate();
    json!({
        "name": way.name,
        "median": e.map(|e| e.median),
        "low": e.map(|e| e.low),
        "high": e.map(|e| e.high),
        "runs": e.map(|e| e.runs),
    })
}

fn memory_json(m: &Memory) -> Value {
    json!({
        "name": m.name,
        "bytes": m.bytes,
        "control_bytes": m.control_bytes,
        "built_in_ms": m.built_in.as_secs_f64() * 1e3,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_bench_measures_every_way_and_its_tables_agree() {
        let options = Options {
            budget: Duration::ZERO,
            runs: 1,
            ipv4: 3000,
            ipv6: 2000,
            threads: 2,
            seed: 5,
        };
        let found = run(&options).unwrap();
        assert!(found.ways.iter().all(|w| w.rate().is_some_and(|e| e.median > 0.0)));
        assert!(found.outcome.figures.iter().all(|f| f.estimate.is_some()));
        let machine = Machine::here();
        let json = found.json(&machine, &[]);
        assert!(json["ratios"]["route.empty.two_threads_vs_one"]["median"].is_number());
        assert!(json["ratios"]["route.1m.lookups_per_us"].is_null(), "of a small table");
        assert!(found.text(&machine).contains("ipv6.full.treebitmap.scalar.2"));
    }
}
