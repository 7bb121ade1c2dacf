//! Direct data placement from the other process's memory into posted buffers: one copy, then the slot is
//! returned.
//!
//! The headers were read once into private memory and validated there, as for every frame; they alone decide
//! where the payload is written.

use fulmar_stack::base::{Counter, Counters, FlowKey, SeqNum};
use fulmar_stack::device::{DeviceStats, DirectPlacement, Unsupported, WritableRanges};
use fulmar_stack::mbuf::{Chain, Pool, Purpose, WritableRange};

use super::device::{Reader, copy};
use super::layout::Record;
use super::loans::Loans;
use crate::drivers::placing::Outcome;
use crate::drivers::placing::flows::{self, Flow, Flows, Segment};

/// The flows with posted buffers.
pub(super) struct Places {
    flows: Flows,
    /// Whether any flow was ever placed.
    is_used: bool,
    /// A posted buffer became full: its owner is notified before more frames are received.
    is_full: bool,
    outcome: Outcome,
}

impl DirectPlacement for Places {
    fn place(
        &mut self,
        flow: FlowKey,
        next_seq: SeqNum,
        ranges: WritableRanges,
    ) -> Result<(), Unsupported> {
        self.flows.set(flow, next_seq, ranges).ok_or(Unsupported)?;
        self.is_used = true;
        Ok(())
    }

    fn place_next(&mut self, flow: &FlowKey, range: WritableRange) -> Result<(), Unsupported> {
        self.flows.add(flow, range).map(drop).ok_or(Unsupported)
    }

    fn revoke(&mut self, flow: &FlowKey) -> WritableRanges {
        self.flows.clear(flow)
    }
}

impl Places {
    pub(super) fn new() -> Places {
        let outcome = Outcome::default();
        Places { flows: Flows::default(), is_used: false, is_full: false, outcome }
    }

    /// Whether no flow has posted ranges.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_used
    }

    /// Whether a posted buffer became full since the last call.
    pub(super) fn take_full(&mut self) -> bool {
        std::mem::take(&mut self.is_full)
    }

    pub(super) fn count(&mut self, counters: &mut Counters, stats: &mut DeviceStats) {
        let outcome = std::mem::take(&mut self.outcome);
        counters.add(Counter::CopiedBytes, outcome.hit_bytes);
        outcome.count(counters, stats);
    }

    /// Copies a frame into the ranges of its flow and returns its slot, if it is the next segment of the flow and the
    /// pool has buffers for the rest of it. `front`: the first bytes of the frame, copied; headers are not read again.
    pub(super) fn place_frame(
        &mut self,
        record: &Record,
        front: &[u8],
        loans: &Loans,
        pool: &mut Pool,
    ) -> Option<Chain> {
        if self.is_idle() {
            return None;
        }
        let segment = Segment::of(front, record.len()).filter(|s| s.payload_bytes > 0)?;
        let slot = self.flows.find(&segment)?;
        let flow = self.flows.get_mut(slot)?;
        if !flow.expects(&segment) {
            self.outcome.miss(0);
            return None;
        }
        let fits = flow.ranges.bytes().min(segment.payload_bytes);
        let (mut chain, rest) = copy_rest(record, front, &segment, fits, loans, pool)?;
        let mut from = Reader::new(record, segment.header_bytes);
        for part in flows::parts(&mut flow.ranges, fits) {
            from.copy(loans, part);
        }
        let (placed, is_full) = fill(flow, &segment, pool)?;
        chain.append(placed);
        chain.append(rest);
        self.is_full |= is_full;
        self.outcome.hit(fits);
        loans.send_back(record.slot);
        Some(chain)
    }
}

/// Copies the headers of a frame, and the payload that does not fit the ranges, into the pool.
fn copy_rest(
    record: &Record,
    front: &[u8],
    s: &Segment,
    fits: usize,
    loans: &Loans,
    pool: &mut Pool,
) -> Option<(Chain, Chain)> {
    let head = pool.alloc(s.header_bytes, 0, Purpose::Receive);
    let mut head = head.or_else(|_| pool.alloc(s.header_bytes, 0, Purpose::Control)).ok()?;
    head.append(s.header_bytes)?.copy_from_slice(front.get(..s.header_bytes)?);
    let head = Chain::from(head);
    if fits == s.payload_bytes {
        return Some((head, Chain::new()));
    }
    match copy(record, s.header_bytes + fits..record.len(), loans, pool) {
        Some(rest) => Some((head, rest)),
        None => {
            pool.free(head);
            None
        }
    }
}

/// The bytes written into the ranges, as a chain. `None`: the pool has no descriptor; the frame is then copied as a
/// whole, and nothing is placed until the stack posts again.
fn fill(flow: &mut Flow, s: &Segment, pool: &mut Pool) -> Option<(Chain, bool)> {
    let filling = flow.fill(s);
    let is_full = filling.is_full;
    match filling.into_chain(pool) {
        Ok(chain) => Some((chain, is_full)),
        Err(_) => {
            flow.lose();
            None
        }
    }
}

#[cfg(test)]
mod tests;
