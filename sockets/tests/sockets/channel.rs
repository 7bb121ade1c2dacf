//! Stacks whose packets the program carries as bytes.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::Duration;

use fulmar::devices::{self, PacketReceiver, PacketSender};
use fulmar::stat::DropReason;
use fulmar::{ListenOptions, SetupError, Stack, TcpListener, TcpStream, UdpSocket};
use proptest::prelude::*;

use crate::support::{A, B, eventually, stack, within};

/// A stack and the program's ends of its channel.
fn channel(n: u8, mtu: usize) -> (Stack, PacketSender, PacketReceiver) {
    let (device, sender, receiver) = devices::channel(mtu).unwrap();
    (stack(n, Box::new(device), |s| s.exit_drain(Duration::from_millis(200))), sender, receiver)
}

/// Carries packets until an end is gone, as a tunnel does; calls `each` for every one.
fn carry(
    mut from: PacketReceiver,
    mut to: PacketSender,
    each: impl Fn(&[u8]) + Send + 'static,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        while let Ok(packet) = from.recv() {
            push(&mut to, packet, &each);
            while let Ok(packet) = from.try_recv() {
                push(&mut to, packet, &each);
            }
            while to.flush().is_err_and(|e| e.kind() == ErrorKind::WouldBlock) {
                thread::yield_now();
            }
        }
    })
}

fn push(to: &mut PacketSender, packet: &[u8], each: impl Fn(&[u8])) {
    each(packet);
    while to.push(packet).is_err_and(|e| e.kind() == ErrorKind::WouldBlock) {
        thread::yield_now();
    }
}

/// Two stacks, joined by the program.
fn joined(mtu: usize) -> (Stack, Stack) {
    let (a, to_a, from_a) = channel(1, mtu);
    let (b, to_b, from_b) = channel(2, mtu);
    let check = move |packet: &[u8]| assert!(packet.len() <= mtu, "{} bytes", packet.len());
    carry(from_a, to_b, check);
    carry(from_b, to_a, check);
    (a, b)
}

/// Sends `bytes` to the peer and back.
fn exchange(client: TcpStream, mut server: TcpStream, bytes: Vec<u8>) {
    let echo = thread::spawn(move || {
        let mut all = Vec::new();
        server.read_to_end(&mut all).unwrap();
        server.write_all(&all).unwrap();
    });
    (&client).write_all(&bytes).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut all = Vec::new();
    (&client).read_to_end(&mut all).unwrap();
    echo.join().unwrap();
    assert!(all == bytes);
}

#[test]
fn what_crosses_a_channel_arrives_whatever_the_mtu() {
    for mtu in [1280, 1500, 9000, 65_535] {
        within(move || {
            let (a, b) = joined(mtu);
            let listener = TcpListener::bind(&b, (B, 80)).unwrap();
            let client = TcpStream::connect(&a, (B, 80)).unwrap();
            let (server, _) = listener.accept().unwrap();
            exchange(client, server, crate::support::pattern(0, 3 << 20));
            let counters = b.stat().unwrap().shard.counters;
            // A segment that was sent twice, since a thread did not run for long, may be dropped.
            for reason in [DropReason::IpChecksum, DropReason::TcpChecksum, DropReason::BadOffload]
            {
                assert_eq!(counters.drops(reason), 0, "{reason:?}");
            }
        });
    }
}

#[test]
fn a_datagram_leaves_as_one_packet_and_arrives_as_one() {
    within(|| {
        let (a, mut to_a, mut from_a) = channel(1, 1500);
        let socket = UdpSocket::bind(&a, (A, 7)).unwrap();
        socket.connect((B, 9)).unwrap();
        assert_eq!(from_a.try_recv().unwrap_err().kind(), ErrorKind::WouldBlock);
        socket.send(b"hello").unwrap();
        let mut packet = from_a.recv().unwrap().to_vec();
        assert_eq!((packet.len(), &packet[28..]), (33, &b"hello"[..]));
        // The answer: ends exchanged, for which both checksums stay right.
        packet[12..20].rotate_left(4);
        packet[20..24].rotate_left(2);
        to_a.send(&packet).unwrap();
        let mut word = [0; 9];
        assert_eq!(socket.recv(&mut word).unwrap(), 5);
    });
}

#[test]
fn a_receiver_that_does_not_read_stops_the_stack_and_loses_nothing() {
    within(|| {
        let (a, _to_a, mut from_a) = channel(1, 1500);
        let socket = UdpSocket::bind(&a, (A, 7)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let mut sent = 0usize;
        while socket.send_to(&[7; 1000], (B, 9)).is_ok() {
            sent += 1;
            assert!(sent < 1 << 20, "the channel is not bounded");
        }
        let mut came = 0;
        eventually("all have come", || {
            while from_a.try_recv().is_ok() {
                came += 1;
            }
            came == sent
        });
        socket.send_to(&[7; 1000], (B, 9)).unwrap();
    });
}

#[test]
fn a_full_channel_refuses_a_packet_until_the_stack_has_taken_some() {
    within(|| {
        let (device, mut to, _from) = devices::channel(1500).unwrap();
        let mut taken = 0usize;
        let refusal = loop {
            match to.push(&[0x45; 1000]) {
                Ok(()) => taken += 1,
                Err(e) => break e,
            }
            assert!(taken < 1 << 20, "the channel is not bounded");
        };
        assert_eq!(refusal.kind(), ErrorKind::WouldBlock);
        assert!(to.rest(), "there is no space");
        let a = stack(1, Box::new(device), |s| s);
        eventually("there is space", || to.flush().is_ok());
        assert!(!to.rest());
        let counted = || a.stat().unwrap().shard.device.rx_frames as usize;
        eventually("all have come", || counted() == taken);
    });
}

#[test]
fn every_end_that_goes_is_noticed_by_the_others() {
    within(|| {
        let broken = |e: std::io::Error| assert_eq!(e.kind(), ErrorKind::BrokenPipe);
        let (a, mut to, mut from) = channel(1, 1500);
        let waits = thread::spawn(move || from.recv().map(drop));
        drop(a);
        broken(waits.join().unwrap().unwrap_err());
        broken(to.send(&[0x45; 40]).unwrap_err());
        assert!(!to.rest());

        let (a, to, mut from) = channel(1, 1500);
        drop(to);
        broken(from.recv().unwrap_err());
        eventually("the device is gone", || a.failure().is_some());

        let (a, mut to, from) = channel(1, 1500);
        drop(from);
        broken(to.send(&[0x45; 40]).unwrap_err());
        eventually("the device is gone", || a.failure().is_some());
    });
}

#[test]
fn a_stack_for_every_address_needs_none_of_its_own() {
    within(|| {
        let (device, to_b, from_b) = devices::channel(1500).unwrap();
        let all = Stack::builder().device(device).any_ip(true).build().unwrap();
        let (a, to_a, from_a) = channel(1, 1500);
        for (all, via) in [("0.0.0.0/0", B), ("::/0", "fd01::2")] {
            let via: std::net::IpAddr = via.parse().unwrap();
            a.add_route(all.parse().unwrap(), via).unwrap();
        }
        carry(from_a, to_b, |_| ());
        carry(from_b, to_a, |_| ());
        let options = ListenOptions { any_port: true, ..ListenOptions::default() };
        let listener = TcpListener::bind_with(&all, "[::]:0", options).unwrap();
        for to in ["192.0.2.1:443", "[2001:db8::1]:443"] {
            let client = TcpStream::connect(&a, to).unwrap();
            let (server, _) = listener.accept().unwrap();
            assert_eq!(server.local_addr().unwrap().to_string(), to);
            exchange(client, server, vec![7; 100_000]);
        }
    });
    let (link, _peer) = devices::link_pair().unwrap();
    let e = Stack::builder().device(link).any_ip(true).build().unwrap_err();
    assert!(matches!(e, SetupError::NoAddress));
}

#[test]
fn a_stack_moves_to_another_address_while_it_runs() {
    within(|| {
        let (a, b) = joined(1500);
        let listener = TcpListener::bind(&b, (B, 80)).unwrap();
        let old = TcpStream::connect(&a, (B, 80)).unwrap();
        assert_eq!(old.local_addr().unwrap().ip().to_string(), A);
        a.add_address("10.1.0.9/24".parse().unwrap()).unwrap();
        a.remove_address(A.parse().unwrap()).unwrap();
        let new = TcpStream::connect(&a, (B, 80)).unwrap();
        assert_eq!(new.local_addr().unwrap().ip().to_string(), "10.1.0.9");
        let _first = listener.accept().unwrap();
        exchange(new, listener.accept().unwrap().0, vec![7; 10_000]);
        assert_eq!(UdpSocket::bind(&a, (A, 7)).unwrap_err().kind(), ErrorKind::AddrNotAvailable);
        assert_eq!(a.remove_address(A.parse().unwrap()).unwrap_err().kind(), ErrorKind::NotFound);
        let e = a.add_address("224.0.0.1/4".parse().unwrap()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidInput);
    });
}

#[test]
fn an_mtu_that_ip_cannot_have_is_refused() {
    for mtu in [0, 67, 65_536] {
        let e = devices::channel(mtu).map(drop).unwrap_err().to_string();
        assert!(e.contains(&format!("invalid MTU {mtu}")) && e.contains("68-65535"), "{e}");
    }
}

/// Bytes that begin like a packet, with lengths that lie.
fn any_packet() -> impl Strategy<Value = Vec<u8>> {
    let header = prop_oneof![Just(0x45u8), Just(0x60), Just(0x4f), any::<u8>()];
    let protocol = prop_oneof![Just(6u8), Just(17), Just(1), Just(58), any::<u8>()];
    (header, protocol, prop::collection::vec(any::<u8>(), 0..120), 0usize..3, any::<bool>())
        .prop_map(|(first, protocol, mut bytes, longer, is_long)| {
            let is_v4 = first >> 4 == 4;
            let (at, length) = if is_v4 { (9, 2) } else { (6, 4) };
            if is_long {
                bytes.resize(65_535 - longer, 7);
            }
            let claimed = (bytes.len() + longer).wrapping_sub(if is_v4 { 0 } else { 40 }) as u16;
            for (i, b) in [(0, first), (at, protocol)] {
                bytes.get_mut(i).into_iter().for_each(|byte| *byte = b);
            }
            if let Some(field) = bytes.get_mut(length..length + 2) {
                field.copy_from_slice(&claimed.to_be_bytes());
            }
            bytes
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Each is taken and counted; the stack serves others afterwards.
    #[test]
    fn packets_of_any_bytes_do_no_harm(packets in prop::collection::vec(any_packet(), 1..40)) {
        let (a, mut to, mut from) = channel(1, 1500);
        for packet in &packets {
            push(&mut to, packet, |_| ());
        }
        eventually("all are passed", || to.flush().is_ok());
        let rx = || a.stat().unwrap().shard.device.rx_frames as usize;
        // Those of one flow are joined.
        eventually("some have come", || rx() > 0);
        let socket = UdpSocket::bind(&a, (A, 7)).unwrap();
        socket.send_to(b"alive", (B, 9)).unwrap();
        while !from.recv().unwrap().ends_with(b"alive") {}
        prop_assert_eq!(to.push(&[0x45; 65_536]).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}
