//! Errors about packets that the caller has consumed.

use crate::ip::rig::*;
use fulmar_stack::base::DropReason;
use fulmar_stack::ip::{Config, InvokingPacket, SentError};
use fulmar_stack::wire::{ipv4, ipv6, protocol};

const FAR6: &str = "2001:db8:ffff::7";

fn gateway() -> Host {
    let mut h = Host::with(Config { any_ip: true, ..config() });
    h.receive(&crate::ip::arp::request(PEER, v4(PEER4), v4(OUR4)));
    h.receive(&crate::ip::ndp::solicitation(PEER6, OUR6));
    h.sent();
    h
}

fn about<'a>(src: &str, dst: &str, payload: &'a [u8]) -> InvokingPacket<'a> {
    let transport = [0x30, 0x39, 0, 53, 0, 12, 0, 0];
    let transport_bytes = 8 + payload.len();
    let (src, dst) = (ip(src), ip(dst));
    InvokingPacket { src, dst, protocol: protocol::UDP, transport, payload, transport_bytes }
}

fn report(h: &mut Host, about: &InvokingPacket<'_>, error: SentError, from: Option<&str>) {
    h.call(|engine, cx| engine.send_error_about_packet(cx, about, error, from.map(ip)));
}

#[test]
fn an_error_quotes_the_rebuilt_packet_in_the_name_of_its_destination() {
    let mut h = gateway();
    let (v4, v6) = (about(PEER4, FAR4, b"ask"), about(PEER6, FAR6, b"ask"));
    let too_big = SentError::TooBig { mtu: 1400 };
    let unreachable = SentError::Unreachable { code: 1 };
    let exceeded = SentError::TimeExceeded { code: 0 };
    for (packet, error, header) in [
        (v4, SentError::PortUnreachable, [3, 3, 0, 0]),
        (v4, unreachable, [3, 1, 0, 0]),
        (v4, too_big, [3, 4, 5, 0x78]),
        (v4, exceeded, [11, 0, 0, 0]),
        (v6, SentError::PortUnreachable, [1, 4, 0, 0]),
        (v6, unreachable, [1, 1, 0, 0]),
        (v6, too_big, [2, 0, 5, 0x78]),
        (v6, exceeded, [3, 0, 0, 0]),
    ] {
        report(&mut h, &packet, error, None);
        let frame = h.sent_one();
        let (src, dst, message) = parse_sent_icmp(&frame);
        assert_eq!((src, dst), (packet.dst, packet.src));
        assert_eq!([message[0], message[1], message[6], message[7]], header, "{error:?}");
        let quoted = &message[8..];
        let (from, to, proto, rest) = match packet.src.is_ipv4() {
            true => {
                let q = ipv4::Header::parse(quoted, usize::MAX).unwrap();
                assert_eq!(q.total_bytes, 20 + 8 + 3);
                (q.src.into(), q.dst.into(), q.protocol, &quoted[20..])
            }
            false => {
                let q = ipv6::Header::parse(quoted, usize::MAX).unwrap();
                assert_eq!(q.payload_bytes, 8 + 3);
                (q.src.into(), q.dst.into(), q.next_header, &quoted[40..])
            }
        };
        assert_eq!((from, to, proto), (packet.src, packet.dst, protocol::UDP));
        assert_eq!(rest, [&packet.transport[..], b"ask"].concat());
    }
    h.end();
}

#[test]
fn a_router_on_the_way_may_be_its_sender() {
    let mut h = gateway();
    let router = "192.0.2.254";
    report(&mut h, &about(PEER4, FAR4, b""), SentError::TimeExceeded { code: 0 }, Some(router));
    assert_eq!(parse_sent_icmp(&h.sent_one()).0, ip(router));
    h.end();
}

#[test]
fn no_error_is_about_a_group_or_from_an_address_that_is_not_accepted() {
    let mut h = gateway();
    let refused = [
        (about(PEER4, "224.0.0.1", b""), None),
        (about(PEER4, "10.0.0.255", b""), None),
        (about(PEER6, "ff02::1", b""), None),
        (about("0.0.0.0", FAR4, b""), None),
        (about(PEER4, FAR6, b""), None),
        (about(PEER4, FAR4, b""), Some(FAR6)),
        (about(PEER4, FAR4, b""), Some("224.0.0.1")),
        (about(PEER4, FAR4, b""), Some("127.0.0.1")),
    ];
    for (packet, from) in refused {
        report(&mut h, &packet, SentError::PortUnreachable, from);
    }
    assert!(h.sent().is_empty());
    let mut plain = Host::new();
    report(&mut plain, &about(PEER4, FAR4, b""), SentError::PortUnreachable, None);
    assert!(plain.sent().is_empty(), "only a gateway speaks for other hosts");
    h.end();
}

#[test]
fn a_long_payload_is_cut_to_the_quote_and_errors_are_limited() {
    let mut h = gateway();
    let payload = [7; 2000];
    report(&mut h, &about(PEER4, FAR4, &payload), SentError::PortUnreachable, None);
    assert_eq!(h.sent_one().len(), 14 + 576);
    report(&mut h, &about(PEER6, FAR6, &payload), SentError::PortUnreachable, None);
    assert_eq!(h.sent_one().len(), 14 + 1280);
    for _ in 0..1000 {
        report(&mut h, &about(PEER4, FAR4, b""), SentError::PortUnreachable, None);
    }
    assert!(h.sent().len() < 200);
    assert!(h.counters.drops(DropReason::RateLimited) > 800);
    h.end();
}
