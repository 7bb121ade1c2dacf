//! What the tests of this room share.

#![forbid(unsafe_code)]

use proptest::test_runner::Config;

use crate::{Chain, Mbuf, Pool, PoolConfig, Purpose};

/// Fewer cases under the interpreter, which is some thousand times slower.
pub(crate) fn cases(n: u32) -> Config {
    let cases = if cfg!(miri) { 3 } else { n };
    Config { cases, failure_persistence: None, ..Config::default() }
}

/// A pool of small pages.
pub(crate) fn pool(budget_bytes: usize) -> Pool {
    let config = PoolConfig { huge_pages: false, ..PoolConfig::with_budget(budget_bytes) };
    Pool::new(config).expect("a pool")
}

/// A mbuf that holds these bytes, with some headroom.
pub(crate) fn mbuf(pool: &mut Pool, bytes: &[u8]) -> Mbuf {
    let mut m = pool.alloc(bytes.len(), 16, Purpose::Send).expect("a mbuf");
    m.append(bytes.len()).expect("room").copy_from_slice(bytes);
    m
}

/// A chain that holds these bytes in segments of `seg` bytes.
pub(crate) fn chain(pool: &mut Pool, bytes: &[u8], seg: usize) -> Chain {
    bytes.chunks(seg.max(1)).map(|part| mbuf(pool, part)).collect()
}

/// `n` bytes that differ from their neighbours.
pub(crate) fn pattern(seed: usize, n: usize) -> Vec<u8> {
    (seed..seed + n).map(|i| (i.wrapping_mul(167) >> 3) as u8 ^ i as u8).collect()
}

/// Asserts that everything has come back.
pub(crate) fn assert_all_home(pool: &mut Pool) {
    pool.drain_remote();
    assert_eq!(pool.outstanding(), 0);
    assert_eq!(pool.stats().used_bytes, [0; 3]);
}
