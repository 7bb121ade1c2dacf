//! The ways of receiving do what they are said to do: counted, never timed.

use super::*;

fn cell(method: &'static str) -> Cell {
    Cell {
        side: Side::Receives,
        device: "tap",
        method,
        write_bytes: 1 << 20,
        super_segments: false,
        source: "touched",
    }
}

#[test]
fn a_way_is_named_by_its_cell() {
    let name = scenario_name(&cell("stock"), Placement::SameCpu);
    assert_eq!(name, "stock.tap.2x1m.no_agg.touched.same_cpu");
    assert_eq!(size_name(64 << 10), "64k");
}

#[test]
fn the_old_way_takes_a_packet_per_crossing_and_copies_every_byte_once() {
    let time = Duration::from_millis(10);
    let load = Load { warm_bytes: 1 << 20, ..Load::of_buffers(64 << 10, Use::Touched) };
    let sample = |method: Method, offloads| {
        let mut rig = sim::Simulated::new(offloads, None).expect("a device");
        let mut reader = method.reader(&load).expect("memory");
        rig.stream(&load, reader.as_mut(), time).expect("it runs")
    };
    let stock = sample(Method::Stock, Offloads::STOCK);
    assert!(stock.quotient("rx_frames", "rx_crossings") <= 1.0);
    // Not the bytes that the reader got: some had come before the measured stretch began.
    assert!(stock.quotient("rx_bytes", "rx_frames") <= 1514.0, "{stock:?}");
    assert_eq!(stock.quotient("all_copied_bytes", "call_bytes"), 1.0);
    let copy = sample(Method::Copy, Offloads::all(true));
    assert!(copy.quotient("rx_bytes", "rx_frames") > 30_000.0);
    assert_eq!(copy.quotient("all_copied_bytes", "call_bytes"), 1.0);
}

#[test]
fn posted_buffers_are_filled_without_a_copy_where_the_device_places_and_with_one_elsewhere() {
    // How much is placed depends on how soon the reader is back; the first buffers always are, since
    // they were posted before the first byte came.
    let load = Load { warm_bytes: 1 << 20, ..Load::of_buffers(64 << 10, Use::Touched) };
    let sample = |offloads| {
        let mut rig = sim::Simulated::new(offloads, None).expect("a device");
        let mut reader = Method::Posted.reader(&load).expect("memory");
        rig.stream(&load, reader.as_mut(), Duration::from_millis(10)).expect("it runs")
    };
    let placed = sample(Offloads::all(true));
    assert!(placed.counted("whole_placed_bytes") >= 64 << 10, "{placed:?}");
    assert!(placed.counted("whole_copied_bytes") < placed.counted("whole_bytes"), "{placed:?}");
    let copied = sample(Offloads::unplaced(true));
    assert_eq!(copied.counted("whole_placed_bytes"), 0);
    assert!(copied.counted("whole_copied_bytes") >= copied.counted("whole_bytes"), "{copied:?}");
}

#[test]
fn a_bursty_sender_is_read_to_the_end_of_each_burst() {
    let load = Load { warm_bytes: 512 << 10, ..Load::of_buffers(1 << 20, Use::Bursty) };
    let mut rig = sim::Simulated::new(Offloads::all(true), None).expect("a device");
    for method in [Method::Copy, Method::Posted, Method::Loan] {
        let mut reader = method.reader(&load).expect("memory");
        let sample = rig.stream(&load, reader.as_mut(), Duration::from_millis(10));
        assert!(sample.expect("it runs").near.bytes > 0, "{method:?}");
    }
}

#[test]
fn the_account_of_a_reader_begins_behind_the_warm_up() {
    let options = bench::Options {
        device: vec![crate::matrix::Device::Sim],
        uses: vec![Use::Untouched],
        way: vec!["copy".into(), "loan".into()],
        ..bench::Options::default()
    };
    let found = account::accounts(&options, false).expect("it runs");
    let titles: Vec<&str> = found.iter().map(|f| f.title.as_str()).collect();
    assert_eq!(titles.len(), 2, "one with aggregation for each way: {titles:?}");
    let [copied, lent] = &found[..] else { panic!("{titles:?}") };
    assert!(copied.copies_per_byte > 0.9 && lent.copies_per_byte < 0.1, "{found:?}");
    // A handshake opens with a packet out; behind the warm-up there is none without bytes.
    assert!(copied.bytes / copied.packets > 500.0 && copied.ns_per_packet() > 0.0);
}
