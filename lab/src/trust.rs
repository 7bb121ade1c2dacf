//! `bench trust`: service of other clients during a flood or with slow peers, and the cost of a flood.
//!
//! Two scenarios on a virtual clock are played as the tests of `shard` play them (`fulmar_testbed`).
//! What a flooded frame costs is measured against the kernel, on links of the same kind and in turn, all on
//! one CPU: a packet socket sends a section of frames, then the victim does what it does about them
//! (`victim`). Each way handles the same number of frames per round.

mod flood;
mod victim;

use std::cell::RefCell;
use std::io;
use std::time::Duration;

use fulmar_stack::base::Duration as VirtualDuration;
use fulmar_stack::shard::ListenOptions;
use fulmar_testbed::listener::Rig;
use fulmar_testbed::slow_peers::{ANSWER, ANSWERING, Server};

use crate::cpu::{self, MachineClock, Placement};
use crate::harness::options::{Common, one_of};
use crate::harness::report::{Chart, Report, Shape, label, number};
use crate::harness::{self, Outcome, Pace, Plan, Ratio, Sample, Scenario, Term};
use crate::on_pinned_thread;
use flood::{Frames, SECTION};
use victim::{Tally, Victim};

/// Time for the rounds.
const FULL: Duration = Duration::from_secs(40);
/// Time for the rounds with --quick, without the scenarios on a virtual clock.
const QUICK: Duration = Duration::from_secs(8);
/// Peers with a closed window.
const SLOW_PEERS: usize = 4000;
/// New connections in addition to the slow peers, or during a flood.
const CONNECTIONS: usize = 250;
/// SYNs per millisecond of virtual time.
const SYNS_PER_MS: u32 = 100;
/// Times that each scenario is played, with other secrets.
const PLAYS: usize = 3;
/// Sections of one run of a way.
const SECTIONS: usize = 16;

/// Connections served during floods and with slow peers, and the CPU cost of a flooded frame
#[derive(clap::Args, Clone, Debug)]
#[command(
    override_usage = "fulmar-lab bench trust [OPTIONS]",
    after_help = "On a virtual clock: new connections next to 4,000 peers with a zero window, and
during a SYN flood. Then, for 40 seconds: CPU per flooded SYN and per stray segment,
of the kernel on veth and of fulmar on veth and TAP.
The command creates its own namespaces and removes them."
)]
pub struct Options {
    #[command(flatten)]
    #[expect(missing_docs, reason = "flattened: its own documentation is shown")]
    pub common: Common,
    /// Measure only these floods, and nothing on the virtual clock
    #[arg(long, value_parser = way, value_delimiter = ',', value_name = "NAME")]
    pub way: Vec<&'static str>,
}

fn way(text: &str) -> Result<&'static str, String> {
    one_of(WAYS.map(|(_, _, name, _)| name), |name| name, text)
}

/// A victim by name, and how it is made.
type Endpoint = (&'static str, fn() -> io::Result<Victim>);

const ENDPOINTS: [Endpoint; 3] =
    [("kernel", Victim::kernel), ("packet", Victim::packet), ("tap", Victim::tap)];

/// The ways in the order in which a round runs them: endpoint, what is sent, name, title.
const WAYS: [(&str, Frames, &str, &str); 9] = [
    ("kernel", Frames::Unclaimed, BASE, "kernel on veth, unclaimed frames"),
    ("kernel", Frames::Syns, "kernel.syn", "kernel on veth, SYNs"),
    ("packet", Frames::Syns, "packet.syn", "fulmar on veth (packet), SYNs"),
    ("tap", Frames::Syns, "tap.syn", "fulmar on TAP, SYNs"),
    ("kernel", Frames::Strays, "kernel.stray", "kernel on veth, stray resets"),
    ("packet", Frames::Strays, "packet.stray", "fulmar on veth (packet), stray resets"),
    ("tap", Frames::Strays, "tap.stray", "fulmar on TAP, stray resets"),
    ("packet", Frames::Unclaimed, "packet.unclaimed", "fulmar on veth (packet), unclaimed frames"),
    ("tap", Frames::Unclaimed, "tap.unclaimed", "fulmar on TAP, unclaimed frames"),
];

/// The cost of flooding itself.
const BASE: &str = "kernel.unclaimed";
/// CPU nanoseconds per frame.
const NS: &str = "cpu_ns_per_frame";
/// Percent of the connections that were served.
const SERVED: &str = "served_pct";

fn percent(served: usize) -> f64 {
    served as f64 * 100.0 / CONNECTIONS as f64
}

/// New connections that are served whole within a second of virtual time beside slow peers.
fn beside_slow_peers(seed: u64) -> f64 {
    let mut server = Server::beside_closed_windows(SLOW_PEERS, seed);
    percent(server.ask(ANSWERING, CONNECTIONS, ANSWER, VirtualDuration::from_secs(1)))
}

/// Honest connections that succeed at the first or second SYN during a flood.
fn during_flood(seed: u64) -> f64 {
    let connections =
        Rig::seeded(seed, ListenOptions::default()).connect_under(CONNECTIONS, SYNS_PER_MS);
    percent(connections.iter().filter(|c| c.server.is_some() && c.syns <= 2).count())
}

/// A scenario on a virtual clock: other secrets in every play.
fn played(name: &'static str, title: &'static str, play: fn(u64) -> f64) -> Scenario<'static> {
    let mut seed = 0;
    let run = move |_| {
        seed += 1;
        Ok(Sample::of(SERVED, play(seed)))
    };
    Scenario::new(name, title, run).at_most(PLAYS)
}

/// Measures; `isolated` says whether this process has namespaces of its own. What cannot be opened here is
/// said on standard error and left out.
///
/// # Errors
/// No CPU to run on.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    let (cpu, _) = Placement::SameCpu.cpus(&cpu::allowed_cpus()?)?;
    let outcome = on_pinned_thread(cpu, || Ok(measured(options, isolated)))?;
    Ok(report(outcome))
}

fn measured(options: &Options, isolated: io::Result<()>) -> Outcome {
    let is_wanted = |name: &str| options.way.is_empty() || options.way.contains(&name);
    let wanted: Vec<_> = WAYS.into_iter().filter(|(_, _, name, _)| is_wanted(name)).collect();
    let mut victims: Vec<(&str, RefCell<Victim>)> = Vec::new();
    match isolated {
        Ok(()) => {
            for (name, open) in
                ENDPOINTS.into_iter().filter(|(e, _)| wanted.iter().any(|w| w.0 == *e))
            {
                match open() {
                    Ok(victim) => victims.push((name, RefCell::new(victim))),
                    Err(e) => eprintln!("not measured: {name}: {e}"),
                }
            }
        }
        Err(e) => eprintln!("not measured: the cost of a flooded frame: {e}"),
    }
    let mut scenarios = Vec::new();
    if options.way.is_empty() {
        scenarios.push(played(SLOW, "new connections with slow peers", beside_slow_peers));
        scenarios.push(played(CONNECTS, "new connections during a SYN flood", during_flood));
    }
    for (endpoint, what, name, title) in wanted {
        let victim = victims.iter().find(|(known, _)| *known == endpoint);
        scenarios.extend(victim.map(|(_, victim)| {
            let run = move |_| {
                let cost = measure(&mut victim.borrow_mut(), what)?;
                check(name, what, &cost)?;
                Ok(cost.sample())
            };
            Scenario::new(name, title, run).label("endpoint", endpoint)
        }));
    }
    let mut ratios = ratios();
    ratios.retain(|r| r.is_measured(&scenarios));
    let (budget, max_runs) = (options.common.budget(QUICK, FULL), options.common.runs);
    harness::run(Plan { scenarios, ratios, budget, max_runs, pace: Pace::Calls })
}

fn report(mut outcome: Outcome) -> Report {
    let base = outcome.rows.iter().find(|r| r.name == BASE).and_then(|r| r.value(NS));
    for row in &mut outcome.rows {
        // Over a TAP the flooder is not charged, so there is nothing to take off.
        let off = if row.name.starts_with("tap.") { Some(0.0) } else { base.map(|b| b.median) };
        let net = row.median(NS).zip(off).map(|(ns, off)| ns - off);
        let net = net.and_then(|ns| crate::stats::Estimate::of(&[ns]));
        row.values.extend(net.map(|e| ("net_cpu_ns_per_frame", e)));
    }
    Report::of(&SHAPE, outcome)
}

/// The cost of one run of a variant.
struct Cost {
    cpu: Duration,
    machine: Duration,
    tally: Tally,
    frames: u64,
}

impl Cost {
    fn sample(&self) -> Sample {
        let frames = self.frames as f64;
        Sample::of(NS, self.cpu.as_nanos() as f64 / frames)
            .with("machine_cpu_ns_per_frame", self.machine.as_nanos() as f64 / frames)
            .with("answers_per_frame", self.tally.answers as f64 / frames)
    }
}

fn measure(victim: &mut Victim, what: Frames) -> io::Result<Cost> {
    victim.meet_router()?;
    let mut sections = victim.make(what, SECTIONS)?;
    let before = victim.tally()?;
    let (machine, mut cpu) = (MachineClock::read()?, Duration::ZERO);
    for section in &mut sections {
        cpu += victim.run(section)?;
    }
    let machine = MachineClock::read()?.since(machine).busy;
    let tally = victim.tally()?.since(before);
    Ok(Cost { cpu, machine, tally, frames: (SECTIONS * SECTION) as u64 })
}

/// A victim that does something else than is measured has no figure: of SYNs nine in ten are answered with a
/// cookie (an embryo that has expired makes room for one of the flood); a stray is not answered, so that
/// nothing comes back but what embryos of earlier SYNs repeat.
fn check(name: &str, what: Frames, cost: &Cost) -> io::Result<()> {
    let Cost { tally, frames, .. } = cost;
    let is_right = match what {
        Frames::Unclaimed => true,
        Frames::Syns => tally.cookies.min(tally.answers) * 10 >= frames * 9,
        Frames::Strays => tally.segments * 10 >= frames * 9 && tally.answers * 10 <= *frames,
    };
    if is_right {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "{name}: {frames} frames were sent, but the victim counted {tally:?}"
    )))
}

const SLOW: &str = "trust.slow_peers.served";
const CONNECTS: &str = "trust.syn_flood.connects";

/// A ratio to the kernel, both minus the cost of flooding itself, which a TAP does not charge.
fn over_kernel(name: &'static str, sentence: &'static str, fulmar: &str, kernel: &str) -> Ratio {
    let terms: Vec<Term> = [fulmar, kernel, BASE].map(|name| (name.to_owned(), NS)).to_vec();
    match fulmar.starts_with("tap.") {
        true => Ratio::new(name, sentence, terms, |t| t[0] / (t[1] - t[2])),
        false => Ratio::new(name, sentence, terms, |t| (t[0] - t[2]) / (t[1] - t[2])),
    }
}

/// The same, minus fulmar's cost of unclaimed frames, so that its device is not charged.
fn above_device(name: &'static str, sentence: &'static str, fulmar: &str, kernel: &str) -> Ratio {
    let device = fulmar.split('.').next().unwrap_or_default();
    let ways =
        [fulmar.to_owned(), kernel.to_owned(), BASE.to_owned(), format!("{device}.unclaimed")];
    let terms = ways.map(|name| (name, NS)).to_vec();
    Ratio::new(name, sentence, terms, |t| (t[0] - t[3]) / (t[1] - t[2]))
}

fn ratios() -> Vec<Ratio> {
    let served = |name, sentence| Ratio::value(name, sentence, SERVED, name).more_is_better();
    let (syn, stray) = ("kernel.syn", "kernel.stray");
    vec![
        served(
            SLOW,
            "% of new connections served completely within 1 s of virtual time, with 4,000 peers with a zero window",
        )
        .goals(100.0, 100.0),
        served(
            CONNECTS,
            "% of honest connects at the first or second SYN during 100,000 spoofed SYNs per virtual \
             second",
        )
        .goals(99.0, 100.0),
        over_kernel(
            "trust.syn_flood.us_per_syn",
            "CPU per flooded SYN with cookies: fulmar on TAP ÷ kernel on veth",
            "tap.syn",
            syn,
        )
        .goals(0.5, 0.25),
        above_device(
            "trust.syn_flood.us_per_syn.above_device",
            "the same, minus fulmar's cost of unclaimed frames",
            "tap.syn",
            syn,
        ),
        over_kernel("trust.syn_flood.us_per_syn.packet", "fulmar on veth (packet)", "packet.syn", syn),
        above_device(
            "trust.syn_flood.us_per_syn.packet.above_device",
            "fulmar on veth (packet), minus fulmar's cost of unclaimed frames",
            "packet.syn",
            syn,
        ),
        over_kernel(
            "trust.drop.vs_kernel",
            "CPU per dropped stray segment: fulmar on TAP ÷ kernel on veth",
            "tap.stray",
            stray,
        )
        .goals(2.0, 1.0),
        above_device(
            "trust.drop.vs_kernel.above_device",
            "the same, minus fulmar's cost of unclaimed frames",
            "tap.stray",
            stray,
        ),
        over_kernel("trust.drop.vs_kernel.packet", "fulmar on veth (packet)", "packet.stray", stray),
        above_device(
            "trust.drop.vs_kernel.packet.above_device",
            "fulmar on veth (packet), minus fulmar's cost of unclaimed frames",
            "packet.stray",
            stray,
        ),
    ]
}

const SHAPE: Shape = Shape {
    name: "trust",
    title: "Service during floods and with slow peers, and the CPU cost of a flood",
    lead: "CPU time per flooded frame, of fulmar and of the kernel, and the share of new connections that are served.",
    columns: &[
        label("title", "way"),
        number(NS, "CPU\nns/frame", 0, "CPU time of the one thread").with_interval(),
        number("net_cpu_ns_per_frame", "net of\nflooding", 0, "minus the cost of unclaimed frames"),
        number("machine_cpu_ns_per_frame", "machine\nns/frame", 0, "all CPUs, from /proc/stat"),
        number("answers_per_frame", "answers\nper frame", 2, "frames returned"),
        number(SERVED, "served\n%", 1, "of 250 connections"),
        number("runs", "runs", 0, "number of measurements"),
    ],
    across: None,
    chart: Some(Chart { unit: "CPU ns per frame", parts: &[NS], group: &[], x: None }),
    legend: LEGEND,
};

const LEGEND: &str = "\
CPU ns/frame is CPU time of one pinned thread, which sends 256 frames from a packet socket and then
  has the victim do what it does about them. What the kernel does about a frame on veth runs inside
  the sender's call, in a softirq, and is in that time: the whole way of the frame up to the kernel's
  TCP or to fulmar's packet socket, and the way of the answer back to the flooder's interface, where
  it is dropped. (A kernel with CONFIG_IRQ_TIME_ACCOUNTING leaves softirqs out of a thread's time.)
  machine is the busy time of all CPUs meanwhile, from /proc/stat, which counts in ticks.
net of flooding: the same less what 256 unclaimed frames cost in the same round. They are SYNs under
  an unclaimed EtherType, on the kernel's veth pair, so that sending and veth are taken off and
  nothing of the victim's. What fulmar's packet socket and polling it cost stays in. Over a TAP the
  kernel only queues what is sent; sending is not timed there, and reading it is. Figures with
  above_device take off what fulmar spends on unclaimed frames too, which is its device and little else.
SYNs come from 198.18.0.0/15, none twice from one address and port in a round. Both listeners have a
  SYN queue of 128, which is full, and tcp_syncookies is 1: nine of ten SYNs or more are answered
  with a cookie (checked in every run). Answers go by a default route to a router whose station does
  not exist. Stray segments are resets to a closed port; none is answered, and what comes back meanwhile
  are SYN,ACKs that embryos repeat, for one frame in ten at most (checked).
Percentages are of 250 connections, on a virtual clock, three plays with different secrets.";

#[cfg(test)]
mod tests;
