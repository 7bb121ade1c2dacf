//! Sockets for every port and every address: datagrams with their destination, from any source, and errors
//! about them; echo requests to other hosts.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::task::Poll;

use fulmar_stack::base::{DropReason, Gso, GsoKind, Offload, SlotId};
use fulmar_stack::ip::{EchoId, InvokingPacket, SentError};
use fulmar_stack::shard::{PendingError, RecvMessage, SendMessage};
use fulmar_stack::socket::{Ready, SocketError};
use fulmar_stack::udp::BindOptions;
use fulmar_stack::wire::checksum::Sum;

use crate::shard::udp::rig::{OURS, PEER, Rig, US, caps, datagram_to, peer, station_of};

const FAR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);

fn every() -> BindOptions {
    BindOptions { any_port: true, ..BindOptions::default() }
}

fn far(port: u16) -> SocketAddr {
    SocketAddr::new(FAR.into(), port)
}

/// A gateway and its socket for all ports.
fn gateway(cuts: bool) -> (Rig, SlotId) {
    let mut rig = Rig::gateway(caps(cuts));
    let id = rig.shard.udp().bind("[::]:0".parse().unwrap(), every()).unwrap();
    rig.take();
    (rig, id)
}

fn receive(rig: &mut Rig, id: SlotId) -> Option<(SocketAddr, SocketAddr, Vec<u8>, Option<u16>)> {
    let Poll::Ready(d) = rig.shard.udp().receive(id).unwrap() else { return None };
    let bytes = d.payload.to_vec();
    rig.shard.free(d.payload);
    Some((d.src, d.dst, bytes, d.segment_bytes))
}

/// Source and destination of a sent datagram, and its payload.
fn parse(frame: &[u8]) -> (SocketAddr, SocketAddr, Vec<u8>) {
    let address = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&frame[at..at + 4]).unwrap());
    let port = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    assert_eq!(frame[23], 17);
    let (from, to) = ((address(26), port(34)), (address(30), port(36)));
    (from.into(), to.into(), frame[42..].to_vec())
}

#[test]
fn a_datagram_has_its_destination() {
    let (mut rig, id) = gateway(false);
    for (to, port) in [(FAR, 53), (US, 1), (Ipv4Addr::new(8, 8, 8, 8), 65_535)] {
        let (frame, offload) = datagram_to((PEER, 9), (to, port), b"ask", None);
        rig.arrive(frame, offload);
        rig.step();
        let to = SocketAddr::new(to.into(), port);
        assert_eq!(receive(&mut rig, id), Some((peer(9), to, b"ask".to_vec(), None)));
    }
    assert!(rig.take().is_empty());
}

#[test]
fn a_batch_has_the_destination_of_each() {
    let (mut rig, id) = gateway(false);
    for port in [53, 123, 443] {
        let (frame, offload) = datagram_to((PEER, 9), (FAR, port), b"ask", None);
        rig.arrive(frame, offload);
    }
    rig.step();
    let mut buffers = [[0; 8]; 4];
    let mut into: Vec<_> = buffers.iter_mut().map(|b| RecvMessage::new(b)).collect();
    assert!(matches!(rig.shard.udp().receive_many(id, &mut into), Ok(Poll::Ready(3))));
    let to: Vec<_> = into.iter().map(|m| m.to()).collect();
    assert_eq!(to, [Some(far(53)), Some(far(123)), Some(far(443)), None]);
    assert!(into[..3].iter().all(|m| m.from() == Some(peer(9)) && m.payload() == b"ask"));
}

#[test]
fn a_socket_of_a_port_comes_first() {
    let (mut rig, id) = gateway(false);
    let dns = rig.shard.udp().bind(far(53), BindOptions::default()).unwrap();
    for port in [53, 54] {
        let (frame, offload) = datagram_to((PEER, 9), (FAR, port), b"ask", None);
        rig.arrive(frame, offload);
    }
    rig.step();
    assert_eq!(receive(&mut rig, dns).map(|d| d.1), Some(far(53)));
    assert_eq!(receive(&mut rig, id).map(|d| d.1), Some(far(54)));
    assert_eq!((receive(&mut rig, dns), receive(&mut rig, id)), (None, None));
}

#[test]
fn malformed_datagrams_are_dropped_with_their_reasons() {
    let (mut rig, id) = gateway(false);
    let used = rig.shard.pool().outstanding();
    let valid = || datagram_to((PEER, 9), (FAR, 53), b"payload", None);
    let with_length = |length: u16| {
        let (mut frame, offload) = valid();
        frame[38..40].copy_from_slice(&length.to_be_bytes());
        (frame, offload)
    };
    let mut bad_checksum = valid();
    bad_checksum.0[40..42].copy_from_slice(&[0x12, 0x34]);
    bad_checksum.1 = Offload::default();
    let short = |bytes: u16| {
        let (mut frame, offload) = valid();
        let total = 20 + bytes;
        frame[16..18].copy_from_slice(&total.to_be_bytes());
        let mut sum = Sum::new();
        frame[24..26].fill(0);
        sum.add_bytes(&frame[14..34]);
        let sum = sum.finish();
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
        frame.truncate(14 + usize::from(total));
        (frame, offload)
    };
    let cases = [
        (short(0), DropReason::UdpHeader),
        (short(3), DropReason::UdpHeader),
        (short(7), DropReason::UdpHeader),
        (with_length(0), DropReason::UdpHeader),
        (with_length(7), DropReason::UdpHeader),
        (with_length(16), DropReason::UdpHeader),
        (with_length(u16::MAX), DropReason::UdpHeader),
        (bad_checksum, DropReason::UdpChecksum),
        (datagram_to((PEER, 9), (FAR, 0), b"x", None), DropReason::UdpNoSocket),
        (datagram_to((FAR, 9), (Ipv4Addr::LOCALHOST, 53), b"x", None), DropReason::IpDestination),
        (datagram_to((US, 9), (FAR, 53), b"x", None), DropReason::IpSource),
        (datagram_to((Ipv4Addr::UNSPECIFIED, 9), (FAR, 53), b"x", None), DropReason::IpSource),
    ];
    for (n, ((frame, offload), reason)) in cases.into_iter().enumerate() {
        let before = rig.shard.counters().drops(reason);
        rig.arrive(frame, offload);
        rig.step();
        assert_eq!(rig.shard.counters().drops(reason), before + 1, "{n}: {reason:?}");
        assert_eq!(receive(&mut rig, id), None, "{n}");
    }
    rig.take();
    assert_eq!(rig.shard.pool().outstanding(), used);
    // From port 0: no answer is wanted (RFC 768).
    let (frame, offload) = datagram_to((PEER, 0), (FAR, 53), b"x", None);
    rig.arrive(frame, offload);
    rig.step();
    assert_eq!(receive(&mut rig, id).map(|d| d.0), Some(peer(0)));
}

#[test]
fn datagrams_go_from_the_source_that_is_named_by_either_path() {
    let (mut rig, id) = gateway(false);
    let messages = [
        SendMessage::new(b"one").from(far(53)).to(peer(9)),
        SendMessage::new(b"two").from(far(53)).to(peer(9)),
        SendMessage::new(b"six").from(far(123)).to(peer(9)),
        SendMessage::new(b"ten").from("8.8.8.8:53".parse().unwrap()).to(peer(9)),
    ];
    // The second time by the headers that the first one has left.
    for _ in 0..2 {
        let sent = rig.shard.udp().send_many(rig.now, id, &messages, PendingError::Return);
        assert!(matches!(sent, Ok(Poll::Ready(sent)) if sent.messages == 4), "{sent:?}");
        let frames: Vec<_> = rig.take().iter().map(|(f, _)| parse(f)).collect();
        let expected = [
            (far(53), peer(9), b"one".to_vec()),
            (far(53), peer(9), b"two".to_vec()),
            (far(123), peer(9), b"six".to_vec()),
            ("8.8.8.8:53".parse().unwrap(), peer(9), b"ten".to_vec()),
        ];
        assert_eq!(frames, expected);
    }
}

#[test]
fn only_datagrams_from_one_source_are_joined() {
    let (mut rig, id) = gateway(true);
    let message = |port| SendMessage::new(b"equal").from(far(port)).to(peer(9));
    let messages = [message(53), message(53), message(54), message(54), message(54)];
    for _ in 0..2 {
        let sent = rig.shard.udp().send_many(rig.now, id, &messages, PendingError::Return);
        assert!(sent.unwrap().is_ready());
        let sent: Vec<_> = rig.take().iter().map(|(f, _)| (parse(f).0, f.len() - 42)).collect();
        assert_eq!(sent, [(far(53), 10), (far(54), 15)]);
    }
}

#[test]
fn a_source_that_cannot_be_is_refused() {
    let (mut rig, id) = gateway(false);
    let one = rig.shard.udp().bind(far(53), BindOptions::default()).unwrap();
    let now = rig.now;
    let mut send = |id, from: Option<&str>, to: SocketAddr| {
        let message = SendMessage::new(b"x").to(to);
        let message = from.map_or(message, |from| message.from(from.parse().unwrap()));
        rig.shard.udp().send_many(now, id, &[message], PendingError::Return).err()
    };
    assert_eq!(send(id, None, peer(9)), Some(SocketError::Invalid), "no source");
    assert_eq!(send(id, Some("192.0.2.7:0"), peer(9)), Some(SocketError::Invalid));
    let v6 = send(id, Some("[2001:db8::7]:53"), peer(9));
    assert_eq!(v6, Some(SocketError::FamilyNotSupported));
    let loopback = send(id, Some("127.0.0.1:53"), peer(9));
    assert_eq!(loopback, Some(SocketError::NetworkUnreachable));
    assert_eq!(send(one, Some("192.0.2.7:54"), peer(9)), Some(SocketError::Invalid));
    assert_eq!(send(one, Some("192.0.2.8:0"), peer(9)), None, "another address, its own port");
    let sent = rig.take();
    assert_eq!(sent.len(), 1);
    assert_eq!(parse(&sent[0].0).0, "192.0.2.8:53".parse().unwrap());
    assert_eq!(rig.shard.udp().connect(id, peer(9)).err(), Some(SocketError::Invalid));
    let with_port = rig.shard.udp().bind(far(55), every());
    assert_eq!(with_port.err(), Some(SocketError::Invalid));
}

#[test]
fn a_run_is_delivered_whole_to_a_socket_that_takes_runs() {
    let (mut rig, id) = gateway(false);
    let gso = Some(Gso { kind: GsoKind::Udp, segment_bytes: 4, header_bytes: 42, ecn: false });
    let arrive = |rig: &mut Rig| {
        let (frame, offload) = datagram_to((PEER, 9), (FAR, 53), b"aaaabbbbcc", gso);
        rig.arrive(frame, offload);
        rig.step();
    };
    arrive(&mut rig);
    let each: Vec<_> = std::iter::from_fn(|| receive(&mut rig, id)).map(|d| (d.2, d.3)).collect();
    assert_eq!(each, [(b"aaaa".to_vec(), None), (b"bbbb".to_vec(), None), (b"cc".to_vec(), None)]);
    rig.shard.udp().with_socket(id, |u| u.gro = true).unwrap();
    arrive(&mut rig);
    let whole = receive(&mut rig, id).unwrap();
    assert_eq!((whole.2, whole.3), (b"aaaabbbbcc".to_vec(), Some(4)));
    arrive(&mut rig);
    let mut buffer = [0; 64];
    let mut into = [RecvMessage::new(&mut buffer)];
    assert!(rig.shard.udp().receive_many(id, &mut into).unwrap().is_ready());
    assert_eq!((into[0].payload(), into[0].segment_bytes()), (&b"aaaabbbbcc"[..], Some(4)));
}

#[test]
fn an_error_about_a_datagram_goes_back_to_its_sender() {
    let (mut rig, _) = gateway(false);
    let about = InvokingPacket::datagram(peer(9), far(53), b"ask", 3);
    let router = Some(IpAddr::from([198, 51, 100, 1]));
    for (error, from, code) in [
        (SentError::PortUnreachable, None, [3, 3]),
        (SentError::Unreachable { code: 1 }, router, [3, 1]),
        (SentError::TooBig { mtu: 1400 }, router, [3, 4]),
        (SentError::TimeExceeded { code: 0 }, router, [11, 0]),
    ] {
        rig.shard.icmp().send_error(rig.now, &about, error, from);
        let (frame, _) = rig.take().pop().unwrap();
        assert_eq!(frame[34..36], code);
        assert_eq!(
            IpAddr::from(<[u8; 4]>::try_from(&frame[26..30]).unwrap()),
            from.unwrap_or(FAR.into())
        );
        assert_eq!(frame[30..34], PEER.octets());
        let quoted = &frame[42..];
        assert_eq!((&quoted[12..16], &quoted[16..20]), (&PEER.octets()[..], &FAR.octets()[..]));
        assert_eq!(quoted[20..28], [0, 9, 0, 53, 0, 11, 0, 0]);
        assert_eq!(&quoted[28..], b"ask");
    }
}

/// A frame with an echo request of the peer.
fn echo_request(to: Ipv4Addr, seq: u16, payload: &[u8]) -> Vec<u8> {
    let (mut frame, _) = datagram_to((PEER, 9), (to, 9), payload, None);
    frame[..6].copy_from_slice(&OURS.0);
    frame[6..12].copy_from_slice(&station_of(2).0);
    frame[23] = 1;
    frame[34..42].copy_from_slice(&[8, 0, 0, 0, 0, 7, (seq >> 8) as u8, seq as u8]);
    let mut sum = Sum::new();
    frame[24..26].fill(0);
    sum.add_bytes(&frame[14..34]);
    let sum = sum.finish();
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    frame
}

fn ask(rig: &mut Rig, to: Ipv4Addr, seq: u16, payload: &[u8]) {
    rig.arrive(echo_request(to, seq, payload), Offload { csum_valid: true, ..Offload::default() });
    rig.step();
}

#[test]
fn an_echo_request_to_another_host_is_answered_by_the_program() {
    let (mut rig, _) = gateway(false);
    ask(&mut rig, FAR, 1, b"ping");
    assert_eq!(rig.shard.counters().drops(DropReason::IcmpIgnored), 1, "nobody listens");
    let id = rig.shard.icmp().listen().unwrap();
    assert_eq!(rig.shard.icmp().listen().err(), Some(SocketError::AddressInUse));
    ask(&mut rig, FAR, 2, b"ping");
    assert_eq!(rig.shard.ready(id), Ok(Ready::READABLE));
    let Ok(Poll::Ready(request)) = rig.shard.icmp().receive_request(id) else {
        panic!("no request")
    };
    assert_eq!((request.src, request.dst), (PEER.into(), FAR.into()));
    assert_eq!((request.ident, request.seq, request.hop_limit), (7, 2, 64));
    let payload = request.payload.to_vec();
    rig.shard.free(request.payload);
    assert_eq!(payload, b"ping");
    assert!(rig.take().is_empty());
    let echo = EchoId { ident: 7, seq: 2 };
    rig.shard.icmp().send_reply(rig.now, id, FAR.into(), PEER.into(), echo, &payload).unwrap();
    let (frame, _) = rig.take().pop().unwrap();
    assert_eq!((&frame[26..30], &frame[30..34]), (&FAR.octets()[..], &PEER.octets()[..]));
    assert_eq!(([frame[34], frame[35]], &frame[38..]), ([0, 0], &b"\0\x07\0\x02ping"[..]));
    assert!(matches!(rig.shard.icmp().receive_request(id), Ok(Poll::Pending)));
    // Its own address the stack answers itself.
    ask(&mut rig, US, 3, b"ping");
    assert_eq!(rig.take().len(), 1);
    let about = InvokingPacket::echo_request(PEER.into(), FAR.into(), echo, b"ping", 4);
    rig.shard.icmp().send_error(rig.now, &about, SentError::TimeExceeded { code: 0 }, None);
    let (frame, _) = rig.take().pop().unwrap();
    assert_eq!((frame[34], &frame[62..]), (11, &b"\x08\0\0\0\0\x07\0\x02ping"[..]));
}

#[test]
fn echo_requests_that_nobody_takes_are_bounded_and_freed_at_the_end() {
    let (mut rig, _) = gateway(false);
    let used = rig.shard.pool().outstanding();
    let id = rig.shard.icmp().listen().unwrap();
    for seq in 0..1000 {
        ask(&mut rig, FAR, seq, b"ping");
    }
    assert_eq!(rig.shard.counters().drops(DropReason::EchoBufferFull), 1000 - 256);
    let Ok(Poll::Ready(first)) = rig.shard.icmp().receive_request(id) else { panic!("no request") };
    assert_eq!(first.seq, 0, "the latest are dropped");
    rig.shard.free(first.payload);
    rig.shard.close(rig.now, id);
    assert_eq!(rig.shard.pool().outstanding(), used);
    let now = rig.now;
    let late = rig.shard.icmp().send_reply(
        now,
        id,
        FAR.into(),
        PEER.into(),
        EchoId { ident: 1, seq: 1 },
        b"",
    );
    assert_eq!(late.err(), Some(SocketError::BadHandle));
    assert!(rig.shard.icmp().listen().is_ok());
}
