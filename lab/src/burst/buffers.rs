//! What taking and freeing a buffer costs by itself: a ready-made mbuf of a pool, and a header with a
//! cluster from the general allocator, as each packet once had.

use std::hint::black_box;

use fulmar::mbuf::{Mbuf, Pool, PoolConfig, Purpose};

use super::{Goal, MORE, figure};
use crate::bench::Figure;
use crate::stats::Estimate;
use crate::sys;

/// Buffers that are out at once: a burst of the largest size.
const OUT: usize = 256;
/// Times that so many are taken and freed in a round.
const TIMES: usize = 32;
/// Room of a buffer: a packet of MTU 1500.
const BYTES: usize = 2048;
/// A header, as large as that of the kernel that the published work is about.
const HEADER_BYTES: usize = 256;

/// Nanoseconds per buffer, one value per round.
#[derive(Default)]
pub struct Buffers {
    pool: Vec<f64>,
    heap: Vec<f64>,
    slow: u64,
}

impl Buffers {
    /// Both, once.
    pub fn round(&mut self) {
        let Ok(mut pool) = Pool::new(PoolConfig::with_budget(16 << 20)) else { return };
        let mut mbufs: Vec<Mbuf> = Vec::with_capacity(OUT);
        let mut once = |pool: &mut Pool| {
            mbufs.extend((0..OUT).map_while(|_| pool.alloc(BYTES, 0, Purpose::Receive).ok()));
            mbufs.drain(..).for_each(|m| pool.free_mbuf(black_box(m)));
        };
        once(&mut pool);
        let slow = pool.stats().slow_allocs;
        self.pool.push(per_buffer(|| once(&mut pool)));
        self.slow += pool.stats().slow_allocs - slow;

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
        self.heap.push(per_buffer(|| {
            take(&mut pairs);
            pairs.drain(..).for_each(|pair| drop(black_box(pair)));
        }));
        drop(black_box(above));
    }

    /// A ready-made mbuf taken and freed, ns.
    pub fn pool(&self) -> Option<Estimate> {
        Estimate::of(&self.pool)
    }

    /// A header and a cluster of the general allocator, ns.
    pub fn heap(&self) -> Option<Estimate> {
        Estimate::of(&self.heap)
    }

    pub(super) fn figures(&self) -> Vec<Figure> {
        let pairs = self.heap.iter().zip(&self.pool).map(|(heap, pool)| heap / pool);
        let ratio = Estimate::of(&pairs.collect::<Vec<_>>());
        let slow = (!self.pool.is_empty()).then_some(self.slow as f64);
        let none = Goal { reach_and_aim: Some((0.0, 0.0)), more_is_better: false };
        let all = vec![
            figure(
                "buffers.heap_vs_pool",
                "taking and freeing, header and cluster from the general allocator ÷ from the pool",
                ratio,
                MORE,
            ),
            figure(
                "buffers.slow_path_allocations",
                "buffers that the general lists had to give while 256 at a time were taken and freed",
                slow.and_then(|s| Estimate::of(&[s])),
                none,
            ),
        ];
        all.into_iter().filter(|f| f.estimate.is_some()).collect()
    }
}

/// Nanoseconds of this thread's CPU.
fn per_buffer(mut once: impl FnMut()) -> f64 {
    let start = sys::thread_cpu();
    (0..TIMES).for_each(|_| once());
    let end = sys::thread_cpu();
    let time = start.and_then(|start| Ok(end?.saturating_sub(start))).unwrap_or_default();
    time.as_nanos() as f64 / (TIMES * OUT) as f64
}
