//! Many datagrams in one call, and runs of them in one frame, out and in.

use fulmar_stack::base::{Counter, DropReason, Duration, Gso, GsoKind, SlotId};
use fulmar_stack::shard::{PendingError, RecvMessage, SendMessage, SentMany};
use fulmar_stack::socket::SocketError;
use std::task::Poll;

use crate::shard::udp::rig::{Rig, caps, datagram, peer};

fn send_many(rig: &mut Rig, id: SlotId, messages: &[SendMessage<'_>]) -> SentMany {
    match rig.shard.udp().send_many(rig.now, id, messages, PendingError::Return) {
        Ok(Poll::Ready(sent)) => sent,
        other => panic!("{:?}", other.map(|_| "has to wait")),
    }
}

fn payload_bytes(frames: &[(Vec<u8>, fulmar_stack::base::Offload)]) -> Vec<usize> {
    frames.iter().map(|f| f.0.len() - 42).collect()
}

#[test]
fn one_call_crosses_once_and_sends_each_datagram_by_itself() {
    let mut rig = Rig::new(caps(false));
    let id = rig.connected();
    rig.wire.lock().bursts = 0;
    let bytes = [7; 40];
    let messages: Vec<_> = (0..40).map(|n| SendMessage::new(&bytes[..n])).collect();
    let sent = send_many(&mut rig, id, &messages);
    assert_eq!(sent, SentMany { messages: 40, is_over: false });
    assert_eq!(rig.wire.lock().bursts, 1);
    assert_eq!(payload_bytes(&rig.take()), (0..40).collect::<Vec<_>>());
    // One to learn the headers, one more of the same by them.
    assert_eq!(rig.shard.counters().value(Counter::UdpOut), 41);
}

#[test]
fn a_device_that_cuts_gets_equal_datagrams_as_one_frame() {
    let mut rig = Rig::new(caps(true));
    let id = rig.connected();
    let bytes = [7; 40];
    let lengths = [18, 18, 18, 18, 5, 18, 18, 20, 20, 0, 0, 9];
    let messages = lengths.map(|n| SendMessage::new(&bytes[..n]));
    assert_eq!(send_many(&mut rig, id, &messages).messages, lengths.len());
    let frames = rig.take();
    assert_eq!(payload_bytes(&frames), [77, 36, 40, 0, 0, 9]);
    let runs = frames.iter().map(|f| f.1.gso.map(|g| (g.segment_bytes, g.header_bytes)));
    assert_eq!(runs.collect::<Vec<_>>()[..3], [Some((18, 42)), Some((18, 42)), Some((20, 42))]);
    // Another destination is another run, and so is a message that is a run already.
    let named = SendMessage::new(&bytes[..18]).to(peer(10));
    let run = SendMessage::new(&bytes).segmented(18);
    send_many(&mut rig, id, &[messages[0], messages[0], named, named, run, run]);
    assert_eq!(payload_bytes(&rig.take()), [36, 36, 40, 40]);
}

#[test]
fn datagrams_of_different_service_are_not_joined() {
    let mut rig = Rig::new(caps(true));
    let id = rig.connected();
    let plain = SendMessage::new(&[7; 18]);
    let messages = [plain, plain, plain.tos(2), plain.tos(2), plain.tos(1), plain, plain.tos(0)];
    assert_eq!(send_many(&mut rig, id, &messages).messages, messages.len());
    let run = SendMessage::new(&[7; 40]).segmented(18).tos(0xb9);
    send_many(&mut rig, id, &[run]);
    let frames = rig.take();
    let sent: Vec<_> = frames.iter().map(|f| (f.0[15], f.0.len() - 42)).collect();
    assert_eq!(sent, [(0, 36), (2, 36), (1, 18), (0, 18), (0, 18), (0xb9, 40)]);
    for (frame, _) in &frames {
        assert_eq!(fulmar_stack::wire::checksum::checksum(&frame[14..34]), 0);
    }
}

#[test]
fn the_service_of_a_datagram_and_of_a_run_is_received() {
    let mut rig = Rig::new(caps(true));
    let id = rig.bound();
    let gso = Gso { kind: GsoKind::Udp, segment_bytes: 18, header_bytes: 42, ecn: false };
    for (service, gso) in [(3, None), (0xb9, Some(gso)), (0, None)] {
        let (mut frame, offload) = datagram(&[7; 30], gso);
        frame[15] = service;
        frame[24..26].fill(0);
        let sum = fulmar_stack::wire::checksum::checksum(&frame[14..34]);
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
        rig.arrive(frame, offload);
    }
    rig.step();
    let mut buffers = [[0u8; 64]; 8];
    let mut messages = buffers.each_mut().map(|b| RecvMessage::new(b));
    assert_eq!(messages[0].tos(), 0);
    assert!(matches!(rig.shard.udp().receive_many(id, &mut messages), Ok(Poll::Ready(4))));
    let came = messages[..4].iter().map(|m| (m.tos(), m.payload().len()));
    assert_eq!(came.collect::<Vec<_>>(), [(3, 30), (0xb9, 18), (0xb9, 12), (0, 30)]);
}

#[test]
fn a_run_is_as_long_as_linux_takes_it_and_a_packet_is() {
    let mut rig = Rig::new(caps(true));
    let id = rig.connected();
    let bytes = vec![7; 1472];
    let small = [SendMessage::new(&bytes[..18]); 64];
    assert_eq!(send_many(&mut rig, id, &small).messages, 64);
    assert_eq!(payload_bytes(&rig.take()), [64 * 18]);
    let large = [SendMessage::new(&bytes); 64];
    assert_eq!(send_many(&mut rig, id, &large).messages, 64);
    let frames = payload_bytes(&rig.take());
    assert!(frames.iter().all(|n| *n <= 65_507 && n % 1472 == 0), "{frames:?}");
    assert_eq!(frames.iter().sum::<usize>(), 64 * 1472);
}

#[test]
fn a_call_ends_at_the_first_message_that_cannot_go() {
    let mut rig = Rig::new(caps(false));
    let id = rig.connected();
    let (bytes, nowhere) = (vec![7; 65_508], "192.0.2.1:9".parse().unwrap());
    let good = SendMessage::new(b"good");
    let cases = [
        (SendMessage::new(&bytes), SocketError::MessageTooLong),
        (good.to(nowhere), SocketError::NetworkUnreachable),
        (SendMessage::new(&bytes[..3000]).segmented(1473), SocketError::MessageTooLong),
        (SendMessage::new(&bytes[..129 * 18]).segmented(18), SocketError::Invalid),
    ];
    for (bad, error) in cases {
        let sent = send_many(&mut rig, id, &[good, good, bad, good]);
        assert_eq!(sent, SentMany { messages: 2, is_over: true });
        let first = rig.shard.udp().send_many(rig.now, id, &[bad, good], PendingError::Return);
        assert_eq!(first.map(|_| ()), Err(error));
        rig.step();
        assert_eq!(payload_bytes(&rig.take()), [4, 4]);
    }
    let none = send_many(&mut rig, id, &[]);
    assert_eq!(none, SentMany { messages: 0, is_over: false });
}

#[test]
fn a_device_that_is_full_ends_a_call_with_the_count_and_is_waited_for_without_one() {
    let mut rig = Rig::new(caps(false));
    let id = rig.connected();
    rig.wire.lock().is_full = true;
    let messages = [SendMessage::new(b"x"); 100];
    // What the burst holds is accepted, and goes when there is room.
    let sent = send_many(&mut rig, id, &messages);
    assert_eq!(sent, SentMany { messages: 64, is_over: false });
    let more = rig.shard.udp().send_many(rig.now, id, &messages[64..], PendingError::Leave);
    assert!(matches!(more, Ok(Poll::Pending)));
    rig.wire.lock().is_full = false;
    rig.step();
    assert_eq!(send_many(&mut rig, id, &messages[64..]).messages, 36);
    assert_eq!(rig.take().len(), 100);
}

#[test]
fn a_path_narrower_than_the_link_joins_nothing_and_loses_nothing() {
    let mut rig = Rig::new(caps(true));
    let id = rig.connected();
    let (now, bytes) = (rig.now, [7; 1400]);
    rig.shard.ip().lower_path_mtu(now, peer(9).ip(), 1000);
    let messages = [SendMessage::new(&bytes); 3];
    assert_eq!(send_many(&mut rig, id, &messages).messages, 3);
    assert_eq!(rig.take().len(), 6, "each in two fragments");
    assert_eq!(rig.shard.counters().drops(DropReason::PacketTooBig), 0);
}

#[test]
fn runs_are_cut_in_software_where_the_device_does_not() {
    let mut rig = Rig::new(caps(false));
    let id = rig.connected();
    let bytes = [7; 50];
    let sent = send_many(&mut rig, id, &[SendMessage::new(&bytes).segmented(18)]);
    assert_eq!(sent.messages, 1);
    let frames = rig.take();
    assert_eq!(payload_bytes(&frames), [18, 18, 14]);
    for (frame, _) in &frames {
        let udp_bytes = usize::from(u16::from_be_bytes([frame[38], frame[39]]));
        assert_eq!(udp_bytes, frame.len() - 34);
    }
    let idents: Vec<_> = frames.iter().map(|f| u16::from_be_bytes([f.0[18], f.0[19]])).collect();
    assert!(idents.windows(2).all(|w| w[1] == w[0].wrapping_add(1)), "{idents:?}");
    // What comes next is not foreseen.
    rig.send(id, b"next").unwrap();
    let next = rig.take()[0].0[18..20].to_vec();
    assert_ne!(next, idents[2].wrapping_add(1).to_be_bytes());
}

#[test]
fn a_neighbour_that_never_answers_costs_a_bounded_queue_and_is_reported_as_unreachable() {
    let mut rig = Rig::new(caps(false));
    let id = rig.bound();
    rig.shard.udp().connect(id, peer(9)).unwrap();
    let messages = [SendMessage::new(b"hello?"); 64];
    for _ in 0..10 {
        assert_eq!(send_many(&mut rig, id, &messages).messages, 64);
    }
    let waiting = rig.shard.ip().queued_pkts();
    assert!(waiting <= 256, "{waiting} wait");
    for _ in 0..8 {
        rig.pass(Duration::from_millis(500));
    }
    assert_eq!(rig.shard.ip().queued_pkts(), 0);
    let counters = rig.shard.counters();
    let full = counters.drops(DropReason::NeighbourQueueFull);
    let lost = counters.drops(DropReason::NeighbourUnreachable);
    assert_eq!((full, lost), (640 - waiting as u64, waiting as u64));
    assert_eq!(rig.send(id, b"x"), Err(SocketError::HostUnreachable));
}

fn receive_many(rig: &mut Rig, id: SlotId, room: usize) -> Vec<Vec<u8>> {
    let mut buffers = vec![[0u8; 64]; room];
    let mut messages: Vec<_> = buffers.iter_mut().map(|b| RecvMessage::new(b)).collect();
    match rig.shard.udp().receive_many(id, &mut messages).unwrap() {
        Poll::Ready(n) => messages[..n].iter().map(|m| m.payload().to_vec()).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn a_run_that_arrives_in_one_frame_is_delivered_apart() {
    let mut rig = Rig::new(caps(true));
    let id = rig.bound();
    let bytes: Vec<u8> = (0..100).collect();
    let gso = |segment_bytes| {
        Some(Gso { kind: GsoKind::Udp, segment_bytes, header_bytes: 42, ecn: false })
    };
    let (frame, offload) = datagram(&bytes, gso(18));
    rig.arrive(frame, offload);
    rig.step();
    let came = receive_many(&mut rig, id, 64);
    assert_eq!(came, bytes.chunks(18).map(<[u8]>::to_vec).collect::<Vec<_>>());
    // A run of one is one; what claims to be thousands is a lie.
    let (frame, offload) = datagram(&bytes, gso(100));
    rig.arrive(frame, offload);
    let (frame, offload) = datagram(&[1; 1400], gso(1));
    rig.arrive(frame, offload);
    rig.step();
    assert_eq!(receive_many(&mut rig, id, 64).len(), 1);
    assert_eq!(rig.shard.counters().drops(DropReason::BadOffload), 1);
}

#[test]
fn one_call_takes_what_is_there_in_order_and_says_what_was_cut_off() {
    let mut rig = Rig::new(caps(false));
    let id = rig.bound();
    assert!(receive_many(&mut rig, id, 4).is_empty());
    for n in [3usize, 0, 100, 7] {
        let (frame, offload) = datagram(&vec![n as u8; n], None);
        rig.arrive(frame, offload);
    }
    rig.step();
    let mut buffers = [[0u8; 64]; 3];
    let mut messages = buffers.each_mut().map(|b| RecvMessage::new(b));
    assert_eq!(messages[0].from(), None);
    let came = rig.shard.udp().receive_many(id, &mut messages).unwrap();
    assert!(matches!(came, Poll::Ready(3)));
    let lengths = messages.each_ref().map(|m| (m.payload().len(), m.sent_len(), m.is_truncated()));
    assert_eq!(lengths, [(3, 3, false), (0, 0, false), (64, 100, true)]);
    assert_eq!(messages[2].from(), Some(peer(9)));
    assert_eq!(receive_many(&mut rig, id, 3), [vec![7; 7]]);
}

#[test]
fn what_a_full_queue_drops_is_not_summed_first() {
    let mut rig = Rig::new(caps(false));
    let id = rig.bound();
    rig.shard.udp().with_socket(id, |u| u.set_recv_limit(256)).unwrap();
    let (good, offload) = datagram(&[1; 100], None);
    // A checksum that is wrong, and that no device has looked at.
    let mut bad = good.clone();
    bad[40..42].copy_from_slice(&[0xba, 0xad]);
    let unseen = fulmar_stack::base::Offload::default();
    rig.arrive(bad.clone(), unseen);
    rig.step();
    let drops = |rig: &Rig| {
        let counters = rig.shard.counters();
        (counters.drops(DropReason::UdpChecksum), counters.drops(DropReason::UdpBufferFull))
    };
    assert_eq!(drops(&rig), (1, 0));
    rig.arrive(good, offload);
    rig.arrive(bad, unseen);
    rig.step();
    assert_eq!(drops(&rig), (1, 1));
    assert_eq!(receive_many(&mut rig, id, 8).len(), 1);
}
