//! A device that changes frames that it receives.

use fulmar::internals::drivers::link::SimLink;
use fulmar_stack::base::{Counters, Instant};
use fulmar_stack::device::{Burst, Device, forward_device};
use fulmar_stack::mbuf::{Pool, Purpose};

/// An end of a link. `change` is shown each received frame and says whether it has changed it.
pub struct Tamper<F> {
    /// The end itself.
    pub inner: SimLink,
    /// See the type.
    pub change: F,
}

impl<F: FnMut(&mut [u8]) -> bool + Send> Device for Tamper<F> {
    forward_device!(self => self.inner, except rx_burst);
    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let n = self.inner.rx_burst(now, pool, out, budget, counters);
        for _ in 0..n {
            let mut p = out.pop_front().expect("it has come");
            let mut bytes = p.chain.to_vec();
            if (self.change)(&mut bytes) {
                let chain = pool.alloc_chain(bytes.len(), 0, Purpose::Receive).expect("buffers");
                pool.free(std::mem::replace(&mut p.chain, chain));
                p.chain.copy_from(0, &bytes);
            }
            out.push(p).unwrap_or_else(|_| panic!("it was in there"));
        }
        n
    }
}
