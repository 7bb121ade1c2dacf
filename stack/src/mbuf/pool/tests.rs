use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::mbuf::testkit::{assert_all_freed, cases, mbuf, pattern, pool};

mod lenders;
mod remote;

/// An external owner whose drops are counted.
struct Owner(Vec<u8>, Arc<AtomicUsize>);

impl External for Owner {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

fn owner(bytes: &[u8]) -> (Box<Owner>, Arc<AtomicUsize>) {
    let released = Arc::new(AtomicUsize::new(0));
    (Box::new(Owner(bytes.to_vec(), released.clone())), released)
}

#[test]
fn a_new_mbuf_is_empty_behind_its_headroom() {
    let mut pool = pool(1 << 20);
    let mut m = pool.alloc(100, 40, Purpose::Control).expect("an mbuf");
    assert_eq!((m.len(), m.headroom(), m.tailroom()), (0, 40, 216));
    m.append(3).expect("room").copy_from_slice(b"def");
    m.prepend(3).expect("room").copy_from_slice(b"abc");
    assert_eq!(m.as_slice(), b"abcdef");
    assert!(m.prepend(38).is_none(), "only 37 bytes of headroom are left");
    assert!(m.append(214).is_none(), "only 213 bytes of tailroom are left");
    m.trim_front(1);
    m.trim_back(2);
    assert_eq!(m.as_slice(), b"bcd");
    m.spare_mut()[..2].copy_from_slice(b"xy");
    m.set_len(5);
    assert_eq!(m.as_slice(), b"bcdxy");
    m.truncate(2);
    m.truncate(7);
    assert_eq!(m.as_slice(), b"bc");
    pool.free_mbuf(m);
    assert_all_freed(&mut pool);
}

#[test]
#[should_panic(expected = "set_len beyond the storage")]
fn set_len_beyond_the_storage_panics() {
    let mut pool = pool(1 << 20);
    pool.alloc(256, 0, Purpose::Send).expect("an mbuf").set_len(257);
}

#[test]
fn more_than_64_kib_is_refused() {
    let mut pool = pool(1 << 20);
    assert_eq!(pool.alloc(65536, 1, Purpose::Control).err(), Some(NoBuffer));
    assert_eq!(pool.alloc(usize::MAX, 1, Purpose::Control).err(), Some(NoBuffer));
    assert_eq!(pool.alloc_chain(9, 65537, Purpose::Control).err(), Some(NoBuffer));
    assert_eq!(pool.alloc_chain(9, usize::MAX, Purpose::Control).err(), Some(NoBuffer));
    assert_all_freed(&mut pool);
}

#[test]
fn shared_storage_is_immutable() {
    let mut pool = pool(1 << 20);
    let mut m = mbuf(&mut pool, b"hello");
    let mut part = pool.clone_ref(&m, 1, 3).expect("a descriptor");
    assert_eq!(part.as_slice(), b"ell");
    for m in [&mut m, &mut part] {
        assert!(!m.is_unique());
        assert!(m.as_mut_slice().is_none() && m.prepend(1).is_none() && m.append(1).is_none());
        assert!(m.spare_mut().is_empty());
    }
    pool.free_mbuf(m);
    assert!(part.is_unique());
    part.as_mut_slice().expect("unique")[0] = b'E';
    assert_eq!(part.as_slice(), b"Ell");
    pool.free_mbuf(part);
    assert_all_freed(&mut pool);
}

#[test]
#[should_panic(expected = "set_len grows shared storage")]
fn set_len_does_not_grow_into_another_reference() {
    let mut pool = pool(1 << 20);
    let m = mbuf(&mut pool, b"hello");
    let mut part = pool.clone_ref(&m, 0, 2).expect("a descriptor");
    part.set_len(3);
}

#[test]
fn append_tail_writes_only_bytes_that_no_reference_covers() {
    let mut pool = pool(1 << 20);
    let mut m = mbuf(&mut pool, b"abc");
    let mut front = pool.clone_ref(&m, 0, 2).expect("a descriptor");
    assert_eq!(pool.append_tail(&mut front, b"X"), 0, "m covers the next byte");
    assert_eq!(pool.append_tail(&mut m, b"de"), 2);
    let whole = pool.clone_ref(&m, 0, 5).expect("a descriptor");
    m.trim_back(1);
    assert_eq!(pool.append_tail(&mut m, b"X"), 0, "whole covers the next byte");
    assert_eq!((m.as_slice(), whole.as_slice()), (&b"abcd"[..], &b"abcde"[..]));
    pool.free_mbuf(m);
    pool.free_mbuf(whole);
    assert_eq!(pool.append_tail(&mut front, b"XYZ"), 3, "no other reference is left");
    assert_eq!(front.as_slice(), b"abXYZ");
    let room = front.tailroom();
    assert_eq!(pool.append_tail(&mut front, &[7; 4096]), room);
    pool.free_mbuf(front);
    assert_all_freed(&mut pool);
}

#[test]
fn send_never_exceeds_its_share_and_control_may_use_the_rest() {
    let mut pool = pool(16 * 65536);
    let take_all = |pool: &mut Pool, p| {
        let taken: Vec<Mbuf> = core::iter::from_fn(|| pool.alloc(65536, 0, p).ok()).collect();
        assert!(pool.available(p) < 65536);
        taken
    };
    let sent = take_all(&mut pool, Purpose::Send);
    assert_eq!(sent.len(), 7);
    let received = take_all(&mut pool, Purpose::Receive);
    assert_eq!(received.len(), 7, "a full send share leaves the receive share");
    let control = take_all(&mut pool, Purpose::Control);
    assert_eq!(control.len(), 2, "the reserve and the remainders of the shares");
    assert!(pool.alloc(1, 0, Purpose::Control).is_err());
    let stats = pool.stats();
    assert_eq!(stats.used_bytes, [7 * 65536, 7 * 65536, 2 * 65536]);
    assert_eq!(stats.failed_budget, 4);
    for m in sent.into_iter().chain(received).chain(control) {
        pool.free_mbuf(m);
    }
    assert_all_freed(&mut pool);
}

#[test]
fn shares_beyond_the_budget_are_refused() {
    let config = PoolConfig { budget_bytes: 1 << 20, ..PoolConfig::default() };
    assert_eq!(Pool::new(config).err(), Some(PoolError::SharesExceedBudget));
    let config = PoolConfig { receive_share_bytes: usize::MAX, ..config };
    assert_eq!(Pool::new(config).err(), Some(PoolError::SharesExceedBudget));
    let config = PoolConfig::with_budget(usize::MAX / 4);
    assert_eq!(Pool::new(config).err(), Some(PoolError::BudgetTooLarge));
}

#[test]
fn a_free_slab_is_reassigned_to_another_class() {
    let budget = 2 * SLAB_BYTES;
    let mut pool = pool(budget);
    let all = |pool: &mut Pool, bytes| -> Vec<Mbuf> {
        core::iter::from_fn(|| pool.alloc(bytes, 0, Purpose::Control).ok()).collect()
    };
    for round in 0..if cfg!(miri) { 2 } else { 3 } {
        for bytes in CLASS_BYTES {
            let mbufs = all(&mut pool, bytes);
            let descs = pool.desc_limits[Purpose::Control as usize];
            assert_eq!(mbufs.len(), (budget / bytes).min(descs), "{bytes} bytes, round {round}");
            assert!(pool.arena.counts_empty_slabs());
            mbufs.into_iter().for_each(|m| pool.free_mbuf(m));
            assert!(pool.arena.counts_empty_slabs());
        }
    }
    assert!(pool.stats().slabs_reassigned > 0);
    assert!(pool.stats().slab_bytes <= budget + CLASSES * SLAB_BYTES);
    assert_all_freed(&mut pool);
}

/// A pool whose slabs all have this class and one block in use.
fn pinned(class: usize) -> (Pool, Chain) {
    let mut pool = pool(8 * SLAB_BYTES);
    let mut pins = Chain::new();
    while pool.arena.slabs() < pool.max_slabs {
        assert!(pool.arena.add_slab(class));
        pins.push_back(pool.alloc(CLASS_BYTES[class], 0, Purpose::Control).expect("a block"));
        // The next block is from the next slab.
        pool.arena.flush_magazines();
    }
    (pool, pins)
}

#[test]
fn a_larger_block_is_used_when_the_best_class_is_exhausted() {
    let (mut pool, pins) = pinned(4);
    let m = pool.alloc(10, 0, Purpose::Control).expect("a larger block");
    assert_eq!((m.storage_bytes(), pool.stats().class_fallbacks), (65536, 1));
    assert_eq!(pool.stats().used_bytes[2], pins.storage_bytes() + 65536);
    pool.free(pins);
    pool.free_mbuf(m);
    assert_all_freed(&mut pool);
}

#[test]
fn smaller_blocks_are_used_for_a_chain_but_not_for_a_single_mbuf() {
    let (mut pool, pins) = pinned(0);
    assert_eq!(pool.alloc(257, 0, Purpose::Control).err(), Some(NoBuffer));
    assert_eq!(pool.stats().failed_block, 1);
    let c = pool.alloc_chain(2000, 100, Purpose::Control).expect("a chain");
    assert_eq!((c.len(), c.segs()), (2000, 9));
    assert_eq!(pool.alloc_chain(2000, 300, Purpose::Control).err(), Some(NoBuffer));
    pool.free(c);
    pool.free(pins);
    assert_all_freed(&mut pool);
}

#[test]
fn descriptors_are_bounded_and_some_are_reserved_for_control() {
    let mut pool = pool(MIN_DESCS * BYTES_PER_DESC);
    let m = mbuf(&mut pool, b"x");
    let mut clones = Chain::new();
    while let Ok(c) = pool.clone_ref(&m, 0, 1) {
        clones.push_back(c);
    }
    assert_eq!(clones.segs() + 1, MIN_DESCS - MIN_DESCS / 16);
    assert!(pool.alloc(1, 0, Purpose::Receive).is_err());
    assert!(pool.stats().failed_descriptor >= 2);
    let control = pool.alloc(1, 0, Purpose::Control).expect("the reserve");
    drop(clones);
    assert!(pool.alloc(1, 0, Purpose::Send).is_ok(), "the remote-free list is drained on demand");
    drop((control, m));
    assert_all_freed(&mut pool);
}

#[test]
fn the_descriptors_of_tiny_packets_fill_the_receive_share() {
    let mut pool = pool(64 << 20);
    let descs = pool.desc_limits[Purpose::Receive as usize];
    let mut tiny = Chain::new();
    while !pool.is_contended(Purpose::Receive) {
        tiny.push_back(pool.alloc(1, 0, Purpose::Receive).expect("an mbuf"));
    }
    assert!(tiny.segs().abs_diff(descs / 2) <= descs / 100, "{} of {descs}", tiny.segs());
    assert!(!pool.is_contended(Purpose::Send));
    assert_eq!(tiny.truesize(), tiny.segs() * Mbuf::MIN_TRUESIZE);
    pool.free(tiny);
    assert_all_freed(&mut pool);
}

#[test]
fn has_reserve_depends_on_bytes_and_descriptors() {
    for bytes in [1, 65_536] {
        let mut pool = pool(if cfg!(miri) { 2 << 20 } else { 16 << 20 });
        let mut held = Chain::new();
        while let Ok(m) = pool.alloc(bytes, 0, Purpose::Receive) {
            held.push_back(m);
        }
        while let Ok(m) = pool.alloc(bytes, 0, Purpose::Send) {
            held.push_back(m);
        }
        let mut kept = 0;
        while pool.has_reserve() {
            held.push_back(pool.alloc(bytes, 0, Purpose::Control).expect("the reserve"));
            kept += 1;
        }
        let mut left = 0_usize;
        while let Ok(m) = pool.alloc(bytes, 0, Purpose::Control) {
            held.push_back(m);
            left += 1;
        }
        assert!(kept > 0 && left > 0 && left.abs_diff(kept) <= 2, "{kept} and {left}");
        pool.free(held);
        assert_all_freed(&mut pool);
    }
}

#[test]
fn a_chain_has_the_largest_blocks_first_and_ends_with_the_best_fit() {
    let mut pool = pool(64 << 20);
    let storages = |pool: &mut Pool, bytes, headroom| -> Vec<usize> {
        let c = pool.alloc_chain(bytes, headroom, Purpose::Send).expect("a chain");
        assert_eq!(c.len(), bytes);
        assert_eq!(c.front().map_or(headroom, Mbuf::headroom), headroom);
        let storages = c.iter().map(Mbuf::storage_bytes).collect();
        pool.free(c);
        storages
    };
    assert!(storages(&mut pool, 0, 0).is_empty());
    assert_eq!(storages(&mut pool, 0, 64), [256]);
    assert_eq!(storages(&mut pool, 1460, 0), [2048]);
    assert_eq!(storages(&mut pool, 65536, 0), [65536]);
    assert_eq!(storages(&mut pool, 65536, 1), [65536, 256]);
    assert_eq!(storages(&mut pool, 131072 + 5000, 0), [65536, 65536, 4096, 2048]);
    assert_eq!(storages(&mut pool, 32768, 0), [65536]);
    assert_all_freed(&mut pool);
}

#[test]
fn a_chain_is_all_or_nothing() {
    let mut pool = pool(4 * 65536);
    let share = pool.available(Purpose::Send);
    assert!(pool.alloc_chain(share + 1, 0, Purpose::Send).is_err());
    assert_all_freed(&mut pool);
}

#[test]
fn an_owner_is_dropped_once_when_the_last_reference_is_freed() {
    let mut pool = pool(1 << 20);
    let (owner, released) = owner(b"owned bytes");
    let mut m = pool.external(owner, Purpose::Send).expect("an mbuf");
    assert_eq!(pool.stats().used_bytes, [11, 0, 0]);
    assert!(m.is_unique() && m.as_mut_slice().is_none() && m.spare_mut().is_empty());
    m.trim_back(6);
    assert!(m.append(1).is_none() && pool.append_tail(&mut m, b"x") == 0);
    let part = pool.clone_ref(&m, 2, 3).expect("a descriptor");
    pool.free_mbuf(m);
    assert_eq!((part.as_slice(), released.load(Ordering::SeqCst)), (&b"ned"[..], 0));
    drop(part);
    assert_eq!(released.load(Ordering::SeqCst), 0, "the remote-free list is not drained yet");
    assert_all_freed(&mut pool);
    assert_eq!(released.load(Ordering::SeqCst), 1);
    let again = pool.external(Box::new(Vec::from(*b"other")), Purpose::Send).expect("an mbuf");
    assert_eq!(again.as_slice(), b"other");
    drop(pool);
    drop(again);
    assert_eq!(released.load(Ordering::SeqCst), 1);
}

#[test]
fn an_owner_that_exceeds_the_share_is_dropped() {
    let mut pool = pool(4096);
    let (owner, released) = owner(&[0; 4096]);
    assert_eq!(pool.external(owner, Purpose::Send).err(), Some(NoBuffer));
    assert_eq!(released.load(Ordering::SeqCst), 1);
}

#[test]
fn an_owner_outlives_the_pool_while_a_reference_is_in_use() {
    let mut pool = pool(1 << 20);
    let (owner, released) = owner(b"loan");
    let m = pool.external(owner, Purpose::Send).expect("an mbuf");
    drop(pool);
    assert_eq!((m.as_slice(), released.load(Ordering::SeqCst)), (&b"loan"[..], 0));
    drop(m);
    assert_eq!(released.load(Ordering::SeqCst), 1);
}

#[test]
fn an_mbuf_of_another_pool_is_copied_by_clone_and_freed_to_its_pool() {
    let (mut a, mut b) = (pool(1 << 20), pool(1 << 20));
    let mut m = mbuf(&mut a, b"from a");
    assert!(a.owns(&m) && !b.owns(&m));
    assert_eq!(b.append_tail(&mut m, b"!"), 0, "the reference count belongs to pool a");
    let copy = b.clone_ref(&m, 2, 3).expect("a copy");
    assert!(b.owns(&copy) && m.is_unique());
    assert_eq!(copy.as_slice(), b"om ");
    let mut mixed = Chain::from(copy);
    mixed.push_back(m);
    let mut twice = b.clone_range(&mixed, 1, 8).expect("clones");
    assert_eq!(twice.to_vec(), b"m from a");
    twice.append(mixed);
    b.free(twice);
    assert_all_freed(&mut b);
    assert_eq!(a.outstanding(), 1);
    assert_all_freed(&mut a);
    assert_eq!(a.stats().remote_frees, 1);
}

#[test]
fn a_large_mbuf_of_another_pool_is_copied_in_parts() {
    let (mut a, mut b) = (pool(8 << 20), pool(8 << 20));
    let bytes = pattern(1, 100_000);
    let m = a.external(Box::new(bytes.clone()), Purpose::Send).expect("an mbuf");
    let copy = b.clone_range(&Chain::from(m), 0, bytes.len()).expect("a copy");
    assert_eq!((copy.to_vec(), copy.segs()), (bytes, 2));
    b.free(copy);
    assert_all_freed(&mut a);
    assert_all_freed(&mut b);
}

#[test]
fn mbufs_dropped_by_other_threads_are_all_freed() {
    let mut pool = pool(4 << 20);
    let per_thread = if cfg!(miri) { 20 } else { 5000 };
    std::thread::scope(|scope| {
        let (tx, rx) = std::sync::mpsc::sync_channel::<Chain>(16);
        let rx = Arc::new(std::sync::Mutex::new(rx));
        for _ in 0..3 {
            let rx = rx.clone();
            scope.spawn(move || {
                loop {
                    let Ok(mut c) = rx.lock().expect("lock").recv() else { return };
                    let bytes = c.to_vec();
                    assert_eq!(bytes, pattern(usize::from(bytes[0]), bytes.len()).as_slice());
                    if c.segs() > 2 {
                        drop(c.pop_front());
                    }
                }
            });
        }
        for i in 0..3 * per_thread {
            let bytes = seeded(i % 200, 30 + i % 100);
            let c = loop {
                match try_chain(&mut pool, &bytes) {
                    Ok(c) => break c,
                    Err(NoBuffer) => std::thread::yield_now(),
                }
            };
            if i % 3 == 0 {
                let copy = pool.clone_range(&c, 0, c.len());
                if let Ok(copy) = copy {
                    tx.send(copy).expect("threads");
                }
                pool.free(c);
            } else {
                tx.send(c).expect("threads");
            }
        }
        drop(tx);
    });
    assert_all_freed(&mut pool);
    assert!(pool.stats().remote_frees > 0);
}

/// A pattern whose first byte is its seed.
fn seeded(seed: usize, n: usize) -> Vec<u8> {
    let seed = (0..256).find(|&s| usize::from(pattern(s, 1)[0]) == s).map_or(0, |s| s.min(seed));
    pattern(seed, n)
}

fn try_chain(pool: &mut Pool, bytes: &[u8]) -> Result<Chain, NoBuffer> {
    let mut chain = Chain::new();
    for part in bytes.chunks(20) {
        let mut m = pool.alloc(part.len(), 0, Purpose::Receive)?;
        m.append(part.len()).expect("room").copy_from_slice(part);
        chain.push_back(m);
    }
    Ok(chain)
}

#[test]
fn the_last_mbuf_frees_the_memory_of_a_dropped_pool() {
    for round in 0..if cfg!(miri) { 4 } else { 200 } {
        let mut pool = pool(1 << 20);
        let chains: Vec<Chain> = (0..3)
            .map(|i| crate::mbuf::testkit::chain(&mut pool, &pattern(i, 64 * (round % 5 + 1)), 50))
            .collect();
        let shared = chains.iter().map(|c| pool.clone_range(c, 3, 20).expect("clones"));
        let shared: Vec<Chain> = shared.collect();
        std::thread::scope(|scope| {
            for (i, c) in chains.into_iter().enumerate() {
                scope.spawn(move || assert_eq!(c.to_vec()[..64], pattern(i, 64)));
            }
            scope.spawn(move || drop(pool));
            for (i, c) in shared.into_iter().enumerate() {
                assert_eq!(c.to_vec(), pattern(i + 3, 20));
            }
        });
    }
}

#[derive(Clone, Debug)]
enum Op {
    Alloc(usize, usize, u8),
    External(usize),
    Clone(usize, usize, usize),
    Append(usize, usize),
    AppendTail(usize, usize),
    Prepend(usize, usize),
    Write(usize),
    TrimFront(usize, usize),
    TrimBack(usize, usize),
    Free(usize),
    Drop(usize),
    Drain,
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0..600usize;
    prop_oneof![
        3 => (0..5000usize, 0..200usize, 0..3u8).prop_map(|(b, h, p)| Op::Alloc(b, h, p)),
        1 => n.clone().prop_map(Op::External),
        4 => (any::<usize>(), any::<usize>(), any::<usize>())
            .prop_map(|(i, o, l)| Op::Clone(i, o, l)),
        3 => (any::<usize>(), n.clone()).prop_map(|(i, n)| Op::Append(i, n)),
        3 => (any::<usize>(), n.clone()).prop_map(|(i, n)| Op::AppendTail(i, n)),
        2 => (any::<usize>(), 0..100usize).prop_map(|(i, n)| Op::Prepend(i, n)),
        2 => any::<usize>().prop_map(Op::Write),
        1 => (any::<usize>(), n.clone()).prop_map(|(i, n)| Op::TrimFront(i, n)),
        2 => (any::<usize>(), n).prop_map(|(i, n)| Op::TrimBack(i, n)),
        3 => any::<usize>().prop_map(Op::Free),
        2 => any::<usize>().prop_map(Op::Drop),
        1 => Just(Op::Drain),
    ]
}

/// A storage: its purpose and its bytes.
type Charged = Rc<(Purpose, usize)>;

/// The model: each mbuf with its expected bytes and its storage.
struct Model {
    pool: Pool,
    held: Vec<(Mbuf, Vec<u8>, Charged)>,
    /// Storage of mbufs on the remote-free list.
    away: Vec<Charged>,
    fresh: usize,
}

impl Model {
    fn add(&mut self, m: Mbuf, bytes: Vec<u8>) {
        let storage = Rc::new((m.purpose(), m.storage_bytes()));
        self.held.push((m, bytes, storage));
    }

    fn fresh(&mut self, n: usize) -> Vec<u8> {
        self.fresh += 1;
        pattern(self.fresh * 31, n)
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Alloc(b, h, p) => {
                if let Ok(m) = self.pool.alloc(b, h, Purpose::ALL[p as usize]) {
                    assert!(m.headroom() == h && m.tailroom() >= b);
                    self.add(m, Vec::new());
                }
            }
            Op::External(n) => {
                let bytes = self.fresh(n);
                if let Ok(m) = self.pool.external(Box::new(bytes.clone()), Purpose::Send) {
                    self.add(m, bytes);
                }
            }
            Op::Drain => self.drain(),
            _ if self.held.is_empty() => {}
            Op::Free(i) => {
                let (m, _, _) = self.held.swap_remove(i % self.held.len());
                self.pool.free_mbuf(m);
            }
            Op::Drop(i) => {
                let (_, _, storage) = self.held.swap_remove(i % self.held.len());
                self.away.push(storage);
            }
            ref op => self.change(op),
        }
    }

    fn change(&mut self, op: &Op) {
        let fresh = self.fresh(600);
        let count = self.held.len();
        let at = |i: usize| i % count;
        match *op {
            Op::Clone(i, off, len) => {
                let (m, bytes, storage) = &self.held[at(i)];
                let off = off % (bytes.len() + 1);
                let len = len % (bytes.len() - off + 1);
                if let Ok(part) = self.pool.clone_ref(m, off, len) {
                    let bytes = bytes[off..off + len].to_vec();
                    let storage = storage.clone();
                    self.held.push((part, bytes, storage));
                }
            }
            Op::Append(i, n) => {
                let (m, bytes, _) = &mut self.held[at(i)];
                let fits = n <= m.tailroom() && m.is_unique() && !m.is_external();
                assert_eq!(m.append(n).map(|b| b.copy_from_slice(&fresh[..n])).is_some(), fits);
                bytes.extend_from_slice(if fits { &fresh[..n] } else { &[] });
            }
            Op::AppendTail(i, n) => {
                let (m, bytes, _) = &mut self.held[at(i)];
                let (room, free) = (m.tailroom(), m.is_unique() && !m.is_external());
                let n = self.pool.append_tail(m, &fresh[..n]).min(n);
                assert!(!free || n == room.min(n), "unshared storage accepts what fits");
                bytes.extend_from_slice(&fresh[..n]);
            }
            Op::Prepend(i, n) => {
                let (m, bytes, _) = &mut self.held[at(i)];
                let fits = n <= m.headroom() && m.is_unique() && !m.is_external();
                assert_eq!(m.prepend(n).map(|b| b.copy_from_slice(&fresh[..n])).is_some(), fits);
                bytes.splice(..0, if fits { fresh[..n].to_vec() } else { Vec::new() });
            }
            Op::Write(i) => {
                let (m, bytes, _) = &mut self.held[at(i)];
                if let Some(b) = m.as_mut_slice() {
                    b.iter_mut().zip(&fresh).for_each(|(b, f)| *b = *f);
                    *bytes = b.to_vec();
                }
            }
            Op::TrimFront(i, n) => {
                let (m, bytes, _) = &mut self.held[at(i)];
                m.trim_front(n);
                bytes.drain(..n.min(bytes.len()));
            }
            Op::TrimBack(i, n) => {
                let (m, bytes, _) = &mut self.held[at(i)];
                m.trim_back(n);
                bytes.truncate(bytes.len().saturating_sub(n));
            }
            _ => unreachable!("handled by step"),
        }
    }

    fn drain(&mut self) {
        self.pool.drain_remote();
        self.away.clear();
        let mut used = [0; 3];
        let storages: HashMap<_, _> =
            self.held.iter().map(|(_, _, s)| (Rc::as_ptr(s), **s)).collect();
        storages.values().for_each(|&(p, bytes)| used[p as usize] += bytes);
        assert_eq!(self.pool.stats().used_bytes, used);
        assert_eq!(self.pool.outstanding(), self.held.len());
    }

    fn check(&self) {
        for (m, bytes, storage) in &self.held {
            assert_eq!(m.as_slice(), bytes.as_slice());
            let others = Rc::strong_count(storage);
            assert!(others > 1 || m.is_unique());
            let held = self.held.iter().filter(|(_, _, s)| Rc::ptr_eq(s, storage)).count();
            assert!(held == 1 || !m.is_unique());
        }
    }
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn mbufs_keep_their_bytes_and_all_storage_is_charged(
        ops in prop::collection::vec(op(), 1..if cfg!(miri) { 60 } else { 300 })
    ) {
        let mut model = Model { pool: pool(256 << 10), held: vec![], away: vec![], fresh: 0 };
        for op in &ops {
            model.step(op);
            model.check();
        }
        model.drain();
        model.held.clear();
        model.drain();
        assert_all_freed(&mut model.pool);
    }
}

#[test]
fn buffers_and_pools_may_move_between_threads() {
    fn may_move<T: Send>() {}
    fn may_be_read_together<T: Sync>() {}
    may_move::<(Pool, Mbuf, Chain, crate::mbuf::SendQueue, crate::mbuf::RecvQueue)>();
    may_be_read_together::<(Mbuf, Chain)>();
}
