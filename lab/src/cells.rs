//! The text tables of benches of sending whose ways are cells of a matrix: one pair of tables per device, with
//! and without super-segments; costs first, then what was counted.

use crate::bench::{Cell, Row, Side};
use crate::report::new_table;
use crate::stats::Estimate;
use std::fmt::Write;

/// Devices whose rows stand in one table, so that the kernel is beside what it is compared with.
pub(crate) const TABLES: [(&str, &[&str]); 5] = [
    ("Simulated device (modelled peer; no kernel)", &["sim"]),
    ("TAP to a kernel peer, beside the kernel over veth", &["tap", "veth"]),
    ("AF_PACKET to a kernel peer, beside the kernel over veth", &["packet"]),
    ("Two processes on one host", &["shm", "loopback", "unix"]),
    ("Two stacks in one process (link)", &["link"]),
];

/// The tables of all rows whose sender is under test; empty without any.
pub fn text(rows: &[Row]) -> String {
    let mut out = String::new();
    for (title, devices) in TABLES {
        for super_segments in [true, false] {
            let mine = |r: &&Row| {
                r.cell.is_some_and(|c| {
                    c.side == Side::Sends
                        && devices.contains(&c.device)
                        && c.super_segments == super_segments
                })
            };
            let mut rows: Vec<&Row> = rows.iter().filter(mine).collect();
            if rows.is_empty() {
                continue;
            }
            rows.sort_by_key(|r| r.cell.map(|c| (c.write_bytes, r.placement as u8)));
            let segments = if super_segments { "on" } else { "off" };
            let _ = write!(out, "{title}; super-segments {segments}\n\n{}\n\n", costs(&rows));
            if rows.iter().any(|r| r.quotient("output_calls_per_write").is_some()) {
                let _ = write!(out, "{}\n\n", counts(&rows));
            }
        }
    }
    out.trim_end().to_owned()
}

/// What a row is: its size, way and placement.
fn place(row: &Row, cell: &Cell) -> [String; 3] {
    let source = if cell.source == "cold" { ", cold" } else { "" };
    let title = format!("{}{source}", row.title);
    [size(cell.write_bytes), title, row.placement.title().to_owned()]
}

fn size(bytes: usize) -> String {
    format!("{} KiB", bytes >> 10)
}

pub(crate) fn number(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "–".to_owned(), |v| format!("{v:.decimals$}"))
}

pub(crate) fn median(e: Option<Estimate>, decimals: usize) -> String {
    number(e.map(|e| e.median), decimals)
}

pub(crate) fn interval(e: Option<Estimate>, decimals: usize) -> String {
    e.map_or_else(|| "–".to_owned(), |e| e.interval(decimals))
}

fn costs(rows: &[&Row]) -> String {
    let header = [
        "write",
        "way",
        "ends on",
        "Gb/s",
        "thread\nns/KB",
        "95 %",
        "hardware\nns/KB",
        "other end\nns/KB",
        "both ends\nns/KB",
        "machine\nµs/KB",
        "95 %",
        "runs",
    ];
    let mut table = new_table(header, 3);
    for (row, cell) in rows.iter().filter_map(|r| Some((r, r.cell.as_ref()?))) {
        let [size, title, placement] = place(row, cell);
        table.add_row([
            size,
            title,
            placement,
            median(row.gbps, 1),
            median(row.thread_ns_per_kb, 0),
            interval(row.thread_ns_per_kb, 0),
            median(row.hardware_ns_per_kb, 0),
            median(row.far_ns_per_kb.filter(|e| e.high > 0.0), 0),
            median(row.both_ns_per_kb, 0),
            median(row.service_demand_us_per_kb, 3),
            interval(row.service_demand_us_per_kb, 3),
            row.both_ns_per_kb.map_or(0, |e| e.runs).to_string(),
        ]);
    }
    table.to_string()
}

fn counts(rows: &[&Row]) -> String {
    let header = [
        "write",
        "way",
        "ends on",
        "outputs\nper write",
        "packets\nper output",
        "frames per\ncrossing",
        "mbufs\nper write",
        "copies\nper byte",
    ];
    let mut table = new_table(header, 3);
    for (row, cell) in rows.iter().filter_map(|r| Some((r, r.cell.as_ref()?))) {
        if row.quotient("output_calls_per_write").is_none() {
            continue;
        }
        let [size, title, placement] = place(row, cell);
        let of = |key, decimals| number(row.quotient(key), decimals);
        table.add_row([
            size,
            title,
            placement,
            of("output_calls_per_write", 2),
            of("packets_per_output", 1),
            of("frames_per_crossing", 2),
            of("mbufs_per_write", 1),
            of("copies_per_byte", 2),
        ]);
    }
    table.to_string()
}

/// What the columns mean, one per line.
pub const LEGEND: [&str; 14] = [
    "write     bytes per call (write or sendfile).",
    "thread    CPU time of the sending thread (what time(1) shows) per KB (1024 bytes), in ns.",
    "hardware  time of the simulated device, which ran inside the sender's calls; it is in no other",
    "          column of its row.",
    "both ends CPU of both processes, service threads included, per KB.",
    "machine   service demand as netperf has it: busy time of all CPUs per KB, in µs, both ends, from",
    "          /proc/stat in the measured stretch.",
    "95 %      the interval that holds the true median with 95 % confidence (order statistics);",
    "          of fewer than six runs the least and the most.",
    "outputs   passes of TCP's output that the writes made themselves (ACKs cause others).",
    "packets   packets of MTU size that such a pass sent.",
    "crossings calls into the device (system calls, doorbells); frames may be super-segments.",
    "copies    copies of each byte on the sending side before the device, the page cache included.",
    "Hot: the same bytes again and again. Cold: one part after the other of a file of 512 MiB.",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Placement;

    fn row(device: &'static str, write_bytes: usize) -> Row {
        let e = Estimate::of(&[10.0, 11.0, 12.0]);
        Row {
            name: "old.sim.64k.tso.same_cpu".into(),
            title: "old".into(),
            placement: Placement::SameCpu,
            cell: Some(Cell {
                side: Side::Sends,
                device,
                method: "old",
                write_bytes,
                super_segments: true,
                source: "hot",
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
            counts: vec![("send_outputs", 64), ("calls", 2)],
            counted_bytes: 9,
            error: None,
        }
    }

    #[test]
    fn devices_have_tables_of_their_own_and_the_kernel_stands_beside_tap() {
        let text = text(&[row("tap", 64 << 10), row("sim", 32 << 10), row("veth", 64 << 10)]);
        let simulated = text.find("Simulated device").expect("a table");
        let tap = text.find("TAP to a kernel peer").expect("a table");
        assert!(simulated < tap, "{text}");
        assert_eq!(text[tap..].matches("64 KiB").count(), 4, "two costs, two counts: {text}");
        assert!(text.contains("32.00"), "outputs per write: {text}");
        assert!(!text.contains("super-segments off"), "{text}");
    }

    #[test]
    fn without_cells_there_is_nothing() {
        let plain = Row { cell: None, ..row("tap", 1) };
        assert_eq!(super::text(&[plain]), "");
    }
}
