//! What taking and freeing a buffer costs by itself: a ready-made mbuf of a pool, and a header with a
//! cluster from the general allocator, as each packet once had.

use std::hint::black_box;
use std::io;

use fulmar::mbuf::{Mbuf, Pool, PoolConfig, Purpose};

use crate::harness::{Ratio, Sample, Scenario};
use crate::sys;

/// Buffers that are out at once: a burst of the largest size.
const OUT: usize = 256;
/// How often that number of buffers is taken and freed in a round.
const TIMES: usize = 32;
/// Room of a buffer: a packet of MTU 1500.
const BYTES: usize = 2048;
/// A header, as large as that of the kernel that the published work is about.
const HEADER_BYTES: usize = 256;

/// A ready-made mbuf taken and freed, ns.
pub const POOL: &str = "pool_ns";
/// A header and a cluster of the general allocator, ns.
pub const HEAP: &str = "heap_ns";
/// Buffers that the general lists had to give.
const SLOW: &str = "slow_buffers";
const NAME: &str = "buffers";

/// Both, one after the other.
pub fn scenario() -> Scenario<'static> {
    Scenario::new(NAME, "a buffer taken and freed", |_| {
        let (pool, slow) = of_pool()?;
        Ok(Sample::of(POOL, pool).with(HEAP, of_heap()).with(SLOW, slow as f64))
    })
    .in_table(super::BY_ITSELF)
}

/// The figures of both.
pub fn ratios() -> [Ratio; 2] {
    let terms = [HEAP, POOL].map(|key| (NAME.to_owned(), key)).to_vec();
    [
        Ratio::new(
            "buffers.heap_vs_pool",
            "taking and freeing, header and cluster from the general allocator ÷ from the pool",
            terms,
            |t| t[0] / t[1],
        )
        .more_is_better(),
        Ratio::value(
            "buffers.slow_path_allocations",
            "buffers that the general lists had to give while 256 at a time were taken and freed",
            SLOW,
            NAME,
        )
        .goals(0.0, 0.0),
    ]
}

/// Nanoseconds, and how many did not come ready-made.
fn of_pool() -> io::Result<(f64, u64)> {
    let mut pool = Pool::new(PoolConfig::with_budget(16 << 20)).map_err(io::Error::other)?;
    let mut mbufs: Vec<Mbuf> = Vec::with_capacity(OUT);
    let mut once = |pool: &mut Pool| {
        mbufs.extend((0..OUT).map_while(|_| pool.alloc(BYTES, 0, Purpose::Receive).ok()));
        mbufs.drain(..).for_each(|m| pool.free_mbuf(black_box(m)));
    };
    once(&mut pool);
    let slow = pool.stats().slow_allocs;
    let ns = per_buffer(|| once(&mut pool));
    Ok((ns, pool.stats().slow_allocs - slow))
}

fn of_heap() -> f64 {
    type Pair = (Box<[u8; HEADER_BYTES]>, Vec<u8>);
    let mut pairs: Vec<Pair> = Vec::with_capacity(OUT);
    let take = |pairs: &mut Vec<Pair>| {
        let pair = |_| (Box::new([0; HEADER_BYTES]), Vec::with_capacity(BYTES));
        pairs.extend((0..OUT).map(pair));
    };
    // Something that stays lies above the first ones: else the allocator might give the memory back
    // to the system each time, and the price would be that of page faults.
    take(&mut pairs);
    let above: Pair = (Box::new([0; HEADER_BYTES]), Vec::with_capacity(BYTES));
    pairs.clear();
    let ns = per_buffer(|| {
        take(&mut pairs);
        pairs.drain(..).for_each(|pair| drop(black_box(pair)));
    });
    drop(black_box(above));
    ns
}

/// Nanoseconds of this thread's CPU.
fn per_buffer(mut once: impl FnMut()) -> f64 {
    let start = sys::thread_cpu();
    (0..TIMES).for_each(|_| once());
    let end = sys::thread_cpu();
    let time = start.and_then(|start| Ok(end?.saturating_sub(start))).unwrap_or_default();
    time.as_nanos() as f64 / (TIMES * OUT) as f64
}
