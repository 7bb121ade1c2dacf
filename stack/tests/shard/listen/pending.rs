//! Pending connections: what a SYN leaves before the program has decided, and what each decision sends.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::task::Poll;

use fulmar_stack::base::{DropReason, Duration, SeqNum};
use fulmar_stack::shard::{
    ConditionalAccept, Decision, ListenOptions, Pending, SourceLimits, StackConfig,
};
use fulmar_stack::socket::{Ready, SocketError};
use fulmar_stack::tcp::State;
use fulmar_stack::wire::icmpv4::Message;
use fulmar_stack::wire::ipv4;
use fulmar_stack::wire::tcp::{Flags, Header};

use fulmar_testbed::listener::{PORT, Rig, ack, syn, syn_options};

const ISS: SeqNum = SeqNum(77);

fn peer(n: u16) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 5), 4000 + n)
}

fn options(accept: ConditionalAccept) -> ListenOptions {
    ListenOptions { conditional_accept: Some(accept), ..ListenOptions::default() }
}

fn rig() -> Rig {
    Rig::new(options(ConditionalAccept::default()))
}

fn send_syn(rig: &mut Rig, from: SocketAddrV4, iss: SeqNum) {
    rig.send_from(from, &syn(iss, syn_options(7)), &[]);
    rig.pass(1);
}

fn take(rig: &mut Rig) -> Option<Pending> {
    match rig.server.tcp_pending(rig.listener).unwrap() {
        Poll::Ready(pending) => Some(pending),
        _ => None,
    }
}

fn decide(
    rig: &mut Rig,
    pending: Pending,
    decision: Decision,
) -> Option<fulmar_stack::base::SlotId> {
    rig.server.tcp_decide(rig.now, pending.id, decision).unwrap()
}

#[test]
fn a_syn_is_answered_after_the_program_has_accepted_it() {
    let mut rig = rig();
    send_syn(&mut rig, peer(0), ISS);
    rig.pass(5000);
    assert!(rig.frames().is_empty());
    assert_eq!(rig.server.ready(rig.listener), Ok(Ready::READABLE));
    let pending = take(&mut rig).unwrap();
    assert_eq!(pending.remote, SocketAddr::V4(peer(0)));
    assert_eq!(pending.local, "10.0.0.1:80".parse().unwrap());
    assert_eq!((pending.syn.mss, pending.syn.window_scale), (Some(1460), Some(7)));
    assert!(pending.syn.sack_permitted && pending.syn.timestamps && !pending.syn.ecn);
    assert_eq!(rig.server.ready(rig.listener), Ok(Ready::NONE));
    let id = decide(&mut rig, pending, Decision::Accept).unwrap();
    assert_eq!(rig.stat().pending, 0);
    let reply = rig.replies_to(peer(0))[0];
    assert_eq!((reply.flags, reply.ack), (Flags::SYN | Flags::ACK, SeqNum(78)));
    assert_eq!(rig.server.ready(id), Ok(Ready::NONE));
    assert!(matches!(rig.server.tcp_connected(id), Ok(Poll::Pending)));
    rig.send_from(peer(0), &ack(&reply), b"hello");
    rig.pass(1);
    assert!(rig.server.ready(id).unwrap().contains(Ready::WRITABLE));
    assert_eq!(rig.read(id), b"hello");
    let remote = rig.server.addresses(id).unwrap().1;
    assert_eq!(remote, Some(SocketAddr::V4(peer(0))));
}

#[test]
fn an_accepted_connection_counts_until_its_handshake_is_over() {
    let accept = ConditionalAccept { backlog: 3, ..ConditionalAccept::default() };
    let mut rig = Rig::new(options(accept));
    // Three whose peers do not exist, and one too many.
    for n in 0..4 {
        send_syn(&mut rig, peer(n), ISS);
        if let Some(pending) = take(&mut rig) {
            decide(&mut rig, pending, Decision::Accept);
        }
    }
    assert_eq!((rig.stat().pending, rig.drops(DropReason::PendingQueueFull)), (0, 1));
    // One of them answers after all.
    let reply = rig.replies_to(peer(1))[0];
    rig.send_from(peer(1), &ack(&reply), &[]);
    rig.pass(1);
    send_syn(&mut rig, peer(5), ISS);
    let pending = take(&mut rig).expect("it has space");
    decide(&mut rig, pending, Decision::Refuse);
    // More than half are under way: the others are given up after two repetitions, 7 seconds.
    rig.pass(8000);
    for n in 6..8 {
        send_syn(&mut rig, peer(n), ISS);
        assert!(take(&mut rig).is_some(), "{n}");
    }
}

#[test]
fn a_source_at_its_limit_is_given_up_early() {
    let accept = ConditionalAccept { per_source: 2, ..ConditionalAccept::default() };
    let mut rig = Rig::new(options(accept));
    for n in 0..3 {
        send_syn(&mut rig, peer(n), ISS);
        if let Some(pending) = take(&mut rig) {
            decide(&mut rig, pending, Decision::Accept);
        }
    }
    assert_eq!(rig.drops(DropReason::SourceLimit), 1);
    rig.pass(8000);
    assert_eq!(rig.stat().embryos_expired, 2);
    send_syn(&mut rig, peer(3), ISS);
    assert!(take(&mut rig).is_some());
}

#[test]
fn limits_of_a_source_hold_for_accepted_connections() {
    let connections = Some(2);
    let limits = SourceLimits { connections, ..SourceLimits::default() };
    let config = StackConfig { source_limits: limits, ..StackConfig::default() };
    let mut rig = Rig::with(options(ConditionalAccept::default()), config);
    let mut accepted = 0;
    for n in 0..4 {
        send_syn(&mut rig, peer(n), ISS);
        let pending = take(&mut rig).unwrap();
        match rig.server.tcp_decide(rig.now, pending.id, Decision::Accept) {
            Ok(_) => accepted += 1,
            Err(e) => {
                assert_eq!(e, SocketError::NoBuffer);
                decide(&mut rig, pending, Decision::Refuse);
            }
        }
    }
    assert_eq!(accepted, 2);
}

#[test]
fn a_connection_of_this_listener_is_not_accepted_otherwise_nor_are_those_of_others_pending() {
    let mut rig = rig();
    assert_eq!(rig.server.tcp_accept(rig.listener).err(), Some(SocketError::Invalid));
    let other = SocketAddr::from(([10, 0, 0, 1], 81));
    let plain = rig.server.tcp_listen(other, ListenOptions::default()).unwrap();
    assert_eq!(rig.server.tcp_pending(plain).err(), Some(SocketError::Invalid));
}

#[test]
fn a_repeated_syn_is_absorbed_and_a_new_one_takes_its_place() {
    let mut rig = rig();
    for _ in 0..3 {
        send_syn(&mut rig, peer(0), ISS);
    }
    assert_eq!((rig.stat().pending, rig.drops(DropReason::SynPending)), (1, 2));
    assert_eq!(rig.stat().syns_dropped, 0);
    let pending = take(&mut rig).unwrap();
    send_syn(&mut rig, peer(0), SeqNum(1000));
    assert!(take(&mut rig).is_none(), "it is the same pending connection");
    assert!(rig.frames().is_empty());
    decide(&mut rig, pending, Decision::Accept);
    assert_eq!(rig.replies_to(peer(0))[0].ack, SeqNum(1001));
    // From here on a repeated SYN asks for the SYN,ACK again.
    send_syn(&mut rig, peer(0), SeqNum(1000));
    assert_eq!(rig.replies_to(peer(0))[0].flags, Flags::SYN | Flags::ACK);
}

#[test]
fn a_refused_connection_is_reset() {
    let mut rig = rig();
    send_syn(&mut rig, peer(0), ISS);
    let pending = take(&mut rig).unwrap();
    decide(&mut rig, pending, Decision::Refuse);
    let reply = rig.replies_to(peer(0))[0];
    assert_eq!((reply.flags, reply.ack), (Flags::RST | Flags::ACK, SeqNum(78)));
    let again = rig.server.tcp_decide(rig.now, pending.id, Decision::Accept);
    assert_eq!(again.err(), Some(SocketError::ConnectionAborted));
}

#[test]
fn an_unreachable_destination_is_reported_by_icmp_with_the_code_and_the_quote_of_the_syn() {
    let mut rig = rig();
    send_syn(&mut rig, peer(0), ISS);
    let pending = take(&mut rig).unwrap();
    decide(&mut rig, pending, Decision::Unreachable(13));
    let frame = rig.frames().pop().unwrap();
    let (packet, icmp) = (&frame[14..], &frame[34..]);
    let header = ipv4::Header::parse(packet, packet.len()).unwrap();
    assert_eq!((header.src, header.dst, header.protocol), ([10, 0, 0, 1].into(), *peer(0).ip(), 1));
    let message = Message::parse(icmp).unwrap();
    assert!(matches!(message, Message::Unreachable { code: 13, .. }), "{message:?}");
    let quoted = ipv4::Header::parse(&icmp[8..], usize::MAX).unwrap();
    assert_eq!((quoted.src, quoted.dst, quoted.protocol), (header.dst, header.src, 6));
    let ports: Vec<u16> =
        icmp[28..32].chunks(2).map(|b| u16::from_be_bytes([b[0], b[1]])).collect();
    assert_eq!(ports, [peer(0).port(), PORT]);
    assert_eq!(icmp[32..36], ISS.0.to_be_bytes());
}

#[test]
fn a_dropped_connection_leaves_nothing_and_its_repeated_syn_is_pending_anew() {
    let mut rig = rig();
    send_syn(&mut rig, peer(0), ISS);
    let pending = take(&mut rig).unwrap();
    decide(&mut rig, pending, Decision::Drop);
    assert!(rig.frames().is_empty());
    assert_eq!(rig.stat().pending, 0);
    send_syn(&mut rig, peer(0), ISS);
    assert!(take(&mut rig).is_some_and(|p| p.id != pending.id));
}

#[test]
fn a_reset_of_the_peer_ends_it_if_its_sequence_number_is_right() {
    let mut rig = rig();
    send_syn(&mut rig, peer(0), ISS);
    let reset = |seq| Header { seq: SeqNum(seq), flags: Flags::RST, ..Header::default() };
    for seq in [77, 79, 5] {
        rig.send_from(peer(0), &reset(seq), &[]);
        rig.pass(1);
    }
    assert_eq!((rig.stat().pending, rig.drops(DropReason::TcpBlindReset)), (1, 3));
    rig.send_from(peer(0), &reset(78), &[]);
    rig.pass(1);
    let stat = rig.stat();
    assert_eq!((stat.pending, stat.pending_reset), (0, 1));
    assert_eq!(rig.server.ready(rig.listener), Ok(Ready::NONE));
    assert!(take(&mut rig).is_none());
    assert!(rig.frames().is_empty());
}

#[test]
fn a_decision_after_the_peers_reset_fails() {
    let mut rig = rig();
    for n in 0..4 {
        send_syn(&mut rig, peer(n), ISS);
        let pending = take(&mut rig).unwrap();
        let reset = Header { seq: SeqNum(78), flags: Flags::RST, ..Header::default() };
        rig.send_from(peer(n), &reset, &[]);
        rig.pass(1);
        let all = [Decision::Accept, Decision::Refuse, Decision::Unreachable(1), Decision::Drop];
        let decided = rig.server.tcp_decide(rig.now, pending.id, all[usize::from(n)]);
        assert_eq!(decided.err(), Some(SocketError::ConnectionAborted));
    }
    assert!(rig.frames().is_empty());
}

#[test]
fn a_peer_that_gave_up_silently_resets_the_accepted_connection() {
    let mut rig = rig();
    send_syn(&mut rig, peer(0), ISS);
    rig.pass(30_000);
    let pending = take(&mut rig).unwrap();
    let id = decide(&mut rig, pending, Decision::Accept).unwrap();
    let reply = rig.replies_to(peer(0))[0];
    let reset = Header { seq: reply.ack, flags: Flags::RST, ..Header::default() };
    rig.send_from(peer(0), &reset, &[]);
    rig.pass(1);
    assert!(rig.server.ready(id).unwrap().contains(Ready::ERROR | Ready::WRITABLE));
    assert_eq!(rig.server.tcp_connected(id).err(), Some(SocketError::ConnectionRefused));
    rig.server.close(rig.now, id);
    assert_eq!(rig.server.stat().connections(), 0);
}

#[test]
fn a_peer_that_is_silent_fails_the_accepted_connection() {
    let mut rig = rig();
    send_syn(&mut rig, peer(0), ISS);
    let pending = take(&mut rig).unwrap();
    let id = decide(&mut rig, pending, Decision::Accept).unwrap();
    rig.pass(140_000);
    assert!(rig.server.tcp_connected(id).is_err());
    rig.server.close(rig.now, id);
    assert_eq!(rig.server.stat().connections(), 0);
}

#[test]
fn an_accepted_connection_that_is_closed_before_its_handshake_ends_leaves_nothing() {
    let mut rig = rig();
    send_syn(&mut rig, peer(0), ISS);
    let pending = take(&mut rig).unwrap();
    let id = decide(&mut rig, pending, Decision::Accept).unwrap();
    assert_eq!(rig.server.tcp_entry(id).unwrap().tcb.state(), State::SynReceived);
    rig.server.close(rig.now, id);
    rig.pass(300_000);
    assert_eq!(rig.server.stat().connections(), 0);
}

#[test]
fn an_icmp_error_about_a_pending_connection_matches_no_flow() {
    let mut rig = rig();
    send_syn(&mut rig, peer(0), ISS);
    let mut icmp = vec![3, 1, 0, 0, 0, 0, 0, 0];
    // What the server would have sent, had it answered.
    icmp.extend(packet([10, 0, 0, 1], peer(0).ip().octets(), 6, 40));
    icmp.extend(PORT.to_be_bytes());
    icmp.extend(peer(0).port().to_be_bytes());
    icmp.extend([0; 4]);
    let mut frame = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]].concat();
    frame.extend([8, 0]);
    frame.extend(packet(peer(0).ip().octets(), [10, 0, 0, 1], 1, icmp.len()));
    frame.extend(icmp);
    rig.send_frame(frame);
    rig.pass(1);
    assert_eq!((rig.stat().pending, rig.drops(DropReason::IcmpNoFlow)), (1, 1));
    let pending = take(&mut rig).unwrap();
    assert!(decide(&mut rig, pending, Decision::Accept).is_some());
}

/// An IPv4 header.
fn packet(src: [u8; 4], dst: [u8; 4], protocol: u8, payload_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; ipv4::HEADER_BYTES];
    let header = ipv4::Header {
        src: src.into(),
        dst: dst.into(),
        protocol,
        ttl: 64,
        dscp_ecn: 0,
        ident: 0,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        header_bytes: ipv4::HEADER_BYTES,
        total_bytes: ipv4::HEADER_BYTES + payload_bytes,
    };
    header.emit(&mut bytes).unwrap();
    bytes
}

#[test]
fn an_undecided_connection_is_dropped_by_its_time_out() {
    let timeout = Duration::from_secs(10);
    let mut rig = Rig::new(options(ConditionalAccept { timeout, ..ConditionalAccept::default() }));
    send_syn(&mut rig, peer(0), ISS);
    rig.pass(5_000);
    send_syn(&mut rig, peer(1), ISS);
    let pending = take(&mut rig).unwrap();
    rig.pass(4_990);
    assert_eq!(rig.stat().pending, 2);
    rig.pass(15);
    let stat = rig.stat();
    assert_eq!((stat.pending, stat.pending_expired), (1, 1));
    let late = rig.server.tcp_decide(rig.now, pending.id, Decision::Accept);
    assert_eq!(late.err(), Some(SocketError::ConnectionAborted));
    rig.pass(5_000);
    assert_eq!((rig.stat().pending, rig.server.ready(rig.listener)), (0, Ok(Ready::NONE)));
    assert!(rig.frames().is_empty());
}

#[test]
fn a_flood_of_100_000_syns_takes_no_more_than_the_backlog() {
    let limits = ConditionalAccept { backlog: 500, ..ConditionalAccept::default() };
    let mut rig = Rig::new(options(limits));
    let used = rig.server.pool().outstanding();
    rig.pass_under(1000, 100);
    let stat = rig.stat();
    assert_eq!((stat.pending, stat.pending_limit, stat.cookies_sent), (500, 500, 0));
    let dropped = rig.drops(DropReason::PendingQueueFull);
    assert_eq!(stat.syns_dropped, dropped);
    assert_eq!(500 + dropped + rig.drops(DropReason::SynPending), 100_000);
    assert_eq!((rig.server.stat().connections(), rig.server.pool().outstanding()), (0, used));
    assert!(rig.frames().is_empty());
    let taken = std::iter::from_fn(|| take(&mut rig)).count();
    assert_eq!(taken, 500);
    rig.pass(80_000);
    assert_eq!((rig.stat().pending, rig.stat().pending_expired), (0, 500));
}

#[test]
fn syns_and_resets_in_turn_leave_nothing_although_the_program_looks_at_none() {
    let limits = ConditionalAccept { backlog: 10, ..ConditionalAccept::default() };
    let mut rig = Rig::new(options(limits));
    for n in 0..1000 {
        send_syn(&mut rig, peer(n), ISS);
        let reset = Header { seq: SeqNum(78), flags: Flags::RST, ..Header::default() };
        rig.send_from(peer(n), &reset, &[]);
    }
    rig.pass(1);
    let stat = rig.stat();
    assert_eq!((stat.pending, stat.pending_reset, stat.syns_dropped), (0, 1000, 0));
    assert!(take(&mut rig).is_none());
    send_syn(&mut rig, peer(0), ISS);
    assert!(take(&mut rig).is_some());
}

#[test]
fn one_source_does_not_take_the_places_of_others() {
    let limits = ConditionalAccept { per_source: 3, ..ConditionalAccept::default() };
    let mut rig = Rig::new(options(limits));
    for n in 0..5 {
        send_syn(&mut rig, peer(n), ISS);
    }
    assert_eq!((rig.stat().pending, rig.drops(DropReason::SourceLimit)), (3, 2));
    send_syn(&mut rig, SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 6), 1), ISS);
    assert_eq!(rig.stat().pending, 4);
    let first = take(&mut rig).unwrap();
    decide(&mut rig, first, Decision::Drop);
    send_syn(&mut rig, peer(4), ISS);
    assert_eq!(rig.stat().pending, 4);
}

#[test]
fn accepted_connections_count_for_their_source() {
    let source_limits = SourceLimits { embryos: None, connections: Some(1) };
    let config = StackConfig { source_limits, ..StackConfig::default() };
    let mut rig = Rig::with(options(ConditionalAccept::default()), config);
    send_syn(&mut rig, peer(0), ISS);
    let pending = take(&mut rig).unwrap();
    let id = decide(&mut rig, pending, Decision::Accept).unwrap();
    let reply = rig.replies_to(peer(0))[0];
    rig.send_from(peer(0), &ack(&reply), &[]);
    rig.pass(1);
    send_syn(&mut rig, peer(1), ISS);
    assert_eq!((rig.stat().pending, rig.drops(DropReason::SourceLimit)), (0, 1));
    rig.server.tcp_entry(id).unwrap().linger = Some(Duration::ZERO);
    rig.server.close(rig.now, id);
    send_syn(&mut rig, peer(1), ISS);
    assert_eq!(rig.stat().pending, 1);
}

#[test]
fn without_a_free_socket_the_connection_stays_pending() {
    let config = StackConfig { max_sockets: 2, ..StackConfig::default() };
    let mut rig = Rig::with(options(ConditionalAccept::default()), config);
    for n in 0..2 {
        send_syn(&mut rig, peer(n), ISS);
    }
    let (first, second) = (take(&mut rig).unwrap(), take(&mut rig).unwrap());
    let id = decide(&mut rig, first, Decision::Accept).unwrap();
    let refused = rig.server.tcp_decide(rig.now, second.id, Decision::Accept);
    assert_eq!((refused.err(), rig.stat().pending), (Some(SocketError::NoBuffer), 1));
    rig.server.tcp_entry(id).unwrap().linger = Some(Duration::ZERO);
    rig.server.close(rig.now, id);
    assert!(decide(&mut rig, second, Decision::Accept).is_some());
}

#[test]
fn the_end_of_a_listener_ends_what_is_pending_and_not_what_was_accepted() {
    let mut rig = rig();
    for n in 0..2 {
        send_syn(&mut rig, peer(n), ISS);
    }
    let (first, second) = (take(&mut rig).unwrap(), take(&mut rig).unwrap());
    let id = decide(&mut rig, first, Decision::Accept).unwrap();
    let reply = rig.replies_to(peer(0))[0];
    rig.server.close(rig.now, rig.listener);
    let late = rig.server.tcp_decide(rig.now, second.id, Decision::Accept);
    assert_eq!(late.err(), Some(SocketError::ConnectionAborted));
    rig.send_from(peer(0), &ack(&reply), b"x");
    rig.pass(100_000);
    assert_eq!(rig.read(id), b"x");
}
