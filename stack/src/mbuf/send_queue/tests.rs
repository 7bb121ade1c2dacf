use proptest::prelude::*;

use super::*;
use crate::mbuf::testkit::{assert_all_freed, cases, chain, pattern, pool};

#[test]
fn bytes_are_ready_only_when_everything_before_them_is_committed() {
    let mut pool = pool(1 << 20);
    let mut q = SendQueue::new(100);
    let (a, b) = (q.claim(10).expect("space"), q.claim(20).expect("space"));
    assert_eq!((q.ready_end(), q.claimed_end(), q.space()), (0, 30, 70));
    q.commit(b, chain(&mut pool, &pattern(10, 20), 7), &mut pool);
    q.commit(a, chain(&mut pool, &pattern(0, 10), 7), &mut pool);
    assert_eq!((q.ready_end(), q.claimed_end()), (30, 30));
    assert_eq!(q.range(0, 30, &mut pool).expect("clones").to_vec(), pattern(0, 30));
    q.clear(&mut pool);
    assert_all_freed(&mut pool);
}

#[test]
fn a_short_commit_moves_later_claims_down() {
    let mut pool = pool(1 << 20);
    let mut q = SendQueue::new(100);
    let (a, b, c) = (q.claim(50).expect("a"), q.claim(25).expect("b"), q.claim(25).expect("c"));
    assert!(q.claim(1).is_none());
    q.commit(c, chain(&mut pool, b"ccc", 9), &mut pool);
    q.abandon(b, &mut pool);
    q.commit(a, chain(&mut pool, b"aaaaa", 9), &mut pool);
    assert_eq!((q.ready_end(), q.claimed_end(), q.space()), (8, 8, 92));
    assert_eq!(q.range(0, 99, &mut pool).expect("clones").to_vec(), b"aaaaaccc");
}

#[test]
fn at_most_64_claims_are_outstanding() {
    let mut pool = pool(1 << 20);
    let mut q = SendQueue::new(1000);
    let mut claims: Vec<Claim> = (0..MAX_CLAIMS).map(|_| q.claim(1).expect("space")).collect();
    assert!(q.claim(1).is_none());
    let other = chain(&mut pool, b"x", 1);
    assert!(q.append(other, &mut pool).is_err());
    q.abandon(claims.remove(0), &mut pool);
    assert!(q.claim(1).is_some());
}

#[test]
fn a_claim_of_a_cleared_queue_frees_its_chain() {
    let mut pool = pool(1 << 20);
    let mut q = SendQueue::new(100);
    q.append(chain(&mut pool, b"ready", 9), &mut pool).expect("space");
    let (a, b) = (q.claim(10).expect("space"), q.claim(10).expect("space"));
    q.commit(b, chain(&mut pool, b"b", 9), &mut pool);
    q.clear(&mut pool);
    q.commit(a, chain(&mut pool, b"a", 9), &mut pool);
    assert_eq!((q.head(), q.ready_end(), q.claimed_end(), q.storage_bytes()), (5, 5, 5, 0));
    assert_all_freed(&mut pool);
}

#[test]
#[should_panic(expected = "more bytes than were claimed")]
fn a_commit_larger_than_its_claim_panics() {
    let mut pool = pool(1 << 20);
    let mut q = SendQueue::new(100);
    let claim = q.claim(2).expect("space");
    q.commit(claim, chain(&mut pool, b"abc", 9), &mut pool);
}

#[test]
fn small_writes_share_an_mbuf() {
    let mut pool = pool(1 << 20);
    let mut q = SendQueue::new(1000);
    assert_eq!(q.append_small(b"no tail yet", &mut pool), 0);
    q.append(chain(&mut pool, b"first", 9), &mut pool).expect("space");
    let sent = q.range(0, 5, &mut pool).expect("a clone");
    assert_eq!(q.append_small(b" second", &mut pool), 7);
    let claim = q.claim(3).expect("space");
    assert_eq!(q.append_small(b" third", &mut pool), 0, "a claim precedes it");
    q.abandon(claim, &mut pool);
    let both = q.range(0, 12, &mut pool).expect("a clone");
    assert_eq!((both.segs(), both.to_vec().as_slice()), (1, &b"first second"[..]));
    assert_eq!(sent.to_vec(), b"first");
    q.set_limit(13);
    assert_eq!(q.append_small(b" third", &mut pool), 1, "one byte of space");
}

#[test]
fn an_idle_queue_releases_its_memory() {
    let mut pool = pool(8 << 20);
    let mut q = SendQueue::new(1 << 20);
    let pieces = 300;
    let bytes = pattern(0, pieces * (MERGED_BYTES + 1));
    q.append(chain(&mut pool, &bytes, MERGED_BYTES + 1), &mut pool).expect("space");
    assert!(q.ready.capacity() >= pieces);
    q.ack_to(bytes.len() as u64, &mut pool);
    assert!(q.ready.capacity() <= IDLE_CAPACITY);
    assert_all_freed(&mut pool);
}

#[test]
fn a_range_without_descriptors_holds_no_references() {
    let mut pool = pool(1 << 20);
    let mut q = SendQueue::new(10_000);
    q.append(chain(&mut pool, &pattern(0, 6000), 600), &mut pool).expect("space");
    let mut all = Chain::new();
    while let Ok(c) = q.range(0, 600, &mut pool) {
        all.append(c);
    }
    pool.free_mbuf(all.pop_front().expect("many"));
    let out = pool.outstanding();
    assert!(q.range(0, 1800, &mut pool).is_err());
    assert_eq!(pool.outstanding(), out);
    // The control reserve still has memory for a copy.
    assert_eq!(q.copy_range(5, 1800, &mut pool).expect("the reserve").to_vec(), pattern(5, 1800));
}

#[test]
fn small_mbufs_are_merged_into_the_tailroom_and_large_ones_are_not() {
    let mut pool = pool(1 << 20);
    let mut q = SendQueue::new(100_000);
    let bytes = pattern(0, 2 * MERGED_BYTES);
    for piece in bytes.chunks(MERGED_BYTES / 2) {
        let c = pool.alloc_chain(piece.len(), 0, Purpose::Send).map(|mut c| {
            c.copy_from(0, piece);
            c
        });
        q.append(c.expect("a buffer"), &mut pool).expect("space");
    }
    // Each block of the small class is filled.
    assert!(q.ready.len() < 8, "{} segments", q.ready.len());
    assert_eq!(q.range(0, bytes.len(), &mut pool).expect("clones").to_vec(), bytes);
    let before = q.ready.len();
    q.append(chain(&mut pool, &pattern(0, MERGED_BYTES + 1), 600), &mut pool).expect("space");
    assert_eq!(q.ready.len(), before + 1);
    q.clear(&mut pool);
    assert_eq!(q.storage_bytes(), 0);
    assert_all_freed(&mut pool);
}

#[derive(Clone, Debug)]
enum Op {
    Claim(usize),
    Commit(usize, usize, usize),
    Abandon(usize),
    Append(usize, usize),
    AppendSmall(usize),
    Consume(u64),
    Range(u64, usize),
    SetLimit(usize),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0..300usize;
    prop_oneof![
        4 => n.clone().prop_map(Op::Claim),
        4 => (any::<usize>(), any::<usize>(), 1..100usize).prop_map(|(i, n, s)| Op::Commit(i, n, s)),
        1 => any::<usize>().prop_map(Op::Abandon),
        4 => (n.clone(), 1..100usize).prop_map(|(n, seg)| Op::Append(n, seg)),
        4 => n.clone().prop_map(Op::AppendSmall),
        4 => any::<u64>().prop_map(Op::Consume),
        6 => (any::<u64>(), n).prop_map(|(off, n)| Op::Range(off, n)),
        1 => (0..2000usize).prop_map(Op::SetLimit),
        1 => prop_oneof![9 => Just(Op::Consume(0)), 1 => Just(Op::Clear)],
    ]
}

/// A claim of the model: committed with these bytes, or outstanding with this length.
type Pending = Result<Vec<u8>, usize>;

struct Model {
    pool: Pool,
    queue: SendQueue,
    claims: Vec<(Claim, u64)>,
    /// All bytes that became ready, from offset 0.
    ready: Vec<u8>,
    head: usize,
    pending: Vec<(u64, Pending)>,
    limit: usize,
    fresh: usize,
    /// References with their bytes, as a device holds them.
    sent: Vec<(Chain, Vec<u8>)>,
}

impl Model {
    fn fresh(&mut self, n: usize) -> Vec<u8> {
        self.fresh += 1;
        pattern(self.fresh * 91, n)
    }

    fn claimed(&self) -> usize {
        let pending = self.pending.iter().map(|(_, p)| p.as_ref().map_or_else(|&n| n, Vec::len));
        self.ready.len() - self.head + pending.sum::<usize>()
    }

    fn extend_ready(&mut self) {
        while matches!(self.pending.first(), Some((_, Ok(_)))) {
            if let (_, Ok(bytes)) = self.pending.remove(0) {
                self.ready.extend(bytes);
            }
        }
    }

    fn commit(&mut self, i: usize, n: usize, seg: usize) {
        if self.claims.is_empty() {
            return;
        }
        let (claim, id) = self.claims.swap_remove(i % self.claims.len());
        let bytes = self.fresh(n % (claim.len() + 1));
        let c = chain(&mut self.pool, &bytes, seg);
        self.queue.commit(claim, c, &mut self.pool);
        if let Some(p) = self.pending.iter_mut().find(|p| p.0 == id) {
            p.1 = Ok(bytes);
        }
        self.extend_ready();
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Claim(n) => {
                let room = self.limit.saturating_sub(self.claimed());
                let claim = self.queue.claim(n);
                assert_eq!(claim.is_some(), n <= room && self.pending.len() < MAX_CLAIMS);
                if let Some(claim) = claim {
                    self.fresh += 1;
                    self.pending.push((self.fresh as u64, Err(n)));
                    self.claims.push((claim, self.fresh as u64));
                }
            }
            Op::Commit(i, n, seg) => self.commit(i, n, seg),
            Op::Abandon(i) => self.commit(i, 0, 1),
            Op::Append(n, seg) => {
                let (bytes, room) = (self.fresh(n), self.limit.saturating_sub(self.claimed()));
                let c = chain(&mut self.pool, &bytes, seg);
                let taken = self.queue.append(c, &mut self.pool).is_ok();
                assert_eq!(taken, n <= room && self.pending.len() < MAX_CLAIMS);
                if taken {
                    self.pending.push((0, Ok(bytes)));
                    self.extend_ready();
                }
            }
            Op::AppendSmall(n) => {
                let (bytes, room) = (self.fresh(n), self.limit.saturating_sub(self.claimed()));
                let n = self.queue.append_small(&bytes, &mut self.pool);
                assert!(n <= room && (n == 0 || self.pending.is_empty()));
                self.ready.extend_from_slice(&bytes[..n]);
            }
            Op::Consume(off) => {
                let off = off as usize % (self.ready.len() + 2);
                self.queue.ack_to(off as u64, &mut self.pool);
                self.head = self.head.max(off.min(self.ready.len()));
            }
            Op::Range(off, n) => self.range(off as usize, n),
            Op::SetLimit(n) => {
                self.queue.set_limit(n);
                self.limit = n;
            }
            Op::Clear => {
                self.queue.clear(&mut self.pool);
                self.pending.clear();
                self.head = self.ready.len();
            }
        }
    }

    fn range(&mut self, off: usize, n: usize) {
        let off = self.head + off % (self.ready.len() - self.head + 2);
        let c = self.queue.range(off as u64, n, &mut self.pool).expect("descriptors");
        let end = (off + n).min(self.ready.len());
        let expected = self.ready.get(off..end).unwrap_or_default().to_vec();
        assert!(c.iter().all(|m| !m.is_empty()), "an empty fragment");
        let copy = self.queue.copy_range(off as u64, n, &mut self.pool).expect("storage");
        assert_eq!(copy.to_vec(), expected);
        self.pool.free(copy);
        self.sent.push((c, expected));
        if self.sent.len() > 5 {
            let (c, _) = self.sent.remove(0);
            self.pool.free(c);
        }
    }

    fn check(&self) {
        let (q, ready) = (&self.queue, self.ready.len());
        assert_eq!((q.head(), q.ready_end()), (self.head as u64, ready as u64));
        assert_eq!(
            ((q.ready_end - q.head) as usize, q.claimed_bytes()),
            (ready - self.head, self.claimed())
        );
        assert_eq!(q.space(), self.limit.saturating_sub(self.claimed()));
        assert_eq!(q.claimed_end(), q.head() + self.claimed() as u64);
        for (c, bytes) in &self.sent {
            assert_eq!(&c.to_vec(), bytes);
        }
        let held: usize = q.ready.iter().map(|s| s.mbuf.storage_bytes()).sum();
        let waiting = q.slots.iter().map(|s| match s {
            Slot::Committed(c) => c.storage_bytes(),
            Slot::Outstanding => 0,
        });
        assert_eq!(q.storage_bytes(), held + waiting.sum::<usize>());
    }
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn a_send_queue_is_a_stream_with_two_prefixes(
        ops in prop::collection::vec(op(), 1..if cfg!(miri) { 40 } else { 200 })
    ) {
        let limit = 1000;
        let mut model = Model {
            pool: pool(8 << 20),
            queue: SendQueue::new(limit),
            claims: vec![],
            ready: vec![],
            head: 0,
            pending: vec![],
            limit,
            fresh: 0,
            sent: vec![],
        };
        for op in &ops {
            model.step(op);
            model.check();
        }
        let Model { mut pool, mut queue, sent, .. } = model;
        drop(sent);
        queue.clear(&mut pool);
        assert_eq!(queue.storage_bytes(), 0);
        assert_all_freed(&mut pool);
    }
}
