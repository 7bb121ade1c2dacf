//! Remote frees and their kick.

use super::*;
use crate::mbuf::Kick;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::Thread;

#[derive(Default)]
struct Count(AtomicUsize);

impl Kick for Count {
    fn kick(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Count {
    fn take(&self) -> usize {
        self.0.swap(0, Ordering::Relaxed)
    }
}

fn counted() -> (Pool, Arc<Count>) {
    let mut pool = Pool::new(PoolConfig::default()).unwrap();
    let count = Arc::new(Count::default());
    pool.set_kick(Arc::clone(&count) as Arc<dyn Kick>);
    (pool, count)
}

#[test]
fn a_remote_free_kicks_once_per_await_and_never_without() {
    let (mut pool, count) = counted();
    let mut mbufs: Vec<Mbuf> = (0..6).map(|_| pool.alloc(100, 0, Purpose::Send).unwrap()).collect();
    drop(mbufs.pop());
    assert_eq!(count.take(), 0, "no kick was requested");
    assert!(!pool.await_remote(), "the list is not empty");
    assert_eq!(pool.drain_remote(), 1);
    assert!(pool.await_remote() && pool.await_remote());
    assert!(!pool.has_remote());
    assert_eq!(pool.drain_remote(), 0, "an awaited list is empty");
    drop(mbufs.pop());
    drop(mbufs.pop());
    assert_eq!(count.take(), 1);
    assert!(pool.has_remote());
    assert_eq!(pool.drain_remote(), 2);
    drop(mbufs.pop());
    assert_eq!(count.take(), 0, "one kick per await");
    pool.free_mbuf(mbufs.pop().unwrap());
    drop(mbufs);
    assert_all_freed(&mut pool);
}

#[test]
fn only_the_first_kick_set_is_called() {
    let (mut pool, first) = counted();
    let second = Arc::new(Count::default());
    pool.set_kick(Arc::clone(&second) as Arc<dyn Kick>);
    let m = pool.alloc(1, 0, Purpose::Send).unwrap();
    assert!(pool.await_remote());
    drop(m);
    assert_eq!((first.take(), second.take()), (1, 0));
}

#[test]
fn a_pool_may_be_dropped_while_it_awaits_a_kick() {
    let (mut pool, count) = counted();
    let m = pool.alloc(1, 0, Purpose::Send).unwrap();
    assert!(pool.await_remote());
    drop(pool);
    drop(m);
    assert_eq!(count.take(), 0);
}

/// Unparks the thread of the pool.
struct Unpark(Thread);

impl Kick for Unpark {
    fn kick(&self) {
        self.0.unpark();
    }
}

#[test]
fn a_pool_that_sleeps_until_a_kick_drains_every_mbuf() {
    let mut pool = Pool::new(PoolConfig::default()).unwrap();
    pool.set_kick(Arc::new(Unpark(std::thread::current())));
    let (tx, rx) = mpsc::channel::<Mbuf>();
    let rx = Arc::new(std::sync::Mutex::new(rx));
    let rounds = if cfg!(miri) { 50 } else { 5000 };
    std::thread::scope(|s| {
        for _ in 0..2 {
            let rx = Arc::clone(&rx);
            s.spawn(move || {
                loop {
                    let next = rx.lock().expect("no panic").recv();
                    let Ok(m) = next else { return };
                    drop(m);
                }
            });
        }
        for _ in 0..rounds {
            for _ in 0..3 {
                tx.send(pool.alloc(100, 0, Purpose::Send).unwrap()).expect("threads");
            }
            // The list is drained only after a kick: a lost kick hangs the test.
            while pool.outstanding() > 0 {
                if pool.await_remote() {
                    std::thread::park();
                }
                pool.drain_remote();
            }
        }
        drop(tx);
    });
    assert_all_freed(&mut pool);
}
