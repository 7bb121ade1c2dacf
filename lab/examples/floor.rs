//! Measures the floor: the kernel against itself, and a do-nothing TCP on TAP and AF_PACKET against
//! a kernel peer, with and without one copy. Needs no root where user namespaces are allowed.
//!
//! `cargo run --release -p fulmar-lab --example floor [SECONDS] [FILE.json]`

use fulmar_lab::cpu::Placement;
use fulmar_lab::floor::{Direction, Kind, Testbed};
use fulmar_lab::harness::report::{Machine, Report, busy_warning};
use fulmar_lab::harness::{self, Pace, Plan, Ratio, Scenario};
use fulmar_lab::kernel::Pair;
use fulmar_lab::lock::BenchLock;
use fulmar_lab::transfer::{self, BOTH};
use fulmar_lab::{Bulk, child, floor, kernel, limit};
use std::cell::RefCell;
use std::io::{self, Write};
use std::time::Duration;

fn main() {
    child::dispatch();
    if let Err(e) = measure() {
        eprintln!("floor: {e}");
        std::process::exit(1);
    }
}

fn measure() -> io::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let seconds = args.get(1).and_then(|s| s.parse().ok()).unwrap_or(60);
    let _lock = BenchLock::take()?;
    fulmar_gateway::netns::enter()?;
    if let Some(warning) = busy_warning() {
        eprintln!("{warning}");
    }
    let (pair, plain_pair) = (Pair::new(1500, true)?, Pair::new(1500, false)?);
    let testbeds = testbeds();
    let (mut scenarios, mut ratios) = (vec![limit::memcpy(Bulk::default())], Vec::new());
    for placement in [Placement::SameCpu, Placement::TwoCpus] {
        scenarios.push(kernel::scenario(&pair, Bulk::default(), placement));
        scenarios.push(kernel::scenario(&plain_pair, Bulk::default(), placement));
        for testbed in &testbeds {
            scenarios.extend(floor_scenarios(testbed, placement));
        }
    }
    for floor in scenarios.iter().filter(|s| s.name.starts_with("floor")) {
        ratios.push(over_kernel(floor));
    }
    let budget = Duration::from_secs(seconds);
    let plan = Plan { scenarios, ratios, budget, max_runs: 40, pace: Pace::Transfers };
    let report = Report::of(&transfer::STREAM, harness::run(plan));
    writeln!(io::stdout(), "{}", report.text(&Machine::here()))?;
    match args.get(2) {
        Some(file) => std::fs::write(file, report.json(&Machine::here(), &args).to_string()),
        None => Ok(()),
    }
}

/// The devices that can be had; for the others it says why not.
fn testbeds() -> Vec<RefCell<Testbed>> {
    let open = |kind: Kind| match Testbed::new(kind) {
        Ok(testbed) => Some(RefCell::new(testbed)),
        Err(e) => {
            eprintln!("no {}: {e}", kind.title());
            None
        }
    };
    [Kind::Tap, Kind::Packet, Kind::PacketRing].into_iter().filter_map(open).collect()
}

fn floor_scenarios(
    testbed: &RefCell<Testbed>,
    placement: Placement,
) -> impl Iterator<Item = Scenario<'_>> {
    let cases =
        [Direction::Send, Direction::Receive].into_iter().flat_map(|d| [(d, false), (d, true)]);
    cases.map(move |(direction, copy)| {
        floor::scenario(testbed, Bulk::default(), direction, copy, placement)
    })
}

fn over_kernel(floor: &Scenario<'_>) -> Ratio {
    let kernel = format!("kernel.{}", floor.word("placement").unwrap_or_default());
    let name = format!("{}.vs_kernel", floor.name);
    Ratio::over(name, "CPU of both ends per KB ÷ kernel to kernel", BOTH, [&floor.name, &kernel])
}
