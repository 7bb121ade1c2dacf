use proptest::prelude::*;

use super::*;
use crate::mbuf::testkit::{assert_all_freed, cases, chain, pattern, pool};

/// Inserts bytes [off, off + n) of the pattern in segments of 5.
fn insert(q: &mut RecvQueue, pool: &mut Pool, off: usize, n: usize) -> Inserted {
    let c = chain(pool, &pattern(off, n), 5);
    q.insert(off as u64, c, pool)
}

fn sacks(q: &RecvQueue) -> Vec<(u64, u64)> {
    let mut out = [(0, 0); 4];
    let n = q.sack_ranges(&mut out);
    out[..n].to_vec()
}

#[test]
fn bytes_in_order_are_readable_at_once() {
    let mut pool = pool(1 << 20);
    let mut q = RecvQueue::new();
    let done = insert(&mut q, &mut pool, 0, 12);
    assert_eq!((done.accepted_bytes, done.in_order_advance, done.duplicate_bytes), (12, 12, 0));
    assert_eq!((q.next(), q.readable(), q.out_of_order_bytes()), (12, 12, 0));
    let mut peeked = [0; 4];
    assert_eq!(q.peek(10, &mut peeked), 2);
    assert_eq!(peeked[..2], pattern(10, 2));
    let c = q.take(7, &mut pool);
    assert_eq!(c.to_vec(), pattern(0, 7));
    q.unread(c);
    assert_eq!(q.take(usize::MAX, &mut pool).to_vec(), pattern(0, 12));
    assert_eq!((q.next(), q.readable(), q.storage_bytes()), (12, 0, 0));
    assert_all_freed(&mut pool);
}

#[test]
fn small_segments_are_merged_into_the_tailroom_of_the_last_mbuf() {
    let mut pool = pool(1 << 20);
    let mut q = RecvQueue::new();
    let piece = |pool: &mut Pool, at| chain(pool, &pattern(at, 1), 5);
    let first = piece(&mut pool, 0);
    let first = q.absorb(first, &mut pool).unwrap_err(); // nothing to merge with
    q.insert(0, first, &mut pool);
    let before = q.storage_bytes();
    for at in 1..100 {
        let c = piece(&mut pool, at);
        assert!(q.absorb(c, &mut pool).is_ok());
    }
    assert_eq!((q.next(), q.readable(), q.storage_bytes()), (100, 100, before.max(100)));
    let all = q.take(usize::MAX, &mut pool);
    assert_eq!(all.segs(), 1);
    q.unread(all);
    insert(&mut q, &mut pool, 102, 10);
    let c = piece(&mut pool, 100);
    assert!(q.absorb(c, &mut pool).is_ok());
    let c = chain(&mut pool, &pattern(101, 2), 5);
    let c = q.absorb(c, &mut pool).unwrap_err(); // not over what is out of order
    pool.free(c);
    let c = piece(&mut pool, 101);
    assert!(q.absorb(c, &mut pool).is_ok()); // closes the gap
    assert_eq!((q.next(), q.out_of_order_bytes()), (112, 0));
    assert_eq!(q.take(usize::MAX, &mut pool).to_vec(), pattern(0, 112));
    q.clear(&mut pool);
    assert_all_freed(&mut pool);
}

#[test]
fn the_last_bytes_are_copied_together_unless_the_pool_is_exhausted() {
    let mut pool = pool(1 << 20);
    for is_exhausted in [false, true] {
        let mut q = RecvQueue::new();
        // All but the last close no gap, and have a block each.
        for (at, n) in (0..10).map(|n| (100 + 300 * n, 300)).chain([(0, 100)]) {
            let mut m = pool.alloc(n, 0, Purpose::Receive).unwrap();
            m.append(n).unwrap().copy_from_slice(&pattern(at, n));
            q.insert(at as u64, Chain::from(m), &mut pool);
        }
        let before = q.storage_bytes();
        assert_eq!(q.readable(), 3100);
        assert!(before >= 11 * 1024, "{before}");
        let mut hoard: Vec<Mbuf> = Vec::new();
        while is_exhausted && let Ok(m) = pool.alloc(1, 0, Purpose::Receive) {
            hoard.push(m);
        }
        q.compact_last(3000, 2048, |m| m.truesize() > m.len(), &mut pool);
        hoard.into_iter().for_each(|m| pool.free_mbuf(m));
        assert_eq!((q.readable(), q.next()), (3100, 3100));
        let after = q.storage_bytes();
        assert!(after <= if is_exhausted { before } else { 3 * 2048 }, "{before} {after}");
        let all = q.take(usize::MAX, &mut pool);
        assert_eq!(all.to_vec(), pattern(0, 3100));
        pool.free(all);
        assert_all_freed(&mut pool);
    }
}

#[test]
fn short_segments_behind_a_gap_are_merged_into_the_tailroom_of_their_run() {
    let mut pool = pool(1 << 20);
    let mut q = RecvQueue::new();
    insert(&mut q, &mut pool, 10, 4);
    insert(&mut q, &mut pool, 60, 4);
    let before = q.storage_bytes();
    for at in 14..59 {
        let mut c = chain(&mut pool, &pattern(at, 1), 5);
        assert_eq!((q.fill_run(at as u64, &mut c, &mut pool), c.len()), (1, 0));
    }
    assert_eq!((q.out_of_order_bytes(), q.storage_bytes()), (53, before.max(53)));
    assert_eq!(sacks(&q), [(10, 59), (60, 64)]);
    // Neither where two runs would meet, nor where none ends.
    for at in [59, 70, 5, 0] {
        let mut c = chain(&mut pool, &pattern(at, 1), 5);
        assert_eq!(q.fill_run(at as u64, &mut c, &mut pool), 0);
        pool.free(c);
    }
    insert(&mut q, &mut pool, 59, 1);
    insert(&mut q, &mut pool, 0, 10);
    let all = q.take(usize::MAX, &mut pool);
    assert_eq!(all.to_vec(), pattern(0, 64));
    pool.free(all);
    assert_all_freed(&mut pool);
}

#[test]
fn bytes_charged_to_a_sender_count_by_length_only() {
    let mut pool = pool(1 << 20);
    for (purpose, counted) in [(Purpose::Send, 700), (Purpose::Receive, 65_536)] {
        let mut q = RecvQueue::new();
        let big = pool.alloc_chain(65_000, 0, purpose).unwrap();
        let part = pool.clone_range(&big, 300, 700).unwrap();
        pool.free(big);
        q.insert(0, part, &mut pool);
        assert_eq!(q.storage_bytes(), counted);
        q.clear(&mut pool);
    }
    assert_all_freed(&mut pool);
}

#[test]
fn tiny_out_of_order_segments_are_charged_for_their_descriptors() {
    let mut pool = pool(1 << 20);
    let mut q = RecvQueue::new();
    for at in 0..10 {
        let mut m = pool.alloc(1, 0, Purpose::Receive).unwrap();
        m.append(1).unwrap()[0] = 1;
        q.insert(100 + at, Chain::from(m), &mut pool);
    }
    assert_eq!(q.storage_bytes(), 10 * Mbuf::MIN_TRUESIZE);
    assert_eq!(q.out_of_order_storage_bytes(), 10 * Mbuf::MIN_TRUESIZE);
    q.clear(&mut pool);
    assert_all_freed(&mut pool);
}

#[test]
fn bytes_behind_a_gap_are_readable_once_it_is_filled() {
    let mut pool = pool(1 << 20);
    let mut q = RecvQueue::new();
    let done = insert(&mut q, &mut pool, 10, 10);
    assert_eq!((done.accepted_bytes, done.in_order_advance), (10, 0));
    assert_eq!((q.next(), q.readable(), q.out_of_order_bytes()), (0, 0, 10));
    let done = insert(&mut q, &mut pool, 0, 15);
    assert_eq!((done.accepted_bytes, done.duplicate_bytes, done.in_order_advance), (10, 5, 20));
    assert_eq!(q.take(99, &mut pool).to_vec(), pattern(0, 20));
}

#[test]
fn bytes_received_before_are_duplicates() {
    let mut pool = pool(1 << 20);
    let mut q = RecvQueue::new();
    insert(&mut q, &mut pool, 0, 10);
    drop(q.take(10, &mut pool));
    let done = insert(&mut q, &mut pool, 2, 5);
    assert_eq!((done.accepted_bytes, done.duplicate_bytes), (0, 5));
    let done = insert(&mut q, &mut pool, 5, 10);
    assert_eq!((done.accepted_bytes, done.duplicate_bytes, done.in_order_advance), (5, 5, 5));
    assert_eq!(q.take(10, &mut pool).to_vec(), pattern(10, 5));
    assert_all_freed(&mut pool);
}

#[test]
fn sack_ranges_begin_with_the_most_recently_changed_run() {
    let mut pool = pool(1 << 20);
    let mut q = RecvQueue::new();
    for off in [10, 30, 50, 70, 90] {
        insert(&mut q, &mut pool, off, 5);
    }
    assert_eq!(sacks(&q), [(90, 95), (70, 75), (50, 55), (30, 35)]);
    insert(&mut q, &mut pool, 35, 5);
    assert_eq!(sacks(&q), [(30, 40), (90, 95), (70, 75), (50, 55)]);
    // RFC 2018: the first block holds the segment that triggered the ACK, new or not.
    insert(&mut q, &mut pool, 51, 2);
    assert_eq!(sacks(&q)[0], (50, 55));
    insert(&mut q, &mut pool, 0, 10);
    assert_eq!(q.next(), 15);
    assert_eq!(sacks(&q), [(50, 55), (30, 40), (90, 95), (70, 75)]);
    assert_eq!(q.sack_ranges(&mut []), 0);
}

#[test]
fn the_first_part_in_a_run_is_found() {
    let mut pool = pool(1 << 20);
    let mut q = RecvQueue::new();
    insert(&mut q, &mut pool, 40, 10);
    insert(&mut q, &mut pool, 20, 10);
    assert_eq!(q.first_out_of_order(25, 100), Some((25, 30)));
    assert_eq!(q.first_out_of_order(30, 45), Some((40, 45)));
    assert_eq!(q.first_out_of_order(30, 40), None);
    q.clear(&mut pool);
}

#[test]
fn a_run_covered_by_new_bytes_is_replaced() {
    let mut pool = pool(1 << 20);
    let mut q = RecvQueue::new();
    insert(&mut q, &mut pool, 20, 5);
    insert(&mut q, &mut pool, 40, 5);
    let done = insert(&mut q, &mut pool, 10, 50);
    assert_eq!((done.accepted_bytes, done.duplicate_bytes), (40, 10));
    assert_eq!(sacks(&q), [(10, 60)]);
    insert(&mut q, &mut pool, 0, 10);
    assert_eq!(q.take(60, &mut pool).to_vec(), pattern(0, 60));
    assert_all_freed(&mut pool);
}

#[test]
fn runs_are_bounded_and_in_order_bytes_are_still_accepted() {
    let mut pool = pool(8 << 20);
    let mut q = RecvQueue::new();
    for i in 1..=MAX_RANGES {
        assert!(!insert(&mut q, &mut pool, 10 * i, 2).refused);
    }
    let far = 10 * (MAX_RANGES + 1);
    let done = insert(&mut q, &mut pool, far, 2);
    assert_eq!(done, Inserted { refused: true, ..Inserted::default() });
    assert!(!insert(&mut q, &mut pool, 12, 3).refused, "it extends a run");
    assert!(!insert(&mut q, &mut pool, 0, 10).refused, "it is in order");
    assert_eq!(q.next(), 15);
    let out_of_order = q.out_of_order_bytes();
    assert_eq!(out_of_order, 2 * (MAX_RANGES - 1));
    insert(&mut q, &mut pool, 15, 10 * MAX_RANGES);
    assert_eq!((q.out_of_order_bytes(), q.runs.capacity()), (0, 0));
    q.clear(&mut pool);
    assert_eq!((q.readable(), q.storage_bytes()), (0, 0));
    assert_all_freed(&mut pool);
}

#[test]
fn offsets_beyond_64_bits_are_refused() {
    let mut pool = pool(1 << 20);
    let mut q = RecvQueue::new();
    for (off, refused) in [(u64::MAX - 8, false), (u64::MAX - 7, true), (u64::MAX, true)] {
        let c = chain(&mut pool, b"far away", 3);
        assert_eq!(q.insert(off, c, &mut pool).refused, refused);
    }
    assert_eq!(sacks(&q), [(u64::MAX - 8, u64::MAX)]);
    q.clear(&mut pool);
    assert_all_freed(&mut pool);
}

#[test]
fn a_take_without_descriptors_copies_and_without_memory_ends_at_an_mbuf() {
    let mut pool = pool(1 << 20);
    let mut q = RecvQueue::new();
    insert(&mut q, &mut pool, 0, 10);
    let m = crate::mbuf::testkit::mbuf(&mut pool, b"x");
    let mut hoard: Vec<Mbuf> = vec![];
    while let Ok(c) = pool.clone_ref(&m, 0, 1) {
        hoard.push(c);
    }
    let c = q.take(7, &mut pool);
    assert_eq!(c.to_vec(), pattern(0, 7));
    while let Ok(m) = pool.alloc(1, 0, Purpose::Control) {
        hoard.push(m);
    }
    assert_eq!(q.take(1, &mut pool).len(), 0);
    assert_eq!(q.readable(), 3);
    pool.free(c);
}

#[derive(Clone, Debug)]
enum Op {
    Insert(usize, usize),
    InOrder(usize),
    Fill(usize),
    FillRun(usize, usize),
    Take(usize, usize),
    Peek(usize, usize),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..600usize, 0..80usize).prop_map(|(off, n)| Op::Insert(off, n)),
        3 => (0..60usize).prop_map(Op::InOrder),
        3 => (0..60usize).prop_map(Op::Fill),
        3 => (0..8usize, 0..60usize).prop_map(|(run, n)| Op::FillRun(run, n)),
        3 => (0..200usize, 0..50usize).prop_map(|(n, back)| Op::Take(n, back)),
        1 => (0..100usize, 0..50usize).prop_map(|(off, n)| Op::Peek(off, n)),
        1 => prop_oneof![29 => Just(Op::InOrder(1)), 1 => Just(Op::Clear)],
    ]
}

/// The model: a map of the bytes received.
struct Model {
    pool: Pool,
    queue: RecvQueue,
    arrived: Vec<bool>,
    read: usize,
}

impl Model {
    fn next(&self) -> usize {
        self.arrived.iter().position(|&a| !a).unwrap_or(self.arrived.len())
    }

    /// Runs of received bytes behind the first gap.
    fn runs(&self) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = vec![];
        for i in self.next()..self.arrived.len() {
            match runs.last_mut() {
                _ if !self.arrived[i] => {}
                Some(run) if run.1 == i as u64 => run.1 += 1,
                _ => runs.push((i as u64, i as u64 + 1)),
            }
        }
        runs
    }

    fn insert(&mut self, off: usize, n: usize) {
        let next = self.next();
        let new = self.arrived[off..off + n].iter().filter(|&&a| !a).count();
        self.arrived[off..off + n].fill(true);
        let done = insert(&mut self.queue, &mut self.pool, off, n);
        assert_eq!((done.accepted_bytes, done.duplicate_bytes), (new, n - new));
        assert_eq!(done.in_order_advance, self.next() - next);
        assert!(!done.refused);
        if n > 0 && off + n > self.next() {
            let first = sacks(&self.queue)[0];
            assert!(first.0 <= off.max(self.next()) as u64 && (off + n) as u64 <= first.1);
        }
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Insert(off, n) => self.insert(off, n),
            Op::InOrder(n) => {
                let next = self.next();
                self.insert(next, n.min(700 - next.min(700)));
            }
            Op::Fill(n) => {
                let (next, n) = (self.next(), n.min(700 - self.next().min(700)));
                let mut c = chain(&mut self.pool, &pattern(next, n), 5);
                self.queue.fill_tail(&mut c, &mut self.pool);
                let left = c.len();
                assert_eq!(c.to_vec(), pattern(next + n - left, left));
                self.pool.free(c);
                self.arrived[next..next + n - left].fill(true);
            }
            Op::FillRun(run, n) => {
                let runs = self.runs();
                let Some(&(_, end)) = runs.get(run % runs.len().max(1)) else { return };
                let at = end as usize;
                let n = n.min(700 - at.min(700));
                let mut c = chain(&mut self.pool, &pattern(at, n), 5);
                let copied = self.queue.fill_run(end, &mut c, &mut self.pool);
                assert_eq!(c.to_vec(), pattern(at + copied, n - copied));
                self.pool.free(c);
                self.arrived[at..at + copied].fill(true);
                assert!(copied == 0 || sacks(&self.queue)[0].1 == (at + copied) as u64);
            }
            Op::Take(n, back) => {
                let mut c = self.queue.take(n, &mut self.pool);
                assert_eq!(c.len(), n.min(self.next() - self.read));
                assert_eq!(c.to_vec(), pattern(self.read, c.len()));
                let keep = c.len().saturating_sub(back);
                let rest = c.split_off(keep, &mut self.pool).expect("a descriptor");
                self.read += keep;
                self.queue.unread(rest);
                self.pool.free(c);
            }
            Op::Peek(off, n) => {
                let mut out = vec![0; n];
                let peeked = self.queue.peek(off, &mut out);
                assert_eq!(peeked, n.min((self.next() - self.read).saturating_sub(off)));
                assert_eq!(out[..peeked], pattern(self.read + off, peeked));
            }
            Op::Clear => {
                self.queue.clear(&mut self.pool);
                let next = self.next();
                self.arrived[next..].fill(false);
                self.read = next;
            }
        }
    }

    fn check(&self) {
        let (q, runs) = (&self.queue, self.runs());
        assert_eq!((q.next(), q.readable()), (self.next() as u64, self.next() - self.read));
        let bytes: u64 = runs.iter().map(|r| r.1 - r.0).sum();
        assert_eq!(q.out_of_order_bytes() as u64, bytes);
        let held: Vec<_> = q.runs.iter().map(|r| (r.start, r.end())).collect();
        assert_eq!(held, runs);
        assert_eq!(sacks(q).len(), runs.len().min(4));
        for run in &q.runs {
            assert_eq!(run.chain.to_vec(), pattern(run.start as usize, run.chain.len()));
        }
    }
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn a_receive_queue_is_a_byte_map(
        ops in prop::collection::vec(op(), 1..if cfg!(miri) { 30 } else { 150 })
    ) {
        let mut model = Model {
            pool: pool(8 << 20),
            queue: RecvQueue::new(),
            arrived: vec![false; 800],
            read: 0,
        };
        for op in &ops {
            model.step(op);
            model.check();
        }
        let Model { mut pool, mut queue, .. } = model;
        queue.clear(&mut pool);
        assert_all_freed(&mut pool);
    }
}

fn placed_and_ordinary(pool: &mut Pool) -> (crate::mbuf::PostedBuf, Chain) {
    let mut hold = crate::mbuf::RecvBuf::with_capacity(100).post();
    let mut room = hold.writable_range(0).unwrap();
    room.bytes().fill(7);
    let mut chain = Chain::from(room.split(10, pool).unwrap());
    let mut m = pool.alloc(5, 0, Purpose::Receive).unwrap();
    m.append(5).unwrap().fill(8);
    chain.push_back(m);
    chain.push_back(room.split(10, pool).unwrap());
    (hold, chain)
}

#[test]
fn evicted_bytes_are_copied_to_memory_of_the_pool() {
    let mut pool = Pool::new(crate::mbuf::PoolConfig::with_budget(4 << 20)).unwrap();
    let mut q = RecvQueue::new();
    let (hold, chain) = placed_and_ordinary(&mut pool);
    let (other, behind) = placed_and_ordinary(&mut pool);
    let all = chain.to_vec();
    q.insert(0, chain, &mut pool);
    q.insert(100, behind, &mut pool);
    assert!(q.evict(hold.id(), &mut pool));
    assert!(hold.release(0).is_ok(), "nothing refers to it");
    let other = other.release(0).expect_err("not asked for");
    assert!(q.evict(other.id(), &mut pool));
    assert!(other.release(0).is_ok());
    assert_eq!((q.readable(), q.out_of_order_bytes()), (25, 25));
    assert_eq!(q.take(25, &mut pool).to_vec(), all);
    q.clear(&mut pool);
}

#[test]
fn an_eviction_without_memory_discards_out_of_order_bytes_and_keeps_bytes_in_order() {
    let mut config = crate::mbuf::PoolConfig::with_budget(4 << 20);
    config.control_reserve_bytes = 0;
    let mut pool = Pool::new(config).unwrap();
    let mut q = RecvQueue::new();
    let (hold, chain) = placed_and_ordinary(&mut pool);
    let (other, behind) = placed_and_ordinary(&mut pool);
    q.insert(0, chain, &mut pool);
    q.insert(100, behind, &mut pool);
    let mut hog = Vec::new();
    while let Ok(m) = pool.alloc(1, 0, Purpose::Control) {
        hog.push(m);
    }
    assert!(!q.evict(hold.id(), &mut pool));
    assert_eq!(q.readable(), 25);
    assert!(q.evict(other.id(), &mut pool));
    assert_eq!(q.out_of_order_bytes(), 0);
    assert!(other.release(0).is_ok());
    drop(hog);
    pool.drain_remote();
    assert!(q.evict(hold.id(), &mut pool));
    assert!(hold.release(0).is_ok());
    q.consume(12, &mut pool);
    assert_eq!(q.front().map(|m| m.as_slice()[0]), Some(8));
    q.clear(&mut pool);
}
