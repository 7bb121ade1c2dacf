//! Identifications as receivers see them (RFC 6864, RFC 7739).

use std::collections::BTreeSet;

use fulmar_stack::base::MtuDiscovery;
use fulmar_stack::ip::{Flow, Outgoing};
use fulmar_stack::wire::{eth, ipv4, ipv6, protocol};

use crate::ip::rig::*;

/// Sends a datagram; returns its identification.
fn ident_of(h: &mut Host, dst: &str, mtu_discovery: MtuDiscovery) -> u16 {
    let p = h.udp_to(OUR4, dst, 10);
    h.send(Outgoing { mtu_discovery, ..p }).unwrap();
    let frame = h.sent_one();
    ipv4::Header::parse(&frame[14..], frame.len() - 14).unwrap().ident
}

/// Counts pairs of numbers that are as close as the values of a counter.
fn near(pairs: impl Iterator<Item = (u16, u16)>) -> usize {
    pairs.filter(|(a, b)| b.wrapping_sub(*a) < 64 || a.wrapping_sub(*b) < 64).count()
}

#[test]
fn an_atomic_datagram_has_identification_0() {
    let mut h = Host::with_resolved_neighbours();
    for dst in [PEER4, FAR4] {
        assert!((0..20).all(|_| ident_of(&mut h, dst, MtuDiscovery::On) == 0));
    }
    h.end();
}

#[test]
fn identifications_of_destinations_are_independent() {
    let mut h = Host::with_resolved_neighbours();
    let pairs: Vec<(u16, u16)> = (0..1000)
        .map(|_| {
            (ident_of(&mut h, PEER4, MtuDiscovery::Off), ident_of(&mut h, FAR4, MtuDiscovery::Off))
        })
        .collect();
    // Independent numbers are that close in 0.2 % of cases.
    assert!(near(pairs.iter().copied()) < 12);
    assert!(near(pairs.windows(2).map(|w| (w[0].0, w[1].0))) < 12);
    h.end();
}

#[test]
fn identifications_do_not_reveal_traffic_to_others() {
    // The idle scan attack: own pings before and after packets to others.
    let mut h = Host::with_resolved_neighbours();
    let mut steps = BTreeSet::new();
    for others in [0, 1, 2, 3, 0, 1, 2, 3] {
        let before = ident_of(&mut h, PEER4, MtuDiscovery::Off);
        (0..others).for_each(|_| _ = ident_of(&mut h, FAR4, MtuDiscovery::Off));
        steps.insert(ident_of(&mut h, PEER4, MtuDiscovery::Off).wrapping_sub(before));
    }
    assert!(steps.len() == 8 && steps.iter().all(|s| *s > 8), "{steps:?}");
    h.end();
}

#[test]
fn identifications_of_ipv6_fragments_are_no_counter() {
    let mut h = Host::with_resolved_neighbours();
    let idents: Vec<u32> = (0..100)
        .map(|_| {
            let p = h.udp_to(OUR6, PEER6, 3000);
            h.send(Outgoing { mtu_discovery: MtuDiscovery::Off, ..p }).unwrap();
            let frames = h.sent();
            let of = |f: &Vec<u8>| {
                let header = ipv6::Header::parse(&f[14..], f.len() - 14).unwrap();
                ipv6::walk_extensions(&f[14..], &header).unwrap().fragment.unwrap().ident
            };
            assert!(frames.len() == 3 && frames.iter().all(|f| of(f) == of(&frames[0])));
            of(&frames[0])
        })
        .collect();
    assert_eq!(idents.iter().collect::<BTreeSet<_>>().len(), idents.len());
    assert!(idents.windows(2).all(|w| w[0].abs_diff(w[1]) > 1000));
    h.end();
}

#[test]
fn a_template_draws_identifications_like_the_slow_path() {
    let mut h = Host::with_resolved_neighbours();
    for (mtu_discovery, is_zero) in [(MtuDiscovery::On, true), (MtuDiscovery::Off, false)] {
        ident_of(&mut h, PEER4, mtu_discovery);
        let flow = Flow {
            src: ip(OUR4),
            dst: ip(PEER4),
            zone: 0,
            ports: (1, 2),
            protocol: protocol::UDP,
            ttl: None,
            dscp_ecn: 0,
            mtu_discovery,
        };
        let template = h.ip.build_template(&flow, h.now).unwrap();
        let mut room = [0; eth::HEADER_BYTES + ipv4::HEADER_BYTES];
        let drawn: BTreeSet<u16> = (0..20)
            .map(|_| {
                let ident = h.ip.draw_ident_for(&template);
                template.emit(8, ident, &mut room).unwrap();
                ipv4::Header::parse(&room[14..], 28).unwrap().ident
            })
            .collect();
        assert_eq!(drawn.iter().all(|i| *i == 0), is_zero, "{drawn:?}");
        assert!(is_zero || drawn.len() > 18, "{drawn:?}");
    }
    h.end();
}

#[test]
fn a_template_that_sets_the_service_writes_what_one_built_with_it_writes() {
    let mut h = Host::with_resolved_neighbours();
    for (src, dst) in [(OUR4, PEER4), (OUR6, PEER6)] {
        let p = h.udp_to(src, dst, 10);
        h.send(p).unwrap();
        h.sent();
        for service in [0u8, 0xb8, 0xfc] {
            let flow = |dscp_ecn| Flow {
                src: ip(src),
                dst: ip(dst),
                zone: 0,
                ports: (1, 2),
                protocol: protocol::TCP,
                ttl: None,
                dscp_ecn,
                mtu_discovery: MtuDiscovery::On,
            };
            for bytes in [0u16, 8, 0x1234, 0xff00] {
                let [mut patched, mut built] = [[0; 54]; 2];
                let plain = h.ip.build_template(&flow(service), h.now).unwrap();
                plain.emit(bytes, 0, &mut patched).unwrap();
                plain.set_ect(&mut patched);
                let marked = h.ip.build_template(&flow(service | 2), h.now).unwrap();
                marked.emit(bytes, 0, &mut built).unwrap();
                assert_eq!(patched, built, "{dst} {service} {bytes}");
                for other in 0..=255 {
                    let made = h.ip.build_template(&flow(other), h.now).unwrap();
                    made.emit(bytes, 7, &mut built).unwrap();
                    plain.emit(bytes, 7, &mut patched).unwrap();
                    plain.set_dscp_ecn(&mut patched, other);
                    assert_eq!(patched, built, "{dst} {service} {other} {bytes}");
                }
            }
        }
    }
    h.end();
}
