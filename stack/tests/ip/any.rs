//! Arbitrary frames: no panic, no leak, at most one drop counted per frame.

use crate::ip::fragments::{V4, V6, fragment};
use crate::ip::rig::*;
use fulmar_stack::base::{Counter, EtherAddr, Gso, GsoKind, Offload};
use fulmar_stack::ip::{Config, Verdict};
use fulmar_stack::wire::{eth, protocol};
use proptest::prelude::*;

fn samples() -> Vec<Vec<u8>> {
    let quote4 = packet(OUR4, PEER4, protocol::TCP, &[7; 20]);
    let quote6 = packet(OUR6, PEER6, protocol::UDP, &udp(ip(OUR6), ip(PEER6), b"x"));
    let mut extended = vec![60, 0, 1, 4, 0, 0, 0, 0, 44, 0, 0xc2, 4, 0, 0, 0, 0];
    extended.extend([17, 0, 0, 1, 0, 0, 0, 9]);
    extended.extend(udp(ip(PEER6), ip(OUR6), b"hello"));
    vec![
        udp_frame(PEER4, OUR4, b"hello"),
        udp_frame(PEER6, OUR6, b"hello"),
        frame(&packet(PEER4, OUR4, protocol::TCP, &[0x50; 60])),
        frame(&packet(PEER6, OUR6, protocol::HOP_BY_HOP, &extended)),
        crate::ip::arp::request(PEER, v4(PEER4), v4(OUR4)),
        crate::ip::ndp::solicitation(PEER6, OUR6),
        icmp_frame(PEER4, OUR4, [8, 0, 0, 0, 1, 2, 3, 4], b"ping"),
        icmp_frame(PEER6, OUR6, [128, 0, 0, 0, 1, 2, 3, 4], b"ping"),
        icmp_frame(PEER4, OUR4, [3, 4, 0, 0, 0, 0, 5, 0], &quote4),
        icmp_frame(PEER6, OUR6, [2, 0, 0, 0, 0, 0, 5, 0], &quote6),
        framed(ALL, &packet(PEER4, "10.0.0.255", 99, &[1; 30])),
        fragment(V4, 3, protocol::UDP, &[0; 48], 0..24, true),
        fragment(V4, 3, protocol::UDP, &[0; 48], 24..48, false),
        fragment(V6, 3, protocol::UDP, &[0; 48], 0..24, true),
        fragment(V6, 3, protocol::ICMPV6, &[0; 48], 24..48, false),
    ]
}

fn any_offload() -> impl Strategy<Value = Offload> {
    (any::<bool>(), any::<bool>(), 0u16..80, any::<u16>(), any::<Option<u16>>()).prop_map(
        |(needs_csum, csum_valid, csum_start, csum_offset, gso)| Offload {
            needs_csum,
            csum_start,
            csum_offset,
            csum_valid,
            gso: gso.map(|header_bytes| Gso {
                kind: GsoKind::TcpV4,
                segment_bytes: header_bytes,
                header_bytes,
                ecn: false,
            }),
        },
    )
}

/// Inputs one frame, split into two mbufs, and checks the invariants of every frame.
fn feed(h: &mut Host, bytes: &[u8], cut: usize, offload: Offload) -> Result<(), TestCaseError> {
    let cut = cut % (bytes.len() + 1);
    let mut c = h.chain(&bytes[..cut], 0);
    let rest = h.chain(&bytes[cut..], 0);
    c.append(rest);
    let drops = h.counters.total_drops();
    let waiting = h.ip.queued_pkts();
    match h.receive_chain(c, offload) {
        Verdict::Deliver(d) => {
            prop_assert_eq!(h.counters.total_drops(), drops);
            let reassembled = h.counters.value(Counter::Reassembled) > 0;
            prop_assert!(d.chain.len() <= bytes.len() || reassembled);
            let about = d.ip_header;
            h.call(|ip, cx| ip.port_unreachable(cx, &about));
            h.pool.free(d.chain);
        }
        Verdict::EchoReply(r) => h.pool.free(r.payload),
        Verdict::EchoRequest(r) => h.pool.free(r.payload),
        Verdict::IcmpError(e) => prop_assert!(h.ip.accepts(e.local.ip())),
        // A reply that displaces another one from the queue is a second drop.
        Verdict::Consumed => prop_assert!(h.counters.total_drops() <= drops + 2),
    }
    prop_assert!(h.ip.queued_pkts() <= waiting + 1 && h.ip.queued_pkts() <= 256);
    prop_assert!(h.ip.neighbours().count() <= 1024);
    prop_assert!(h.ip.incomplete_datagrams() <= 64 && h.ip.incomplete_bytes() <= 4 << 20);
    h.sent();
    Ok(())
}

proptest! {
    #[test]
    fn any_bytes_are_handled(
        ethertype in prop::sample::select(vec![eth::IPV4, eth::IPV6, eth::ARP, 0x1234]),
        to_all in any::<bool>(),
        body in prop::collection::vec(any::<u8>(), 0..200),
        cut in any::<usize>(),
        any_ip in any::<bool>(),
        offload in any_offload(),
    ) {
        let mut h = Host::with(Config { any_ip, ..config() });
        let dst = if to_all { EtherAddr::BROADCAST } else { US };
        feed(&mut h, &ether(dst, PEER, ethertype, &body), cut, offload)?;
        h.end();
    }

    #[test]
    fn mutated_frames_are_handled(
        picks in prop::collection::vec(
            (any::<usize>(), prop::collection::vec((any::<usize>(), any::<u8>()), 0..4),
             any::<usize>(), any::<usize>(), prop::bool::weighted(0.3), 0u64..3000),
            1..40,
        ),
        any_ip in any::<bool>(),
        offload in any_offload(),
    ) {
        let samples = samples();
        let mut h = Host::with(Config { any_ip, ..config() });
        for (pick, changes, cut, len, shorten, wait_ms) in picks {
            let mut bytes = samples[pick % samples.len()].clone();
            for (at, value) in changes {
                let at = at % bytes.len();
                bytes[at] = value;
            }
            // A wrong header checksum would hide the rest.
            if bytes[12..14] == [8, 0] && bytes.len() >= 34 {
                bytes[24..26].fill(0);
                let sum = fulmar_stack::wire::checksum::checksum(&bytes[14..34]).to_be_bytes();
                bytes[24..26].copy_from_slice(&sum);
            }
            if shorten {
                bytes.truncate(len % bytes.len());
            }
            let offload = if shorten { offload } else { Offload { csum_valid: true, ..Offload::default() } };
            feed(&mut h, &bytes, cut, offload)?;
            h.advance(wait_ms);
            h.sent();
        }
        h.end();
    }
}
