//! Differential tests against etherparse: each parses the headers that the other emits.

use etherparse::{
    Ipv4HeaderSlice, Ipv6ExtensionsSlice, Ipv6HeaderSlice, PacketBuilder, SlicedPacket,
    TcpHeaderSlice, TcpOptionElement, TransportSlice,
};
use fulmar_stack::base::{EtherAddr, SeqNum};
use fulmar_stack::wire::checksum::Sum;
use fulmar_stack::wire::{arp, eth, icmpv4, icmpv6, ipv4, ipv6, protocol, tcp, udp};
use proptest::prelude::*;
use std::net::IpAddr;

const ETHER: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];

fn bytes_up_to(most: usize) -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..most)
}

/// Payloads of even and odd length.
fn payload() -> impl Strategy<Value = Vec<u8>> {
    bytes_up_to(200)
}

/// Parses the network header of a frame. Returns the protocol, the offset of the transport header, and
/// whether its checksum is correct.
fn network(frame: &[u8]) -> (u8, usize, bool) {
    let ether = eth::Header::parse(frame).unwrap();
    assert_eq!((ether.src, ether.dst), (EtherAddr(ETHER[0]), EtherAddr(ETHER[1])));
    let packet = &frame[eth::HEADER_BYTES..];
    let (src, dst, protocol, offset): (IpAddr, IpAddr, u8, usize) = match ether.ethertype {
        eth::IPV4 => {
            let h = ipv4::Header::parse(packet, packet.len()).unwrap();
            assert!(ipv4::checksum_ok(packet, h.header_bytes));
            assert_eq!((h.total_bytes, h.ttl), (packet.len(), 61));
            (h.src.into(), h.dst.into(), h.protocol, h.header_bytes)
        }
        eth::IPV6 => {
            let h = ipv6::Header::parse(packet, packet.len()).unwrap();
            let upper = ipv6::walk_extensions(packet, &h).unwrap();
            assert_eq!((h.payload_bytes + 40, h.hop_limit), (packet.len(), 61));
            (h.src.into(), h.dst.into(), upper.protocol, upper.offset)
        }
        other => panic!("ethertype {other:#x}"),
    };
    let transport = &packet[offset..];
    let mut sum = Sum::new();
    if protocol != protocol::ICMP {
        sum.add_pseudo(src, dst, protocol, transport.len() as u32);
    }
    sum.add_bytes(transport);
    (protocol, eth::HEADER_BYTES + offset, sum.is_valid())
}

/// A frame by etherparse up to the network header.
macro_rules! theirs {
    ($v6:expr, $addresses:expr, $then:expr) => {{
        let ether = PacketBuilder::ethernet2(ETHER[0], ETHER[1]);
        let (src, dst): (u128, u128) = $addresses;
        if $v6 {
            $then(ether.ipv6(src.to_be_bytes(), dst.to_be_bytes(), 61))
        } else {
            $then(ether.ipv4((src as u32).to_be_bytes(), (dst as u32).to_be_bytes(), 61))
        }
    }};
}

proptest! {
    #[test]
    fn tcp_headers_of_etherparse_are_parsed(
        v6: bool,
        addresses: (u128, u128),
        ports: (u16, u16),
        numbers: (u32, u32),
        window: u16,
        stamps: Option<(u32, u32)>,
        mss: Option<u16>,
        shift: Option<u8>,
        payload in payload(),
    ) {
        let options: Vec<_> = [
            mss.map(TcpOptionElement::MaximumSegmentSize),
            Some(TcpOptionElement::Noop),
            stamps.map(|(v, e)| TcpOptionElement::Timestamp(v, e)),
            shift.map(TcpOptionElement::WindowScale),
        ].into_iter().flatten().collect();
        let mut frame = Vec::new();
        theirs!(v6, addresses, |b: etherparse::PacketBuilderStep<_>| {
            b.tcp(ports.0, ports.1, numbers.0, window).psh().ack(numbers.1)
                .options(&options).unwrap().write(&mut frame, &payload).unwrap();
        });
        let (protocol, at, valid) = network(&frame);
        prop_assert_eq!((protocol, valid), (protocol::TCP, true));
        let (h, header_bytes) = tcp::Header::parse(&frame[at..]).unwrap();
        prop_assert_eq!(&frame[at + header_bytes..], &payload[..]);
        let timestamps = stamps.map(|(value, echo)| tcp::Timestamps { value, echo });
        let options = tcp::Options { mss, window_scale: shift, timestamps, ..Default::default() };
        prop_assert_eq!(h, tcp::Header {
            src_port: ports.0,
            dst_port: ports.1,
            seq: SeqNum(numbers.0),
            ack: SeqNum(numbers.1),
            flags: tcp::Flags::PSH | tcp::Flags::ACK,
            window,
            urgent: 0,
            options,
        });
    }

    #[test]
    fn udp_headers_of_etherparse_are_parsed_and_emitted_identically(
        v6: bool,
        addresses: (u128, u128),
        ports: (u16, u16),
        payload in payload(),
    ) {
        let mut frame = Vec::new();
        theirs!(v6, addresses, |b: etherparse::PacketBuilderStep<_>| {
            b.udp(ports.0, ports.1).write(&mut frame, &payload).unwrap();
        });
        let (protocol, at, valid) = network(&frame);
        prop_assert_eq!((protocol, valid), (protocol::UDP, true));
        let h = udp::Header::parse(&frame[at..]).unwrap();
        prop_assert_eq!((h.src_port, h.dst_port), ports);
        prop_assert_eq!(usize::from(h.length), 8 + payload.len());
        let mut ours = [0; 8];
        h.emit(&mut ours).unwrap();
        prop_assert_eq!(&ours[..], &frame[at..at + 8]);
    }

    #[test]
    fn echo_messages_of_etherparse_are_parsed_and_emitted_identically(
        v6: bool,
        addresses: (u128, u128),
        ident: u16,
        seq: u16,
        payload in payload(),
    ) {
        let mut frame = Vec::new();
        theirs!(v6, addresses, |b: etherparse::PacketBuilderStep<_>| {
            if v6 {
                b.icmpv6_echo_request(ident, seq).write(&mut frame, &payload).unwrap();
            } else {
                b.icmpv4_echo_request(ident, seq).write(&mut frame, &payload).unwrap();
            }
        });
        let (protocol, at, valid) = network(&frame);
        prop_assert!(valid);
        let mut ours = [0; 8];
        if v6 {
            let message = icmpv6::Message::EchoRequest { ident, seq };
            prop_assert_eq!((protocol, icmpv6::Message::parse(&frame[at..])), (58, Ok(message)));
            message.emit(&mut ours).unwrap();
        } else {
            let message = icmpv4::Message::EchoRequest { ident, seq };
            prop_assert_eq!((protocol, icmpv4::Message::parse(&frame[at..])), (1, Ok(message)));
            message.emit(&mut ours).unwrap();
        }
        ours[2..4].copy_from_slice(&frame[at + 2..at + 4]);
        prop_assert_eq!(&ours[..], &frame[at..at + 8]);
    }

    #[test]
    fn etherparse_parses_emitted_tcp_headers(
        v6: bool,
        addresses: (u128, u128),
        numbers: (u32, u32),
        flags in 0u16..0x200,
        syn: bool,
        blocks in 0..5u32,
        payload in payload(),
    ) {
        let mut sack = tcp::SackBlocks::default();
        for i in 0..blocks {
            sack.push(SeqNum(i * 10), SeqNum(i * 10 + 5));
        }
        let timestamps = Some(tcp::Timestamps { value: numbers.1, echo: numbers.0 });
        let options = if syn {
            let (mss, window_scale, sack_permitted) = (Some(1460), Some(7), true);
            tcp::Options { mss, window_scale, sack_permitted, timestamps, ..Default::default() }
        } else {
            tcp::Options { timestamps, sack, ..Default::default() }
        };
        let (seq, ack) = (SeqNum(numbers.0), SeqNum(numbers.1));
        let header = tcp::Header {
            src_port: 4000,
            dst_port: 80,
            seq,
            ack,
            flags: tcp::Flags(flags),
            window: 1000,
            urgent: 9,
            options,
        };
        let frame = our_frame(ip(v6, addresses.0), ip(v6, addresses.1), &header, &payload);
        let sliced = SlicedPacket::from_ethernet(&frame).unwrap();
        let Some(TransportSlice::Tcp(theirs)) = &sliced.transport else { panic!("not TCP") };
        prop_assert_eq!(theirs.payload(), &payload[..]);
        prop_assert_eq!((theirs.sequence_number(), theirs.acknowledgment_number()), numbers);
        let they_say = [theirs.fin(), theirs.syn(), theirs.rst(), theirs.psh(), theirs.ack(),
            theirs.urg(), theirs.ece(), theirs.cwr(), theirs.ns()];
        let bits = they_say.iter().enumerate().map(|(i, set)| u16::from(*set) << i).sum::<u16>();
        prop_assert_eq!((bits, theirs.window_size(), theirs.urgent_pointer()), (flags, 1000, 9));
        let (src, dst) = addresses;
        let h = theirs.to_header();
        let expected = if v6 {
            h.calc_checksum_ipv6_raw(src.to_be_bytes(), dst.to_be_bytes(), &payload)
        } else {
            let (src, dst) = (src as u32, dst as u32);
            h.calc_checksum_ipv4_raw(src.to_be_bytes(), dst.to_be_bytes(), &payload)
        };
        prop_assert_eq!(theirs.checksum(), expected.unwrap());
        prop_assert_eq!(their_options(theirs.options_iterator()), header_as_sent(&header).options);
    }

    #[test]
    fn any_bytes_are_accepted_or_rejected_as_by_etherparse(mut bytes in bytes_up_to(80), version in 0..20u8) {
        if let Some(first) = bytes.first_mut().filter(|_| version < 16) {
            *first = *first & 0x0f | if version % 2 == 0 { 0x40 } else { 0x60 };
        }
        judge_ipv4(&bytes);
        judge_ipv6(&bytes);
        judge_tcp(&bytes);
    }

    #[test]
    fn extension_headers_end_at_the_same_offset_as_in_etherparse(
        hop_by_hop: bool,
        kinds in proptest::collection::vec(
            prop::sample::select(vec![protocol::ROUTING, protocol::DESTINATION_OPTIONS]), 0..6),
        fragment in prop::option::of(any::<prop::sample::Index>()),
        units in 0..3u8,
    ) {
        let mut chain = kinds;
        if let Some(at) = fragment {
            chain.insert(at.index(chain.len() + 1), protocol::FRAGMENT);
        }
        if hop_by_hop {
            chain.insert(0, protocol::HOP_BY_HOP);
        }
        chain.push(protocol::UDP);
        let bytes = extensions(&chain, units);
        let header = ipv6::Header {
            src: 1.into(),
            dst: 2.into(),
            next_header: chain[0],
            hop_limit: 1,
            traffic_class: 0,
            flow_label: 0,
            payload_bytes: bytes.len(),
        };
        let mut packet = vec![0; 40];
        header.emit(&mut packet).unwrap();
        packet.extend_from_slice(&bytes);
        let ours = ipv6::walk_extensions(&packet, &header).unwrap();
        let theirs = Ipv6ExtensionsSlice::from_slice(chain[0].into(), &bytes);
        let (theirs, next, rest) = theirs.unwrap();
        prop_assert_eq!((ours.protocol, ours.offset), (next.0, packet.len() - rest.len()));
        prop_assert_eq!(theirs.is_fragmenting_payload(), false);
        prop_assert_eq!(ours.fragment.is_some(), fragment.is_some());
    }

    #[test]
    fn arp_packets_of_etherparse_are_parsed_and_emitted_identically(reply: bool, ether: ([u8; 6], [u8; 6]), ip: (u32, u32)) {
        let theirs = etherparse::ArpEthIpv4Packet {
            operation: etherparse::ArpOperation(1 + u16::from(reply)),
            sender_mac: ether.0,
            sender_ipv4: ip.0.to_be_bytes(),
            target_mac: ether.1,
            target_ipv4: ip.1.to_be_bytes(),
        };
        let operation = if reply { arp::Operation::Reply } else { arp::Operation::Request };
        let ours = arp::Packet {
            operation,
            sender_ether: EtherAddr(ether.0),
            sender_ip: ip.0.into(),
            target_ether: EtherAddr(ether.1),
            target_ip: ip.1.into(),
        };
        let bytes = theirs.to_bytes();
        prop_assert_eq!(arp::Packet::parse(&bytes), Ok(ours));
        let mut out = [0; arp::BYTES];
        ours.emit(&mut out).unwrap();
        prop_assert_eq!(out, bytes);
    }
}

/// The extension headers of a chain that ends with a transport, each of 8 bytes plus `units` times 8 where
/// possible: options are padding, routing headers have no segments left, fragments are atomic.
fn extensions(chain: &[u8], units: u8) -> Vec<u8> {
    let mut bytes = Vec::new();
    for pair in chain.windows(2) {
        let header = match pair[0] {
            protocol::FRAGMENT => vec![pair[1], 0, 0, 0, 0, 0, 0, 0],
            protocol::ROUTING => [&[pair[1], units][..], &[0; 6]].concat(),
            _ => [&[pair[1], units, 1, 4 + 8 * units][..], &[0; 4]].concat(),
        };
        bytes.extend(header);
        let more_bytes = if pair[0] == protocol::FRAGMENT { 0 } else { usize::from(units) * 8 };
        bytes.resize(bytes.len() + more_bytes, 0);
    }
    bytes
}

fn judge_ipv4(bytes: &[u8]) {
    match (ipv4::Header::parse(bytes, usize::MAX), Ipv4HeaderSlice::from_slice(bytes)) {
        (Ok(ours), Ok(theirs)) => same_ipv4(&ours, &theirs),
        // etherparse checks the total length elsewhere.
        (Err(_), Ok(theirs)) => assert!(usize::from(theirs.total_len()) < theirs.slice().len()),
        (Ok(_), Err(e)) => panic!("only we accept: {e}"),
        (Err(_), Err(_)) => {}
    }
}

fn same_ipv4(ours: &ipv4::Header, theirs: &Ipv4HeaderSlice<'_>) {
    assert_eq!((ours.src, ours.dst), (theirs.source_addr(), theirs.destination_addr()));
    assert_eq!((ours.protocol, ours.ttl), (theirs.protocol().0, theirs.ttl()));
    assert_eq!(ours.ident, theirs.identification());
    assert_eq!(ours.header_bytes, theirs.slice().len());
    assert_eq!(ours.total_bytes, usize::from(theirs.total_len()));
    assert_eq!(ours.dscp_ecn, theirs.dcp().value() << 2 | theirs.ecn().value());
    assert_eq!(ours.fragment_offset, theirs.fragments_offset().value() * 8);
    assert_eq!(ours.dont_fragment, theirs.dont_fragment());
    assert_eq!(ours.more_fragments, theirs.more_fragments());
    assert_eq!(ours.is_fragment(), theirs.is_fragmenting_payload());
}

fn judge_ipv6(bytes: &[u8]) {
    match (ipv6::Header::parse(bytes, usize::MAX), Ipv6HeaderSlice::from_slice(bytes)) {
        (Ok(ours), Ok(theirs)) => {
            assert_eq!((ours.src, ours.dst), (theirs.source_addr(), theirs.destination_addr()));
            assert_eq!(ours.next_header, theirs.next_header().0);
            assert_eq!(ours.hop_limit, theirs.hop_limit());
            assert_eq!(ours.traffic_class, theirs.traffic_class());
            assert_eq!(ours.flow_label, theirs.flow_label().value());
            assert_eq!(ours.payload_bytes, usize::from(theirs.payload_length()));
        }
        (ours, theirs) => assert_eq!(ours.is_ok(), theirs.is_ok()),
    }
}

fn judge_tcp(bytes: &[u8]) {
    match (tcp::Header::parse(bytes), TcpHeaderSlice::from_slice(bytes)) {
        (Ok((ours, header_bytes)), Ok(theirs)) => {
            let ports = (theirs.source_port(), theirs.destination_port());
            assert_eq!((ours.src_port, ours.dst_port), ports);
            assert_eq!((ours.seq.0, ours.window), (theirs.sequence_number(), theirs.window_size()));
            assert_eq!(header_bytes, theirs.slice().len());
        }
        // etherparse checks the options elsewhere.
        (Err(_), Ok(theirs)) => assert!(!theirs.options().is_empty()),
        (ours, theirs) => assert_eq!(ours.is_ok(), theirs.is_ok()),
    }
}

/// An IPv4 or IPv6 address with these bits.
fn ip(v6: bool, bits: u128) -> IpAddr {
    if v6 { IpAddr::V6(bits.into()) } else { IpAddr::V4((bits as u32).into()) }
}

/// An emitted frame with its checksums, whose payload is summed while it is copied.
fn our_frame(src: IpAddr, dst: IpAddr, tcp: &tcp::Header, payload: &[u8]) -> Vec<u8> {
    let (ip_bytes, ethertype) = match src {
        IpAddr::V6(_) => (ipv6::HEADER_BYTES, eth::IPV6),
        IpAddr::V4(_) => (ipv4::HEADER_BYTES, eth::IPV4),
    };
    let segment_bytes = tcp.header_bytes() + payload.len();
    let mut frame = vec![0; eth::HEADER_BYTES + ip_bytes + segment_bytes];
    let (ether, packet) = frame.split_at_mut(eth::HEADER_BYTES);
    let (network, segment) = packet.split_at_mut(ip_bytes);
    let (src_ether, dst_ether) = (EtherAddr(ETHER[0]), EtherAddr(ETHER[1]));
    eth::Header { dst: dst_ether, src: src_ether, ethertype }.emit(ether).unwrap();
    emit_ip(src, dst, segment_bytes, network);
    let header_bytes = tcp.emit(segment).unwrap();
    let mut sum = Sum::new();
    sum.add_pseudo(src, dst, protocol::TCP, segment_bytes as u32);
    segment[header_bytes..].copy_from_slice(payload);
    sum.add_bytes(segment);
    segment[tcp::CHECKSUM_OFFSET..][..2].copy_from_slice(&sum.finish().to_be_bytes());
    frame
}

fn emit_ip(src: IpAddr, dst: IpAddr, payload_bytes: usize, out: &mut [u8]) {
    match (src, dst) {
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let header = ipv6::Header {
                src,
                dst,
                next_header: protocol::TCP,
                hop_limit: 61,
                traffic_class: 0,
                flow_label: 0,
                payload_bytes,
            };
            header.emit(out).unwrap();
        }
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let header = ipv4::Header {
                src,
                dst,
                protocol: protocol::TCP,
                ttl: 61,
                dscp_ecn: 0,
                ident: 0,
                dont_fragment: true,
                more_fragments: false,
                fragment_offset: 0,
                header_bytes: 20,
                total_bytes: 20 + payload_bytes,
            };
            header.emit(out).unwrap();
        }
        _ => panic!("addresses of different versions"),
    }
}

/// The header without the SACK blocks that do not fit.
fn header_as_sent(header: &tcp::Header) -> tcp::Header {
    let mut sack = tcp::SackBlocks::default();
    let most = if header.options.timestamps.is_some() { 3 } else { 4 };
    header.options.sack.iter().take(most).for_each(|b| {
        sack.push(b.0, b.1);
    });
    tcp::Header { options: tcp::Options { sack, ..header.options }, ..*header }
}

fn their_options(iterator: etherparse::TcpOptionsIterator<'_>) -> tcp::Options {
    let mut options = tcp::Options::default();
    for option in iterator {
        match option.unwrap() {
            TcpOptionElement::Noop => {}
            TcpOptionElement::MaximumSegmentSize(mss) => options.mss = Some(mss),
            TcpOptionElement::WindowScale(shift) => options.window_scale = Some(shift),
            TcpOptionElement::SelectiveAcknowledgementPermitted => options.sack_permitted = true,
            TcpOptionElement::Timestamp(value, echo) => {
                options.timestamps = Some(tcp::Timestamps { value, echo });
            }
            TcpOptionElement::SelectiveAcknowledgement(first, rest) => {
                for (l, r) in [Some(first)].into_iter().chain(rest).flatten() {
                    options.sack.push(SeqNum(l), SeqNum(r));
                }
            }
        }
    }
    options
}
