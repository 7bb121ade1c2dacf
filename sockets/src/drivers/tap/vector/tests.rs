use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;

use crate::drivers::udp_gso::UdpGso;
use fulmar_stack::base::EtherAddr;
use fulmar_stack::mbuf::PoolConfig;

use super::*;

const FRAME_BYTES: usize = 60;

fn pool() -> Pool {
    let config = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(16 << 20) };
    Pool::new(config).unwrap()
}

fn caps() -> Caps {
    Caps::plain(1500, EtherAddr([2, 0, 0, 0, 0, 1]))
}

/// A frame in two mbufs, every byte of it its number.
fn frame(pool: &mut Pool, number: u8, bytes: usize) -> Packet {
    let mut chain = Chain::new();
    for part in [20, bytes - 20] {
        let mut one = pool.alloc_chain(part, 0, Purpose::Send).unwrap();
        one.copy_from(0, &vec![number; part]);
        chain.append(one);
    }
    Packet::new(chain)
}

fn burst(pool: &mut Pool, numbers: std::ops::Range<u8>) -> Burst {
    let mut burst = Burst::with_capacity(256);
    for n in numbers {
        burst.push(frame(pool, n, FRAME_BYTES)).unwrap();
    }
    burst
}

fn numbers(burst: &Burst) -> Vec<u8> {
    burst.iter().map(|p| p.chain.to_vec()[0]).collect()
}

/// Keeps temporarily refused frames, frees the others, and records the sent frames.
fn keeper<'a>(
    pool: &'a mut Pool,
    sent: &'a mut Vec<u8>,
) -> impl FnMut(Packet, Written) -> Option<Packet> + use<'a> {
    |p, written| match written {
        Err(libc::EAGAIN) => Some(p),
        written => {
            if written.is_ok() {
                sent.push(p.chain.to_vec()[0]);
            }
            pool.free(p.chain);
            None
        }
    }
}

#[test]
fn frames_refused_in_the_middle_stay_in_order_and_none_is_lost_or_doubled() {
    let mut pool = pool();
    let mut burst = burst(&mut pool, 0..8);
    let (mut refused, mut sent) = (Burst::with_capacity(TX_SLOTS), Vec::new());
    let results = [72, -libc::EAGAIN, 72, -libc::EIO, -libc::EAGAIN].map(Some);
    let results = results.into_iter().chain([None]);
    let mut complete = keeper(&mut pool, &mut sent);
    let in_order = complete_all(results, &mut burst, &mut refused, &mut complete);
    drop(complete);
    assert!(!in_order, "frame 2 went before frame 1");
    assert_eq!(put_back(&mut refused, &mut burst), 2);
    assert_eq!(sent, [0, 2]);
    // 3 failed for good; the result of 5 is unknown, and it is not sent twice.
    assert_eq!(numbers(&burst), [1, 4, 6, 7]);
    burst.clear(&mut pool);
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn a_refusal_that_lasts_keeps_the_order() {
    let mut pool = pool();
    let mut burst = burst(&mut pool, 0..4);
    let (mut refused, mut sent) = (Burst::with_capacity(TX_SLOTS), Vec::new());
    let results = [72, 72, -libc::EAGAIN, -libc::EAGAIN].map(Some).into_iter();
    assert!(complete_all(results, &mut burst, &mut refused, &mut keeper(&mut pool, &mut sent)));
    put_back(&mut refused, &mut burst);
    assert_eq!((sent, numbers(&burst)), (vec![0, 1], vec![2, 3]));
    burst.clear(&mut pool);
}

/// A pair of datagram sockets with rings stands in for an interface with limited space. `None`, with a message, without
/// io_uring.
fn interface() -> Option<(Vector, UnixDatagram, UnixDatagram)> {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    match Vector::rings(ours.as_fd()) {
        Ok(vector) => Some((vector, ours, theirs)),
        Err(e) => {
            let required = std::env::var_os("FULMAR_REQUIRE_KERNEL_TESTS").is_some();
            assert!(!required, "no io_uring: {e}");
            // Not `eprintln`: the test harness hides what a passing test prints by it.
            let _ = writeln!(std::io::stderr(), "SKIPPED a test of io_uring: {e}");
            None
        }
    }
}

/// Every frame that waits at the other end, without its virtio-net header.
fn taken(theirs: &UnixDatagram) -> Vec<Vec<u8>> {
    let mut bytes = [0; 4096];
    let mut all = Vec::new();
    loop {
        match theirs.recv(&mut bytes) {
            Ok(n) => all.push(bytes[vnet::HEADER_BYTES..n].to_vec()),
            Err(e) if e.kind() == ErrorKind::WouldBlock => return all,
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn an_interface_that_takes_a_part_of_a_burst_gets_the_rest_later_in_order() {
    let Some((mut vector, _ours, theirs)) = interface() else { return };
    let mut pool = pool();
    let mut burst = Burst::with_capacity(256);
    for n in 0..250 {
        burst.push(frame(&mut pool, n, 1400)).unwrap();
    }
    let (mut arrived, mut sent, mut refusals) = (Vec::new(), Vec::new(), 0);
    while !burst.is_empty() {
        let run = burst.len().min(TX_SLOTS);
        let kept = vector.send(run, &mut burst, keeper(&mut pool, &mut sent));
        // The other end reads only when it must.
        if kept > 0 {
            arrived.append(&mut taken(&theirs));
        }
        refusals += kept;
    }
    arrived.append(&mut taken(&theirs));
    assert!(refusals > 0, "the sockets hold more than was sent");
    assert_eq!(sent, (0..250).collect::<Vec<u8>>());
    assert_eq!(arrived, (0..250u8).map(|n| vec![n; 1400]).collect::<Vec<_>>());
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn waiting_frames_are_read_in_order_and_the_end_is_seen() {
    let Some((mut vector, _ours, theirs)) = interface() else { return };
    let mut pool = pool();
    for n in 0..5u8 {
        let mut bytes = vec![0; vnet::HEADER_BYTES];
        bytes.resize(vnet::HEADER_BYTES + 60 + usize::from(n) * 300, n);
        theirs.send(&bytes).unwrap();
    }
    let mut got = Vec::new();
    let count = vector.read_count(8, 64);
    let came = vector.receive(count, &mut pool, |p| got.push(p.unwrap()));
    assert_eq!((count, came.frames, came.errno), (8, 5, Some(libc::EAGAIN)));
    assert!(came.all_short);
    for (n, p) in got.into_iter().enumerate() {
        assert_eq!(p.chain.to_vec(), vec![n as u8; 60 + n * 300]);
        pool.free(p.chain);
    }
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn a_dry_pool_drops_long_frames_and_still_takes_acknowledgements() {
    let Some((mut vector, _ours, theirs)) = interface() else { return };
    let mut pool = pool();
    let mut held = Vec::new();
    while let Ok(m) =
        pool.alloc(60_000, 0, Purpose::Receive).or_else(|_| pool.alloc(1, 0, Purpose::Receive))
    {
        held.push(m);
    }
    for bytes in [1000, 60] {
        theirs.send(&vec![0; vnet::HEADER_BYTES + bytes]).unwrap();
    }
    theirs.send(&[0; 5]).unwrap();
    let mut got = Vec::new();
    vector.receive(4, &mut pool, |p| got.push(p.map(|p| p.chain.len())));
    assert_eq!(got, [Err(DropReason::NoBuffer), Ok(60), Err(DropReason::Truncated)]);
}

#[test]
fn only_frames_that_fit_a_slot_go_together() {
    let Some((vector, _ours, _theirs)) = interface() else { return };
    let mut pool = pool();
    let mut few = burst(&mut pool, 0..2);
    assert_eq!(vector.run(&few, &caps(), UdpGso::On), 0, "two are cheaper one by one");
    let longest = TX_SLOT_BYTES - vnet::HEADER_BYTES;
    for bytes in [longest, longest + 1, 60, 60, 60] {
        few.push(frame(&mut pool, 9, bytes)).unwrap();
    }
    let jumbo = Caps { mtu: 9000, ..caps() };
    assert_eq!(vector.run(&few, &jumbo, UdpGso::On), 3);
    (0..3).for_each(|_| pool.free(few.pop_front().unwrap().chain));
    assert_eq!(vector.run(&few, &jumbo, UdpGso::On), 0, "the long one goes alone");
    few.clear(&mut pool);
}

#[test]
fn an_order_that_was_broken_once_is_kept_from_then_on() {
    let Some((mut vector, _ours, _theirs)) = interface() else { return };
    let mut pool = pool();
    let burst = burst(&mut pool, 0..8);
    assert_eq!(vector.run(&burst, &caps(), UdpGso::On), 8);
    vector.sends = false;
    assert_eq!(vector.run(&burst, &caps(), UdpGso::On), 0);
}

#[test]
fn a_descriptor_that_does_not_refuse_a_frame_of_one_byte_gets_no_rings_and_a_reason() {
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").unwrap();
    let why = Vector::open(null.as_fd()).err().expect("it is no TAP");
    assert!(why.starts_with("io_uring: "), "{why}");
}
