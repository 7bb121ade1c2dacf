//! Fragmentation and reassembly, for both IP versions.

use core::ops::Range;

use crate::ip::rig::*;
use fulmar_stack::base::{Counter, DropReason, MtuDiscovery, Offload};
use fulmar_stack::ip::{Outgoing, OutputError, Verdict};
use fulmar_stack::wire::checksum::Sum;
use fulmar_stack::wire::{eth, ipv4, ipv6, protocol};

/// Source and destination address of a packet.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    src: &'static str,
    dst: &'static str,
}

pub const V4: Pair = Pair { src: PEER4, dst: OUR4 };
pub const V6: Pair = Pair { src: PEER6, dst: OUR6 };
const PAIRS: [Pair; 2] = [V4, V6];

/// A frame from the peer with `payload[range]` as a fragment of datagram `ident`.
pub fn fragment(
    Pair { src, dst }: Pair,
    ident: u32,
    protocol: u8,
    payload: &[u8],
    range: Range<usize>,
    more: bool,
) -> Vec<u8> {
    let start = range.start;
    let bytes = &payload[range];
    if ip(src).is_ipv4() {
        let mut packet = vec![0; 20];
        let header = ipv4::Header {
            ident: ident as u16,
            more_fragments: more,
            fragment_offset: start as u16,
            ..ipv4_header(src, dst, protocol, bytes.len())
        };
        header.emit(&mut packet).unwrap();
        return frame(&[&packet[..], bytes].concat());
    }
    let mut extension = vec![0; 8];
    let fragment = ipv6::Fragment { offset: start as u16, more, ident };
    fragment.emit(protocol, &mut extension).unwrap();
    frame(&packet(src, dst, protocol::FRAGMENT, &[&extension[..], bytes].concat()))
}

/// All fragments of a payload, each of at most `unit` bytes.
fn fragments_of(pair: Pair, ident: u32, protocol: u8, payload: &[u8], unit: usize) -> Vec<Vec<u8>> {
    let len = payload.len();
    let starts = (0..len).step_by(unit);
    starts
        .map(|s| s..(s + unit).min(len))
        .map(|range| fragment(pair, ident, protocol, payload, range.clone(), range.end < len))
        .collect()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 5 + i / 256) as u8).collect()
}

fn datagram(Pair { src, dst }: Pair, bytes: usize) -> Vec<u8> {
    udp(ip(src), ip(dst), &pattern(bytes))
}

/// Inputs frames of which only the last one may complete a datagram.
fn feed(h: &mut Host, frames: &[Vec<u8>]) -> Verdict {
    let (last, others) = frames.split_last().unwrap();
    for f in others {
        assert!(matches!(h.receive(f), Verdict::Consumed));
    }
    h.receive(last)
}

#[test]
fn a_fragmented_datagram_is_delivered_reassembled() {
    for pair in PAIRS {
        for bytes in [1473, 8000, 65_507] {
            let mut h = Host::new();
            let whole = datagram(pair, bytes);
            let mut frames = fragments_of(pair, 9, protocol::UDP, &whole, 1448);
            frames.rotate_left(1);
            let Verdict::Deliver(d) = feed(&mut h, &frames) else { panic!("{pair:?} {bytes}") };
            let got = h.got(d);
            assert_eq!((got.src, got.dst), (ip(pair.src), ip(pair.dst)));
            assert!(got.bytes == whole);
            assert_eq!(got.offload, Offload::default());
            assert_eq!(h.counters.value(Counter::FragmentsIn), frames.len() as u64);
            assert_eq!((h.counters.value(Counter::Reassembled), h.counters.total_drops()), (1, 0));
            h.end();
        }
    }
}

#[test]
fn port_unreachable_quotes_the_reassembled_datagram() {
    for pair in PAIRS {
        let mut h = Host::with_resolved_neighbours();
        let whole = datagram(pair, 3000);
        let verdict = feed(&mut h, &fragments_of(pair, 9, protocol::UDP, &whole, 1448));
        let Verdict::Deliver(d) = verdict else { panic!() };
        let got = h.got(d);
        h.call(|ip, cx| ip.port_unreachable(cx, &got.header));
        let answer = h.sent_one();
        let (_, to, message) = parse_sent_icmp(&answer);
        assert_eq!(to, ip(pair.src));
        let quoted = &message[8..];
        let (header_bytes, length) = if to.is_ipv4() {
            let header = ipv4::Header::parse(quoted, usize::MAX).unwrap();
            assert!(!header.is_fragment() && ipv4::checksum_ok(quoted, 20));
            (20, header.payload_bytes())
        } else {
            let header = ipv6::Header::parse(quoted, usize::MAX).unwrap();
            assert_eq!(header.next_header, protocol::UDP);
            (40, header.payload_bytes)
        };
        assert_eq!(length, whole.len());
        assert_eq!(quoted[header_bytes..], whole[..8]);
        h.end();
    }
}

#[test]
fn a_fragmented_echo_request_gets_a_fragmented_reply() {
    for (pair, kind) in PAIRS.into_iter().zip([8, 128]) {
        let mut h = Host::with_resolved_neighbours();
        let body = pattern(8000);
        let request = icmp(pair.src, pair.dst, [kind, 0, 0, 0, 1, 2, 3, 4], &body);
        let frames = fragments_of(pair, 9, icmp_protocol(pair.src), &request, 1448);
        assert!(matches!(feed(&mut h, &frames), Verdict::Consumed));
        let reply = reassembled_output(&mut h, 1500);
        assert_eq!((&reply[4..8], &reply[8..]), (&[1, 2, 3, 4][..], &body[..]));
        assert_eq!(h.counters.total_drops(), 0);
        h.end();
    }
}

/// The payload of the single datagram that was sent in fragments of at most `mtu`. Checks their
/// order and headers.
#[track_caller]
fn reassembled_output(h: &mut Host, mtu: usize) -> Vec<u8> {
    let frames = h.sent();
    assert_eq!(h.counters.value(Counter::FragmentsOut), frames.len() as u64);
    let (mut whole, mut idents) = (Vec::new(), Vec::new());
    for (n, f) in frames.iter().enumerate() {
        let (link, _, _, next, body) = parse_sent(f);
        let is_last = n + 1 == frames.len();
        assert!(f.len() <= 14 + mtu && frames.len() > 1);
        let (start, more, ident, bytes) = if link.ethertype == eth::IPV4 {
            let header = ipv4::Header::parse(&f[14..], f.len() - 14).unwrap();
            assert!(!header.dont_fragment);
            (header.fragment_offset, header.more_fragments, u32::from(header.ident), body)
        } else {
            assert_eq!(next, protocol::FRAGMENT);
            let header = ipv6::Header::parse(&f[14..], f.len() - 14).unwrap();
            let fragment = ipv6::walk_extensions(&f[14..], &header).unwrap().fragment.unwrap();
            (fragment.offset, fragment.more, fragment.ident, &body[8..])
        };
        assert_eq!((usize::from(start), more), (whole.len(), !is_last));
        assert!(is_last || bytes.len() % 8 == 0);
        whole.extend_from_slice(bytes);
        idents.push(ident);
    }
    assert!(idents.windows(2).all(|w| w[0] == w[1]));
    whole
}

fn fragmentable(h: &mut Host, src: &str, dst: &str, bytes: usize) -> Outgoing {
    Outgoing { mtu_discovery: MtuDiscovery::Off, ..h.udp_to(src, dst, bytes) }
}

#[test]
fn a_packet_above_the_path_mtu_is_fragmented_with_a_complete_checksum() {
    for (src, dst, least, most) in [(OUR4, PEER4, 1473, 65_507), (OUR6, PEER6, 1453, 65_527)] {
        for bytes in [least, 8000, most] {
            let mut h = Host::with_resolved_neighbours();
            let mut p = fragmentable(&mut h, src, dst, bytes);
            let expected = p.chain.to_vec();
            // As `udp` passes it: the field holds the pseudo-header sum.
            let mut sum = Sum::new();
            sum.add_pseudo(ip(src), ip(dst), protocol::UDP, p.chain.len() as u32);
            p.chain.copy_from(6, &sum.fold().to_be_bytes()).unwrap();
            p.offload = Offload { needs_csum: true, csum_start: 0, csum_offset: 6, ..p.offload };
            assert_eq!(h.send(p), Ok(()));
            assert!(reassembled_output(&mut h, 1500) == expected, "{src} {bytes}");
            h.end();
        }
    }
}

#[test]
fn a_packet_of_the_mtu_is_not_fragmented_and_a_larger_one_with_df_is_refused() {
    let mut h = Host::with_resolved_neighbours();
    for (src, dst, most) in [(OUR4, PEER4, 1472), (OUR6, PEER6, 1452)] {
        let p = fragmentable(&mut h, src, dst, most);
        assert_eq!(h.send(p), Ok(()));
        assert_eq!(h.sent().len(), 1);
        assert_eq!(h.send_udp(src, dst, most + 1), Err(OutputError::TooBig { mtu: 1500 }));
        assert_eq!(h.sent().len(), 0);
    }
    assert_eq!(h.counters.value(Counter::FragmentsOut), 0);
    h.end();
}

#[test]
fn fragments_fill_the_path_mtu() {
    for (src, dst, mtu) in [(OUR4, FAR4, 900), (OUR6, PEER6, 1300)] {
        let mut h = Host::with_resolved_neighbours();
        h.ip.lower_path_mtu(h.now, ip(dst), mtu);
        let p = fragmentable(&mut h, src, dst, 1400);
        assert_eq!(h.send(p), Ok(()));
        assert_eq!(reassembled_output(&mut h, mtu).len(), 1408);
        h.end();
    }
}

#[test]
fn a_large_datagram_is_queued_unfragmented_for_resolution() {
    let mut h = Host::new();
    let p = fragmentable(&mut h, OUR4, PEER4, 60_000);
    assert_eq!(h.send(p), Ok(()));
    assert_eq!((h.ip.queued_pkts(), h.sent().len()), (1, 1));
    h.receive(&crate::ip::arp::request(PEER, v4(PEER4), v4(OUR4)));
    // The reply to the neighbour's own request is not a fragment.
    let is_arp = |c: &fulmar_stack::mbuf::Chain| c.to_vec()[12..14] == [8, 6];
    let at = h.sink.frames.iter().position(|(c, _)| is_arp(c)).unwrap();
    let (answer, _) = h.sink.frames.remove(at);
    h.pool.free(answer);
    assert_eq!(reassembled_output(&mut h, 1500).len(), 60_008);
    h.end();
}

#[test]
fn a_full_sink_accepts_no_fragment() {
    let mut h = Host::with_resolved_neighbours();
    h.sink.full = true;
    let p = fragmentable(&mut h, OUR4, PEER4, 60_000);
    assert_eq!(h.send(p), Err(OutputError::Full));
    assert_eq!((h.counters.total_drops(), h.counters.value(Counter::FragmentsOut)), (0, 0));
    h.end();
}

#[test]
fn the_largest_datagram_passes_loopback() {
    for (own, bytes) in [(OUR4, 65_507), (OUR6, 65_527)] {
        let mut h = Host::new();
        let p = fragmentable(&mut h, own, own, bytes);
        assert_eq!(h.send(p), Ok(()));
        let mut got = 0;
        for (c, o) in std::mem::take(&mut h.sink.looped) {
            if let Verdict::Deliver(d) = h.receive_looped(c, o) {
                got = h.got(d).bytes.len();
            }
        }
        assert_eq!(got, bytes + 8);
        h.end();
    }
}

#[test]
fn a_missing_fragment_causes_time_exceeded_if_the_first_arrived() {
    for ((pair, header), secs) in PAIRS.into_iter().zip([[11, 1], [3, 1]]).zip([30, 60]) {
        let mut h = Host::with_resolved_neighbours();
        let whole = datagram(pair, 4000);
        let frames = fragments_of(pair, 9, protocol::UDP, &whole, 1448);
        h.receive(&frames[0]);
        h.receive(&frames[2]);
        h.receive(&fragments_of(pair, 10, protocol::UDP, &whole, 1448)[1]);
        assert_eq!(h.ip.incomplete_datagrams(), 2);
        assert!(
            h.ip.next_deadline().unwrap() <= h.now + fulmar_stack::base::Duration::from_secs(secs)
        );
        h.advance(secs * 1000 - 1);
        let is_error = |f: &Vec<u8>| {
            let link = eth::Header::parse(f).unwrap();
            link.ethertype != eth::ARP && parse_sent_icmp(f).2[..2] == header
        };
        assert_eq!(h.sent().iter().filter(|f| is_error(f)).count(), 0);
        // Meanwhile the neighbours are resolved again.
        h.receive(&crate::ip::arp::request(PEER, v4(PEER4), v4(OUR4)));
        h.receive(&crate::ip::ndp::solicitation(PEER6, OUR6));
        h.sent();
        h.advance(1);
        let sent = h.sent();
        let errors: Vec<_> = sent.iter().filter(|f| is_error(f)).collect();
        assert_eq!(errors.len(), 1);
        let quoted = &parse_sent_icmp(errors[0]).2[8..];
        let came = &frames[0][14..];
        let most = if ip(pair.src).is_ipv4() { 548 } else { 1232 };
        assert_eq!(quoted, &came[..most]);
        assert_eq!(h.counters.drops(DropReason::FragmentTimeout), 2);
        assert_eq!((h.ip.incomplete_datagrams(), h.ip.incomplete_bytes()), (0, 0));
        h.end();
    }
}

#[test]
fn fragments_of_icmp_errors_get_no_error() {
    // Port unreachable, and an echo request.
    for (pair, protocol, kinds) in [(V4, protocol::ICMP, [3, 8]), (V6, protocol::ICMPV6, [1, 128])]
    {
        for (kind, expected) in kinds.into_iter().zip([0, 1]) {
            let mut h = Host::with_resolved_neighbours();
            let message = [&[kind, 3][..], &pattern(3000)].concat();
            h.receive(&fragment(pair, 9, protocol, &message, 0..1448, true));
            h.advance(61_000);
            // The neighbours are resolved again.
            h.receive(&crate::ip::arp::request(PEER, v4(PEER4), v4(OUR4)));
            h.receive(&crate::ip::ndp::solicitation(PEER6, OUR6));
            assert_eq!(h.counters.value(Counter::IcmpOut), expected, "{pair:?} {kind}");
            h.end();
        }
    }
    // A length that is not a multiple of 8.
    for (kind, expected) in [(1, 0), (128, 1)] {
        let mut h = Host::with_resolved_neighbours();
        let message = [&[kind, 3][..], &pattern(3000)].concat();
        let odd = fragment(V6, 9, protocol::ICMPV6, &message, 0..1441, true);
        h.drops(&odd, DropReason::FragmentInvalid);
        assert_eq!(h.counters.value(Counter::IcmpOut), expected, "{kind}");
        h.end();
    }
    // In a later fragment there is no type.
    let mut h = Host::with_resolved_neighbours();
    let later = fragment(V6, 9, protocol::ICMPV6, &[1; 3000], 1440..2881, true);
    h.drops(&later, DropReason::FragmentInvalid);
    assert_eq!(h.counters.value(Counter::IcmpOut), 1);
    h.end();
}

#[test]
fn invalid_fragments_are_counted_drops() {
    let mut h = Host::with_resolved_neighbours();
    let whole = pattern(3000);
    for pair in PAIRS {
        for (range, more) in [(0..1001, true), (1000..1000, true), (1000..1000, false)] {
            h.drops(
                &fragment(pair, 9, protocol::UDP, &whole, range, more),
                DropReason::FragmentInvalid,
            );
        }
        // Beyond the maximum length: the ping of death.
        let far = 65_528;
        let mut payload = vec![0; far + 8];
        payload[far] = 1;
        let beyond = fragment(pair, 9, protocol::UDP, &payload, far..far + 8, false);
        h.drops(&beyond, DropReason::FragmentInvalid);
    }
    // IPv6 reports the field: the payload length, then the offset.
    let answers = h.sent();
    let errors: Vec<_> = answers.iter().map(|f| parse_sent_icmp(f).2[..8].to_vec()).collect();
    let problem = |at: u8, i: usize| errors[i][..2] == [4, 0] && errors[i][7] == at;
    assert!(errors.len() == 2 && problem(4, 0) && problem(42, 1), "{errors:?}");
    assert_eq!(h.ip.incomplete_datagrams(), 0);
    h.end();
}

#[test]
fn an_overlap_delivers_nothing() {
    for pair in PAIRS {
        let mut h = Host::new();
        let whole = datagram(pair, 3000);
        let cut = |range, more| fragment(pair, 9, protocol::UDP, &whole, range, more);
        h.receive(&cut(0..1448, true));
        h.drops(&cut(1440..2888, true), DropReason::FragmentOverlap);
        h.drops(&cut(1448..3008, false), DropReason::FragmentOverlap);
        assert_eq!(h.ip.incomplete_bytes(), 0);
        h.end();
    }
}

#[test]
fn a_fragment_within_a_reassembled_datagram_is_dropped() {
    let mut h = Host::new();
    let mut inner = vec![protocol::UDP, 0, 0, 0, 0, 0, 0, 5];
    inner.extend(datagram(V6, 3000));
    let frames = fragments_of(V6, 9, protocol::FRAGMENT, &inner, 1448);
    let before = h.counters.total_drops();
    for f in &frames {
        assert!(matches!(h.receive(f), Verdict::Consumed));
    }
    assert!(h.counters.total_drops() > before);
    h.end();
}

#[test]
fn extension_headers_after_the_fragment_header_are_parsed() {
    let mut h = Host::new();
    let pair = V6;
    let whole = datagram(pair, 3000);
    let mut body = vec![protocol::UDP, 0, 1, 4, 0, 0, 0, 0];
    body.extend_from_slice(&whole);
    let frames = fragments_of(pair, 9, protocol::DESTINATION_OPTIONS, &body, 1448);
    let Verdict::Deliver(d) = feed(&mut h, &frames) else { panic!() };
    assert!(h.got(d).bytes == whole);
    h.end();
}

#[test]
fn a_first_fragment_with_an_incomplete_header_chain_is_reported_and_dropped() {
    let pair = V6;
    let options = [protocol::UDP, 1, 1, 4, 0, 0, 0, 0, 1, 6, 0, 0, 0, 0, 0, 0];
    let tcp = [0; 64];
    for (protocol, payload, cut) in [
        // Inside an extension header, after one, inside a TCP header.
        (protocol::DESTINATION_OPTIONS, &options[..], 8),
        (protocol::DESTINATION_OPTIONS, &[&options[..], &[0; 16]].concat(), 16),
        (protocol::TCP, &tcp, 16),
    ] {
        let mut h = Host::with_resolved_neighbours();
        let first = fragment(pair, 9, protocol, payload, 0..cut, true);
        let reason =
            if cut == 8 { DropReason::ExtensionHeader } else { DropReason::FragmentInvalid };
        h.drops(&first, reason);
        let answer = h.sent_one();
        let (_, to, message) = parse_sent_icmp(&answer);
        assert_eq!(
            (to, &message[..8]),
            (ip(PEER6), &[4, 3, message[2], message[3], 0, 0, 0, 0][..])
        );
        assert_eq!(message[8..], first[14..]);
        assert_eq!(h.ip.incomplete_datagrams(), 0);
        h.end();
    }
    // A UDP header, or the fixed part of a TCP header, suffices.
    for (protocol, cut) in
        [(protocol::UDP, 8), (protocol::TCP, 24), (protocol::ICMPV6, 8), (199, 8)]
    {
        let mut h = Host::with_resolved_neighbours();
        h.receive(&fragment(pair, 9, protocol, &tcp, 0..cut, true));
        assert_eq!((h.ip.incomplete_datagrams(), h.counters.total_drops()), (1, 0), "{protocol}");
        h.end();
    }
}

#[test]
fn an_atomic_fragment_is_independent_of_a_datagram_with_its_identification() {
    // RFC 6946 section 4: in isolation from any other fragment.
    let mut h = Host::new();
    let pair = V6;
    let (whole, small) = (datagram(pair, 3000), datagram(pair, 100));
    let frames = fragments_of(pair, 9, protocol::UDP, &whole, 1448);
    assert!(matches!(feed(&mut h, &frames[..2]), Verdict::Consumed));
    let atomic = fragment(pair, 9, protocol::UDP, &small, 0..small.len(), false);
    assert!(h.delivers(&atomic).bytes == small);
    assert!(h.delivers(&frames[2]).bytes == whole);
    h.end();
}

#[test]
fn neighbour_discovery_in_a_fragment_is_dropped() {
    let mut h = Host::new();
    let solicitation = crate::ip::ndp::solicitation(PEER6, OUR6);
    let mut bytes = solicitation[..54].to_vec();
    let message = &solicitation[54..];
    bytes[14 + 6] = protocol::FRAGMENT;
    bytes[14 + 4..14 + 6].copy_from_slice(&(message.len() as u16 + 8).to_be_bytes());
    bytes.extend([protocol::ICMPV6, 0, 0, 0, 0, 0, 0, 1]);
    bytes.extend_from_slice(message);
    h.drops(&bytes, DropReason::NdpInvalid);
    h.end();
}

#[test]
fn a_flood_of_first_fragments_uses_bounded_storage() {
    for pair in PAIRS {
        let mut h = Host::new();
        let whole = datagram(pair, 60_000);
        for ident in 0..5000 {
            h.receive(&fragment(pair, ident, protocol::UDP, &whole, 0..1448, true));
            assert!(h.ip.incomplete_datagrams() <= 1024 && h.ip.incomplete_bytes() <= 4 << 20);
        }
        // A datagram whose fragments arrive back to back is delivered.
        let verdict = feed(&mut h, &fragments_of(pair, 9999, protocol::UDP, &whole, 1448));
        let Verdict::Deliver(d) = verdict else { panic!() };
        assert!(h.got(d).bytes == whole);
        h.end();
    }
}
