//! The locks and atomics of the models of `make loom`. A module with state that threads share takes its locks and
//! atomics from a module `sync`. That module has the machine's or, under `cfg(fulmar_loom)`, these: loom's, with the
//! orders that loom itself does not keep (`atomic`). The models run the code unchanged, in every order of its steps;
//! `tests/orders.rs` runs the models.
//!
//! Empty otherwise.

#![forbid(unsafe_code)]
#![cfg(fulmar_loom)]

pub mod atomic;
pub mod channel;
pub mod kernel;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

pub use loom::sync::{Mutex, MutexGuard};
pub use loom::thread::{JoinHandle, yield_now};
pub use loom::{cell, lazy_static, sync, thread_local};

/// A model and its name.
pub type Model = (&'static str, fn());

/// Lists models by their names.
#[macro_export]
macro_rules! models {
    ($($model:ident),* $(,)?) => {
        &[$((stringify!($model), $model as fn())),*]
    };
}

/// Words: loom's own are too few for a whole stack.
const STACK: usize = 1 << 16;

std::thread_local! {
    static ORDERS: Cell<usize> = const { Cell::new(0) };
}

/// How many orders the models of this thread have tried.
pub fn orders() -> usize {
    ORDERS.get()
}

/// Starts a thread of a model.
pub fn spawn<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    loom::thread::Builder::new().stack_size(STACK).spawn(f).expect("a thread")
}

/// Tries every order in which runnable threads are preempted at most `interruptions` times. `f` must be deterministic,
/// except for the effects of other threads.
pub fn model(interruptions: usize, f: impl Fn() + Sync + Send + 'static) {
    let f = Arc::new(f);
    for is_fence_first in [true, false] {
        atomic::set_fence_first(is_fence_first);
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(interruptions);
        let orders = Arc::new(AtomicUsize::new(0));
        let (f, count) = (Arc::clone(&f), Arc::clone(&orders));
        builder.check(move || {
            let f = Arc::clone(&f);
            count.fetch_add(1, Relaxed);
            spawn(move || f()).join().unwrap();
        });
        ORDERS.set(ORDERS.get() + orders.load(Relaxed));
    }
}
