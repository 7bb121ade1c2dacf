use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

use fulmar_stack::base::{Counters, DropReason, Duration, Instant, Offload, OwnerKey};
use fulmar_stack::device::{Burst, Device, Packet};
use fulmar_stack::mbuf::{Chain, Pool, PoolConfig, Purpose, SLAB_BYTES};
use proptest::prelude::*;

use super::layout::{FRAMES, SENT};
use super::*;
use crate::drivers::sys::{is_readable, wait_readable};

mod hostile;
mod meeting;

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

/// Whether something comes to be so. The end of a peer may take a moment: a child that another test has
/// forked still holds a copy of its socket.
fn sooner_or_later(mut is_so: impl FnMut() -> bool) -> bool {
    let start = std::time::Instant::now();
    while !is_so() {
        if start.elapsed() > std::time::Duration::from_secs(60) {
            return false;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    true
}

impl Host {
    fn new(mut device: Shm) -> Host {
        let pool = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(16 << 20) };
        let owner = OwnerKey::new([0; OwnerKey::WORDS]);
        let pool = Pool::with_backing(pool, device.attach(&owner).region).unwrap();
        Host { device, pool, burst: Burst::with_capacity(64), counters: Counters::default() }
    }

    pub(super) fn pair() -> (Host, Host) {
        let (a, b) = Shm::pair(&config()).unwrap();
        (Host::new(a), Host::new(b))
    }

    fn packet(&mut self, bytes: &[u8]) -> Packet {
        let mut chain = self.pool.alloc_chain(bytes.len(), 0, Purpose::Send).unwrap();
        chain.copy_from(0, bytes);
        Packet { chain, offload: offload(bytes) }
    }

    /// False: the device had no space.
    fn offer(&mut self, p: Packet) -> bool {
        self.burst.push(p).unwrap();
        let taken = self.device.tx_burst(NOW, &mut self.pool, &mut self.burst, &mut self.counters);
        self.burst.clear(&mut self.pool);
        taken == 1
    }

    pub(super) fn send(&mut self, bytes: &[u8]) -> bool {
        let p = self.packet(bytes);
        self.offer(p)
    }

    pub(super) fn receive(&mut self) -> Vec<Packet> {
        self.receive_at(NOW)
    }

    fn receive_at(&mut self, now: Instant) -> Vec<Packet> {
        self.device.rx_burst(now, &mut self.pool, &mut self.burst, 64, &mut self.counters);
        std::iter::from_fn(|| self.burst.pop_front()).collect()
    }

    pub(super) fn drop_all(&mut self, packets: Vec<Packet>) {
        packets.into_iter().for_each(|p| self.pool.free(p.chain));
    }

    fn drops(&self, reason: DropReason) -> u64 {
        self.counters.drops(reason)
    }
}

/// The offload request of a stack that leaves checksums to the device.
fn offload(frame: &[u8]) -> Offload {
    let is_udp = frame.get(12..14) == Some(&[8, 0]) && frame.get(23) == Some(&17);
    match is_udp {
        true => Offload { needs_csum: true, csum_start: 34, csum_offset: 6, ..Offload::default() },
        false => Offload::default(),
    }
}

/// Bytes of the headers of a [`datagram`].
const HEADERS: usize = 42;

/// A UDP datagram as a frame of `len` bytes; the payload tells its frame and place.
fn datagram(seed: usize, len: usize) -> Vec<u8> {
    let mut f = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    let (ip, udp) = ((len - 14) as u16, (len - 34) as u16);
    f.extend([0x45, 0, (ip >> 8) as u8, ip as u8, 0, 0, 0, 0, 64, 17, 0, 0]);
    f.extend([10, 0, 0, 1, 10, 0, 0, 2]);
    let sum = fulmar_stack::wire::checksum::checksum(&f[14..34]);
    f[24..26].copy_from_slice(&sum.to_be_bytes());
    f.extend([0, 9, 0, 9, (udp >> 8) as u8, udp as u8, 0, 0]);
    f.extend(pattern(seed, len - HEADERS));
    f
}

/// Bytes that tell their frame and place.
fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (seed.wrapping_mul(31) + i * 7 + (i >> 8)) as u8).collect()
}

#[test]
fn short_frames_are_copied_and_long_ones_read_where_they_are() {
    let (mut a, mut b) = Host::pair();
    for len in [60, 256, 2048, 2049, 9000, 65_549] {
        let bytes = datagram(len, len);
        assert!(a.send(&bytes));
        let got = b.receive();
        assert_eq!(got.len(), 1);
        assert!(got[0].chain.to_vec() == bytes, "{len} bytes differ");
        let by_reference = got[0].chain.is_volatile();
        assert_eq!(by_reference, len > 2048);
        let front = got[0].chain.front().unwrap();
        assert!(!front.is_external() && front.len() >= HEADERS, "headers must be private");
        a.receive();
        assert_eq!(a.pool.outstanding() > 0, by_reference, "a lent frame is its sender's still");
        b.drop_all(got);
        a.receive();
        assert_eq!((a.pool.outstanding(), b.pool.outstanding()), (0, 0));
    }
}

#[test]
fn a_sleeper_is_rung_for_space_although_it_went_to_sleep_before_anything_was_refused() {
    let (mut a, mut b) = Host::pair();
    assert!(a.device.arm());
    // Another thread of the same stack sends until nothing more is taken.
    while a.send(&[1; 100]) {}
    let bell = a.device.wake_fd().unwrap().fd;
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
    // The other end reads; then there is space again.
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
    assert!(a.device.arm(), "it may sleep until there is space");
    drop(b);
    wait_readable(a.device.wake_fd().unwrap().fd);
    a.device.disarm();
    assert_eq!(a.device.lost(), Some(libc::EPIPE));
    a.receive();
    assert_eq!(a.pool.outstanding(), 0, "nobody can read them any more");
    assert!(a.send(b"taken, and dropped") && a.drops(DropReason::DeviceGone) == 1);
}

#[test]
fn unread_frames_leave_half_of_the_slots_to_others() {
    let (mut a, mut b) = Host::pair();
    let long = datagram(1, 3000);
    let mut kept = Vec::new();
    while kept.len() < FRAMES / 2 {
        assert!(a.send(&long));
        kept.append(&mut b.receive());
    }
    assert!(kept.iter().all(|p| p.chain.is_volatile()));
    for _ in 0..2 * FRAMES {
        assert!(a.send(&long), "a reader who keeps frames stops the others");
        let got = b.receive();
        assert!(!got[0].chain.is_volatile() && got[0].chain.to_vec() == long);
        b.drop_all(got);
        a.receive();
    }
    b.drop_all(kept);
    a.receive();
    assert_eq!((a.pool.outstanding(), b.pool.outstanding()), (0, 0));
}

#[test]
fn an_ack_finds_space_where_the_receive_share_is_used_up() {
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
fn a_sleeper_is_woken_once_by_frames_and_by_space_only_if_it_wants_space() {
    let (mut a, mut b) = Host::pair();
    let fd = b.device.wake_fd().unwrap().fd;
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
    assert!(!is_readable(a.device.wake_fd().unwrap().fd), "space was not asked for");
    a.device.disarm();
    while a.send(b"fill") {}
    assert!(a.device.arm());
    while !is_readable(a.device.wake_fd().unwrap().fd) {
        let got = b.receive();
        assert!(!got.is_empty(), "all is read, and nobody was told");
        b.drop_all(got);
    }
    a.device.disarm();
    assert!(a.send(b"there is space"));
}

#[test]
fn frames_sent_before_the_end_are_received_before_the_error() {
    let (mut a, mut b) = Host::pair();
    assert!(a.send(&pattern(1, 100)) && a.send(&datagram(2, 9000)));
    drop(a);
    let late = NOW + Duration::from_secs(1);
    assert_eq!(b.device.lost(), None);
    let got = b.receive_at(late);
    assert!(got.len() == 2 && got[1].chain.to_vec() == datagram(2, 9000), "the memory stays");
    let mut at = late;
    assert!(sooner_or_later(|| {
        at = at + Duration::from_secs(1);
        assert_eq!(b.receive_at(at).len(), 0);
        b.device.lost() == Some(libc::EPIPE)
    }));
    b.drop_all(got);
    assert_eq!(b.pool.outstanding(), 0);
}

#[test]
fn references_may_outlive_the_device_and_the_pool() {
    let (mut a, mut b) = Host::pair();
    assert!(a.send(&datagram(3, 9000)));
    let got = b.receive();
    drop((a, b));
    assert!(got[0].chain.to_vec() == datagram(3, 9000));
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
    fn frames_arrive_in_order_and_unchanged_and_every_mbuf_is_returned(ops in ops()) {
        let (mut a, mut b) = Host::pair();
        let mut model: VecDeque<Vec<u8>> = VecDeque::new();
        let mut held: Vec<(Packet, Vec<u8>)> = Vec::new();
        for (i, op) in ops.into_iter().enumerate() {
            match op {
                Op::Send(len) => {
                    let bytes =
                        if len % 3 == 0 || len < HEADERS { pattern(i, len) } else { datagram(i, len) };
                    let Ok(mut chain) = a.pool.alloc_chain(len, 0, Purpose::Send) else { continue };
                    chain.copy_from(0, &bytes);
                    if a.offer(Packet { chain, offload: offload(&bytes) }) {
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

#[test]
fn a_child_that_inherits_a_device_can_let_go_of_it_without_harm() {
    let (mut a, mut b) = Host::pair();
    assert!(a.send(&datagram(1, 9000)));
    let Host { device, mut pool, .. } = a;
    let mut device = Some(device);
    assert_eq!(sys::in_child(|| drop(device.take())), 0);
    let got = b.receive();
    assert!(got[0].chain.to_vec() == datagram(1, 9000));
    assert_eq!(b.receive_at(NOW + Duration::from_secs(1)).len(), 0);
    assert_eq!(b.device.lost(), None, "the child's end is not the parent's");
    b.drop_all(got);
    let mut device = device.expect("the parent still has it");
    device.tx_reap(NOW, &mut pool);
    assert_eq!(pool.outstanding(), 0);
}
