//! A wrapper that limits a device: it places nothing, and can be set to hand over one packet per crossing. It separates
//! the gain of the two features.
//!
//! Frames pass unchanged both ways.

use fulmar::device::placement::DirectPlacement;
use fulmar::device::{Burst, Caps, Counters, Device, Instant, Pool, forward_device};

/// The wrapper.
pub struct Limited {
    inner: Box<dyn Device>,
    caps: Caps,
    one_per_crossing: bool,
    /// The frame that crosses.
    one: Burst,
}

impl Limited {
    /// Wraps `inner`. `one_per_crossing`: it also splits each burst, in both directions, into single packets.
    pub fn new(inner: Box<dyn Device>, one_per_crossing: bool) -> Limited {
        let caps = Caps { places_on_receive: false, ..*inner.caps() };
        Limited { inner, caps, one_per_crossing, one: Burst::with_capacity(1) }
    }
}

impl Device for Limited {
    forward_device!(self => self.inner, except caps, tx_burst, rx_burst, placement);

    fn caps(&self) -> &Caps {
        &self.caps
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

    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        None
    }
}
