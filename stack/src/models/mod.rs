//! What the models of `make loom` run on. A room that threads share parts of takes its locks and atomics from
//! a module `sync`: those of the machine, or under `cfg(fulmar_loom)` these, which are loom's, made to keep what
//! loom does not keep by itself (`atomic`). Its models run the code as it is, in every order of its steps;
//! `lab/models` runs the models.

#![forbid(unsafe_code)]

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

/// Tries every order in which threads that could go on are interrupted at most so many times. `f` is to do
/// the same each time, but for what other threads do.
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
