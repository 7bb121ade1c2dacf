//! `bench stream`: bulk TCP in both directions; which scenarios are measured, and which of them are compared.

use crate::cpu::Placement;
use crate::floor::{self, Direction, Kind, Testbed};
use crate::harness::options::{Common, Stack, or, placement};
use crate::harness::report::Report;
use crate::harness::{self, Pace, Plan, Ratio, Scenario};
use crate::kernel::{self, Pair};
use crate::stream::{self, Joined, Over};
use crate::topology::MTU;
use crate::transfer::{self, BOTH};
use crate::{Bulk, limit};
use clap::ValueEnum;
use std::cell::RefCell;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Over which device fulmar and the kernel meet.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    /// TAP, else AF_PACKET on veth, else fulmar to fulmar alone
    Auto,
    /// TAP with the virtio-net header
    Tap,
    /// AF_PACKET on a veth pair
    Packet,
    /// No kernel: two stacks joined in this process
    Link,
}

/// Bulk TCP, both directions: fulmar and the kernel, the kernel alone, the floor of the device
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab bench stream [OPTIONS]",
    after_help = "Costs are CPU time per KB (1024 bytes) that was moved. The floor is the
least that any TCP over the same device against the same kernel peer can cost.
It makes its own namespaces and leaves nothing behind."
)]
pub struct Options {
    /// How long, and where the report goes.
    #[command(flatten)]
    pub common: Common,
    /// Where the two ends run; both by default
    #[arg(long, value_parser = placement, value_name = "same-cpu|two-cpus|unpinned")]
    placement: Vec<Placement>,
    /// Over which device; auto takes TAP, else AF_PACKET on veth
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    device: Device,
    /// Which TCP is measured; kernel: this machine's, without fulmar
    #[arg(long, value_enum, default_value_t = Stack::Both)]
    stack: Stack,
    /// Write fulmar's frames to this file (pcapng); the figures then mean little
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
}

impl Options {
    fn budget(&self) -> Duration {
        self.common.budget(Duration::from_secs(16), Duration::from_secs(110))
    }

    fn placements(&self) -> Vec<Placement> {
        or(&self.placement, &[Placement::SameCpu, Placement::TwoCpus])
    }
}

/// The shape of the transfer, for every scenario alike.
const BULK: fn() -> Bulk = Bulk::default;

/// Measures. `isolated`: whether this process has namespaces of its own; without them nothing
/// that needs the kernel as a peer can be measured, which is said on standard error.
///
/// # Errors
/// What setting up the kernel's side failed with.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    let kernel = match isolated {
        Ok(()) => Some(Pair::new(MTU, true)?),
        Err(e) => {
            eprintln!("the kernel cannot be measured here: {e}");
            None
        }
    };
    let has_kernel = kernel.is_some();
    let testbed = kernel.as_ref().and_then(|_| testbed(options)).map(RefCell::new);
    let over = testbed.as_ref().map(|g| over_of(g.borrow().kind()));
    let ours = grounds_of_ours(options, over)?;
    let joined = joined(options)?;
    let mut scenarios = vec![limit::memcpy(BULK())];
    for placement in options.placements() {
        scenarios.extend(kernel.as_ref().map(|pair| kernel::scenario(pair, BULK(), placement)));
        for direction in [Direction::Send, Direction::Receive] {
            scenarios.extend(at(&ours, placement).map(|g| stream::scenario(g, BULK(), direction)));
            let floor =
                testbed.iter().map(|g| floor::scenario(g, BULK(), direction, true, placement));
            scenarios.extend(floor);
        }
        scenarios.extend(at(&joined, placement).map(|j| stream::link_scenario(j, BULK())));
    }
    let ratios = options.placements().into_iter().flat_map(|p| ratios_at(p, over)).collect();
    let mut ratios = transfer::measured(ratios, &scenarios);
    ratios.extend(allocations(&scenarios, has_kernel));
    let (budget, max_runs) = (options.budget(), options.common.runs);
    let plan = Plan { scenarios, ratios, budget, max_runs, pace: Pace::Transfers };
    Ok(Report::of(&transfer::STREAM, harness::run(plan)))
}

/// The device under the floor; `None` where there is none or the kernel alone is asked for.
fn testbed(options: &Options) -> Option<Testbed> {
    let kinds: &[Kind] = match (options.stack, options.device) {
        (Stack::Kernel, _) | (_, Device::Link) => &[],
        (_, Device::Auto) => &[Kind::Tap, Kind::Packet],
        (_, Device::Tap) => &[Kind::Tap],
        (_, Device::Packet) => &[Kind::Packet],
    };
    kinds.iter().find_map(|&kind| match Testbed::new(kind) {
        Ok(testbed) => Some(testbed),
        Err(e) => {
            eprintln!("not measured: {}: {e}", kind.title());
            None
        }
    })
}

fn over_of(kind: Kind) -> Over {
    match kind {
        Kind::Tap => Over::Tap,
        Kind::Packet | Kind::PacketRing => Over::Packet,
    }
}

/// A stack of ours per placement, on the same kind of device as the floor.
fn grounds_of_ours(
    options: &Options,
    over: Option<Over>,
) -> io::Result<Vec<(Placement, RefCell<stream::Testbed>)>> {
    let Some(over) = over else { return Ok(Vec::new()) };
    let open = |p| Ok((p, RefCell::new(stream::Testbed::new(over, p, options.pcap.as_ref())?)));
    options.placements().into_iter().map(open).collect()
}

/// Two stacks of ours per placement, joined.
fn joined(options: &Options) -> io::Result<Vec<(Placement, RefCell<Joined>)>> {
    if options.stack == Stack::Kernel {
        return Ok(Vec::new());
    }
    options.placements().into_iter().map(|p| Ok((p, RefCell::new(Joined::new(p)?)))).collect()
}

fn at<T>(all: &[(Placement, T)], placement: Placement) -> impl Iterator<Item = &T> {
    all.iter().filter(move |(p, _)| *p == placement).map(|(_, one)| one)
}

/// What is compared at one placement. The same names whatever the device, which the scenarios tell.
fn ratios_at(placement: Placement, over: Option<Over>) -> Vec<Ratio> {
    let at = placement.name();
    let kernel = format!("kernel.{at}");
    let link = Ratio::over(
        format!("stream.link.{at}.vs_kernel"),
        "fulmar to fulmar over link ÷ kernel to kernel over veth, both ends",
        BOTH,
        [&format!("fulmar.link.{at}"), &kernel],
    );
    let mut ratios = vec![match placement {
        Placement::SameCpu => link.goals(0.6, 0.4),
        _ => link,
    }];
    for direction in [Direction::Send, Direction::Receive] {
        let Some(over) = over else { continue };
        let verb = direction.name();
        let ours = format!("fulmar.{}.{verb}.{at}", over.name());
        let floor = Ratio::over(
            format!("stream.{verb}.{at}.vs_floor"),
            "fulmar ÷ the floor of the same device with one memcpy, both ends",
            BOTH,
            [&ours, &format!("floor.{}.{verb}.{at}", over.name())],
        );
        let kernel = Ratio::over(
            format!("stream.{verb}.{at}.vs_kernel"),
            "fulmar ÷ kernel to kernel over veth, both ends",
            BOTH,
            [&ours, &kernel],
        );
        ratios.extend(match (placement, direction) {
            (Placement::SameCpu, _) => [floor.goals(1.15, 1.05), kernel],
            (Placement::TwoCpus, Direction::Send) => [floor, kernel.goals(1.1, 0.85)],
            (Placement::TwoCpus, Direction::Receive) => [floor, kernel.goals(1.25, 1.05)],
            (Placement::Unpinned, _) => [floor, kernel],
        });
    }
    ratios
}

/// Heap allocations per packet of MTU size in steady state, of the scenario that matters most.
fn allocations(scenarios: &[Scenario<'_>], has_kernel: bool) -> Option<Ratio> {
    let wanted = if has_kernel { "send" } else { "link" };
    let mut all = scenarios.iter().map(|s| &s.name);
    let name = all.find(|n| n.starts_with("fulmar.") && n.contains(wanted))?;
    let ratio = Ratio::value(
        "stream.heap_allocations_per_packet",
        "heap allocations per packet of MTU size, steady state",
        "heap_allocations_per_packet",
        name,
    );
    Some(ratio.goals(0.0, 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::options::parsed;

    fn options(line: &str) -> Options {
        parsed(line).expect("it parses")
    }

    #[test]
    fn both_placements_are_measured_unless_one_is_asked_for() {
        assert_eq!(options("").placements(), [Placement::SameCpu, Placement::TwoCpus]);
        assert_eq!(options("--placement two-cpus").placements(), [Placement::TwoCpus]);
    }

    #[test]
    fn quick_stays_under_twenty_seconds_and_full_under_two_minutes() {
        assert!(options("--quick").budget() < Duration::from_secs(20));
        assert!(options("").budget() < Duration::from_secs(120));
    }
}
