//! Devices over a descriptor that carries whole packets.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::thread;

use fulmar::device::EtherAddr;
use fulmar::devices::{self, PacketIo, QemuStream};
use fulmar::{Stack, TcpListener, TcpStream};

use crate::support::{B, eventually, pattern, stack, within};

fn ether(n: u8) -> EtherAddr {
    EtherAddr([2, 0, 0, 0, 7, n])
}

fn on_ethernet(n: u8, io: impl PacketIo + 'static) -> Stack {
    stack(n, Box::new(devices::plain_ethernet(io, 1500, ether(n)).unwrap()), |s| s)
}

/// Data in both directions at once.
fn exchange(a: &Stack, b: &Stack) {
    const BYTES: usize = 2 << 20;
    let listener = TcpListener::bind(b, (B, 80)).unwrap();
    let client = TcpStream::connect(a, (B, 80)).unwrap();
    let (server, _) = listener.accept().unwrap();
    let both = [client, server].map(|stream| {
        let reader = stream.try_clone().unwrap();
        let writes = thread::spawn(move || {
            (&stream).write_all(&pattern(0, BYTES)).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        });
        let reads = thread::spawn(move || {
            let mut all = Vec::new();
            (&reader).read_to_end(&mut all).unwrap();
            assert!(all == pattern(0, BYTES));
        });
        [writes, reads]
    });
    both.into_iter().flatten().for_each(|thread| thread.join().unwrap());
}

#[test]
fn datagrams_of_a_socket_carry_ethernet_frames_or_ip_packets() {
    within(|| {
        let (a, b) = UnixDatagram::pair().unwrap();
        exchange(&on_ethernet(1, a), &on_ethernet(2, b));
        let (a, b) = UnixDatagram::pair().unwrap();
        let on_ip =
            |n, io| stack(n, Box::new(devices::plain(io, 1500).unwrap()), |s: fulmar::Builder| s);
        exchange(&on_ip(1, a), &on_ip(2, b));
    });
}

#[test]
fn a_stream_carries_the_frames_of_a_virtual_machine() {
    within(|| {
        let (a, b) = UnixStream::pair().unwrap();
        exchange(&on_ethernet(1, QemuStream::new(a)), &on_ethernet(2, QemuStream::new(b)));
    });
}

/// Passes bytes on in small pieces.
fn trickle(mut from: UnixStream, mut to: UnixStream, piece: usize) {
    thread::spawn(move || {
        let mut buf = vec![0; piece];
        while let Ok(n @ 1..) = from.read(&mut buf) {
            if to.write_all(&buf[..n]).is_err() {
                break;
            }
        }
    });
}

#[test]
fn frames_that_come_in_pieces_are_put_together() {
    within(|| {
        let (a, near) = UnixStream::pair().unwrap();
        let (far, b) = UnixStream::pair().unwrap();
        trickle(near.try_clone().unwrap(), far.try_clone().unwrap(), 701);
        trickle(far, near, 1033);
        exchange(&on_ethernet(1, QemuStream::new(a)), &on_ethernet(2, QemuStream::new(b)));
    });
}

#[test]
fn a_device_whose_other_side_is_gone_or_lies_is_gone() {
    within(|| {
        let (a, b) = UnixStream::pair().unwrap();
        let stack = on_ethernet(1, QemuStream::new(a));
        drop(b);
        eventually("it is noticed", || stack.failure().is_some_and(|f| f.ends_with("is gone")));

        let (a, mut b) = UnixStream::pair().unwrap();
        let stack = on_ethernet(1, QemuStream::new(a));
        b.write_all(&[0, 0, 0, 0, 0, 0, 0, 3, 1, 2, 3]).unwrap();
        b.write_all(&70_000u32.to_be_bytes()).unwrap();
        let is_violated = |f: String| f.contains("violated the protocol");
        eventually("it is noticed", || stack.failure().is_some_and(is_violated));
        assert_eq!(stack.stat().unwrap().shard.device.rx_frames, 0);

        let (a, b) = UnixDatagram::pair().unwrap();
        let stack = on_ethernet(1, a);
        drop(b);
        let _ = TcpStream::connect(&stack, (B, 80)).unwrap_err();
        eventually("it is noticed", || stack.failure().is_some());
    });
}
