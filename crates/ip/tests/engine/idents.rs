//! Identifications, as those see them who are sent to (RFC 6864, RFC 7739).

use std::collections::BTreeSet;

use fulmar_ip::{Flow, Outgoing};
use fulmar_wire::{eth, ipv4, ipv6, protocol};

use crate::rig::*;

/// Sends a datagram that may be fragmented, or not; returns its identification.
fn ident_of(h: &mut Host, dst: &str, dont_fragment: bool) -> u16 {
    let p = h.udp_to(OUR4, dst, 10);
    h.send(Outgoing { dont_fragment, ..p }).unwrap();
    let frame = h.sent_one();
    ipv4::Header::parse(&frame[14..], frame.len() - 14).unwrap().ident
}

/// Pairs of numbers whose distance is small, as those of a counter would be.
fn near(pairs: impl Iterator<Item = (u16, u16)>) -> usize {
    pairs.filter(|(a, b)| b.wrapping_sub(*a) < 64 || a.wrapping_sub(*b) < 64).count()
}

#[test]
fn an_atomic_datagram_carries_0() {
    let mut h = Host::acquainted();
    for dst in [PEER4, FAR4] {
        assert!((0..20).all(|_| ident_of(&mut h, dst, true) == 0));
    }
    h.end();
}

#[test]
fn idents_of_one_destination_tell_nothing_about_those_of_another() {
    let mut h = Host::acquainted();
    let pairs: Vec<(u16, u16)> = (0..1000)
        .map(|_| (ident_of(&mut h, PEER4, false), ident_of(&mut h, FAR4, false)))
        .collect();
    // Independent numbers are so near each other in 0.2 % of cases.
    assert!(near(pairs.iter().copied()) < 12);
    assert!(near(pairs.windows(2).map(|w| (w[0].0, w[1].0))) < 12);
    h.end();
}

#[test]
fn how_much_is_sent_to_others_does_not_show() {
    // The attack of "idle scan": one's own pings, before and after what others are sent.
    let mut h = Host::acquainted();
    let mut steps = BTreeSet::new();
    for others in [0, 1, 2, 3, 0, 1, 2, 3] {
        let before = ident_of(&mut h, PEER4, false);
        (0..others).for_each(|_| _ = ident_of(&mut h, FAR4, false));
        steps.insert(ident_of(&mut h, PEER4, false).wrapping_sub(before));
    }
    assert!(steps.len() == 8 && steps.iter().all(|s| *s > 8), "{steps:?}");
    h.end();
}

#[test]
fn fragments_of_ipv6_datagrams_do_not_count() {
    let mut h = Host::acquainted();
    let idents: Vec<u32> = (0..100)
        .map(|_| {
            let p = h.udp_to(OUR6, PEER6, 3000);
            h.send(Outgoing { dont_fragment: false, ..p }).unwrap();
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
fn a_template_draws_as_the_slow_path_does() {
    let mut h = Host::acquainted();
    for (dont_fragment, is_zero) in [(true, true), (false, false)] {
        ident_of(&mut h, PEER4, dont_fragment);
        let flow = Flow {
            src: ip(OUR4),
            dst: ip(PEER4),
            zone: 0,
            ports: (1, 2),
            protocol: protocol::UDP,
            ttl: None,
            dscp_ecn: 0,
            dont_fragment,
        };
        let template = h.ip.template_of(&flow, h.now).unwrap();
        let mut room = [0; eth::HEADER_BYTES + ipv4::HEADER_BYTES];
        let drawn: BTreeSet<u16> = (0..20)
            .map(|_| {
                let ident = h.ip.ident_by(&template);
                template.emit(8, ident, &mut room).unwrap();
                ipv4::Header::parse(&room[14..], 28).unwrap().ident
            })
            .collect();
        assert_eq!(drawn.iter().all(|i| *i == 0), is_zero, "{drawn:?}");
        assert!(is_zero || drawn.len() > 18, "{drawn:?}");
    }
    h.end();
}
