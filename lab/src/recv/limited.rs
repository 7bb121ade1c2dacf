//! A device that does less than it could, in front of one that does all: it places nothing, and may
//! be made to hand over one packet per crossing. For telling apart what each of the two pays.
//!
//! Frames pass unchanged both ways.

use fulmar::base::{Counters, FlowKey, Instant};
use fulmar::mbuf::{Backing, Pool};
use fulmar::netdev::{
    Burst, Caps, Device, DeviceStats, LinkState, Peek, PlacementHint, Rooms, Unsupported,
};
use std::os::fd::RawFd;
use std::sync::Arc;

/// The wrapper.
pub struct Limited {
    inner: Box<dyn Device>,
    one_per_crossing: bool,
    /// The frame that crosses.
    one: Burst,
}

impl Limited {
    /// Puts `inner` behind it; `one_per_crossing`: of each burst, both ways, too.
    pub fn new(inner: Box<dyn Device>, one_per_crossing: bool) -> Limited {
        Limited { inner, one_per_crossing, one: Burst::with_capacity(1) }
    }
}

impl Device for Limited {
    fn caps(&self) -> &Caps {
        self.inner.caps()
    }

    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        if !self.one_per_crossing {
            return self.inner.tx_burst(now, pool, burst, counters);
        }
        let mut taken = 0;
        while let Some(packet) = burst.pop_front() {
            // It is empty, and has room for one.
            let _ = self.one.push(packet);
            if self.inner.tx_burst(now, pool, &mut self.one, counters) == 0 {
                if let Some(refused) = self.one.pop_front() {
                    let _ = burst.push_front(refused);
                }
                break;
            }
            taken += 1;
        }
        taken
    }

    fn tx_reap(&mut self, now: Instant, pool: &mut Pool) -> usize {
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
        if !self.one_per_crossing {
            return self.inner.rx_burst(now, pool, out, budget, counters);
        }
        let mut n = 0;
        while n < budget && self.inner.rx_burst(now, pool, out, 1, counters) > 0 {
            n += 1;
        }
        n
    }

    fn arm(&mut self) -> bool {
        self.inner.arm()
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    fn wake_fd(&self) -> Option<RawFd> {
        self.inner.wake_fd()
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.inner.next_deadline()
    }

    fn link_state(&self) -> LinkState {
        self.inner.link_state()
    }

    fn lost(&self) -> Option<i32> {
        self.inner.lost()
    }

    fn wants_tx_wake(&self) -> bool {
        self.inner.wants_tx_wake()
    }

    fn region(&mut self) -> Option<Backing> {
        self.inner.region()
    }

    fn peek(&self) -> Option<Arc<dyn Peek>> {
        self.inner.peek()
    }

    fn place(&mut self, hint: PlacementHint) -> Result<(), Unsupported> {
        drop(hint);
        Err(Unsupported)
    }

    fn unplace(&mut self, _flow: &FlowKey) -> Rooms {
        Rooms::default()
    }

    fn stats(&self) -> DeviceStats {
        self.inner.stats()
    }
}
