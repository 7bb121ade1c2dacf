//! The bulk bench: which ways are measured, and which of them are compared.

use clap::ValueEnum;
use fulmar_lab::bench::{self, Outcome, Plan, Ratio, Sample, Way};
use fulmar_lab::cpu::Placement;
use fulmar_lab::floor::{self, Direction, Ground, Kind};
use fulmar_lab::kernel::{self, Pair};
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
    let ground = kernel.as_ref().and_then(|_| ground(options)).map(RefCell::new);
    let mut ways = vec![limit::memcpy(BULK())];
    for &placement in &options.placements {
        ways.extend(kernel.as_ref().map(|pair| kernel::way(pair, BULK(), placement)));
        ways.extend(ground.iter().flat_map(|g| floors(g, placement)));
    }
    let ratios = ways.iter().filter_map(|w| ratio_of(w, &ways)).collect();
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

fn floors(ground: &RefCell<Ground>, placement: Placement) -> impl Iterator<Item = Way<'_>> {
    let directions = [Direction::Send, Direction::Receive].into_iter();
    directions.map(move |direction| floor::way(ground, BULK(), direction, true, placement))
}

/// A floor over the kernel's own way at the same placement.
fn ratio_of(way: &Way<'_>, all: &[Way<'_>]) -> Option<Ratio> {
    let over = format!("kernel.{}", way.placement.name());
    let compared = way.name.starts_with("floor.") && all.iter().any(|w| w.name == over);
    compared.then(|| Ratio {
        name: format!("stream.{}.vs_kernel", way.name),
        sentence: "the floor of the device ÷ kernel to kernel, both ends".to_owned(),
        way: way.name.clone(),
        over: Some(over),
        measure: Sample::both_ns_per_kb,
        reach_and_aim: None,
    })
}
