//! A device that does less than it could, in front of one that does all: it places nothing, and may
//! be made to hand over one packet per crossing. For telling apart what each of the two pays.
//!
//! Frames pass unchanged both ways.

use fulmar::base::{Counters, Instant};
use fulmar::mbuf::Pool;
use fulmar::netdev::{Burst, Caps, Device, DirectPlacement, forward_device};

/// The wrapper.
pub struct Limited {
    inner: Box<dyn Device>,
    caps: Caps,
    one_per_crossing: bool,
    /// The frame that crosses.
    one: Burst,
}

impl Limited {
    /// Puts `inner` behind it; `one_per_crossing`: of each burst, both ways, too.
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
