//! ICMP of both versions: echo, received and sent errors, path MTU.

use crate::ip::rig::*;
use fulmar_stack::base::{Counter, DropReason, Duration, MtuDiscovery, Secrets};
use fulmar_stack::ip::{Config, EchoId, ErrorKind, Outgoing, OutputError, QuotedError, Verdict};
use fulmar_stack::wire::{ipv4, protocol};

const PAIRS: [(&str, &str); 2] = [(PEER4, OUR4), (PEER6, OUR6)];

fn echo(src: &str, dst: &str, body: &[u8]) -> Vec<u8> {
    let kind = if ip(src).is_ipv4() { 8 } else { 128 };
    icmp_frame(src, dst, [kind, 0, 0, 0, 0x12, 0x34, 0, 7], body)
}

#[test]
fn an_echo_reply_returns_the_payload() {
    for (src, dst) in PAIRS {
        for len in [0, 1, 56, 1400, 60_000] {
            let mut h = Host::with_resolved_neighbours();
            h.ip = fulmar_stack::ip::Ip::new(
                Config { mtu: 65_535, ..config() },
                &Secrets::for_simulation(7),
            )
            .unwrap();
            h.receive(&crate::ip::arp::request(PEER, v4(PEER4), v4(OUR4)));
            h.receive(&crate::ip::ndp::solicitation(PEER6, OUR6));
            h.sent();
            let body: Vec<u8> = (0..len).map(|i| i as u8).collect();
            h.receive(&echo(src, dst, &body));
            let frame = h.sent_one();
            let (from, to, message) = parse_sent_icmp(&frame);
            assert_eq!((from, to), (ip(dst), ip(src)));
            assert_eq!(message[0], if ip(src).is_ipv4() { 0 } else { 129 });
            assert_eq!(message[4..8], [0x12, 0x34, 0, 7]);
            assert_eq!(message[8..], body);
            h.end();
        }
    }
}

#[test]
fn an_echo_request_with_a_wrong_checksum_is_dropped() {
    for (src, dst) in PAIRS {
        let mut h = Host::with_resolved_neighbours();
        let mut frame = echo(src, dst, b"abcd");
        *frame.last_mut().unwrap() ^= 1;
        h.drops(&frame, DropReason::IcmpChecksum);
        h.end();
    }
}

#[test]
fn an_echo_request_to_broadcast_is_not_answered() {
    let mut h = Host::with_resolved_neighbours();
    let request = icmp(PEER4, "10.0.0.255", [8, 0, 0, 0, 0, 1, 0, 1], b"smurf");
    let packet = packet(PEER4, "10.0.0.255", protocol::ICMP, &request);
    h.drops(&framed(ALL, &packet), DropReason::IpDestination);
    assert_eq!(h.sent().len(), 0);
    h.end();
}

#[test]
fn echo_replies_are_rate_limited() {
    let mut h = Host::with_resolved_neighbours();
    for _ in 0..1500 {
        h.receive(&echo(PEER4, OUR4, b""));
    }
    let sent = h.sent().len();
    assert!((400..=1200).contains(&sent), "{sent}");
    assert_eq!(h.counters.drops(DropReason::RateLimited), 1500 - sent as u64);
    h.end();
}

#[test]
fn the_reply_to_an_own_echo_request_is_returned() {
    for (peer, own) in PAIRS {
        let mut h = Host::with_resolved_neighbours();
        let payload = h.chain(b"ping", 80);
        let to = std::net::SocketAddr::new(ip(peer), 0);
        let id = EchoId { ident: 5, seq: 6 };
        h.call(|ip, cx| ip.echo_request(cx, to, id, payload)).unwrap();
        let sent = h.sent_one();
        let (src, dst, message) = parse_sent_icmp(&sent);
        assert_eq!((src, dst), (ip(own), ip(peer)));
        assert_eq!((&message[4..8], &message[8..]), (&[0, 5, 0, 6][..], &b"ping"[..]));
        let kind = if ip(peer).is_ipv4() { 0 } else { 129 };
        let reply = icmp_frame(peer, own, [kind, 0, 0, 0, 0, 5, 0, 6], b"ping");
        let Verdict::EchoReply(r) = h.receive(&reply) else { panic!() };
        assert_eq!((r.from, r.ident, r.seq, r.hop_limit), (ip(peer), 5, 6, 64));
        assert_eq!(r.payload.to_vec(), b"ping");
        h.pool.free(r.payload);
        h.end();
    }
}

/// Inputs an error from `from` that quotes `quote`.
#[track_caller]
fn error(h: &mut Host, from: &str, header: [u8; 8], quote: &[u8]) -> QuotedError {
    let own = if ip(from).is_ipv4() { OUR4 } else { OUR6 };
    let verdict = h.receive(&icmp_frame(from, own, header, quote));
    let Verdict::IcmpError(e) = verdict else { panic!("{verdict:?}") };
    e
}

/// Sets the DF bit of an IPv4 packet. (The checksum of a quoted packet is not verified.)
fn forbid_fragments(packet: &mut [u8]) {
    packet[6] |= 0x40;
}

/// A TCP segment of this host, as much as an old router quotes.
fn quoted_tcp(src: &str, dst: &str) -> Vec<u8> {
    let mut packet = packet(src, dst, protocol::TCP, &[0x30; 1400]);
    if ip(src).is_ipv4() {
        forbid_fragments(&mut packet);
    }
    let at = if ip(src).is_ipv4() { 20 } else { 40 };
    packet[at..at + 8].copy_from_slice(&[0x03, 0xe8, 0, 80, 0xde, 0xad, 0xbe, 0xef]);
    packet.truncate(at + 8);
    packet
}

#[test]
fn errors_name_the_flow_and_the_sequence_number() {
    for ((peer, own), port_unreachable) in PAIRS.into_iter().zip([[3, 3], [1, 4]]) {
        let mut h = Host::new();
        let [kind, code] = port_unreachable;
        let e = error(&mut h, peer, [kind, code, 0, 0, 0, 0, 0, 0], &quoted_tcp(own, peer));
        assert_eq!((e.local.ip(), e.local.port()), (ip(own), 1000));
        assert_eq!((e.remote.ip(), e.remote.port()), (ip(peer), 80));
        assert_eq!((e.protocol, e.seq), (protocol::TCP, 0xdead_beef));
        assert_eq!(e.kind, ErrorKind::PortUnreachable);
        assert_eq!(h.counters.value(Counter::IcmpIn), 1);
        h.end();
    }
}

#[test]
fn unreachable_codes_are_classified_as_hard_or_soft() {
    let mut h = Host::new();
    let hard = |e: QuotedError| match e.kind {
        ErrorKind::Unreachable { hard, .. } => hard,
        other => panic!("{other:?}"),
    };
    for (code, is_hard) in [(0, false), (1, false), (2, true), (5, false), (9, true), (13, true)] {
        let e = error(&mut h, PEER4, [3, code, 0, 0, 0, 0, 0, 0], &quoted_tcp(OUR4, PEER4));
        assert_eq!(hard(e), is_hard, "code {code}");
    }
    for (code, is_hard) in [(0, false), (1, true), (3, false), (5, true)] {
        let e = error(&mut h, PEER6, [1, code, 0, 0, 0, 0, 0, 0], &quoted_tcp(OUR6, PEER6));
        assert_eq!(hard(e), is_hard, "code {code}");
    }
    h.end();
}

#[test]
fn errors_about_packets_of_other_hosts_are_dropped() {
    let mut h = Host::new();
    let quote = quoted_tcp("10.0.0.9", PEER4);
    let frame = icmp_frame(PEER4, OUR4, [3, 3, 0, 0, 0, 0, 0, 0], &quote);
    h.drops(&frame, DropReason::IcmpNoFlow);
    h.end();
}

#[test]
fn a_truncated_quote_is_dropped() {
    for (peer, own) in PAIRS {
        let mut h = Host::new();
        let quote = quoted_tcp(own, peer);
        let kind = if ip(peer).is_ipv4() { 3 } else { 1 };
        for cut in 0..quote.len() {
            let frame = icmp_frame(peer, own, [kind, 1, 0, 0, 0, 0, 0, 0], &quote[..cut]);
            h.drops(&frame, DropReason::IcmpInvalid);
        }
        h.end();
    }
}

#[test]
fn too_big_carries_the_mtu() {
    let mut h = Host::new();
    let quote = quoted_tcp(OUR4, PEER4);
    let e = error(&mut h, PEER4, [3, 4, 0, 0, 0, 0, 0x05, 0x14], &quote);
    assert_eq!(e.kind, ErrorKind::TooBig { mtu: 1300 });
    // An old router reports no MTU: the plateau below the 1420 bytes of the packet.
    let e = error(&mut h, PEER4, [3, 4, 0, 0, 0, 0, 0, 0], &quote);
    assert_eq!(e.kind, ErrorKind::TooBig { mtu: 1006 });
    let e = error(&mut h, PEER6, [2, 0, 0, 0, 0, 0, 0x05, 0x14], &quoted_tcp(OUR6, PEER6));
    assert_eq!(e.kind, ErrorKind::TooBig { mtu: 1300 });
    let e = error(&mut h, PEER6, [2, 0, 0, 0, 0, 0, 0, 68], &quoted_tcp(OUR6, PEER6));
    assert_eq!(e.kind, ErrorKind::TooBig { mtu: 1280 });
    h.end();
}

#[test]
fn an_error_that_quotes_the_other_ip_version_is_dropped() {
    for ((peer, own), (kind, quote)) in
        PAIRS.into_iter().zip([(3, quoted_tcp(OUR6, PEER6)), (1, quoted_tcp(OUR4, PEER4))])
    {
        let mut h = Host::new();
        h.drops(&icmp_frame(peer, own, [kind, 1, 0, 0, 0, 0, 0, 0], &quote), DropReason::IcmpQuote);
        h.end();
    }
}

#[test]
fn an_error_not_addressed_to_the_quoted_source_is_dropped() {
    let mut h = Host::new();
    // An own address, but not the destination of the error.
    let frame = icmp_frame(PEER6, LOCAL6, [1, 4, 0, 0, 0, 0, 0, 0], &quoted_tcp(OUR6, PEER6));
    h.drops(&frame, DropReason::IcmpNoFlow);
    h.end();
}

#[test]
fn an_error_about_a_packet_to_a_group_is_dropped() {
    let mut h = Host::new();
    for (peer, own, group) in
        [(PEER4, OUR4, "224.0.0.251"), (PEER4, OUR4, "10.0.0.255"), (PEER6, OUR6, "ff02::fb")]
    {
        let kind = if ip(peer).is_ipv4() { 3 } else { 1 };
        let header = [kind, 1, 0, 0, 0, 0, 0, 0];
        h.drops(&icmp_frame(peer, own, header, &quoted_tcp(own, group)), DropReason::IcmpQuote);
    }
    h.end();
}

#[test]
fn an_error_that_is_sent_to_a_group_is_dropped() {
    let mut h = Host::new();
    let error = icmp(PEER4, "10.0.0.255", [3, 3, 0, 0, 0, 0, 0, 0], &quoted_tcp(OUR4, PEER4));
    let frame = framed(ALL, &packet(PEER4, "10.0.0.255", protocol::ICMP, &error));
    h.drops(&frame, DropReason::IpDestination);
    h.end();
}

#[test]
fn a_path_mtu_is_reported_only_for_a_larger_packet_that_may_not_be_fragmented() {
    let mut h = Host::new();
    let frame = |mtu: u16, quote: &[u8]| {
        let [high, low] = mtu.to_be_bytes();
        icmp_frame(PEER4, OUR4, [3, 4, 0, 0, 0, 0, high, low], quote)
    };
    let quote = quoted_tcp(OUR4, PEER4);
    assert!(matches!(h.receive(&frame(1419, &quote)), Verdict::IcmpError(_)));
    h.drops(&frame(1420, &quote), DropReason::IcmpQuote);
    let mut fragmentable = quote;
    fragmentable[6] &= !0x40;
    h.drops(&frame(576, &fragmentable), DropReason::IcmpQuote);
    // Every IPv6 link takes 1280 bytes: a smaller packet cannot be too big.
    let mut small = packet(OUR6, PEER6, protocol::TCP, &[0x30; 1240]);
    small.truncate(48);
    let report = icmp_frame(PEER6, OUR6, [2, 0, 0, 0, 0, 0, 2, 0], &small);
    h.drops(&report, DropReason::IcmpQuote);
    h.end();
}

#[test]
fn a_quoted_fragment_other_than_the_first_is_dropped() {
    let mut h = Host::new();
    let mut quote = quoted_tcp(OUR4, PEER4);
    quote[7] = 1;
    let frame = icmp_frame(PEER4, OUR4, [3, 1, 0, 0, 0, 0, 0, 0], &quote);
    h.drops(&frame, DropReason::IcmpInvalid);
    h.end();
}

#[test]
fn a_quoted_length_that_leaves_no_transport_header_is_dropped() {
    let mut h = Host::new();
    let mut quote = quoted_tcp(OUR4, PEER4);
    quote[2..4].copy_from_slice(&27_u16.to_be_bytes());
    let frame = icmp_frame(PEER4, OUR4, [3, 1, 0, 0, 0, 0, 0, 0], &quote);
    h.drops(&frame, DropReason::IcmpInvalid);
    h.end();
}

#[test]
fn redirects_are_ignored() {
    let mut h = Host::with_resolved_neighbours();
    let before = h.ip.generation();
    let [a, b, c, d] = v4(PEER4).octets();
    let redirect = icmp_frame(GATEWAY4, OUR4, [5, 1, 0, 0, a, b, c, d], &quoted_tcp(OUR4, FAR4));
    h.drops(&redirect, DropReason::IcmpIgnored);
    let body = [&v6(PEER6).octets()[..], &v6("2001:db8:9::1").octets()].concat();
    let redirect = icmp("fe80::9", OUR6, [137, 0, 0, 0, 0, 0, 0, 0], &body);
    let redirect = packet_with("fe80::9", OUR6, protocol::ICMPV6, 255, &redirect);
    h.drops(&frame(&redirect), DropReason::IcmpIgnored);
    assert_eq!(h.ip.generation(), before);
    h.end();
}

#[test]
fn the_path_mtu_of_datagrams_does_not_apply_to_tcp() {
    let mut h = Host::with_resolved_neighbours();
    assert!(h.ip.lower_datagram_mtu(h.now, ip(FAR4), 600));
    let choice = h.ip.route(ip(FAR4), 0).unwrap();
    assert_eq!((choice.mtu, choice.datagram_mtu), (1500, 600));
    assert_eq!(h.send_udp(OUR4, FAR4, 601 - 28), Err(OutputError::TooBig { mtu: 600 }));
    let segment = h.udp_to(OUR4, FAR4, 1500 - 28);
    assert_eq!(h.send(Outgoing { protocol: protocol::TCP, ..segment }), Ok(()));
    h.end();
}

#[test]
fn a_probe_is_limited_by_the_mtu_of_the_interface_alone() {
    for (src, dst, header_bytes) in [(OUR4, FAR4, 28), (OUR6, PEER6, 48)] {
        let mut h = Host::with_resolved_neighbours();
        // Below the least MTU of IPv4, where DF is cleared for others.
        assert!(h.ip.lower_path_mtu(h.now, ip(dst), 500));
        let choice = h.ip.route(ip(dst), 0).unwrap();
        assert!(choice.mtu < 1500 && choice.link_mtu == 1500);
        let mut send = |bytes| {
            let packet = h.udp_to(src, dst, bytes);
            let sent = h.send(Outgoing { mtu_discovery: MtuDiscovery::Probe, ..packet });
            (sent, h.sent())
        };
        let (sent, frames) = send(1500 - header_bytes);
        assert_eq!((sent, frames.len()), (Ok(()), 1));
        assert_eq!(frames[0].len(), 1514);
        if src == OUR4 {
            assert!(ipv4::Header::parse(&frames[0][14..], 1500).unwrap().dont_fragment);
        }
        let too_big = Err(OutputError::TooBig { mtu: 1500 });
        assert_eq!(send(1501 - header_bytes), (too_big, vec![]));
        h.end();
    }
}

#[test]
fn a_lowered_path_mtu_holds_for_its_destination_until_it_expires() {
    let mut h = Host::with_resolved_neighbours();
    let before = h.ip.generation();
    h.ip.lower_path_mtu(h.now, ip(FAR4), 1300);
    assert_ne!(h.ip.generation(), before);
    assert_eq!(h.ip.route(ip(FAR4), 0).unwrap().mtu, 1300);
    assert_eq!(h.ip.route(ip(PEER4), 0).unwrap().mtu, 1500);
    assert_eq!(h.send_udp(OUR4, FAR4, 1300 - 28), Ok(()));
    assert_eq!(h.send_udp(OUR4, FAR4, 1301 - 28), Err(OutputError::TooBig { mtu: 1300 }));
    h.advance(600_000);
    assert_eq!(h.ip.route(ip(FAR4), 0).unwrap().mtu, 1500);
    h.end();
}

#[test]
fn below_the_smallest_mtu_df_is_cleared() {
    let mut h = Host::with_resolved_neighbours();
    h.ip.lower_path_mtu(h.now, ip(FAR4), 300);
    assert_eq!(h.ip.route(ip(FAR4), 0).unwrap().mtu, 576);
    h.send_udp(OUR4, FAR4, 100).unwrap();
    assert_eq!(h.sent_one()[14 + 6] & 0x40, 0);
    h.end();
}

#[test]
fn port_unreachable_quotes_the_datagram() {
    for ((src, dst), header) in PAIRS.into_iter().zip([[3, 3], [1, 4]]) {
        let mut h = Host::with_resolved_neighbours();
        let frame = udp_frame(src, dst, b"anybody?");
        let got = h.delivers(&frame);
        h.call(|ip, cx| ip.port_unreachable(cx, &got.header));
        let answer = h.sent_one();
        let (from, to, message) = parse_sent_icmp(&answer);
        assert_eq!((from, to), (ip(dst), ip(src)));
        assert_eq!(message[..2], header);
        let quote_bytes = if ip(src).is_ipv4() { 28 } else { 48 };
        assert_eq!(message[8..], frame[14..14 + quote_bytes]);
        assert_eq!(h.counters.value(Counter::IcmpOut), 1);
        h.end();
    }
}

#[test]
fn broadcast_datagrams_and_segments_are_not_answered() {
    let mut h = Host::with_resolved_neighbours();
    let datagram = udp(ip(PEER4), ip("10.0.0.255"), b"hi");
    let frame = framed(ALL, &packet(PEER4, "10.0.0.255", protocol::UDP, &datagram));
    let got = h.delivers(&frame);
    h.call(|ip, cx| ip.port_unreachable(cx, &got.header));
    let segment = frame_of_tcp();
    let got = h.delivers(&segment);
    h.call(|ip, cx| ip.port_unreachable(cx, &got.header));
    assert_eq!(h.sent().len(), 0);
    h.end();
}

fn frame_of_tcp() -> Vec<u8> {
    frame(&packet(PEER4, OUR4, protocol::TCP, &[0x50; 20]))
}

/// Errors sent for a burst of datagrams to a closed port.
fn errors_for(h: &mut Host, datagrams: usize) -> usize {
    let frame = udp_frame(PEER4, OUR4, b"anybody?");
    for _ in 0..datagrams {
        let got = h.delivers(&frame);
        h.call(|ip, cx| ip.port_unreachable(cx, &got.header));
    }
    h.sent().len()
}

#[test]
fn errors_are_rate_limited() {
    let mut h = Host::with_resolved_neighbours();
    let sent = errors_for(&mut h, 200);
    assert!((15..=80).contains(&sent), "{sent}");
    assert_eq!(h.counters.drops(DropReason::RateLimited), 200 - sent as u64);
    h.end();
}

#[test]
fn the_error_rate_limit_is_no_side_channel_for_closed_ports() {
    // CVE-2020-25705: 50 probes with a spoofed source, then one with the attacker's own. With a
    // limit of exactly 50, the answer to the last one would reveal a single open port among the 50.
    let answers = |closed: usize| {
        let is_answered = |h: &mut Host| {
            h.now = h.now + Duration::from_secs(10);
            errors_for(h, closed);
            errors_for(h, 1) == 1
        };
        let mut h = Host::with_resolved_neighbours();
        let answered = (0..300).filter(|_| is_answered(&mut h)).count();
        h.end();
        answered
    };
    let (all_closed, one_open) = (answers(50), answers(49));
    assert!(all_closed.abs_diff(one_open) < 60, "{all_closed} and {one_open} of 300");
}

#[test]
fn an_unknown_protocol_is_reported() {
    let mut h = Host::with_resolved_neighbours();
    h.drops(&frame(&packet(PEER4, OUR4, 132, &[0; 700])), DropReason::UnknownProtocol);
    let answer = h.sent_one();
    let (.., message) = parse_sent_icmp(&answer);
    assert_eq!((message[0], message[1], message.len()), (3, 2, 576 - 20));
    h.drops(&frame(&packet(PEER6, OUR6, 132, &[0; 9])), DropReason::UnknownProtocol);
    let answer = h.sent_one();
    let (.., message) = parse_sent_icmp(&answer);
    assert_eq!(message[..8], [4, 1, message[2], message[3], 0, 0, 0, 6]);
    assert_eq!(message.len(), 8 + 40 + 9);
    h.end();
}

#[test]
fn an_unknown_option_is_handled_by_its_action_bits() {
    // Skip, discard, discard and report, report unless multicast.
    for (kind, answers) in [(0x1e, None), (0x5e, Some(0)), (0x9e, Some(1)), (0xde, Some(1))] {
        let mut h = Host::with_resolved_neighbours();
        let mut body = vec![17, 0, kind, 4, 0, 0, 0, 0];
        body.extend(udp(ip(PEER6), ip(OUR6), b"hi"));
        let frame = frame(&packet(PEER6, OUR6, protocol::DESTINATION_OPTIONS, &body));
        match answers {
            None => drop(h.delivers(&frame)),
            Some(n) => {
                h.drops(&frame, DropReason::ExtensionHeader);
                let sent = h.sent();
                assert_eq!(sent.len(), n, "option {kind:x}");
                for frame in sent {
                    let (.., message) = parse_sent_icmp(&frame);
                    assert_eq!((message[0], message[1], message[7]), (4, 2, 42));
                }
            }
        }
        h.end();
    }
}

#[test]
fn an_unknown_option_before_an_icmp_error_is_not_reported() {
    let options = |next| [next, 0, 0x9e, 4, 0, 0, 0, 0];
    let fragment = [protocol::ICMPV6, 0, 0, 1, 0, 0, 0, 9];
    for (kind, expected) in [(1, 0), (4, 0), (137, 0), (128, 1), (136, 1)] {
        let message = [kind, 0, 0, 0, 0, 0, 0, 0];
        for body in [
            [&options(protocol::ICMPV6)[..], &message].concat(),
            [&options(protocol::FRAGMENT)[..], &fragment, &message].concat(),
        ] {
            let mut h = Host::with_resolved_neighbours();
            let packet = packet(PEER6, OUR6, protocol::DESTINATION_OPTIONS, &body);
            h.drops(&frame(&packet), DropReason::ExtensionHeader);
            assert_eq!(h.sent().len(), expected, "{kind} in {body:?}");
            h.end();
        }
    }
    // The type of the message is missing.
    let mut h = Host::with_resolved_neighbours();
    let packet = packet(PEER6, OUR6, protocol::DESTINATION_OPTIONS, &options(protocol::ICMPV6));
    h.drops(&frame(&packet), DropReason::ExtensionHeader);
    assert_eq!(h.sent().len(), 0);
    h.end();
}

#[test]
fn errors_are_not_answered_with_errors() {
    let mut h = Host::with_resolved_neighbours();
    // A malformed error, and a message of unknown type.
    h.drops(&icmp_frame(PEER4, OUR4, [3, 3, 0, 0, 0, 0, 0, 0], &[9; 40]), DropReason::IcmpInvalid);
    assert!(matches!(h.receive(&icmp_frame(PEER4, OUR4, [77; 8], b"")), Verdict::Consumed));
    assert_eq!(h.sent().len(), 0);
    h.end();
}
