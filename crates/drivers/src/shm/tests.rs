use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

use fulmar_base::{Counters, DropReason, Duration, Instant};
use fulmar_mbuf::{Chain, Pool, PoolConfig, Purpose, SLAB_BYTES};
use fulmar_netdev::{Burst, Device, Packet};
use proptest::prelude::*;

use super::layout::{BELL, FRAMES, PIECES, RETURNED, SENT, SLABS, STATE};
use super::meet::{Met, meet_oneself};
use super::*;
use crate::sys::{is_readable, wait_readable};

const NOW: Instant = Instant::ZERO;

/// Small, so that a test can fill it.
fn config() -> ShmConfig {
    ShmConfig { name: "/test".into(), mtu: 65_535, pool_bytes: 16 << 20, ..ShmConfig::default() }
}

/// A stack as far as a device is concerned.
pub(super) struct Host {
    pub device: Shm,
    pub pool: Pool,
    burst: Burst,
    pub counters: Counters,
}

impl Host {
    fn new(mut device: Shm) -> Host {
        let pool = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(16 << 20) };
        let pool = Pool::with_backing(pool, device.region()).unwrap();
        Host { device, pool, burst: Burst::with_capacity(64), counters: Counters::default() }
    }

    pub fn pair() -> (Host, Host) {
        let (a, b) = Shm::pair(&config()).unwrap();
        (Host::new(a), Host::new(b))
    }

    fn packet(&mut self, bytes: &[u8]) -> Packet {
        let mut chain = self.pool.alloc_chain(bytes.len(), 0, Purpose::Send).unwrap();
        chain.copy_from(0, bytes);
        Packet::new(chain)
    }

    /// False: the device had no room.
    fn offer(&mut self, p: Packet) -> bool {
        self.burst.push(p).unwrap();
        let taken = self.device.tx_burst(NOW, &mut self.pool, &mut self.burst, &mut self.counters);
        self.burst.clear(&mut self.pool);
        taken == 1
    }

    pub fn send(&mut self, bytes: &[u8]) -> bool {
        let p = self.packet(bytes);
        self.offer(p)
    }

    pub fn receive(&mut self) -> Vec<Packet> {
        self.receive_at(NOW)
    }

    fn receive_at(&mut self, now: Instant) -> Vec<Packet> {
        self.device.rx_burst(now, &mut self.pool, &mut self.burst, 64, &mut self.counters);
        std::iter::from_fn(|| self.burst.pop_front()).collect()
    }

    pub fn drop_all(&mut self, packets: Vec<Packet>) {
        packets.into_iter().for_each(|p| self.pool.free(p.chain));
    }

    fn drops(&self, reason: DropReason) -> u64 {
        self.counters.drops(reason)
    }
}

/// Bytes that tell their frame and place.
fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (seed.wrapping_mul(31) + i * 7 + (i >> 8)) as u8).collect()
}

#[test]
fn short_frames_are_copied_and_long_ones_read_where_they_are() {
    let (mut a, mut b) = Host::pair();
    for len in [14, 60, 256, 2048, 2049, 9000, 65_549] {
        let bytes = pattern(len, len);
        assert!(a.send(&bytes));
        let got = b.receive();
        assert_eq!(got.len(), 1);
        assert!(got[0].chain.to_vec() == bytes, "{len} bytes differ");
        let by_reference = got[0].chain.iter().any(|m| m.is_external());
        assert_eq!(by_reference, len > 2048);
        let front = got[0].chain.front().unwrap();
        assert!(!front.is_external() && front.len() >= 14, "headers must be private");
        a.receive();
        assert_eq!(a.pool.outstanding() > 0, by_reference, "a lent frame is its sender's still");
        b.drop_all(got);
        a.receive();
        assert_eq!((a.pool.outstanding(), b.pool.outstanding()), (0, 0));
    }
}

#[test]
fn a_sleeper_is_rung_for_room_although_it_went_to_sleep_before_anything_was_refused() {
    let (mut a, mut b) = Host::pair();
    assert!(a.device.arm());
    // Another thread of the same stack sends until nothing more is taken.
    while a.send(&[1; 100]) {}
    let bell = a.device.wake_fd().unwrap();
    assert!(!is_readable(bell));
    for _ in 0..FRAMES / 64 {
        let packets = b.receive();
        b.drop_all(packets);
    }
    wait_readable(bell);
    a.device.disarm();
    assert!(a.send(&[1; 100]));
}

#[test]
fn bytes_outside_of_the_region_are_copied_on_their_way_and_bounded() {
    let (mut a, mut b) = Host::pair();
    let bytes = pattern(5, 60_000);
    let owned = |pool: &mut Pool| {
        Chain::from(pool.external(Box::new(pattern(5, 60_000)), Purpose::Send).unwrap())
    };
    let chain = owned(&mut a.pool);
    assert!(a.offer(Packet::new(chain)));
    assert_eq!(a.pool.outstanding(), 0, "the caller's memory is free at once");
    let got = b.receive();
    assert!(got[0].chain.to_vec() == bytes);
    b.drop_all(got);
    a.receive();
    let mut sent = 0;
    loop {
        let chain = owned(&mut a.pool);
        if !a.offer(Packet::new(chain)) {
            break;
        }
        sent += 1;
        assert!(sent < FRAMES, "staging has no bound");
    }
    // The other end reads; then there is room again.
    let mut got = 0;
    while got < sent {
        let packets = b.receive();
        got += packets.len();
        b.drop_all(packets);
    }
    a.receive();
    let chain = owned(&mut a.pool);
    assert!(a.offer(Packet::new(chain)));
}

#[test]
fn a_peer_that_never_reads_costs_a_bounded_number_of_frames() {
    let (mut a, b) = Host::pair();
    let sent = (0..2 * FRAMES).filter(|i| a.send(&pattern(*i, 100))).count();
    assert_eq!(sent, FRAMES);
    assert_eq!(a.pool.outstanding(), FRAMES);
    assert!(a.device.arm(), "it may sleep until there is room");
    drop(b);
    wait_readable(a.device.wake_fd().unwrap());
    a.device.disarm();
    assert_eq!(a.device.lost(), Some(libc::EPIPE));
    a.receive();
    assert_eq!(a.pool.outstanding(), 0, "nobody can read them any more");
    assert!(a.send(b"taken, and dropped") && a.drops(DropReason::DeviceGone) == 1);
}

#[test]
fn frames_that_nobody_reads_leave_half_of_the_slots_to_others() {
    let (mut a, mut b) = Host::pair();
    let long = pattern(1, 3000);
    let mut kept = Vec::new();
    while kept.len() < FRAMES / 2 {
        assert!(a.send(&long));
        kept.append(&mut b.receive());
    }
    assert!(kept.iter().all(|p| p.chain.back().unwrap().is_external()));
    for _ in 0..2 * FRAMES {
        assert!(a.send(&long), "a reader who keeps frames stops the others");
        let got = b.receive();
        assert!(!got[0].chain.back().unwrap().is_external() && got[0].chain.to_vec() == long);
        b.drop_all(got);
        a.receive();
    }
    b.drop_all(kept);
    a.receive();
    assert_eq!((a.pool.outstanding(), b.pool.outstanding()), (0, 0));
}

#[test]
fn an_ack_finds_room_where_the_receive_share_is_used_up() {
    let (mut a, mut b) = Host::pair();
    let mut hoard = Vec::new();
    while let Ok(m) = b.pool.alloc(65_536, 0, Purpose::Receive) {
        hoard.push(m);
    }
    while let Ok(m) = b.pool.alloc(1, 0, Purpose::Receive) {
        hoard.push(m);
    }
    assert!(a.send(&pattern(1, 1500)) && a.send(&pattern(2, 66)));
    let got = b.receive();
    assert_eq!(got.len(), 1);
    assert_eq!((got[0].chain.len(), b.drops(DropReason::NoBuffer)), (66, 1));
    a.receive();
    assert_eq!(a.pool.outstanding(), 0, "a dropped frame goes back too");
}

#[test]
fn a_sleeper_is_woken_once_by_frames_and_by_room_only_if_it_wants_room() {
    let (mut a, mut b) = Host::pair();
    let fd = b.device.wake_fd().unwrap();
    assert!(a.send(b"before anybody sleeps"));
    assert!(!is_readable(fd) && !b.device.arm(), "a frame waits");
    let got = b.receive();
    b.drop_all(got);
    assert!(b.device.arm());
    assert!(a.send(b"one") && a.send(b"two"));
    wait_readable(fd);
    assert_eq!(a.device.stats().wakes, 1);
    b.device.disarm();
    assert!(!is_readable(fd));
    assert!(a.device.arm());
    let got = b.receive();
    b.drop_all(got);
    assert!(!is_readable(a.device.wake_fd().unwrap()), "room was not asked for");
    a.device.disarm();
    while a.send(b"fill") {}
    assert!(a.device.arm());
    while !is_readable(a.device.wake_fd().unwrap()) {
        let got = b.receive();
        assert!(!got.is_empty(), "all is read, and nobody was told");
        b.drop_all(got);
    }
    a.device.disarm();
    assert!(a.send(b"there is room"));
}

#[test]
fn what_was_sent_before_the_end_is_received_before_it_is_told() {
    let (mut a, mut b) = Host::pair();
    assert!(a.send(&pattern(1, 100)) && a.send(&pattern(2, 9000)));
    drop(a);
    let late = NOW + Duration::from_secs(1);
    assert_eq!(b.device.lost(), None);
    let got = b.receive_at(late);
    assert!(got.len() == 2 && got[1].chain.to_vec() == pattern(2, 9000), "the memory stays");
    assert_eq!(b.receive_at(late + Duration::from_secs(1)).len(), 0);
    assert_eq!(b.device.lost(), Some(libc::EPIPE));
    b.drop_all(got);
    assert_eq!(b.pool.outstanding(), 0);
}

#[test]
fn references_may_outlive_the_device_and_the_pool() {
    let (mut a, mut b) = Host::pair();
    assert!(a.send(&pattern(3, 9000)));
    let got = b.receive();
    drop((a, b));
    assert!(got[0].chain.to_vec() == pattern(3, 9000));
}

// The ring, against the simplest thing that is right.

#[derive(Clone, Debug)]
enum Op {
    Send(usize),
    Receive,
    /// Lets go of the n-th frame that is held.
    Free(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let len = prop_oneof![14usize..300, 2000usize..2100, 14usize..65_549];
    let op = prop_oneof![
        4 => len.prop_map(Op::Send),
        2 => Just(Op::Receive),
        3 => any::<usize>().prop_map(Op::Free),
    ];
    proptest::collection::vec(op, 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn frames_come_in_order_and_unchanged_and_every_mbuf_comes_home(ops in ops()) {
        let (mut a, mut b) = Host::pair();
        let mut model: VecDeque<Vec<u8>> = VecDeque::new();
        let mut held: Vec<(Packet, Vec<u8>)> = Vec::new();
        for (i, op) in ops.into_iter().enumerate() {
            match op {
                Op::Send(len) => {
                    let bytes = pattern(i, len);
                    let Ok(mut chain) = a.pool.alloc_chain(len, 0, Purpose::Send) else { continue };
                    chain.copy_from(0, &bytes);
                    if a.offer(Packet::new(chain)) {
                        model.push_back(bytes);
                    }
                }
                Op::Receive => {
                    for p in b.receive() {
                        let sent = model.pop_front().expect("a frame that was not sent");
                        held.push((p, sent));
                    }
                    a.receive();
                }
                Op::Free(n) if !held.is_empty() => {
                    let (p, sent) = held.swap_remove(n % held.len());
                    prop_assert!(p.chain.to_vec() == sent, "a frame changed while it was held");
                    b.pool.free(p.chain);
                }
                Op::Free(_) => {}
            }
        }
        for p in b.receive() {
            prop_assert!(p.chain.to_vec() == model.pop_front().expect("a frame that was not sent"));
            b.pool.free(p.chain);
        }
        for (p, sent) in held {
            prop_assert!(p.chain.to_vec() == sent);
            b.pool.free(p.chain);
        }
        a.receive();
        prop_assert_eq!((a.pool.outstanding(), b.pool.outstanding()), (0, 0));
        prop_assert_eq!((a.device.lost(), b.device.lost()), (None, None));
    }
}

// A peer that lies: one honest end, and the bare memory of the other.

fn liar() -> (Host, Met) {
    let (honest, liar) = meet_oneself(&config()).unwrap();
    (Host::new(Shm::new(honest, &config()).unwrap()), liar)
}

/// Any word of the rings, with values that are nearly right, and any at all.
fn lies() -> impl Strategy<Value = Vec<(usize, u64)>> {
    let word = prop_oneof![
        4 => Just(SENT), 2 => Just(RETURNED), 1 => Just(BELL), 1 => Just(STATE),
        8 => (0..40usize * 16).prop_map(|i| 4096 + i * 8),
        4 => (0..16usize).prop_map(|i| 4096 + FRAMES * 128 + i * 8),
    ];
    let small = 0u64..20;
    let piece = (0u64..1 << 26, 0u64..70_000).prop_map(|(at, len)| at | len << 32);
    let head = (0u64..FRAMES as u64 + 2, 0u64..PIECES as u64 + 2).prop_map(|(s, n)| s | n << 32);
    let value = prop_oneof![3 => small, 3 => piece, 3 => head, 1 => any::<u64>()];
    proptest::collection::vec((word, value), 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_peer_that_scribbles_over_everything_costs_drops_or_the_link_and_nothing_else(
        lies in lies(),
    ) {
        let (mut host, liar) = liar();
        let mut kept = Vec::new();
        for (i, (at, value)) in lies.into_iter().enumerate() {
            liar.own.store(at, value, Relaxed);
            host.send(&pattern(i, 100));
            let got = host.receive_at(NOW + Duration::from_millis(i as u64));
            prop_assert!(got.iter().all(|p| p.chain.len() <= 65_549));
            kept.extend(got);
            host.device.arm();
            host.device.disarm();
        }
        prop_assert!(matches!(host.device.lost(), None | Some(libc::EPROTO)));
        prop_assert!(host.pool.outstanding() < 20_000);
        host.drop_all(kept);
        // Dead at last: everything comes home, lied or not.
        drop(liar);
        host.receive_at(NOW + Duration::from_secs(10));
        host.receive_at(NOW + Duration::from_secs(20));
        host.device.tx_reap(NOW, &mut host.pool);
        prop_assert_eq!(host.pool.outstanding(), 0);
    }
}

/// Where a piece lies and how long it is, as the liar says.
type Range = (u64, u64);

/// Puts one record into the liar's ring and shows it.
fn claim(liar: &Met, slot: u64, count: u64, pieces: &[Range]) {
    liar.own.store(4096, slot | count << 32, Relaxed);
    for (i, (at, len)) in pieces.iter().enumerate() {
        liar.own.store(4096 + 24 + i * 8, at | len << 32, Relaxed);
    }
    liar.own.store(SENT, 1, Relaxed);
}

#[test]
fn a_record_that_no_honest_peer_writes_ends_the_link() {
    let good = (SLABS as u64, 100);
    let end = (SLABS + (8 << 20) + (16 << 20) + 10 * SLAB_BYTES) as u64;
    let cases: [(u64, u64, &[Range]); 9] = [
        (FRAMES as u64, 1, &[good]),
        (0, 0, &[good]),
        (0, PIECES as u64 + 1, &[good]),
        (0, u32::MAX.into(), &[good]),
        (0, 1, &[(0, 100)]),
        (0, 1, &[(end, 1)]),
        (0, 1, &[(end - 1, 2)]),
        (0, 1, &[(SLABS as u64, 0)]),
        (0, 2, &[(SLABS as u64, 60_000), (SLABS as u64, 60_000)]),
    ];
    for (slot, count, pieces) in cases {
        let (mut host, liar) = liar();
        claim(&liar, slot, count, pieces);
        assert!(host.receive().is_empty());
        assert_eq!(host.device.lost(), Some(libc::EPROTO), "{slot} {count} {pieces:?}");
        assert_eq!(host.drops(DropReason::ShmInvalid), 1);
    }
    let (mut host, liar) = liar();
    claim(&liar, 0, 1, &[good]);
    assert_eq!(host.receive().len(), 1);
    assert_eq!(host.device.lost(), None);
}

#[test]
fn a_slot_that_is_out_cannot_be_sent_again_and_one_that_is_not_cannot_come_back() {
    let (mut host, first) = liar();
    claim(&first, 7, 1, &[(SLABS as u64, 5000)]);
    let kept = host.receive();
    assert_eq!(kept.len(), 1);
    first.own.store(4096 + 128, 7 | 1 << 32, Relaxed);
    first.own.store(4096 + 128 + 24, SLABS as u64 | 5000 << 32, Relaxed);
    first.own.store(SENT, 2, Relaxed);
    assert!(host.receive().is_empty());
    assert_eq!(host.device.lost(), Some(libc::EPROTO));
    host.drop_all(kept);

    let (mut host, second) = liar();
    second.own.store(RETURNED, 1, Relaxed);
    host.receive();
    assert_eq!(host.device.lost(), Some(libc::EPROTO));
}

#[test]
fn what_a_liar_was_sent_is_kept_from_reuse_until_it_is_dead() {
    let (mut host, liar) = liar();
    assert!(host.send(&pattern(1, 500)));
    liar.own.store(SENT, u64::MAX / 2, Relaxed);
    host.receive();
    assert_eq!(host.device.lost(), Some(libc::EPROTO));
    host.receive();
    assert_eq!(host.pool.outstanding(), 1, "the liar may be reading it");
    drop(liar);
    host.receive();
    assert_eq!(host.pool.outstanding(), 0);
}

// The memory files.

#[test]
fn a_file_that_is_shown_to_others_can_be_neither_written_nor_cut_by_them() {
    let (own, file) = sys::OwnMap::create(4 * SLAB_BYTES).unwrap();
    own.store(SENT, 77, Relaxed);
    assert!(sys::attack(file.as_fd(), 4 * SLAB_BYTES).is_empty());
    let peer = sys::PeerMap::open(file.as_fd(), 4 * SLAB_BYTES).unwrap();
    own.store(SENT, 78, Relaxed);
    assert_eq!(peer.load(SENT, Relaxed), 78, "the owner still writes");
    assert!(!sys::can_be_made_writable(&peer));
}

#[test]
fn memory_that_its_owner_could_cut_or_that_is_too_short_is_not_read() {
    let (_own, sealed) = sys::OwnMap::create(4 * SLAB_BYTES).unwrap();
    assert!(sys::PeerMap::open(sealed.as_fd(), 4 * SLAB_BYTES + 1).is_err());
    let bare = sys::unsealed(4 * SLAB_BYTES);
    assert!(sys::PeerMap::open(bare.as_fd(), SLAB_BYTES).is_err());
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(sys::PeerMap::open(file.as_fd(), 10).is_err());
}

// Meeting.

fn named(name: String) -> ShmConfig {
    ShmConfig { name, wait: Some(std::time::Duration::from_secs(20)), ..config() }
}

#[test]
fn who_comes_first_listens_whether_by_path_or_by_name() {
    let path = std::env::temp_dir().join(format!("fulmar-shm-test-{}", std::process::id()));
    let path = path.to_str().unwrap().to_owned();
    for name in [path.clone(), format!("fulmar-shm-test-{}", std::process::id())] {
        // What a process that was killed leaves behind.
        if name.contains('/') {
            drop(std::os::unix::net::UnixListener::bind(&name).unwrap());
        }
        let ends: Vec<_> = (0..2)
            .map(|_| {
                let config = named(name.clone());
                std::thread::spawn(move || Shm::open(&config).unwrap())
            })
            .collect();
        let ends: Vec<Shm> = ends.into_iter().map(|t| t.join().unwrap()).collect();
        assert_ne!(ends[0].side(), ends[1].side());
        assert_ne!(ends[0].caps().ether, ends[1].caps().ether);
        assert!(!std::path::Path::new(&name).exists(), "the path has served");
        let (mut a, mut b) = {
            let mut ends = ends.into_iter().map(Host::new);
            (ends.next().unwrap(), ends.next().unwrap())
        };
        assert!(a.send(b"fourteen bytes") && b.receive().len() == 1);
    }
}

#[test]
fn nobody_in_time_and_names_that_cannot_be_are_told_apart() {
    let alone = ShmConfig {
        wait: Some(std::time::Duration::ZERO),
        ..named(format!("fulmar-shm-alone-{}", std::process::id()))
    };
    let error = Shm::open(&alone).err().expect("nobody is there");
    assert_eq!(error.errno(), libc::ETIMEDOUT);
    assert!(error.to_string().contains("same name"), "{error}");
    for name in [String::new(), "x".repeat(200), "/no/such/directory/x".into()] {
        let error = Shm::open(&named(name)).err().expect("no such name");
        assert!(error.to_string().contains("choose another name"), "{error}");
    }
}

#[test]
fn a_stranger_at_the_door_is_passed_over_and_another_version_is_refused() {
    let name = format!("fulmar-shm-door-{}", std::process::id());
    let config = named(name.clone());
    let first = std::thread::spawn(move || Shm::open(&config));
    let address = sys::Address::new(&name, true).unwrap();
    let connect = || {
        let socket = sys::socket().unwrap();
        while sys::connect(socket.as_fd(), &address).is_err() {
            std::thread::yield_now();
        }
        socket
    };
    drop(connect());
    let (_own, file) = sys::OwnMap::create(2 * SLAB_BYTES).unwrap();
    let mut hello = [0; 36];
    hello[..8].copy_from_slice(b"fulmarsh");
    hello[8] = 99;
    // A connection may still have been in the queue of the door that closed after the stranger.
    let _socket = loop {
        let socket = connect();
        let _ = sys::send_with(socket.as_fd(), &hello, file.as_fd());
        assert!(sys::wait_readable(socket.as_fd(), 10_000).unwrap());
        if matches!(sys::receive_with(socket.as_fd(), &mut [0; 36]), Ok((1.., _))) {
            break socket;
        }
    };
    let error = first.join().unwrap().err().expect("version 99");
    assert!(error.to_string().contains("version 99"), "{error}");
    assert!(error.to_string().contains("same release"), "{error}");
}

#[test]
fn a_child_that_inherits_a_device_can_let_go_of_it_without_harm() {
    let (mut a, mut b) = Host::pair();
    assert!(a.send(&pattern(1, 9000)));
    let Host { device, mut pool, .. } = a;
    let mut device = Some(device);
    assert_eq!(sys::in_child(|| drop(device.take())), 0);
    let got = b.receive();
    assert!(got[0].chain.to_vec() == pattern(1, 9000));
    assert_eq!(b.receive_at(NOW + Duration::from_secs(1)).len(), 0);
    assert_eq!(b.device.lost(), None, "the child's end is not the parent's");
    b.drop_all(got);
    let mut device = device.expect("the parent still has it");
    device.tx_reap(NOW, &mut pool);
    assert_eq!(pool.outstanding(), 0);
}
