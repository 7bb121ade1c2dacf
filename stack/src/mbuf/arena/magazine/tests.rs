use std::vec::Vec;

use super::*;
use crate::mbuf::testkit::{assert_all_freed, pool};
use crate::mbuf::{Mbuf, Pool, PoolStats, Purpose};

fn take(pool: &mut Pool, class: usize, n: usize) -> Vec<Mbuf> {
    let one = |_| pool.alloc(CLASS_BYTES[class], 0, Purpose::Receive).expect("a block");
    (0..n).map(one).collect()
}

fn free(pool: &mut Pool, mbufs: Vec<Mbuf>) {
    mbufs.into_iter().for_each(|m| pool.free_mbuf(m));
}

#[test]
fn the_block_freed_last_is_allocated_first() {
    let mut pool = pool(16 << 20);
    let first = take(&mut pool, 1, 3);
    let at = first.iter().map(|m| m.as_slice().as_ptr()).rev().collect::<Vec<_>>();
    free(&mut pool, first);
    let again = take(&mut pool, 1, 3);
    assert_eq!(again.iter().map(|m| m.as_slice().as_ptr()).collect::<Vec<_>>(), at);
    free(&mut pool, again);
    assert_all_freed(&mut pool);
}

#[test]
fn a_steady_state_never_uses_the_free_lists() {
    let mut pool = pool(64 << 20);
    let round = |pool: &mut Pool| {
        for class in 0..CLASSES {
            let mbufs = take(pool, class, capacity(class) / 2);
            free(pool, mbufs);
        }
    };
    round(&mut pool);
    let warm = pool.stats();
    assert!(warm.slow_allocs > 0 && warm.refills >= warm.slow_allocs);
    (0..5).for_each(|_| round(&mut pool));
    let PoolStats { slow_allocs, refills, empty_allocs, .. } = pool.stats();
    assert_eq!((slow_allocs, refills, empty_allocs), (warm.slow_allocs, warm.refills, 0));
    let taken = (0..CLASSES).map(|class| capacity(class) / 2).sum::<usize>() as u64;
    assert_eq!(pool.stats().fast_allocs - warm.fast_allocs, 5 * taken);
    assert_all_freed(&mut pool);
}

#[test]
fn every_allocation_is_counted_once() {
    let mut pool = pool(if cfg!(miri) { 2 << 20 } else { 8 << 20 });
    let mut all: Vec<Mbuf> = Vec::new();
    while let Ok(m) = pool.alloc(2048, 0, Purpose::Receive) {
        all.push(m);
    }
    let PoolStats { fast_allocs, slow_allocs, empty_allocs, allocs, .. } = pool.stats();
    assert_eq!((fast_allocs + slow_allocs, empty_allocs), (allocs, 1));
    assert_eq!(allocs, all.len() as u64);
    free(&mut pool, all);
    assert_all_freed(&mut pool);
}

#[test]
fn a_full_magazine_unloads_its_older_half_to_the_free_lists() {
    let mut pool = pool(64 << 20);
    let class = CLASSES - 1;
    let mbufs = take(&mut pool, class, capacity(class) + 1);
    let cold = mbufs[0].as_slice().as_ptr();
    free(&mut pool, mbufs);
    let before = pool.stats();
    let mut mbufs = Vec::new();
    while pool.stats().slow_allocs == before.slow_allocs {
        assert!(mbufs.iter().all(|m: &Mbuf| m.as_slice().as_ptr() != cold));
        mbufs.append(&mut take(&mut pool, class, 1));
    }
    let warm = mbufs.len() - 1;
    assert!((capacity(class) / 2..=capacity(class)).contains(&warm), "{warm}");
    free(&mut pool, mbufs);
    assert_all_freed(&mut pool);
}

#[test]
fn remote_frees_are_a_refill_and_not_slow_allocations() {
    let mut pool = pool(64 << 20);
    let class = CLASSES - 1;
    let mbufs = take(&mut pool, class, batch(class));
    let before = pool.stats();
    drop(mbufs);
    let again = take(&mut pool, class, batch(class));
    let after = pool.stats();
    assert_eq!(after.slow_allocs, before.slow_allocs);
    assert_eq!(after.refills, before.refills + 1);
    free(&mut pool, again);
    assert_all_freed(&mut pool);
}

#[test]
fn descriptors_in_magazines_are_used_before_more_than_the_limit_are_made() {
    let mut pool = pool(if cfg!(miri) { 1 << 20 } else { 4 << 20 });
    let most = pool.stats().budget_bytes / 1024;
    let small = take(&mut pool, 0, capacity(0));
    free(&mut pool, small);
    let m = pool.alloc(1, 0, Purpose::Control).expect("a block");
    let mut clones = Vec::new();
    while let Ok(c) = pool.clone_ref(&m, 0, 0) {
        clones.push(c);
    }
    let descs = pool.stats().descriptors;
    assert!(descs <= most.max(if cfg!(miri) { 256 } else { 4096 }), "{descs}");
    free(&mut pool, clones);
    pool.free_mbuf(m);
    assert_all_freed(&mut pool);
}
