//! A device that does not cut super-frames, in front of one that does: for comparing a stack with
//! and without segmentation offload (TSO) on the same device.
//!
//! Frames pass unchanged both ways; only what the device says of itself differs. Checksums stay as
//! they were.

use fulmar::base::{Counters, FlowKey, Instant};
use fulmar::mbuf::{Backing, BufId, Pool};
use fulmar::netdev::moderation::Profile;
use fulmar::netdev::{
    Burst, Caps, Device, DeviceStats, LinkState, Peek, PlacementHint, Rooms, Unsupported,
};
use std::os::fd::RawFd;
use std::sync::Arc;

/// The wrapper.
pub struct WithoutTso {
    inner: Box<dyn Device>,
    caps: Caps,
}

impl WithoutTso {
    /// Hides the segmentation offload of `inner`.
    pub fn new(inner: Box<dyn Device>) -> WithoutTso {
        let caps = Caps { tso: None, udp_gso: false, ..*inner.caps() };
        WithoutTso { inner, caps }
    }
}

impl Device for WithoutTso {
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
        self.inner.tx_burst(now, pool, burst, counters)
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
        self.inner.rx_burst(now, pool, out, budget, counters)
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

    fn shows_what_waits(&self) -> bool {
        self.inner.shows_what_waits()
    }

    fn coalesce(&mut self, to: Option<Profile>) -> Result<(), Unsupported> {
        self.inner.coalesce(to)
    }

    fn peek(&self) -> Option<Arc<dyn Peek>> {
        self.inner.peek()
    }

    fn place(&mut self, hint: PlacementHint) -> Result<(), Unsupported> {
        self.inner.place(hint)
    }

    fn unplace(&mut self, flow: &FlowKey) -> Rooms {
        self.inner.unplace(flow)
    }

    fn places_lent(&self) -> bool {
        self.inner.places_lent()
    }

    fn register(&mut self, buffer: BufId) {
        self.inner.register(buffer);
    }

    fn release(&mut self, buffer: BufId) {
        self.inner.release(buffer);
    }

    fn stats(&self) -> DeviceStats {
        self.inner.stats()
    }
}
