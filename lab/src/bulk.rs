//! `bench stream`: bulk TCP in both directions; which scenarios are measured, and which of them are compared.

use crate::cpu::Placement;
use crate::floor::{self, Direction, Kind, Testbed};
use crate::harness::options::{Common, Stack, or, placement};
use crate::harness::report::Report;
use crate::harness::{self, Pace, Plan, Ratio, Scenario};
use crate::kernel::send::KernelCall;
use crate::kernel::{Pair, Work};
use crate::recv::rig::Real;
use crate::recv::{self, Rig as _};
use crate::send;
use crate::stream::{self, Joined, Over};
use crate::topology::MTU;
use crate::transfer::{self, BOTH};
use crate::{Bulk, limit};
use clap::ValueEnum;
use std::cell::RefCell;
use std::io;
use std::time::Duration;

/// Over which device fulmar and the kernel meet.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    /// TAP if available, else AF_PACKET on veth, else link
    Auto,
    /// TAP with the virtio-net header
    Tap,
    /// AF_PACKET on a veth pair
    Packet,
    /// Two fulmar stacks connected in this process, without the kernel
    Link,
}

/// Bulk TCP in both directions: fulmar, the kernel, and a lower bound for any TCP over the device
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "fulmar-lab bench stream [OPTIONS]",
    after_help = "Costs are CPU time per KB (1024 bytes) transferred. The floor is the least that
any TCP can cost over the same device with the same kernel peer.
The command creates its own namespaces and removes them."
)]
pub struct Options {
    /// How long, and where the report goes.
    #[command(flatten)]
    pub common: Common,
    /// CPUs of the two ends [default: same-cpu, two-cpus]
    #[arg(long, value_parser = placement, value_name = "same-cpu|two-cpus|unpinned")]
    placement: Vec<Placement>,
    /// The device
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    device: Device,
    /// The TCP to measure
    #[arg(long, value_enum, default_value_t = Stack::Both)]
    stack: Stack,
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
/// The error of the set-up of the kernel's side.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Report> {
    let kernel = match isolated {
        Ok(()) => Some(Pair::new(MTU, true)?),
        Err(e) => {
            eprintln!("cannot measure the kernel here: {e}");
            None
        }
    };
    let has_kernel = kernel.is_some();
    let testbed = kernel.as_ref().and_then(|_| testbed(options)).map(RefCell::new);
    let over = testbed.as_ref().map(|g| over_of(g.borrow().kind()));
    let all_ends: Vec<Ends> = options
        .placements()
        .into_iter()
        .map(|placement| Ends::open(options.stack, over, placement))
        .collect::<io::Result<_>>()?;
    let mut scenarios = vec![limit::memcpy(BULK())];
    for ends in &all_ends {
        let placement = ends.placement;
        scenarios.extend(kernel.as_ref().map(|pair| kernel_to_kernel(pair, placement)));
        for direction in [Direction::Send, Direction::Receive] {
            scenarios.extend(ends.beside_kernel(direction));
            let floor =
                testbed.iter().map(|g| floor::scenario(g, BULK(), direction, true, placement));
            scenarios.extend(floor);
        }
        scenarios.extend(ends.joined.as_ref().map(|rig| {
            let name = format!("fulmar.link.{}", placement.name());
            sending(rig, name, "fulmar to fulmar, link".to_owned())
        }));
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
        Kind::Packet => Over::Packet,
    }
}

/// fulmar's ends at one placement, from `bench send` and `bench recv`.
struct Ends {
    placement: Placement,
    /// On the same kind of device as the floor.
    beside_kernel: Option<(Over, RefCell<stream::Testbed>, RefCell<Real>)>,
    joined: Option<RefCell<Joined>>,
}

impl Ends {
    fn open(stack: Stack, over: Option<Over>, placement: Placement) -> io::Result<Ends> {
        let beside_kernel = match over {
            Some(over) => {
                let sending = stream::Testbed::new(over, placement, None)?;
                let receiving = Real::new(over, placement, recv::Offloads::all(true), None)?;
                Some((over, RefCell::new(sending), RefCell::new(receiving)))
            }
            None => None,
        };
        let joined = match stack {
            Stack::Kernel => None,
            _ => Some(RefCell::new(Joined::new(placement, true)?)),
        };
        Ok(Ends { placement, beside_kernel, joined })
    }

    fn beside_kernel(&self, direction: Direction) -> Option<Scenario<'_>> {
        let (over, sender, receiver) = self.beside_kernel.as_ref()?;
        let (device, at) = (over.name(), self.placement.name());
        let name = format!("fulmar.{device}.{}.{at}", direction.name());
        Some(match direction {
            Direction::Send => sending(sender, name, format!("fulmar, {}, sending", over.title())),
            Direction::Receive => {
                let load = recv::Load::of_one_buffer(BULK().read_bytes);
                let title = format!("fulmar, {}, receiving", over.title());
                transfer::scenario(name, title, self.placement, move |time| {
                    let mut reader = recv::Method::Copy.reader(&load)?;
                    receiver.borrow_mut().stream(&load, reader.as_mut(), time)
                })
            }
        })
    }
}

fn sending(rig: &RefCell<impl send::Rig>, name: String, title: String) -> Scenario<'_> {
    let (load, placement) = (load(), rig.borrow().config().placement);
    transfer::scenario(name, title, placement, move |time| {
        rig.borrow_mut().stream(&load, send::Method::Ours.caller(&load).as_mut(), time)
    })
}

fn kernel_to_kernel(pair: &Pair, placement: Placement) -> Scenario<'_> {
    let (name, title) = (format!("kernel.{}", placement.name()), "kernel to kernel, veth");
    let work = Work { call: KernelCall::Write, load: load(), file: None };
    transfer::scenario(name, title, placement, move |time| work.run(&pair.ends(), placement, time))
}

fn load() -> send::Load {
    send::Load::of_writes(BULK().write_bytes)
}

/// The ratios of one placement. Their names do not depend on the device, which the scenarios record.
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
