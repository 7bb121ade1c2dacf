use proptest::prelude::*;

use super::*;
use crate::mbuf::testkit::{assert_all_freed, cases, chain, mbuf, pattern, pool};

#[test]
fn a_new_chain_is_empty() {
    let mut pool = pool(1 << 20);
    let mut c = Chain::new();
    assert!(c.is_empty() && c.front().is_none() && c.back().is_none() && c.pop_front().is_none());
    assert!(c.front_mut().is_none() && c.iter().next().is_none() && c.to_vec().is_empty());
    c.trim_front(3, &mut pool);
    c.trim_back(3, &mut pool);
    assert!(c.split_off(0, &mut pool).expect("nothing to cut").is_empty());
    assert_eq!(c.pullup(0, &mut pool), Ok(()));
    assert_eq!(c.pullup(1, &mut pool), Err(NoBuffer));
    assert_eq!(c.copy_to(0, &mut [0; 4]), 0);
    assert_eq!(c.copy_from(0, &[0; 4]), Some(0));
}

#[test]
fn changes_of_a_segment_in_place_update_the_length_of_the_chain() {
    let mut pool = pool(1 << 20);
    let mut c = chain(&mut pool, b"abcdef", 3);
    let mut front = c.front_mut().expect("a segment");
    front.prepend(2).expect("headroom").copy_from_slice(b"xy");
    front.trim_back(1);
    let mut back = c.back_mut().expect("a segment");
    back.append(1).expect("tailroom").copy_from_slice(b"z");
    back.spare_mut()[0] = b'!';
    back.set_len(5);
    back.trim_front(1);
    assert_eq!(back.append_tail(b"??", &mut pool), 2);
    c.back_mut().expect("a segment").truncate(5);
    assert_eq!((c.to_vec().as_slice(), c.len()), (&b"xyabefz!?"[..], 9));
    assert_eq!(c.front_mut().expect("a segment").as_mut_slice().expect("unique").len(), 4);
    pool.free(c);
    assert_all_freed(&mut pool);
}

#[test]
fn prepend_uses_headroom_or_a_new_segment_with_headroom() {
    let mut pool = pool(1 << 20);
    let mut c = chain(&mut pool, b"payload", 7);
    c.prepend(4, &mut pool, Purpose::Control).expect("headroom").copy_from_slice(b"tcp ");
    assert_eq!(c.segs(), 1);
    let mut shared = pool.clone_range(&c, 0, c.len()).expect("a clone");
    shared.prepend(3, &mut pool, Purpose::Control).expect("an mbuf").copy_from_slice(b"ip ");
    assert_eq!(shared.segs(), 2);
    shared.prepend(4, &mut pool, Purpose::Control).expect("an mbuf").copy_from_slice(b"eth ");
    assert_eq!((shared.segs(), shared.to_vec().as_slice()), (2, &b"eth ip tcp payload"[..]));
    assert_eq!(shared.front().map(Mbuf::purpose), Some(Purpose::Control));
    assert!(c.prepend(70_000, &mut pool, Purpose::Control).is_err());
    assert_eq!(c.to_vec(), b"tcp payload");
    drop((c, shared));
    assert_all_freed(&mut pool);
}

#[test]
fn copy_from_writes_nothing_if_a_part_is_shared() {
    let mut pool = pool(1 << 20);
    let mut c = chain(&mut pool, b"abcdefghi", 3);
    let kept = pool.clone_ref(c.iter().nth(2).expect("three"), 0, 1).expect("a clone");
    assert_eq!(c.copy_from(4, b"XXX"), None);
    assert_eq!(c.to_vec(), b"abcdefghi");
    assert_eq!(c.copy_from(2, b"1234"), Some(4));
    assert_eq!(c.to_vec(), b"ab1234ghi");
    drop(kept);
    pool.drain_remote();
    assert_eq!(c.copy_from(7, b"5678"), Some(2));
    assert_eq!(c.to_vec(), b"ab1234g56");
}

#[test]
fn a_chain_with_mbufs_of_two_pools_is_freed_to_both() {
    let (mut a, mut b) = (pool(1 << 20), pool(1 << 20));
    let mixed = |a: &mut Pool, b: &mut Pool| {
        let mut c = Chain::new();
        for i in 0..9 {
            c.push_back(mbuf(if i % 4 < 2 { a } else { b }, &[i]));
        }
        c
    };
    drop(mixed(&mut a, &mut b));
    assert_all_freed(&mut a);
    assert_all_freed(&mut b);
    let c = mixed(&mut a, &mut b);
    a.free(c);
    assert_eq!((a.outstanding(), b.outstanding()), (0, 4));
    assert_all_freed(&mut b);
}

#[test]
fn short_mbufs_collapse_into_the_tailroom_before_them() {
    let mut pool = pool(1 << 20);
    let blocks = |pool: &mut Pool, n: usize| -> Chain {
        let block = |at| {
            let mut m = pool.alloc(1000, 60, Purpose::Receive).expect("a block of 2 KiB");
            m.append(275).expect("room").copy_from_slice(&pattern(275 * at, 275));
            m
        };
        (0..n).map(block).collect()
    };
    let mut c = blocks(&mut pool, 40);
    assert_eq!(c.collapse(|m| m.len() > 275, &mut pool), 0);
    // (2048 - 60) / 275: seven in a block, the first of which stays where it is.
    assert_eq!(c.collapse(|m| m.truesize() > m.len(), &mut pool), 34 * 275);
    assert_eq!((c.segs(), c.storage_bytes()), (6, 6 * 2048));
    assert_eq!(c.to_vec(), pattern(0, 40 * 275));
    pool.free(c);
    // An append does not overwrite bytes that another reference covers.
    let mut c = blocks(&mut pool, 2);
    let whole = pool.clone_range(&c, 0, 275).expect("a descriptor");
    c.front_mut().expect("two").trim_back(5);
    assert_eq!(c.collapse(|_| true, &mut pool), 0);
    assert_eq!(whole.to_vec(), pattern(0, 275));
    pool.free(whole);
    pool.free(c);
    assert_all_freed(&mut pool);
}

#[derive(Clone, Debug)]
enum Op {
    PushBack(usize),
    PushFront(usize),
    Append(usize, usize),
    PopFront,
    TrimFront(usize),
    TrimBack(usize),
    Split(usize, bool),
    CloneRange(usize, usize),
    Pullup(usize),
    CopyFrom(usize, usize),
    CopyTo(usize, usize),
    Prepend(usize),
    Grow(usize, bool),
    Collapse(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0..200usize;
    let at = any::<usize>();
    prop_oneof![
        2 => n.clone().prop_map(Op::PushBack),
        2 => n.clone().prop_map(Op::PushFront),
        2 => (n.clone(), 1..60usize).prop_map(|(n, seg)| Op::Append(n, seg)),
        1 => Just(Op::PopFront),
        1 => n.clone().prop_map(Op::TrimFront),
        1 => n.clone().prop_map(Op::TrimBack),
        2 => (at, any::<bool>()).prop_map(|(at, tail)| Op::Split(at, tail)),
        1 => (at, at).prop_map(|(off, len)| Op::CloneRange(off, len)),
        2 => at.prop_map(Op::Pullup),
        1 => (at, n.clone()).prop_map(|(off, n)| Op::CopyFrom(off, n)),
        1 => (at, n.clone()).prop_map(|(off, n)| Op::CopyTo(off, n)),
        1 => n.clone().prop_map(Op::Prepend),
        1 => (n.clone(), any::<bool>()).prop_map(|(n, front)| Op::Grow(n, front)),
        1 => n.prop_map(Op::Collapse),
    ]
    .boxed()
}

/// A chain with its expected bytes.
struct Model {
    pool: Pool,
    chain: Chain,
    bytes: Vec<u8>,
    fresh: usize,
}

impl Model {
    fn fresh(&mut self, n: usize) -> Vec<u8> {
        self.fresh += 1;
        pattern(self.fresh * 57, n)
    }

    fn step(&mut self, op: &Op) {
        let (chain_now, pool) = (&mut self.chain, &mut self.pool);
        let len = self.bytes.len();
        match *op {
            Op::PopFront => {
                if let Some(m) = chain_now.pop_front() {
                    assert_eq!(m.as_slice(), &self.bytes[..m.len()]);
                    self.bytes.drain(..m.len());
                    pool.free_mbuf(m);
                }
            }
            Op::TrimFront(n) => {
                chain_now.trim_front(n, pool);
                self.bytes.drain(..n.min(len));
            }
            Op::TrimBack(n) => {
                chain_now.trim_back(n, pool);
                self.bytes.truncate(len.saturating_sub(n));
            }
            Op::Split(at, keep_tail) => {
                let at = at % (len + 2);
                let mut tail = chain_now.split_off(at, pool).expect("a descriptor");
                let mut tail_bytes = self.bytes.split_off(at.min(len));
                assert_eq!(tail.to_vec(), tail_bytes);
                assert_eq!(chain_now.to_vec(), self.bytes);
                if keep_tail {
                    core::mem::swap(chain_now, &mut tail);
                    core::mem::swap(&mut self.bytes, &mut tail_bytes);
                }
                pool.free(tail);
            }
            Op::CloneRange(off, n) => {
                let off = off % (len + 1);
                let n = n % (len - off + 1);
                let part = pool.clone_range(chain_now, off, n).expect("descriptors");
                assert_eq!(part.to_vec(), self.bytes[off..off + n]);
                drop(core::mem::replace(chain_now, part));
                self.bytes = self.bytes[off..off + n].to_vec();
            }
            Op::Pullup(n) => {
                let n = n % (len + 1);
                assert_eq!(chain_now.pullup(n, pool), Ok(()));
                let front = chain_now.front().map_or(&[][..], Mbuf::as_slice);
                assert_eq!(&front[..n], &self.bytes[..n]);
                assert_eq!(chain_now.pullup(len + 1, pool), Err(NoBuffer));
            }
            Op::CopyTo(off, n) => {
                let (off, mut out) = (off % (len + 2), vec![0; n]);
                let expected = &self.bytes[off.min(len)..(off + n).min(len).max(off.min(len))];
                let copied = chain_now.copy_to(off, &mut out);
                assert_eq!(&out[..copied], expected);
            }
            Op::Collapse(least) => {
                let (segs, storage) = (chain_now.segs(), chain_now.storage_bytes());
                let copied = chain_now.collapse(|m| m.len() >= least, pool);
                assert!(copied <= len && chain_now.segs() <= segs);
                assert!(chain_now.storage_bytes() <= storage);
            }
            ref op => self.add(op),
        }
    }

    fn add(&mut self, op: &Op) {
        let bytes = self.fresh(200);
        match *op {
            Op::PushBack(n) => {
                let m = mbuf(&mut self.pool, &bytes[..n]);
                self.chain.push_back(m);
                self.bytes.extend_from_slice(&bytes[..n]);
            }
            Op::PushFront(n) => {
                let m = mbuf(&mut self.pool, &bytes[..n]);
                self.chain.push_front(m);
                self.bytes.splice(..0, bytes[..n].iter().copied());
            }
            Op::Append(n, seg) => {
                let other = chain(&mut self.pool, &bytes[..n], seg);
                self.chain.append(other);
                self.bytes.extend_from_slice(&bytes[..n]);
            }
            Op::Prepend(n) => {
                let front = self.chain.prepend(n, &mut self.pool, Purpose::Control);
                front.expect("room").copy_from_slice(&bytes[..n]);
                self.bytes.splice(..0, bytes[..n].iter().copied());
            }
            Op::CopyFrom(off, n) => {
                let off = off % (self.bytes.len() + 2);
                if let Some(n) = self.chain.copy_from(off, &bytes[..n]) {
                    self.bytes.splice(
                        off.min(self.bytes.len())..(off + n).min(self.bytes.len()),
                        bytes[..n].iter().copied(),
                    );
                }
            }
            Op::Grow(n, true) => {
                let grown = self
                    .chain
                    .front_mut()
                    .and_then(|mut m| m.prepend(n).map(|b| b.copy_from_slice(&bytes[..n])));
                if grown.is_some() {
                    self.bytes.splice(..0, bytes[..n].iter().copied());
                }
            }
            Op::Grow(n, false) => {
                let pool = &mut self.pool;
                let n = self.chain.back_mut().map_or(0, |mut m| m.append_tail(&bytes[..n], pool));
                self.bytes.extend_from_slice(&bytes[..n]);
            }
            _ => unreachable!("handled by step"),
        }
    }

    fn check(&self) {
        assert_eq!(self.chain.to_vec(), self.bytes);
        assert_eq!(self.chain.len(), self.bytes.len());
        assert_eq!(self.chain.is_empty(), self.bytes.is_empty());
        assert_eq!(self.chain.segs(), self.chain.iter().count());
        let storage: usize = self.chain.iter().map(Mbuf::storage_bytes).sum();
        assert_eq!(self.chain.storage_bytes(), storage);
        let last = self.chain.iter().last().map(|m| m.as_slice().as_ptr());
        assert_eq!(self.chain.back().map(|m| m.as_slice().as_ptr()), last);
        assert!(self.chain.slices().all(|s| !s.is_empty()));
    }
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn a_chain_agrees_with_a_vector_of_bytes(
        ops in prop::collection::vec(op(), 1..if cfg!(miri) { 40 } else { 200 })
    ) {
        let mut model =
            Model { pool: pool(8 << 20), chain: Chain::new(), bytes: vec![], fresh: 0 };
        for op in &ops {
            model.step(op);
            model.check();
        }
        let Model { mut pool, chain, .. } = model;
        pool.free(chain);
        assert_all_freed(&mut pool);
    }
}

#[test]
fn slices_mut_agree_with_slices_up_to_a_shared_segment() {
    let mut pool = pool(1 << 20);
    let mut c = chain(&mut pool, b"abcdef", 2);
    c.push_back(mbuf(&mut pool, b""));
    let shared = mbuf(&mut pool, b"shared");
    let other = pool.clone_ref(&shared, 0, 3).expect("a descriptor");
    c.push_back(shared);
    c.push_back(mbuf(&mut pool, b"behind"));
    assert_eq!(c.slices_mut().map(|s| s.to_vec()).collect::<Vec<_>>().concat(), b"abcdef");
    c.slices_mut().for_each(|s| s.fill(b'x'));
    assert_eq!(c.to_vec(), b"xxxxxxsharedbehind");
    pool.free_mbuf(other);
    c.slices_mut().for_each(|s| s.fill(b'y'));
    assert_eq!(c.to_vec(), [b'y'; 18]);
    pool.free(c);
    assert_all_freed(&mut pool);
}

#[test]
fn fill_from_pieces_agrees_with_fill_from_one_slice() {
    // Under Miri a pool has fewer descriptors than the smallest segments of 9,000 bytes take.
    const N: usize = if cfg!(miri) { 900 } else { 9_000 };
    let mut pool = pool(1 << 20);
    let bytes = pattern(3, N + 1_000);
    for (segment, piece) in [(7, 3), (9, 1), (600, 4096), (4096, 600), (10_000, 10_000)] {
        for keeps_sums in [false, true] {
            pool.keep_sums(keeps_sums);
            let mut c = chain(&mut pool, &pattern(50, N), segment);
            let filled = c.fill(bytes.chunks(piece).flat_map(|p| [&[][..], p]));
            assert_eq!((filled, c.to_vec()), (Some(N), bytes[..N].to_vec()));
            assert_eq!(c.fill([&b"xy"[..], b"z"]), Some(3));
            assert_eq!(&c.to_vec()[..5], [b'x', b'y', b'z', bytes[3], bytes[4]]);
            let (known, fresh) = (
                c.sum(0..N).sum,
                Chain::from_iter(c.iter().map(|m| {
                    let mut copy = pool.alloc(m.len(), 0, Purpose::Receive).expect("an mbuf");
                    copy.append(m.len()).expect("room").copy_from_slice(m.as_slice());
                    copy
                })),
            );
            assert_eq!(known.finish(), fresh.sum(0..N).sum.finish());
            drop(fresh);
            pool.free(c);
        }
    }
    assert_all_freed(&mut pool);
}
