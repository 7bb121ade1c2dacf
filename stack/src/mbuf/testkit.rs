//! Helpers of the unit tests.

#![forbid(unsafe_code)]

use proptest::test_runner::Config;

use crate::mbuf::{Chain, Mbuf, Pool, PoolConfig, Purpose};

/// `n` cases, and few under Miri, which is a thousand times slower.
pub(crate) fn cases(n: u32) -> Config {
    let cases = if cfg!(miri) { 3 } else { n };
    Config { cases, failure_persistence: None, ..Config::default() }
}

/// A pool without huge pages.
pub(crate) fn pool(budget_bytes: usize) -> Pool {
    let config = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(budget_bytes) };
    Pool::new(config).expect("a pool")
}

/// An mbuf with these bytes and 16 bytes of headroom.
pub(crate) fn mbuf(pool: &mut Pool, bytes: &[u8]) -> Mbuf {
    let mut m = pool.alloc(bytes.len(), 16, Purpose::Send).expect("an mbuf");
    m.append(bytes.len()).expect("room").copy_from_slice(bytes);
    m
}

/// A chain with these bytes in segments of `seg` bytes.
pub(crate) fn chain(pool: &mut Pool, bytes: &[u8], seg: usize) -> Chain {
    bytes.chunks(seg.max(1)).map(|part| mbuf(pool, part)).collect()
}

/// `n` bytes of a pattern in which neighbouring bytes differ.
pub(crate) fn pattern(seed: usize, n: usize) -> Vec<u8> {
    (seed..seed + n).map(|i| (i.wrapping_mul(167) >> 3) as u8 ^ i as u8).collect()
}

/// Asserts that every mbuf and all storage is freed.
pub(crate) fn assert_all_freed(pool: &mut Pool) {
    pool.drain_remote();
    assert_eq!(pool.outstanding(), 0);
    assert_eq!(pool.stats().used_bytes, [0; 3]);
}
