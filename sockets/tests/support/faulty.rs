//! A device with a bug: it panics at the n-th call of one of its methods.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Once};
use std::thread;

use fulmar::device::Device;
use fulmar::device::Pool;
use fulmar::device::{Burst, forward_device};
use fulmar::device::{Counters, Instant};

/// Where it panics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    Tx,
    Reap,
    Rx,
    Arm,
    Disarm,
    Deadline,
    Lost,
    Drop,
}

pub const CALLS: [Call; 7] =
    [Call::Tx, Call::Reap, Call::Rx, Call::Arm, Call::Disarm, Call::Deadline, Call::Lost];

/// When.
#[derive(Default)]
pub struct Bug {
    /// The call, by number, and how many of it are left to go well; 0: it does not panic.
    call: AtomicU32,
    left: AtomicU32,
    /// Only on the stack's own thread.
    is_of_service: AtomicBool,
    has_struck: AtomicBool,
    is_dropped: AtomicBool,
}

const MESSAGE: &str = "a bug of the driver";

impl Bug {
    /// From now on the `n`-th call (from 1) panics; `of_service`: of those by the stack's own thread.
    pub fn set(&self, call: Call, n: u32, of_service: bool) {
        quiet();
        self.call.store(call as u32, Ordering::SeqCst);
        self.is_of_service.store(of_service, Ordering::SeqCst);
        self.left.store(n, Ordering::SeqCst);
    }

    pub fn has_struck(&self) -> bool {
        self.has_struck.load(Ordering::SeqCst)
    }

    pub fn is_dropped(&self) -> bool {
        self.is_dropped.load(Ordering::SeqCst)
    }

    fn at(&self, call: Call) {
        if self.left.load(Ordering::SeqCst) == 0 || self.call.load(Ordering::SeqCst) != call as u32
        {
            return;
        }
        let is_service = thread::current().name().is_some_and(|n| n.starts_with("fulmar-"));
        if self.is_of_service.load(Ordering::SeqCst) && !is_service {
            return;
        }
        if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.has_struck.store(true, Ordering::SeqCst);
            panic!("{MESSAGE}");
        }
    }
}

/// The panics that tests ask for are not printed.
pub fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let said = info.payload();
            let text = said.downcast_ref::<String>().map(String::as_str);
            if text.or(said.downcast_ref::<&str>().copied()) != Some(MESSAGE) {
                others(info);
            }
        }));
    });
}

/// See the module's header.
pub struct Faulty {
    inner: Box<dyn Device>,
    bug: Arc<Bug>,
}

impl Faulty {
    pub fn around(inner: Box<dyn Device>) -> (Box<dyn Device>, Arc<Bug>) {
        let bug = Arc::new(Bug::default());
        (Box::new(Faulty { inner, bug: Arc::clone(&bug) }), bug)
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        self.bug.is_dropped.store(true, Ordering::SeqCst);
        self.bug.at(Call::Drop);
    }
}

impl Device for Faulty {
    forward_device!(self => self.inner, except tx_burst, tx_reap, rx_burst, arm, disarm, next_deadline, lost);
    fn tx_burst(&mut self, n: Instant, p: &mut Pool, b: &mut Burst, c: &mut Counters) -> usize {
        self.bug.at(Call::Tx);
        self.inner.tx_burst(n, p, b, c)
    }
    fn tx_reap(&mut self, now: Instant, pool: &mut Pool) -> usize {
        self.bug.at(Call::Reap);
        self.inner.tx_reap(now, pool)
    }
    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let n = self.inner.rx_burst(now, pool, out, budget, counters);
        self.bug.at(Call::Rx);
        n
    }
    fn arm(&mut self) -> bool {
        self.bug.at(Call::Arm);
        self.inner.arm()
    }
    fn disarm(&mut self) {
        self.bug.at(Call::Disarm);
        self.inner.disarm();
    }
    fn next_deadline(&self) -> Option<Instant> {
        self.bug.at(Call::Deadline);
        self.inner.next_deadline()
    }
    fn lost(&self) -> Option<i32> {
        self.bug.at(Call::Lost);
        self.inner.lost()
    }
}
