//! The bulk bench: which ways are measured, and which of them are compared.

use clap::ValueEnum;
use fulmar_lab::bench::{self, Outcome, Plan, Ratio, Sample, Way};
use fulmar_lab::cpu::Placement;
use fulmar_lab::floor::{self, Direction, Ground, Kind};
use fulmar_lab::kernel::{self, Pair};
use fulmar_lab::stream::{self, Joined, Over};
use fulmar_lab::{Bulk, limit};
use std::cell::RefCell;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// What is asked of the bench.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// Time for everything.
    pub budget: Duration,
    /// Rounds at most.
    pub runs: usize,
    /// Where the ends run.
    pub placements: Vec<Placement>,
    /// Over which device.
    pub device: Device,
    /// Whose TCP.
    pub stack: Stack,
    /// Where fulmar's frames are written.
    pub pcap: Option<PathBuf>,
}

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

/// Whose TCP is measured.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stack {
    /// fulmar, with what it is compared with
    Fulmar,
    /// This machine's own, without fulmar
    Kernel,
    /// Both
    Both,
}

/// The shape of the transfer, for every way alike.
const BULK: fn() -> Bulk = Bulk::default;
const MTU: u32 = 1500;
const SOAK_FROM: Duration = Duration::from_secs(60);

/// Measures. `isolated`: whether this process has namespaces of its own; without them nothing
/// that needs the kernel as a peer can be measured, which is said on standard error.
///
/// # Errors
/// What setting up the kernel's side failed with.
pub fn run(options: &Options, isolated: io::Result<()>) -> io::Result<Outcome> {
    let kernel = match isolated {
        Ok(()) => Some(Pair::new(MTU, true)?),
        Err(e) => {
            eprintln!("the kernel cannot be measured here: {e}");
            None
        }
    };
    let has_kernel = kernel.is_some();
    let ground = kernel.as_ref().and_then(|_| ground(options)).map(RefCell::new);
    let over = ground.as_ref().map(|g| over_of(g.borrow().kind()));
    let ours = grounds_of_ours(options, over)?;
    let joined = joined(options)?;
    let mut ways = vec![limit::memcpy(BULK())];
    for &placement in &options.placements {
        ways.extend(kernel.as_ref().map(|pair| kernel::way(pair, BULK(), placement)));
        for direction in [Direction::Send, Direction::Receive] {
            ways.extend(ours_at(&ours, placement).map(|g| stream::way(g, BULK(), direction)));
            ways.extend(ground.iter().map(|g| floor::way(g, BULK(), direction, true, placement)));
        }
        ways.extend(joined_at(&joined, placement).map(|j| stream::link_way(j, BULK())));
    }
    let mut ratios =
        options.placements.iter().flat_map(|p| ratios_at(*p, over)).collect::<Vec<_>>();
    ratios.retain(|r| is_measured(r, &ways));
    ratios.extend(allocations(&ways, has_kernel));
    let (budget, max_runs) = (options.budget, options.runs);
    Ok(bench::run(Plan { ways, ratios, budget, max_runs, soak: budget >= SOAK_FROM }))
}

/// The device under the floor; `None` where there is none or the kernel alone is asked for.
fn ground(options: &Options) -> Option<Ground> {
    let kinds: &[Kind] = match (options.stack, options.device) {
        (Stack::Kernel, _) | (_, Device::Link) => &[],
        (_, Device::Auto) => &[Kind::Tap, Kind::Packet],
        (_, Device::Tap) => &[Kind::Tap],
        (_, Device::Packet) => &[Kind::Packet],
    };
    kinds.iter().find_map(|&kind| match Ground::new(kind) {
        Ok(ground) => Some(ground),
        Err(e) => {
            eprintln!("no {}: {e}", kind.title());
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
) -> io::Result<Vec<(Placement, RefCell<stream::Ground>)>> {
    let Some(over) = over else { return Ok(Vec::new()) };
    let placements = options.placements.iter();
    let open = |&p| Ok((p, RefCell::new(stream::Ground::new(over, p, options.pcap.as_ref())?)));
    placements.map(open).collect()
}

/// Two stacks of ours per placement, joined.
fn joined(options: &Options) -> io::Result<Vec<(Placement, RefCell<Joined>)>> {
    if options.stack == Stack::Kernel {
        return Ok(Vec::new());
    }
    let placements = options.placements.iter();
    placements.map(|&p| Ok((p, RefCell::new(Joined::new(p)?)))).collect()
}

fn ours_at(
    all: &[(Placement, RefCell<stream::Ground>)],
    placement: Placement,
) -> impl Iterator<Item = &RefCell<stream::Ground>> {
    all.iter().filter(move |(p, _)| *p == placement).map(|(_, g)| g)
}

fn joined_at(
    all: &[(Placement, RefCell<Joined>)],
    placement: Placement,
) -> impl Iterator<Item = &RefCell<Joined>> {
    all.iter().filter(move |(p, _)| *p == placement).map(|(_, j)| j)
}

/// What is compared at one placement. The same names whatever the device, which the ways tell.
fn ratios_at(placement: Placement, over: Option<Over>) -> Vec<Ratio> {
    let at = placement.name();
    let kernel = format!("kernel.{at}");
    let mut ratios = vec![compared(
        format!("stream.link.{at}.vs_kernel"),
        "fulmar to fulmar over link ÷ kernel to kernel over veth, both ends",
        format!("fulmar.link.{at}"),
        &kernel,
        (placement == Placement::SameCpu).then_some((0.6, 0.4)),
    )];
    for direction in [Direction::Send, Direction::Receive] {
        let Some(over) = over else { continue };
        let verb = direction.name();
        let ours = format!("fulmar.{}.{verb}.{at}", over.name());
        let floor = format!("floor.{}.{verb}.{at}", over.name());
        let goals = |vs_floor: bool| match (placement, direction, vs_floor) {
            (Placement::SameCpu, _, true) => Some((1.15, 1.05)),
            (Placement::TwoCpus, Direction::Send, false) => Some((1.1, 0.85)),
            (Placement::TwoCpus, Direction::Receive, false) => Some((1.25, 1.05)),
            _ => None,
        };
        ratios.push(compared(
            format!("stream.{verb}.{at}.vs_floor"),
            "fulmar ÷ the floor of the same device with one memcpy, both ends",
            ours.clone(),
            &floor,
            goals(true),
        ));
        ratios.push(compared(
            format!("stream.{verb}.{at}.vs_kernel"),
            "fulmar ÷ kernel to kernel over veth, both ends",
            ours,
            &kernel,
            goals(false),
        ));
    }
    ratios
}

fn compared(
    name: String,
    sentence: &str,
    way: String,
    over: &str,
    reach_and_aim: Option<(f64, f64)>,
) -> Ratio {
    Ratio {
        name,
        sentence: sentence.to_owned(),
        way,
        over: Some(over.to_owned()),
        measure: Sample::both_ns_per_kb,
        reach_and_aim,
        more_is_better: false,
        published: None,
    }
}

fn is_measured(ratio: &Ratio, ways: &[Way<'_>]) -> bool {
    let has = |name: &String| ways.iter().any(|w| w.name == *name);
    has(&ratio.way) && ratio.over.as_ref().is_none_or(has)
}

/// Heap allocations per packet of MTU size in steady state, of the way that matters most.
fn allocations(ways: &[Way<'_>], has_kernel: bool) -> Option<Ratio> {
    let wanted = if has_kernel { "send" } else { "link" };
    let way = ways.iter().find(|w| w.name.starts_with("fulmar.") && w.name.contains(wanted))?;
    Some(Ratio {
        name: "stream.heap_allocations_per_packet".to_owned(),
        sentence: "heap allocations per packet of MTU size, steady state".to_owned(),
        way: way.name.clone(),
        over: None,
        measure: |s| s.counted("heap_allocations") as f64 / s.counted("packets").max(1) as f64,
        reach_and_aim: Some((0.0, 0.0)),
        more_is_better: false,
        published: None,
    })
}
