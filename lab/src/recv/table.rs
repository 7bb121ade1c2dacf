//! The text tables of `bench recv`: one pair per device, with and without aggregation; costs first,
//! then what was counted.

use crate::bench::{Cell, Row, Side};
use crate::cells::{TABLES, interval, median, number};
use crate::report::new_table;
use std::fmt::Write;

/// The tables of all rows whose receiver is under test; empty without any.
pub fn text(rows: &[Row]) -> String {
    let mut out = String::new();
    for (title, devices) in TABLES {
        for aggregation in [true, false] {
            let mine = |r: &&Row| {
                r.cell.is_some_and(|c| {
                    c.side == Side::Receives
                        && devices.contains(&c.device)
                        && c.super_segments == aggregation
                })
            };
            let mut rows: Vec<&Row> = rows.iter().filter(mine).collect();
            if rows.is_empty() {
                continue;
            }
            rows.sort_by_key(|r| r.cell.map(|c| (c.write_bytes, c.source, r.placement as u8)));
            let state = if aggregation { "on" } else { "off" };
            let _ = write!(
                out,
                "{title}; receive aggregation {state}\n\n{}\n\n{}\n\n",
                costs(&rows),
                counts(&rows)
            );
        }
    }
    out.trim_end().to_owned()
}

/// What a row is: its buffers, what becomes of the bytes, its way and placement.
fn place(row: &Row, cell: &Cell) -> [String; 4] {
    let buffers = format!("2 x {} KiB", cell.write_bytes >> 10);
    let usage = if cell.source == "bursty" { "touched, bursty" } else { cell.source };
    [buffers, usage.to_owned(), row.title.clone(), row.placement.title().to_owned()]
}

fn costs(rows: &[&Row]) -> String {
    let header = [
        "buffers",
        "bytes are",
        "way",
        "ends on",
        "Gb/s",
        "thread\nns/KB",
        "hardware\nns/KB",
        "this end\nns/KB",
        "other end\nns/KB",
        "both ends\nns/KB",
        "95 %",
        "machine\nns/KB",
        "runs",
    ];
    let mut table = new_table(header, 4);
    for (row, cell) in rows.iter().filter_map(|r| Some((r, r.cell.as_ref()?))) {
        let mut cells = place(row, cell).to_vec();
        cells.extend([
            median(row.gbps, 1),
            median(row.thread_ns_per_kb, 0),
            median(row.hardware_ns_per_kb, 0),
            median(row.near_ns_per_kb, 0),
            median(row.far_ns_per_kb.filter(|e| e.high > 0.0), 0),
            median(row.both_ns_per_kb, 0),
            interval(row.both_ns_per_kb, 0),
            number(row.machine_ns_per_kb, 0),
            row.both_ns_per_kb.map_or(0, |e| e.runs).to_string(),
        ]);
        table.add_row(cells);
    }
    table.to_string()
}

fn counts(rows: &[&Row]) -> String {
    let header = [
        "buffers",
        "bytes are",
        "way",
        "ends on",
        "KB per\nread",
        "KB per\nwait",
        "KB per\nframe",
        "frames per\ncrossing",
        "copies\nper byte",
        "placed\n%",
        "slow buffers\nper MB",
    ];
    let mut table = new_table(header, 4);
    for (row, cell) in rows.iter().filter_map(|r| Some((r, r.cell.as_ref()?))) {
        let kb = |key| number(row.quotient(key).map(|bytes| bytes / 1024.0), 1);
        let of = |key, decimals| number(row.quotient(key), decimals);
        let mut cells = place(row, cell).to_vec();
        cells.extend([
            kb("bytes_per_read"),
            kb("bytes_per_wait"),
            kb("bytes_per_rx_frame"),
            of("frames_per_rx_crossing", 2),
            of("copies_per_byte", 2),
            number(row.quotient("placed_share").map(|share| share * 100.0), 1),
            of("slow_allocations_per_mb", 2),
        ]);
        table.add_row(cells);
    }
    table.to_string()
}

/// What the columns mean, one per line.
pub const LEGEND: [&str; 18] = [
    "buffers   that the reader has and uses in turn, and what it does with what it finds there:",
    "          touched, a word of every cache line is read. Bursty: 256 KiB, then a millisecond of pause.",
    "thread    CPU time of the thread that receives, per KB (1024 bytes).",
    "hardware  time of the simulated device, which ran inside the receiver's calls; it is in no other",
    "          column of its row. The device places and aggregates; it writes no payload (as DMA).",
    "both ends CPU of both processes, service threads included, per KB.",
    "machine   busy time of all CPUs in the measured stretch, from /proc/stat, which counts in ticks: coarse",
    "          for bursts. The fifths of rounds that cost most and least are left out.",
    "95 %      the interval that holds the true median with 95 % confidence (order statistics);",
    "          of fewer than six runs the least and the most.",
    "wait      a thread of the receiver gave its CPU up to wait: KB received per such wait.",
    "crossings calls into the device to receive, empty ones included; frames may be aggregates.",
    "copies    copies of each byte that fulmar made in user space, the reader's own included.",
    "placed    bytes that the device itself put into the reader's buffer: nobody copies them again. Over",
    "          tap that is the kernel's own copy, which every way there has; over shm it is the one copy",
    "          from the peer's memory, made by fulmar and counted under copies.",
    "slow      buffers that did not come ready-made out of the cache of recycled ones.",
    "stock     the old way: see the help of this command.",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Placement;
    use crate::stats::Estimate;

    fn row(device: &'static str, source: &'static str) -> Row {
        let e = Estimate::of(&[10.0, 11.0, 12.0]);
        Row {
            name: "copy.sim.2x64k.agg.touched.same_cpu".into(),
            title: "fulmar read, copy".into(),
            placement: Placement::SameCpu,
            cell: Some(Cell {
                side: Side::Receives,
                device,
                method: "copy",
                write_bytes: 64 << 10,
                super_segments: true,
                source,
            }),
            gbps: e,
            near_ns_per_kb: e,
            thread_ns_per_kb: e,
            hardware_ns_per_kb: None,
            far_ns_per_kb: e,
            both_ns_per_kb: e,
            machine_ns_per_kb: Some(11.0),
            service_demand_us_per_kb: e,
            user_share: None,
            soaker_ns_per_kb: None,
            counts: vec![("placed_bytes", 3), ("call_bytes", 4), ("reads_made", 1)],
            counted_bytes: 9,
            error: None,
        }
    }

    #[test]
    fn the_legend_does_not_call_what_is_placed_over_shm_free_of_copies() {
        let legend = LEGEND.join(" ");
        assert!(!legend.contains("without a copy") && legend.contains("counted under copies"));
    }

    #[test]
    fn a_receivers_row_says_its_buffers_and_how_much_was_placed() {
        let text = text(&[row("tap", "bursty"), row("sim", "untouched")]);
        assert!(text.contains("2 x 64 KiB") && text.contains("touched, bursty"), "{text}");
        assert!(text.contains("75.0"), "{text}");
        assert!(!text.contains("aggregation off"), "{text}");
    }
}
