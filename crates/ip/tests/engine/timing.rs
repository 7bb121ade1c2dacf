//! Benchmark of one packet: `cargo test --release -p fulmar-ip -- --ignored --nocapture`.

use std::time::Instant;

use crate::rig::*;
use fulmar_base::Offload;
use fulmar_ip::{Outgoing, Traffic, Verdict};
use fulmar_mbuf::Purpose;
use fulmar_wire::protocol;

const ROUNDS: u32 = 2_000_000;

/// Runs `step` and prints nanoseconds per call, pool included.
fn measure(name: &str, mut step: impl FnMut()) {
    (0..ROUNDS / 10).for_each(|_| step());
    let start = Instant::now();
    (0..ROUNDS).for_each(|_| step());
    let ns = start.elapsed().as_nanos() as f64 / f64::from(ROUNDS);
    println!("{name}: {ns:.1} ns");
}

#[test]
#[ignore = "prints a measurement"]
fn output_and_input_of_one_packet() {
    for (own, peer) in [(OUR4, PEER4), (OUR6, PEER6)] {
        let mut h = Host::with_resolved_neighbours();
        let (src, dst) = (ip(own), ip(peer));
        measure(&format!("alloc and free, {own}"), || {
            let m = h.pool.alloc(32, 80, Purpose::Control).unwrap();
            h.pool.free_mbuf(m);
        });
        measure(&format!("output, {own}"), || {
            let mut m = h.pool.alloc(32, 80, Purpose::Control).unwrap();
            m.append(32);
            let packet = Outgoing {
                src,
                dst,
                zone: 0,
                protocol: protocol::TCP,
                ttl: None,
                dscp_ecn: 0,
                chain: m.into(),
                offload: Offload::default(),
                traffic: Traffic::Own,
                dont_fragment: true,
            };
            h.send(packet).unwrap();
            let (c, _) = h.sink.frames.pop().unwrap();
            h.pool.free(c);
        });
        let frame = frame(&packet(peer, own, protocol::TCP, &[0x50; 32]));
        measure(&format!("input, {own}"), || {
            let mut m = h.pool.alloc(frame.len(), 0, Purpose::Receive).unwrap();
            m.append(frame.len()).unwrap().copy_from_slice(&frame);
            let Verdict::Deliver(d) = h.receive_chain(m.into(), Offload::default()) else {
                panic!()
            };
            h.pool.free(d.chain);
        });
        h.end();
    }
}
