//! A device that puts payload into posted buffers, and says that it does so for single reads too: a copy, as
//! it crosses. It may be told to keep what it has placed, as one that is not true to its word, or to fail.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use fulmar::Device;
use fulmar::base::{Counters, FlowKey, Instant, SeqNum};
use fulmar::mbuf::Pool;
use fulmar::netdev::{
    Burst, Caps, DirectPlacement, Packet, Unsupported, WritableRanges, forward_device,
};
use fulmar_testbed::placing::{Expected, segment};

/// What it is to do, and what it has done.
#[derive(Default)]
pub struct Orders {
    /// What was placed is kept until this is false again.
    pub keeps: AtomicBool,
    /// The next look of this thread at the device panics.
    pub panics: Mutex<Option<ThreadId>>,
    /// Frames that were placed.
    pub placed: AtomicUsize,
    /// Frames that it keeps.
    pub kept: AtomicUsize,
    /// Flows of which it has rooms.
    pub flows: AtomicUsize,
}

/// See the module's header.
pub struct Landing {
    inner: Box<dyn Device>,
    caps: Caps,
    expected: Vec<Expected>,
    fresh: Burst,
    kept: VecDeque<Packet>,
    orders: Arc<Orders>,
}

impl Landing {
    pub fn new(inner: Box<dyn Device>) -> (Landing, Arc<Orders>) {
        let orders = Arc::new(Orders::default());
        let (fresh, kept) = (Burst::with_capacity(64), VecDeque::new());
        let theirs = Arc::clone(&orders);
        let caps = Caps { places_on_receive: true, ..*inner.caps() };
        (Landing { inner, caps, expected: Vec::new(), fresh, kept, orders: theirs }, orders)
    }

    /// The frame with its payload in the rooms of its flow, if it is the next one; whether it is so.
    fn land(&mut self, p: Packet, pool: &mut Pool) -> (Packet, bool) {
        let frame = p.chain.to_vec();
        let Some((flow, seq, headers)) = segment(&frame) else { return (p, false) };
        let is_it = |e: &&mut Expected| e.is_next(flow, seq) && !e.rooms.is_empty();
        let Some(e) = self.expected.iter_mut().find(is_it) else { return (p, false) };
        let chain = e.place(&frame, headers, pool);
        pool.free(p.chain);
        self.orders.placed.fetch_add(1, Ordering::Relaxed);
        (Packet { chain, offload: p.offload }, true)
    }

    fn count_flows(&self) {
        self.orders.flows.store(self.expected.len(), Ordering::Relaxed);
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.expected.clear();
        self.count_flows();
    }
}

impl Device for Landing {
    forward_device!(self => self.inner, except caps, rx_burst, placement);
    fn caps(&self) -> &Caps {
        &self.caps
    }
    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let told = self.orders.panics.lock().unwrap().take_if(|t| *t == thread::current().id());
        assert!(told.is_none(), "the device was told to fail");
        let before = out.len();
        let keeps = self.orders.keeps.load(Ordering::Relaxed);
        let budget = budget.min(out.space()).min(32);
        while !keeps
            && out.len() - before < budget
            && let Some(p) = self.kept.pop_front()
        {
            out.push(p).expect("there is room");
        }
        let left = budget - (out.len() - before);
        self.inner.rx_burst(now, pool, &mut self.fresh, left, counters);
        while let Some(p) = self.fresh.pop_front() {
            match self.land(p, pool) {
                (p, true) if keeps => self.kept.push_back(p),
                (p, _) => out.push(p).expect("there is room"),
            }
        }
        self.orders.kept.store(self.kept.len(), Ordering::Relaxed);
        out.len() - before
    }
    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        Some(self)
    }
}

impl DirectPlacement for Landing {
    fn place(
        &mut self,
        flow: FlowKey,
        next: SeqNum,
        rooms: WritableRanges,
    ) -> Result<(), Unsupported> {
        drop(self.revoke(&flow));
        self.expected.push(Expected { flow, next, rooms });
        self.count_flows();
        Ok(())
    }
    fn revoke(&mut self, flow: &FlowKey) -> WritableRanges {
        let at = self.expected.iter().position(|e| e.flow == *flow);
        let rooms = at.map_or_else(WritableRanges::default, |at| self.expected.remove(at).rooms);
        self.count_flows();
        rooms
    }
}
