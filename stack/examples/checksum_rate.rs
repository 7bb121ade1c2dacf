//! The speed of the checksum on this machine compared with a plain copy: `cargo run --release -p
//! fulmar-stack --example checksum_rate`. Hot: the same 64 KiB. Cold: 256 MiB. Best of five runs.

use fulmar_stack::wire::{checksum, ipv4, tcp};
use std::hint::black_box;
use std::time::Instant;

const HOT_BYTES: usize = 64 << 10;
const COLD_BYTES: usize = 256 << 20;
const TOTAL_BYTES: usize = 1 << 30;

/// Runs `work` over an area in pieces of 64 KiB, `TOTAL_BYTES` in all. Best GB/s of five runs.
fn rate(area_bytes: usize, mut work: impl FnMut(usize)) -> f64 {
    let mut pass = || {
        let start = Instant::now();
        for piece in 0..TOTAL_BYTES / HOT_BYTES {
            work(piece * HOT_BYTES % area_bytes);
        }
        TOTAL_BYTES as f64 / start.elapsed().as_nanos() as f64
    };
    (0..5).map(|_| pass()).fold(0.0, f64::max)
}

/// Nanoseconds per call of `work`, best of five runs.
fn nanos(mut work: impl FnMut()) -> f64 {
    const CALLS: u32 = 10_000_000;
    let mut pass = || {
        let start = Instant::now();
        (0..CALLS).for_each(|_| work());
        start.elapsed().as_nanos() as f64 / f64::from(CALLS)
    };
    (0..5).map(|_| pass()).fold(f64::MAX, f64::min)
}

fn main() {
    let src: Vec<u8> = (0..COLD_BYTES).map(|i| i as u8).collect();
    let mut dst = vec![1u8; COLD_BYTES];
    let mut sums = vec![None; HOT_BYTES / checksum::UNIT_BYTES];
    for (name, area) in [("hot", HOT_BYTES), ("cold", COLD_BYTES)] {
        let sum = rate(area, |at| {
            black_box(checksum::checksum(black_box(&src[at..at + HOT_BYTES])));
        });
        let fused = rate(area, |at| {
            let (to, from) = (&mut dst[at..at + HOT_BYTES], &src[at..at + HOT_BYTES]);
            checksum::copy_and_sum_units(black_box(to), black_box(from), black_box(&mut sums));
        });
        let copy = rate(area, |at| {
            let (to, from) = (&mut dst[at..at + HOT_BYTES], &src[at..at + HOT_BYTES]);
            black_box(to).copy_from_slice(black_box(from));
        });
        println!("{name:4}  sum {sum:5.1}  copy and sum {fused:5.1}  copy {copy:5.1} GB/s");
    }
    headers();
}

fn headers() {
    let mut bytes = [0u8; 60];
    let ip = ipv4::Header {
        src: [10, 0, 0, 1].into(),
        dst: [10, 0, 0, 2].into(),
        protocol: 6,
        ttl: 64,
        dscp_ecn: 0,
        ident: 7,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        header_bytes: 20,
        total_bytes: 1500,
    };
    let emit = nanos(|| black_box(&ip).emit(black_box(&mut bytes)).unwrap());
    let parse = nanos(|| {
        let _ = black_box(ipv4::Header::parse(black_box(&bytes), 1500));
    });
    let check = nanos(|| assert!(ipv4::checksum_ok(black_box(&bytes), black_box(20))));
    println!("ipv4  emit {emit:4.1}  parse {parse:4.1}  checksum {check:4.1} ns");
    let timestamps = Some(tcp::Timestamps { value: 1, echo: 2 });
    let options = tcp::Options { timestamps, ..Default::default() };
    let header = tcp::Header { flags: tcp::Flags::ACK, options, ..Default::default() };
    let emit = nanos(|| assert!(black_box(&header).emit(black_box(&mut bytes)).is_ok()));
    let parse = nanos(|| {
        let (h, header_bytes) = tcp::Header::parse(black_box(&bytes)).unwrap();
        let echo = h.options.timestamps.map_or(0, |t| t.echo);
        black_box((h.seq, h.ack, h.window, h.flags, echo, h.options.sack.len(), header_bytes));
    });
    println!("tcp   emit {emit:4.1}  parse {parse:4.1} ns");
}
