//! Loom models of the remote-free list and of the drop of a pool, in all interleavings (`make loom`). They
//! use external storage only, since the blocks of a slab are too many atomics for loom.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::models::sync::atomic::AtomicUsize as Modelled;
use crate::models::{Model, model, spawn};

use crate::mbuf::{Chain, External, Kick, Mbuf, Pool, PoolConfig, Purpose};

/// The models of this room.
pub const MODELS: &[Model] = crate::models![
    mbufs_dropped_while_the_pool_drains_are_freed_once,
    the_last_of_pool_and_mbufs_frees_the_memory_once,
    a_unique_reference_sees_what_dropped_references_did,
    a_kick_follows_unless_the_remote_free_list_is_not_empty,
];

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
        self.pool.external(owner, Purpose::Send).expect("an mbuf")
    }

    fn released(&self) -> usize {
        self.released.load(Ordering::SeqCst)
    }
}

fn mbufs_dropped_while_the_pool_drains_are_freed_once() {
    model(3, || {
        let mut w = World::new();
        let dropped = [w.mbuf(), w.mbuf()].map(|m| spawn(move || drop(m)));
        let early = w.pool.drain_remote();
        dropped.into_iter().for_each(|t| t.join().expect("a drop"));
        assert_eq!(early + w.pool.drain_remote(), 2);
        assert_eq!((w.released(), w.pool.outstanding()), (2, 0));
    });
}

fn the_last_of_pool_and_mbufs_frees_the_memory_once() {
    model(3, || {
        let mut w = World::new();
        let mut chain = Chain::from(w.mbuf());
        chain.push_back(w.mbuf());
        let other = w.mbuf();
        let dropped = [
            spawn(move || drop(chain)),
            spawn(move || {
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

fn a_unique_reference_sees_what_dropped_references_did() {
    model(3, || {
        let mut w = World::new();
        let m = w.mbuf();
        let twin = w.pool.clone_ref(&m, 0, 4).expect("a descriptor");
        // Stands for the reads of the bytes before the drop.
        let read = Arc::new(Modelled::new(0));
        let reads = Arc::clone(&read);
        let reader = spawn(move || {
            reads.store(1, Ordering::Relaxed);
            drop(twin);
        });
        let holder = spawn(move || {
            if m.is_unique() {
                assert_eq!(read.load(Ordering::Relaxed), 1);
            }
            m
        });
        w.pool.drain_remote();
        let m = holder.join().expect("a holder");
        reader.join().expect("a drop");
        w.pool.drain_remote();
        assert!(m.is_unique());
        drop(m);
        w.pool.drain_remote();
        assert_eq!(w.released(), 1);
    });
}

struct Kicks(Arc<AtomicUsize>);

impl Kick for Kicks {
    fn kick(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn a_kick_follows_unless_the_remote_free_list_is_not_empty() {
    model(3, || {
        let mut w = World::new();
        let kicks = Arc::new(AtomicUsize::new(0));
        let dropped = [w.mbuf(), w.mbuf()].map(|m| spawn(move || drop(m)));
        w.pool.set_kick(Arc::new(Kicks(Arc::clone(&kicks))));
        let is_awaited = w.pool.await_remote();
        dropped.into_iter().for_each(|t| t.join().expect("a drop"));
        assert_eq!(kicks.load(Ordering::Relaxed), usize::from(is_awaited));
        assert_eq!(w.pool.drain_remote(), 2);
    });
}
