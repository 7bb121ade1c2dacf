//! The cost of pool and queue operations on this machine. Ignored, since figures need a quiet machine:
//! `cargo test --release -p fulmar-mbuf --test timing -- --ignored --nocapture`.

use std::time::Instant;

use fulmar_mbuf::{Chain, Pool, PoolConfig, Purpose, RecvQueue, SendQueue};

/// The minimum of several rounds, in nanoseconds per call: other load only makes a round longer.
fn best_ns(mut f: impl FnMut()) -> f64 {
    let calls = 200_000;
    let round = |f: &mut dyn FnMut()| {
        let start = Instant::now();
        (0..calls).for_each(|_| f());
        start.elapsed().as_nanos() as f64 / f64::from(calls)
    };
    (0..20).map(|_| round(&mut f)).fold(f64::INFINITY, f64::min)
}

fn pool() -> Pool {
    Pool::new(PoolConfig::default()).expect("a pool")
}

fn filled(pool: &mut Pool, bytes: usize) -> Chain {
    pool.alloc_chain(bytes, 0, Purpose::Send).expect("a chain")
}

#[test]
#[ignore = "a measurement"]
fn a_64_kib_mbuf_is_allocated_and_freed_in_15_ns() {
    let mut pool = pool();
    let ns = best_ns(|| {
        let m = pool.alloc(65536, 0, Purpose::Send).expect("an mbuf");
        pool.free_mbuf(std::hint::black_box(m));
    });
    println!("alloc + free, 64 KiB: {ns:.1} ns");
    assert!(ns < 15.0);
}

#[test]
#[ignore = "a measurement"]
fn a_reference_is_made_and_freed_in_10_ns() {
    let mut pool = pool();
    let m = pool.alloc(65536, 0, Purpose::Send).expect("an mbuf");
    let ns = best_ns(|| {
        let part = pool.clone_ref(&m, 0, 0).expect("a descriptor");
        pool.free_mbuf(std::hint::black_box(part));
    });
    println!("clone_ref + free: {ns:.1} ns");
    assert!(ns < 10.0);
}

/// A send queue of 2 MiB in mbufs of 64 KiB.
fn full_queue(pool: &mut Pool) -> SendQueue {
    let mut q = SendQueue::new(4 << 20);
    for _ in 0..32 {
        let c = filled(pool, 65536);
        q.append(c, pool).expect("space");
    }
    q
}

#[test]
#[ignore = "a measurement"]
fn a_range_of_64_kib_is_referenced_and_freed_in_40_ns() {
    let mut pool = pool();
    let q = full_queue(&mut pool);
    for (what, first, limit_ns) in [("one mbuf", 0, 40.0), ("two mbufs", 100, 60.0)] {
        let mut off = first;
        let ns = best_ns(|| {
            off = if off < 30 * 65536 { off + 65536 } else { first };
            let c = q.range(off, 65536, &mut pool).expect("descriptors");
            pool.free(std::hint::black_box(c));
        });
        println!("SendQueue::range of 64 KiB in {what} + free: {ns:.1} ns");
        assert!(ns < limit_ns);
    }
}

#[test]
#[ignore = "a measurement"]
fn a_chain_is_allocated_and_freed() {
    let mut pool = pool();
    for bytes in [1448, 65536, 1 << 20] {
        let ns = best_ns(|| {
            let c = filled(&mut pool, bytes);
            pool.free(std::hint::black_box(c));
        });
        println!("alloc_chain + free, {bytes} bytes: {ns:.1} ns");
    }
}

#[test]
#[ignore = "a measurement"]
fn a_write_passes_through_the_send_queue() {
    let mut pool = pool();
    let mut q = SendQueue::new(1 << 20);
    let ns = best_ns(|| {
        let claim = q.claim(65536).expect("space");
        let c = filled(&mut pool, 65536);
        q.commit(claim, c, &mut pool);
        let sent = q.range(q.head(), 65536, &mut pool).expect("descriptors");
        pool.free(std::hint::black_box(sent));
        q.ack_to(q.ready_end(), &mut pool);
    });
    println!("claim + alloc_chain + commit + range + free + ack_to, 64 KiB: {ns:.1} ns");
}

#[test]
#[ignore = "a measurement"]
fn a_segment_in_order_passes_through_the_receive_queue() {
    let mut pool = pool();
    let mut q = RecvQueue::new();
    let ns = best_ns(|| {
        let c = filled(&mut pool, 1448);
        q.insert(q.next(), c, &mut pool);
        let c = q.take(1 << 20, &mut pool);
        pool.free(std::hint::black_box(c));
    });
    println!("alloc_chain + insert in order + take + free: {ns:.1} ns");
}

#[test]
#[ignore = "a measurement"]
fn a_remotely_freed_mbuf_is_drained() {
    let mut pool = pool();
    let ns = best_ns(|| {
        let m = pool.alloc(1448, 0, Purpose::Send).expect("an mbuf");
        drop(std::hint::black_box(m));
        pool.drain_remote();
    });
    println!("alloc + drop + drain_remote: {ns:.1} ns");
}
