//! The remote-free list and the end of a pool in every order of their steps (`make loom`). Only mbufs over
//! memory of others: the blocks of a slab are too many atomics for loom.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::{Chain, External, Mbuf, Pool, PoolConfig, Purpose};

struct Owner(Arc<AtomicUsize>);

impl External for Owner {
    fn bytes(&self) -> &[u8] {
        &[7; 4]
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

struct World {
    pool: Pool,
    released: Arc<AtomicUsize>,
}

impl World {
    fn new() -> World {
        let pool = Pool::new(PoolConfig::with_budget(4 << 20)).expect("a pool");
        World { pool, released: Arc::default() }
    }

    fn mbuf(&mut self) -> Mbuf {
        let owner = Box::new(Owner(Arc::clone(&self.released)));
        self.pool.external(owner, Purpose::Send).expect("a mbuf")
    }

    fn released(&self) -> usize {
        self.released.load(Ordering::SeqCst)
    }
}

#[test]
fn what_threads_drop_while_the_pool_drains_comes_home_once() {
    loom::model(|| {
        let mut w = World::new();
        let dropped = [w.mbuf(), w.mbuf()].map(|m| loom::thread::spawn(move || drop(m)));
        let early = w.pool.drain_remote();
        dropped.into_iter().for_each(|t| t.join().expect("a drop"));
        assert_eq!(early + w.pool.drain_remote(), 2);
        assert_eq!((w.released(), w.pool.outstanding()), (2, 0));
    });
}

#[test]
fn the_last_of_pool_and_mbufs_frees_the_memory_once() {
    loom::model(|| {
        let mut w = World::new();
        let mut chain = Chain::from(w.mbuf());
        chain.push_back(w.mbuf());
        let other = w.mbuf();
        let dropped = [
            loom::thread::spawn(move || drop(chain)),
            loom::thread::spawn(move || {
                assert_eq!(other.as_slice(), [7; 4]);
                drop(other);
            }),
        ];
        let World { pool, released } = w;
        drop(pool);
        dropped.into_iter().for_each(|t| t.join().expect("a drop"));
        assert_eq!(released.load(Ordering::SeqCst), 3);
    });
}

#[test]
fn a_reference_that_is_alone_sees_what_the_others_did() {
    loom::model(|| {
        let mut w = World::new();
        let m = w.mbuf();
        let twin = w.pool.clone_ref(&m, 0, 4).expect("a descriptor");
        // What its reader does with the bytes before it drops them.
        let read = Arc::new(loom::sync::atomic::AtomicUsize::new(0));
        let reads = Arc::clone(&read);
        let reader = loom::thread::spawn(move || {
            reads.store(1, Ordering::Relaxed);
            drop(twin);
        });
        while w.pool.drain_remote() == 0 {
            loom::thread::yield_now();
        }
        assert!(m.is_unique());
        assert_eq!(read.load(Ordering::Relaxed), 1);
        reader.join().expect("a drop");
        drop(m);
        w.pool.drain_remote();
        assert_eq!(w.released(), 1);
    });
}
