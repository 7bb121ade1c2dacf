//! What joining received segments in software is worth (`StackConfig::gro`) where the device hands over
//! packets of MTU size: a TAP and a veth pair whose kernel end cuts its segments itself, a stream from
//! the kernel, read with and without, in turns.

use std::io;
use std::time::Duration;

use serde_json::{Value, json};

use super::{LESS, figure};
use crate::Bulk;
use crate::bench::Figure;
use crate::cpu::Placement;
use crate::floor::Direction;
use crate::stats::Estimate;
use crate::stream::{Ground, Over};

/// How long one stream is measured.
const SLICE: Duration = Duration::from_millis(80);
/// Bytes before that.
const WARM_BYTES: u64 = 4 << 20;

/// Both ways on one device.
struct Cell {
    over: Over,
    joined: Ground,
    single: Ground,
    /// ns per KB of the receiving process, joined and not, one pair per round.
    values: Vec<(f64, f64)>,
}

/// Every device that has this.
pub struct Joining {
    cells: Vec<Cell>,
}

impl Joining {
    /// Opens the devices; what cannot be opened is said on standard error and left out.
    pub fn open(overs: &[Over]) -> Joining {
        let opened = |over: Over| -> io::Result<Cell> {
            let ground = |gro| Ground::of_packets(over, Placement::SameCpu, gro);
            Ok(Cell { over, joined: ground(true)?, single: ground(false)?, values: Vec::new() })
        };
        let said = |over: &Over| match opened(*over) {
            Ok(cell) => Some(cell),
            Err(e) => {
                eprintln!("no receiving over {} packet by packet: {e}", over.name());
                None
            }
        };
        Joining { cells: overs.iter().filter_map(said).collect() }
    }

    /// One pair of streams per device. What fails is said and not tried again.
    pub fn round(&mut self) {
        self.cells.retain_mut(|cell| match cell.round() {
            Ok(()) => true,
            Err(e) => {
                eprintln!("receiving over {} packet by packet: {e}", cell.over.name());
                !cell.values.is_empty()
            }
        });
    }

    pub(super) fn figures(&self) -> Vec<Figure> {
        let all = self.cells.iter().map(|cell| {
            let ratios: Vec<f64> = cell.values.iter().map(|(j, s)| j / s).collect();
            figure(
                &format!("burst.{}.joined_vs_single", cell.over.name()),
                "CPU per KB received packet by packet, segments joined in software ÷ not",
                Estimate::of(&ratios),
                LESS,
            )
        });
        all.filter(|f| f.estimate.is_some()).collect()
    }

    /// A line per device.
    pub(super) fn lines(&self) -> Vec<String> {
        let line = |cell: &Cell| {
            let (joined, single) = cell.medians()?;
            Some(format!(
                "A stream received packet by packet over {}: {single:.0} ns of CPU per KB, {joined:.0} \
                 with segments joined in software.",
                cell.over.name()
            ))
        };
        self.cells.iter().filter_map(line).collect()
    }

    pub(super) fn json(&self) -> Value {
        let one = |cell: &Cell| {
            let (joined, single) = cell.medians()?;
            Some(json!({
                "device": cell.over.name(),
                "joined_ns_per_kb": joined,
                "single_ns_per_kb": single,
                "runs": cell.values.len(),
            }))
        };
        self.cells.iter().filter_map(one).collect()
    }
}

impl Cell {
    fn round(&mut self) -> io::Result<()> {
        let bulk = Bulk { warm_bytes: WARM_BYTES, ..Bulk::default() };
        let cost = |ground: &mut Ground| {
            ground.stream(&bulk, Direction::Receive, SLICE).map(|s| s.near_ns_per_kb())
        };
        // Who goes first changes from round to round.
        let pair = if self.values.len().is_multiple_of(2) {
            let joined = cost(&mut self.joined)?;
            (joined, cost(&mut self.single)?)
        } else {
            let single = cost(&mut self.single)?;
            (cost(&mut self.joined)?, single)
        };
        self.values.push(pair);
        Ok(())
    }

    fn medians(&self) -> Option<(f64, f64)> {
        let of = |pick: fn(&(f64, f64)) -> f64| {
            let values: Vec<f64> = self.values.iter().map(pick).collect();
            Estimate::of(&values).map(|e| e.median)
        };
        Some((of(|v| v.0)?, of(|v| v.1)?))
    }
}
