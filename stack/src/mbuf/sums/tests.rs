use proptest::prelude::*;

use super::*;
use crate::mbuf::testkit::{assert_all_freed, cases, pattern, pool};
use crate::mbuf::{Pool, Purpose};

/// Bytes of the longest chains: fewer under Miri, which is slow per byte.
const LARGEST: usize = if cfg!(miri) { 1500 } else { 20_000 };

fn summing_pool() -> Pool {
    let mut pool = pool(8 << 20);
    pool.keep_sums(true);
    pool
}

/// The checksum of bytes that follow a header with non-zero bytes.
fn checksum_of(sum: Sum) -> u16 {
    let mut all = Sum::new();
    all.add_u16(0x1234);
    all.append(sum);
    all.finish()
}

fn model(bytes: &[u8]) -> u16 {
    let mut sum = Sum::new();
    sum.add_bytes(bytes);
    checksum_of(sum)
}

/// Asserts that each known sum, and the sum of the chain, is the sum of its bytes.
fn check(chain: &Chain) {
    let bytes = chain.to_vec();
    assert_eq!(checksum_of(chain.sum(0..bytes.len()).sum), model(&bytes));
    for m in chain.iter() {
        for index in 0..m.storage_bytes() / UNIT_BYTES {
            if let Some((sum, unit)) = m.known_unit(index) {
                assert_eq!(checksum_of(sum.into()), model(unit), "unit {index}");
            }
        }
    }
}

fn write_whole(pool: &mut Pool, n: usize) -> Chain {
    let mut chain = pool.alloc_chain(n, 0, Purpose::Send).unwrap();
    assert_eq!(chain.copy_from(0, &pattern(3, n)), Some(n));
    chain
}

/// An operation on a chain.
#[derive(Clone, Debug)]
enum Op {
    Write(usize, usize, usize),
    TrimFront(usize),
    TrimBack(usize),
    /// A write through `slices_mut`, as by a device or a file read.
    Poke(usize),
    Append(usize),
    AppendTail(usize),
    Clone(usize, usize),
    DropClones,
    Split(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let at = 0..LARGEST;
    let n = prop_oneof![0usize..40, 0..LARGEST / 6];
    prop_oneof![
        4 => (at.clone(), n.clone(), any::<usize>()).prop_map(|(a, n, s)| Op::Write(a, n, s % 251)),
        1 => n.clone().prop_map(Op::TrimFront),
        1 => n.clone().prop_map(Op::TrimBack),
        1 => at.clone().prop_map(Op::Poke),
        1 => n.clone().prop_map(Op::Append),
        2 => n.clone().prop_map(Op::AppendTail),
        2 => (at.clone(), n).prop_map(|(a, n)| Op::Clone(a, n)),
        1 => Just(Op::DropClones),
        1 => at.prop_map(Op::Split),
    ]
}

/// Applies an operation if it is allowed.
fn apply(op: Op, chain: &mut Chain, clones: &mut Vec<(Chain, Vec<u8>)>, pool: &mut Pool) {
    match op {
        Op::Write(at, n, seed) => {
            chain.copy_from(at, &pattern(seed, n));
        }
        Op::TrimFront(n) => chain.trim_front(n, pool),
        Op::TrimBack(n) => chain.trim_back(n, pool),
        Op::Poke(at) => {
            if let Some(bytes) = chain.front_mut().as_mut().and_then(|m| m.as_mut_slice())
                && let Some(byte) = bytes.get_mut(at)
            {
                *byte = !*byte;
            }
        }
        Op::Append(n) => {
            if let Some(mut back) = chain.back_mut() {
                back.append(n);
            }
        }
        Op::AppendTail(n) => {
            if let Some(mut back) = chain.back_mut() {
                back.append_tail(&pattern(9, n), pool);
            }
        }
        Op::Clone(at, n) => {
            let at = at.min(chain.len());
            let n = n.min(chain.len() - at);
            let part = pool.clone_range(chain, at, n).unwrap();
            let bytes = part.to_vec();
            clones.push((part, bytes));
        }
        Op::DropClones => clones.drain(..).for_each(|(c, _)| pool.free(c)),
        Op::Split(at) => {
            let tail = chain.split_off(at, pool).unwrap();
            let bytes = tail.to_vec();
            clones.push((tail, bytes));
        }
    }
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn known_sums_agree_with_the_bytes_after_any_operations(
        bytes in 1usize..LARGEST, ops in proptest::collection::vec(op(), 0..40),
    ) {
        let mut pool = summing_pool();
        let mut chain = write_whole(&mut pool, bytes);
        let mut clones = Vec::new();
        for op in ops {
            apply(op, &mut chain, &mut clones, &mut pool);
            check(&chain);
            for (clone, bytes) in &clones {
                prop_assert_eq!(&clone.to_vec(), bytes);
                check(clone);
            }
        }
        clones.drain(..).for_each(|(c, _)| pool.free(c));
        pool.free(chain);
        assert_all_freed(&mut pool);
    }

    #[test]
    fn the_sum_of_any_range_is_correct_and_reads_few_bytes(
        pieces in proptest::collection::vec(1..LARGEST / 2, 1..6), headroom in 0usize..200,
        range in any::<(usize, usize)>(), keep: bool,
    ) {
        let mut pool = summing_pool();
        pool.keep_sums(keep);
        let total: usize = pieces.iter().sum();
        let all = pattern(11, total);
        let mut chain = pool.alloc_chain(total, headroom, Purpose::Send).unwrap();
        let mut at = 0;
        for piece in pieces {
            chain.copy_from(at, &all[at..at + piece]).unwrap();
            at += piece;
        }
        let (a, b) = (range.0 % (total + 1), range.1 % (total + 1));
        let (from, to) = (a.min(b), a.max(b));
        let summed = chain.sum(from..to);
        prop_assert_eq!(checksum_of(summed.sum), model(&all[from..to]));
        let most = if keep { (chain.segs() + 2) * UNIT_BYTES } else { to - from };
        prop_assert!(summed.read_bytes <= most, "{} of {}", summed.read_bytes, to - from);
        pool.free(chain);
    }
}

#[test]
#[cfg_attr(miri, ignore = "nothing unsafe in it that the others do not show")]
fn segments_of_any_size_read_half_a_unit_on_average() {
    let mut pool = summing_pool();
    let chain = write_whole(&mut pool, 64 << 10);
    let (mut read, mut segments) = (0, 0);
    for from in (0..chain.len()).step_by(1448) {
        read += chain.sum(from..(from + 1448).min(chain.len())).read_bytes;
        segments += 1;
    }
    assert!(read <= segments * UNIT_BYTES * 6 / 10, "{read} bytes for {segments} segments");
    pool.free(chain);
}

#[test]
fn small_sequential_writes_leave_every_unit_summed() {
    let mut pool = summing_pool();
    let bytes = pattern(1, 32 * UNIT_BYTES);
    for piece in [1, 7, 100, 129, 500] {
        let mut chain = pool.alloc_chain(bytes.len(), 0, Purpose::Send).unwrap();
        for (i, part) in bytes.chunks(piece).enumerate() {
            chain.copy_from(i * piece, part).unwrap();
        }
        let summed = chain.sum(0..bytes.len());
        assert_eq!((summed.read_bytes, checksum_of(summed.sum)), (0, model(&bytes)));
        pool.free(chain);
    }
}

#[test]
fn a_reallocated_block_has_no_known_sums() {
    let mut pool = summing_pool();
    for round in 0..3 {
        let chain = write_whole(&mut pool, 4096);
        assert_eq!(chain.sum(0..4096).read_bytes, 0);
        pool.free(chain);
        let purpose = [Purpose::Receive, Purpose::Send, Purpose::Control][round];
        let other = pool.alloc_chain(4096, 0, purpose).unwrap();
        assert_eq!(other.sum(0..4096).read_bytes, 4096);
        check(&other);
        pool.free(other);
    }
}

#[test]
fn append_tail_does_not_write_into_a_unit_with_a_known_sum_of_shared_storage() {
    let mut pool = summing_pool();
    let mut chain = write_whole(&mut pool, 2 * UNIT_BYTES);
    chain.trim_back(10, &mut pool);
    let clone = pool.clone_range(&chain, 0, chain.len()).unwrap();
    let mut back = chain.back_mut().unwrap();
    assert_eq!(back.append_tail(&[7; 5], &mut pool), 0);
    pool.free(clone);
    assert_eq!(chain.back_mut().unwrap().append_tail(&[7; 5], &mut pool), 5);
    check(&chain);
    assert_eq!(chain.sum(0..chain.len()).read_bytes, UNIT_BYTES - 5);
    pool.free(chain);
}

#[test]
fn bytes_of_other_pools_and_external_bytes_are_read() {
    let (mut a, mut b) = (summing_pool(), summing_pool());
    let theirs = write_whole(&mut a, 4096);
    let copied = b.clone_range(&theirs, 0, 4096).unwrap();
    assert_eq!(copied.sum(0..4096).read_bytes, 4096);
    let given = Chain::from(b.external(Box::new(vec![5u8; 300]), Purpose::Send).unwrap());
    assert_eq!(given.sum(0..300).read_bytes, 300);
    check(&copied);
    check(&given);
    b.free(copied);
    b.free(given);
    a.free(theirs);
}
