//! The device as the posted buffers of a connection see it.

use crate::base::{Counter, Counters, FlowKey, SeqNum};
use crate::device::{Device, WritableRanges};
use crate::mbuf::{BufId, WritableRange};
use crate::socket::posted::Placer;

/// The device, for one flow.
pub(in crate::shard) struct FlowPlacer<'a> {
    pub(in crate::shard) device: &'a mut dyn Device,
    pub(in crate::shard) counters: &'a mut Counters,
    pub(in crate::shard) flow: FlowKey,
    /// Sequence number of the first byte of the stream.
    pub(in crate::shard) first: SeqNum,
}

impl Placer for FlowPlacer<'_> {
    fn place(&mut self, next: u64, first: WritableRange, second: Option<WritableRange>) -> bool {
        let mut ranges = WritableRanges::default();
        for range in [Some(first), second].into_iter().flatten() {
            // Two always fit.
            drop(ranges.push(range));
        }
        self.counters.count(Counter::PlaceHints);
        let next_seq = self.first + next as u32;
        let placement = self.device.placement();
        placement.is_some_and(|p| p.place(self.flow, next_seq, ranges).is_ok())
    }

    fn place_next(&mut self, second: WritableRange) -> bool {
        self.counters.count(Counter::PlaceHints);
        let placement = self.device.placement();
        placement.is_some_and(|p| p.place_next(&self.flow, second).is_ok())
    }

    fn revoke(&mut self) {
        drop(self.device.placement().map(|p| p.revoke(&self.flow)));
    }

    fn register(&mut self, buffer: BufId) {
        self.counters.count(Counter::PlaceRegistrations);
        if let Some(placement) = self.device.placement() {
            placement.register(buffer);
        }
    }

    fn release(&mut self, buffer: BufId) {
        if let Some(placement) = self.device.placement() {
            placement.release(buffer);
        }
    }

    fn has_syscall_per_frame(&self) -> bool {
        // Such a device copies on receive, so placement saves a copy for each call.
        self.device.caps().places_on_receive
    }
}

/// For buffers of closed connections, which the device no longer has.
pub(in crate::shard) struct NoDevice;

impl Placer for NoDevice {
    fn place(&mut self, _: u64, _: WritableRange, _: Option<WritableRange>) -> bool {
        false
    }
    fn place_next(&mut self, _: WritableRange) -> bool {
        false
    }
    fn revoke(&mut self) {}
    fn register(&mut self, _: BufId) {}
    fn release(&mut self, _: BufId) {}
    fn has_syscall_per_frame(&self) -> bool {
        false
    }
}
