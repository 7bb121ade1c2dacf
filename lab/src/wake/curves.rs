//! The sweep of loads as curves: what each way of waiting adds and costs, one chart per device and
//! quantity, the kernel's own way in each.

use super::figures::both_cpu_us;
use super::place::Sample;
use super::report::per_second;
use super::{Cell, Device, Mode, Part};
use crate::page::{Block, Line, Lines, Section};

/// A quantity: its heading, its unit, and what it is of one run.
type Quantity = (&'static str, &'static str, fn(&Sample) -> Option<f64>);

const QUANTITIES: [Quantity; 4] = [
    ("Half of the datagrams were younger than this when they were taken", "p50, \u{b5}s", |s| {
        s.latency_ns().map(|l| l[0] as f64 / 1e3)
    }),
    ("99 % of the datagrams were younger than this when they were taken", "p99, \u{b5}s", |s| {
        s.latency_ns().map(|l| l[1] as f64 / 1e3)
    }),
    ("How often the waiting thread was woken", "wake-ups per second", |s| {
        per_second(s, s.near.wakeups as f64)
    }),
    ("CPU of both ends", "CPU \u{b5}s per datagram", |s| Some(both_cpu_us(s))),
];

/// The section, if a sweep was measured.
pub fn section(cells: &[Cell]) -> Option<Section> {
    let mut blocks = Vec::new();
    for device in [Device::Tap, Device::Packet, Device::Shm, Device::Sim] {
        let charts = QUANTITIES.iter().map(|q| chart(cells, device, q));
        blocks.extend(charts.filter(|c| !c.is_empty()).map(Block::Lines));
    }
    let title = "From one packet per second to as many as go, as curves";
    (!blocks.is_empty()).then(|| Section::new(title, blocks))
}

fn chart(cells: &[Cell], device: Device, (what, unit, of): &Quantity) -> Lines {
    let modes = device.modes().iter().map(|&mode| (device, mode));
    let kernel = std::iter::once((Device::Veth, Mode::Kernel));
    let of_mode = |(colour, (device, mode)): (usize, (Device, Mode))| Line {
        name: match mode {
            Mode::Kernel => "kernel over veth".to_owned(),
            mode => mode.name().to_owned(),
        },
        colour: [0, 2, 3, 4, 7][colour.min(4)],
        points: points(cells, device, mode, *of),
    };
    let modes: Vec<(Device, Mode)> = modes.collect();
    // The kernel keeps its colour whatever stands beside it.
    let ours = modes.into_iter().enumerate().map(of_mode);
    let lines = ours.chain(kernel.map(|k| of_mode((4, k)))).filter(|l| l.points.len() > 1);
    let lines: Vec<Line> = lines.collect();
    let of_ours = lines.iter().any(|l| !l.name.starts_with("kernel"));
    Lines {
        caption: format!("{}: {what}; the load as it was taken.", name(device)),
        units: ("datagrams per second".to_owned(), (*unit).to_owned()),
        lines: if of_ours { lines } else { Vec::new() },
    }
}

fn name(device: Device) -> &'static str {
    match device {
        Device::Tap => "TAP",
        Device::Packet => "AF_PACKET",
        Device::Shm => "Shared memory",
        Device::Sim => "Simulated card",
        other => other.name(),
    }
}

/// The medians of a curve, by the load that was taken.
fn points(
    cells: &[Cell],
    device: Device,
    mode: Mode,
    of: fn(&Sample) -> Option<f64>,
) -> Vec<(f64, f64)> {
    let sweep = cells
        .iter()
        .filter(|c| matches!(c.part, Part::Sweep(_)) && c.device == device && c.mode == mode);
    let load = |s: &Sample| per_second(s, s.near.packets as f64);
    sweep.filter_map(|c| Some((c.median(load)?, c.median(of)?))).collect()
}
