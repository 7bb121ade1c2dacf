//! `bench trust`: whom a flood, or slow peers, keep from being served, and what a flood costs.
//!
//! Two scenarios on a virtual clock are played as the tests of `stack` play them (`fulmar_testbed`).
//! What a flooded frame costs is measured against the kernel, on links of the same kind and in turn, all on
//! one CPU: a packet socket sends a section of frames, then the victim does what it does about them
//! (`victim`). Each way handles the same number of frames per round.

mod flood;
mod found;
mod victim;

use std::io;
use std::time::{Duration, Instant};

use fulmar_base::Duration as VirtualDuration;
use fulmar_stack::ListenOptions;
use fulmar_testbed::listener::Rig;
use fulmar_testbed::slow_peers::{ANSWER, ANSWERING, World};

use crate::bench::Stop;
use crate::cpu::{self, MachineClock, Placement};
use crate::on_pinned_thread;
use flood::{Frames, SECTION};
pub use found::Found;
use victim::{Tally, Victim};

/// Peers with a closed window.
const SLOW_PEERS: usize = 4000;
/// New connections beside them, or during a flood.
const CONNECTIONS: usize = 250;
/// SYNs per millisecond of virtual time.
const SYNS_PER_MS: u32 = 100;
/// Times that each scenario is played, with other secrets.
const PLAYS: u64 = 3;
/// Sections of one run of a way.
const SECTIONS: usize = 16;
/// Rounds that an interval needs, whatever the budget says.
const LEAST_ROUNDS: usize = 3;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Only these ways, of [`way_names`], and no scenario; empty: everything.
    pub ways: Vec<&'static str>,
    /// Time for the rounds; the scenarios on a virtual clock come on top.
    pub budget: Duration,
    /// Rounds at most.
    pub runs: usize,
}

/// Says what is being done, how far it is and how far it will get.
pub type Progress<'a> = &'a mut (dyn FnMut(&'static str, usize, usize) + Send);

/// A victim by name, and how it is made.
type Endpoint = (&'static str, fn() -> io::Result<Victim>);

const ENDPOINTS: [Endpoint; 3] =
    [("kernel", Victim::kernel), ("packet", Victim::packet), ("tap", Victim::tap)];

/// The ways in the order in which a round runs them: endpoint, what is sent, name, title.
const WAYS: [(&str, Frames, &str, &str); 9] = [
    ("kernel", Frames::Unclaimed, "kernel.unclaimed", "kernel on veth, unclaimed frames"),
    ("kernel", Frames::Syns, "kernel.syn", "kernel on veth, SYNs"),
    ("packet", Frames::Syns, "packet.syn", "fulmar on veth (packet), SYNs"),
    ("tap", Frames::Syns, "tap.syn", "fulmar on TAP, SYNs"),
    ("kernel", Frames::Strays, "kernel.stray", "kernel on veth, stray resets"),
    ("packet", Frames::Strays, "packet.stray", "fulmar on veth (packet), stray resets"),
    ("tap", Frames::Strays, "tap.stray", "fulmar on TAP, stray resets"),
    ("packet", Frames::Unclaimed, "packet.unclaimed", "fulmar on veth (packet), unclaimed frames"),
    ("tap", Frames::Unclaimed, "tap.unclaimed", "fulmar on TAP, unclaimed frames"),
];

/// The names of all ways.
pub fn way_names() -> impl Iterator<Item = &'static str> {
    WAYS.into_iter().map(|(_, _, name, _)| name)
}

/// One way, and what it cost.
pub struct Way {
    /// Stable dotted name.
    pub name: &'static str,
    title: &'static str,
    /// CPU nanoseconds per frame, one value per round.
    ns: Vec<f64>,
    /// Busy time of the machine in all rounds.
    machine: Duration,
    answers: u64,
    frames: u64,
}

/// Percent of the connections that were served, one value per play.
#[derive(Default)]
struct Played {
    beside_slow_peers: Vec<f64>,
    during_flood: Vec<f64>,
}

fn percent(served: usize) -> f64 {
    served as f64 * 100.0 / CONNECTIONS as f64
}

/// New connections that are served whole within a second of virtual time beside slow peers.
fn beside_slow_peers(seed: u64) -> f64 {
    let mut world = World::beside_closed_windows(SLOW_PEERS, seed);
    percent(world.ask(ANSWERING, CONNECTIONS, ANSWER, VirtualDuration::from_secs(1)))
}

/// Honest connections that succeed at the first or second SYN during a flood.
fn during_flood(seed: u64) -> f64 {
    let connections =
        Rig::seeded(seed, ListenOptions::default()).connect_under(CONNECTIONS, SYNS_PER_MS);
    percent(connections.iter().filter(|c| c.server.is_some() && c.syns <= 2).count())
}

fn play(progress: Progress<'_>) -> Played {
    let mut played = Played::default();
    for n in 1..=PLAYS {
        progress("playing slow peers", n as usize, PLAYS as usize);
        played.beside_slow_peers.push(beside_slow_peers(n));
        progress("playing a SYN flood", n as usize, PLAYS as usize);
        played.during_flood.push(during_flood(n));
    }
    played
}

/// Measures; `isolated` says whether this process has namespaces of its own. What cannot be opened here is
/// said on standard error and left out.
///
/// # Errors
/// What the system refuses in the middle of a round; a victim that does not do what is measured.
pub fn run(
    options: &Options,
    isolated: io::Result<()>,
    progress: Progress<'_>,
) -> io::Result<Found> {
    let began = Instant::now();
    let is_whole = options.ways.is_empty();
    let played = if is_whole { play(progress) } else { Played::default() };
    let (cpu, _) = Placement::SameCpu.cpus(&cpu::allowed_cpus()?)?;
    let (ways, stop) = match isolated {
        Ok(()) => on_pinned_thread(cpu, || flood(options, progress))?,
        Err(e) => {
            eprintln!("what a flooded frame costs cannot be measured here: {e}");
            (Vec::new(), Stop::Runs)
        }
    };
    Ok(Found::new(ways, &played, stop, began.elapsed()))
}

/// Opens what can be opened and runs rounds until the time is over.
fn flood(options: &Options, progress: Progress<'_>) -> io::Result<(Vec<Way>, Stop)> {
    let is_wanted = |name: &str| options.ways.is_empty() || options.ways.contains(&name);
    let plan: Vec<_> = WAYS.into_iter().filter(|(_, _, name, _)| is_wanted(name)).collect();
    let mut victims: Vec<(&str, Victim)> = Vec::new();
    for (name, open) in ENDPOINTS.into_iter().filter(|(e, _)| plan.iter().any(|w| w.0 == *e)) {
        match open() {
            Ok(victim) => victims.push((name, victim)),
            Err(e) => eprintln!("no {name}: {e}"),
        }
    }
    let (mut ways, mut done, began) = (Vec::new(), 0, Instant::now());
    while done < options.runs && (done < LEAST_ROUNDS || began.elapsed() < options.budget) {
        let ms = |d: Duration| d.as_millis() as usize;
        progress("flooding (ms)", ms(began.elapsed()), ms(options.budget));
        for &(endpoint, what, name, title) in &plan {
            let victim = victims.iter_mut().find(|(known, _)| *known == endpoint);
            if let Some((_, victim)) = victim {
                let cost = measure(victim, what)?;
                check(name, what, &cost)?;
                note(&mut ways, (name, title), &cost);
            }
        }
        done += 1;
    }
    Ok((ways, if done == options.runs { Stop::Runs } else { Stop::Budget }))
}

/// What one run of a way cost.
struct Cost {
    cpu: Duration,
    machine: Duration,
    tally: Tally,
    frames: u64,
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
        "{name}: {frames} frames were sent, and the victim did {tally:?}"
    )))
}

fn note(ways: &mut Vec<Way>, (name, title): (&'static str, &'static str), cost: &Cost) {
    let at = ways.iter().position(|w| w.name == name).unwrap_or_else(|| {
        ways.push(Way {
            name,
            title,
            ns: Vec::new(),
            machine: Duration::ZERO,
            answers: 0,
            frames: 0,
        });
        ways.len() - 1
    });
    let way = &mut ways[at];
    way.ns.push(cost.cpu.as_nanos() as f64 / cost.frames as f64);
    way.machine += cost.machine;
    way.answers += cost.tally.answers;
    way.frames += cost.frames;
}

#[cfg(test)]
mod tests;
