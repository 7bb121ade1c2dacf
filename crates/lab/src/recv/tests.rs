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
    let name = way_name(&cell("stock"), Placement::SameCpu);
    assert_eq!(name, "stock.tap.2x1m.no_agg.touched.same_cpu");
    assert_eq!(size_name(64 << 10), "64k");
}

#[test]
fn the_old_way_takes_a_packet_per_crossing_and_copies_every_byte_once() {
    let time = Duration::from_millis(10);
    let load = Load { warm_bytes: 1 << 20, ..Load::of_buffers(64 << 10, Use::Touched) };
    let sample = |method: Method, offloads| {
        let mut place = sim::Simulated::new(offloads, None).expect("a device");
        let mut reader = method.reader(&load).expect("memory");
        place.stream(&load, reader.as_mut(), time).expect("it runs")
    };
    let old = Offloads { aggregation: false, one_per_crossing: true };
    let stock = sample(Method::Stock, old);
    assert!(stock.quotient("rx_frames", "rx_crossings") <= 1.0);
    assert!(stock.quotient("call_bytes", "rx_frames") <= 1448.0);
    assert_eq!(stock.quotient("all_copied_bytes", "call_bytes"), 1.0);
    let new = Offloads { aggregation: true, one_per_crossing: false };
    let copy = sample(Method::Copy, new);
    assert!(copy.quotient("call_bytes", "rx_frames") > 30_000.0);
    assert_eq!(copy.quotient("all_copied_bytes", "call_bytes"), 1.0);
}
