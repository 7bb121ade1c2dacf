//! Direct data placement on devices that scatter each read into given buffers: the flow of the next frame
//! is predicted, and the read is a transaction.
//!
//! ```text
//!             expected headers      range A         range B          overflow
//!   frame   | headers of the flow | payload ─────────────────────────────────── |
//!           +---------------------+-----------+--------------------+-----------+
//!   read to | small (a pool's)    | rest of A | rest of B          | large     |
//! ```
//!
//! *Begin*: `Placer::prediction` predicts the flow of the next frame; the frame is read into the
//! posted ranges of that flow and the `BufferPair`. *Commit*: the frame is the next segment of that flow,
//! with headers of the expected length; the bytes in the ranges become the payload of the packet. *Roll
//! back*: the bytes in the ranges are copied out (to the ranges of their own flow, or to a pool's buffers)
//! and wiped, before the next read and before the owner of the ranges can see them. The packet handed up
//! is the same in either case.
//!
//! Without a prediction the next segment of a flow with posted ranges is copied there: one copy, as for
//! any receiver.
//!
//! **Trust.** Between the read and the end of `Placer::take` bytes of one flow may be in the posted
//! buffer of another. The owner of the buffer has no access to it then; but registered memory may be
//! mapped by another process. Where owners of posted buffers do not trust each other, prediction must be
//! disabled (`predict` of the device).
//!
//! Bounds: [`flows::MAX_FLOWS`] flows, two ranges each. Cost: one parse of the headers per frame, and
//! one descriptor per placed frame; none while no flow has posted ranges.

#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

pub mod flows;
mod predict;
pub mod scatter;
#[cfg(test)]
pub(crate) mod tests;

use fulmar_stack::base::{Counter, Counters, DropReason, FlowKey, Offload, SeqNum};
use fulmar_stack::device::{DeviceStats, DirectPlacement, Packet, Unsupported, WritableRanges};
use fulmar_stack::mbuf::{Chain, NoBuffer, Pool, Purpose, WritableRange};
use fulmar_stack::wire::eth;

use crate::drivers::buffer_pair::{BufferPair, SMALL_BYTES};
use crate::drivers::{big_tcp, vnet};
use flows::{Flow, Flows, Place, Segment};
use predict::Predictor;
use scatter::{Landed, PARTS, wipe};

/// Bytes of a frame's front: Ethernet, IPv4 and TCP headers with all options, or IPv6 with an extension.
pub(crate) const FRONT_BYTES: usize = 160;

/// Above this payload copying a frame costs more than a system call of its own.
const LONG_BYTES: usize = 8192;

/// The longest frame that a device hands up, with a VLAN tag.
const MAX_FRAME_BYTES: usize = 14 + 4 + 65_535;

/// The predicted flow of the next read, and its header length in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Prediction {
    slot: usize,
    header_bytes: usize,
}

/// Counts since the last `Placer::take_outcome`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// Frames whose payload was read into its own flow's ranges.
    pub hits: u64,
    /// Payload bytes of these frames.
    pub hit_bytes: u64,
    /// Frames of flows with posted ranges that were read elsewhere, and frames read into the ranges of
    /// another flow.
    pub misses: u64,
    /// Bytes copied because of misses.
    pub moved_bytes: u64,
}

impl Outcome {
    /// Adds the counts to the device's counts.
    pub fn count(self, counters: &mut Counters, stats: &mut DeviceStats) {
        let list = [
            (Counter::PlacedFrames, self.hits, &mut stats.place_hits),
            (Counter::PlacedBytes, self.hit_bytes, &mut stats.placed_bytes),
            (Counter::PlaceMisses, self.misses, &mut stats.place_misses),
            (Counter::PlaceMissBytes, self.moved_bytes, &mut stats.place_miss_bytes),
        ];
        for (counter, n, stat) in list {
            counters.add(counter, n);
            *stat = stat.saturating_add(n);
        }
    }

    /// Counts a frame with `bytes` bytes of payload that landed in the posted buffer of its flow.
    pub fn hit(&mut self, bytes: usize) {
        self.hits = self.hits.saturating_add(1);
        self.hit_bytes = self.hit_bytes.saturating_add(bytes as u64);
    }

    /// Counts a frame that landed elsewhere, and the bytes that were copied because of it.
    pub fn miss(&mut self, moved_bytes: usize) {
        self.misses = self.misses.saturating_add(1);
        self.moved_bytes = self.moved_bytes.saturating_add(moved_bytes as u64);
    }
}

/// See the module's header.
pub(crate) struct Placer {
    flows: Flows,
    predictor: Predictor,
    /// Whether frames may be read into the ranges of a predicted flow.
    is_predicting: bool,
    /// Whether any flow may have posted ranges.
    is_active: bool,
    /// A posted buffer became full: its owner is notified before more frames are read.
    is_full: bool,
    outcome: Outcome,
}

impl DirectPlacement for Placer {
    fn place(
        &mut self,
        flow: FlowKey,
        next_seq: SeqNum,
        ranges: WritableRanges,
    ) -> Result<(), Unsupported> {
        let place = self.flows.set(flow, next_seq, ranges);
        self.placed(place)
    }

    fn place_next(&mut self, flow: &FlowKey, range: WritableRange) -> Result<(), Unsupported> {
        let place = self.flows.add(flow, range);
        self.placed(place)
    }

    fn revoke(&mut self, flow: &FlowKey) -> WritableRanges {
        let ranges = self.flows.clear(flow);
        self.is_active = self.flows.has_ranges();
        ranges
    }
}

impl Placer {
    pub(crate) fn new(is_predicting: bool) -> Placer {
        Placer {
            flows: Flows::default(),
            predictor: Predictor::new(),
            is_predicting,
            is_active: false,
            is_full: false,
            outcome: Outcome::default(),
        }
    }

    fn placed(&mut self, place: Option<Place>) -> Result<(), Unsupported> {
        let place = place.ok_or(Unsupported)?;
        if place.is_new {
            self.predictor.forget(place.slot);
        }
        self.predictor.placed(place.slot);
        self.is_active = true;
        Ok(())
    }

    /// Whether no flow has posted ranges: frames need not be inspected.
    pub(crate) fn is_idle(&self) -> bool {
        !self.is_active
    }

    /// Whether a posted buffer became full since the last call.
    pub(crate) fn take_full(&mut self) -> bool {
        std::mem::take(&mut self.is_full)
    }

    /// The counts since the last call.
    pub(crate) fn take_outcome(&mut self) -> Outcome {
        std::mem::take(&mut self.outcome)
    }

    /// Predicts the flow of the next frame. `None`: no prediction, or predictions do not pay.
    pub(crate) fn prediction(&self) -> Option<Prediction> {
        if !self.is_active || !self.is_predicting || !self.predictor.is_worth_it() {
            return None;
        }
        let slot = self.predictor.predict()?;
        let flow = self.flows.get(slot).filter(|f| f.is_ready())?;
        Some(Prediction { slot, header_bytes: flow.header_bytes.min(FRONT_BYTES) })
    }

    /// As `Placer::prediction`, if the frames of that flow are long enough for a system call each.
    pub(crate) fn predict_long(&self) -> Option<Prediction> {
        let prediction = self.prediction()?;
        let flow = self.flows.get(prediction.slot)?;
        (flow.last_bytes >= LONG_BYTES).then_some(prediction)
    }

    /// Memory for the next frame: expected headers, two ranges, overflow. Without a prediction the ranges
    /// are empty and the first part is the whole small buffer. `None`: the pool has no buffers.
    pub(crate) fn parts<'a>(
        &'a mut self,
        prediction: Option<Prediction>,
        pair: &'a mut BufferPair,
    ) -> Option<[&'a mut [u8]; PARTS]> {
        let flow = prediction.and_then(|a| self.flows.get_mut(a.slot));
        parts(prediction, flow, pair)
    }

    /// Copies the front of the received frame of `bytes` bytes. Returns the number of bytes copied.
    pub(crate) fn front(
        &mut self,
        prediction: Option<Prediction>,
        bytes: usize,
        pair: &mut BufferPair,
        to: &mut [u8; FRONT_BYTES],
    ) -> usize {
        self.parts(prediction, pair).map_or(0, |p| landed(p, bytes).copy(0, to))
    }

    /// The frame that was read into `Placer::parts` of this prediction and this pair. Afterwards no range
    /// has a byte of another flow, errors included.
    ///
    /// # Errors
    /// [`DropReason::NoBuffer`].
    pub(crate) fn take(
        &mut self,
        prediction: Option<Prediction>,
        frame: Frame<'_>,
        pair: &mut BufferPair,
        pool: &mut Pool,
    ) -> Result<Chain, DropReason> {
        let (slot, owner) = self.classify(&frame);
        let is_hit = match (prediction, owner) {
            (Some(a), Some((o, s))) => (a.slot, a.header_bytes) == (o, s.header_bytes),
            _ => false,
        };
        if let Some((o, s)) = owner.filter(|_| is_hit) {
            if let Some(flow) = self.flows.get_mut(o) {
                flow.learn(frame.front);
            }
            let hit = self.commit(o, &s, pair, pool);
            return hit.inspect_err(|_| self.wipe(prediction, frame.bytes));
        }
        let is_miss = slot.is_some() || prediction.is_some_and(|a| frame.bytes > a.header_bytes);
        let moved = self.roll_back(prediction, owner, frame, pair, pool);
        self.wipe(prediction, frame.bytes);
        let (chain, moved_bytes) = moved?;
        if is_miss {
            self.outcome.miss(moved_bytes);
        }
        Ok(chain)
    }

    /// The frame of `bytes` bytes behind a virtio-net header, as `Placer::take` has it.
    ///
    /// # Errors
    /// [`DropReason::NoBuffer`], [`DropReason::Truncated`], [`DropReason::BadOffload`].
    pub(crate) fn packet(
        &mut self,
        prediction: Option<Prediction>,
        header: &[u8; vnet::HEADER_BYTES],
        bytes: usize,
        pair: &mut BufferPair,
        pool: &mut Pool,
    ) -> Result<Packet, DropReason> {
        let Some((slot, s, offload)) = self.predicted(prediction, header, bytes, pair) else {
            return self.packet_read_in_full(prediction, header, bytes, pair, pool);
        };
        self.predictor.record(Some(slot), true, s.payload_bytes);
        let chain = self.commit(slot, &s, pair, pool);
        let chain = chain.inspect_err(|_| self.wipe(prediction, bytes))?;
        Ok(Packet { chain, offload })
    }

    /// The frame of BIG TCP whose first bytes were read into `Placer::parts` of this prediction and this pair, and the rest
    /// into `overflow`. No range keeps a byte of it.
    ///
    /// # Errors
    /// As [`big_tcp::copied`].
    pub(crate) fn big_packet(
        &mut self,
        prediction: Prediction,
        (header, bytes): (&[u8; vnet::HEADER_BYTES], usize),
        pair: &mut BufferPair,
        overflow: &[u8],
        pool: &mut Pool,
    ) -> Result<(Packet, big_tcp::Layout), DropReason> {
        let prediction = Some(prediction);
        let parts = self.parts(prediction, pair).ok_or(DropReason::NoBuffer);
        let packet = parts.and_then(|[head, a, b, rest]| {
            let landed = Landed::new([head, a, b, rest, overflow], bytes);
            big_tcp::copied(landed, header, bytes, pool)
        });
        self.discard(prediction);
        self.predictor.record(None, false, bytes);
        packet
    }

    /// Slow path of `Placer::packet`: parses all headers.
    #[inline(never)]
    fn packet_read_in_full(
        &mut self,
        prediction: Option<Prediction>,
        header: &[u8; vnet::HEADER_BYTES],
        bytes: usize,
        pair: &mut BufferPair,
        pool: &mut Pool,
    ) -> Result<Packet, DropReason> {
        let mut front = [0; FRONT_BYTES];
        let n = self.front(prediction, bytes, pair, &mut front);
        let front = front.get(..n).unwrap_or(&[]);
        let offload = match vnet::parse(header, bytes, front) {
            _ if bytes < eth::HEADER_BYTES => Err(DropReason::Truncated),
            parsed => parsed,
        };
        let offload = offload.inspect_err(|_| self.discard(prediction))?;
        let chain = self.take(prediction, Frame { bytes, front }, pair, pool)?;
        Ok(Packet { chain, offload })
    }

    /// Fast path: the predicted segment, if its headers match the previous segment's. No side effects.
    #[inline]
    fn predicted(
        &mut self,
        prediction: Option<Prediction>,
        header: &[u8; vnet::HEADER_BYTES],
        bytes: usize,
        pair: &mut BufferPair,
    ) -> Option<(usize, Segment, Offload)> {
        let prediction = prediction?;
        let front = &*pair.front_mut(prediction.header_bytes)?;
        let segment = self.flows.get(prediction.slot)?.predict(front, bytes)?;
        if segment.header_bytes != prediction.header_bytes {
            return None;
        }
        let offload = vnet::parse(header, bytes, front).ok()?;
        Some((prediction.slot, segment, offload))
    }

    /// Wipes the ranges after a read that gave no usable frame.
    pub(crate) fn discard(&mut self, prediction: Option<Prediction>) {
        self.wipe(prediction, MAX_FRAME_BYTES);
    }

    /// The flow of a frame with payload, and the flow with the segment if it is the flow's next one.
    fn classify(&mut self, frame: &Frame<'_>) -> (Option<usize>, Option<(usize, Segment)>) {
        let segment = Segment::of(frame.front, frame.bytes).filter(|s| s.payload_bytes > 0);
        let Some(s) = segment else {
            if frame.bytes > SMALL_BYTES {
                self.predictor.record(None, false, frame.bytes);
            }
            return (None, None);
        };
        let slot = self.flows.find(&s);
        let expects = |slot: &usize| self.flows.get(*slot).is_some_and(|f| f.expects(&s));
        let owner = slot.filter(expects).map(|slot| (slot, s));
        self.predictor.record(slot, owner.is_some(), s.payload_bytes);
        (slot, owner)
    }

    /// Wipes the bytes of a frame of `bytes` bytes in the ranges of the predicted flow.
    fn wipe(&mut self, prediction: Option<Prediction>, bytes: usize) {
        let Some(prediction) = prediction else { return };
        let Some(flow) = self.flows.get_mut(prediction.slot) else { return };
        let bytes = bytes.saturating_sub(prediction.header_bytes);
        wipe(flows::parts(&mut flow.ranges, prediction.range_bytes()), bytes);
    }

    /// Hands up a frame whose payload is in its flow's ranges.
    fn commit(
        &mut self,
        slot: usize,
        s: &Segment,
        pair: &mut BufferPair,
        pool: &mut Pool,
    ) -> Result<Chain, DropReason> {
        let flow = self.flows.get_mut(slot).ok_or(DropReason::NoBuffer)?;
        let fits = flow.ranges.bytes().min(s.payload_bytes);
        let over = pair.take_overflow(s.payload_bytes.saturating_sub(fits), pool)?;
        let (chain, is_full) = headed(flow, s, over, pair, pool)?;
        self.is_full |= is_full;
        self.outcome.hit(fits);
        Ok(chain)
    }

    /// Moves a misplaced frame. Returns also the number of bytes copied.
    fn roll_back(
        &mut self,
        prediction: Option<Prediction>,
        owner: Option<(usize, Segment)>,
        frame: Frame<'_>,
        pair: &mut BufferPair,
        pool: &mut Pool,
    ) -> Result<(Chain, usize), DropReason> {
        let elsewhere = owner.filter(|(slot, _)| prediction.is_none_or(|a| a.slot != *slot));
        match (prediction, elsewhere) {
            (_, Some((slot, s))) => self.copy_into_ranges(prediction, slot, &s, frame, pair, pool),
            (None, None) => Ok((pair.take_own(frame.bytes, pool)?, 0)),
            // Also if the flow was right but its headers had another length: the payload cannot be
            // moved within the range.
            (Some(a), None) => self.copy_out(a, frame, pair, pool),
        }
    }

    /// Copies a frame from the ranges of another flow into buffers of the pool.
    fn copy_out(
        &mut self,
        prediction: Prediction,
        frame: Frame<'_>,
        pair: &mut BufferPair,
        pool: &mut Pool,
    ) -> Result<(Chain, usize), DropReason> {
        if frame.bytes <= SMALL_BYTES {
            // The small buffer has the front of the frame, and space for the rest.
            let mut whole = [0; SMALL_BYTES];
            let parts = self.parts(Some(prediction), pair).ok_or(DropReason::NoBuffer)?;
            landed(parts, frame.bytes).copy(0, &mut whole);
            pair.put_front(&whole);
            let copied = frame.bytes.saturating_sub(prediction.header_bytes);
            return Ok((pair.take_own(frame.bytes, pool)?, copied));
        }
        let parts = self.parts(Some(prediction), pair).ok_or(DropReason::NoBuffer)?;
        let chain = copy(landed(parts, frame.bytes), 0, frame.bytes, pool)?;
        Ok((chain, frame.bytes))
    }

    /// Copies the payload of a flow's next segment into its ranges.
    fn copy_into_ranges(
        &mut self,
        prediction: Option<Prediction>,
        slot: usize,
        s: &Segment,
        frame: Frame<'_>,
        pair: &mut BufferPair,
        pool: &mut Pool,
    ) -> Result<(Chain, usize), DropReason> {
        let (from, to) = match prediction {
            Some(a) => self.flows.both(a.slot, slot).map(|(from, to)| (Some(from), to)),
            None => self.flows.get_mut(slot).map(|to| (None, to)),
        }
        .ok_or(DropReason::NoBuffer)?;
        let source =
            landed(parts(prediction, from, pair).ok_or(DropReason::NoBuffer)?, frame.bytes);
        let fits = to.ranges.bytes().min(s.payload_bytes);
        let mut at = s.header_bytes;
        for part in flows::parts(&mut to.ranges, fits) {
            at = at.saturating_add(source.copy(at, part));
        }
        let over = copy(source, at, s.payload_bytes.saturating_sub(fits), pool)?;
        pair.put_front(frame.front);
        let (chain, is_full) = headed(to, s, over, pair, pool)?;
        self.is_full |= is_full;
        Ok((chain, s.payload_bytes))
    }
}

/// A frame and its parsed front.
#[derive(Clone, Copy)]
pub(crate) struct Frame<'a> {
    /// Length of the frame.
    pub bytes: usize,
    /// The bytes that `Placer::front` has copied.
    pub front: &'a [u8],
}

impl Prediction {
    /// Most payload bytes of a frame.
    fn range_bytes(&self) -> usize {
        MAX_FRAME_BYTES.saturating_sub(self.header_bytes)
    }
}

/// See `Placer::parts`. `flow`: the predicted one.
fn parts<'a>(
    prediction: Option<Prediction>,
    flow: Option<&'a mut Flow>,
    pair: &'a mut BufferPair,
) -> Option<[&'a mut [u8]; PARTS]> {
    let (Some(prediction), Some(flow)) = (prediction, flow) else {
        let [small, large] = pair.own_parts()?;
        return Some([small, &mut [], &mut [], large]);
    };
    let needed = prediction.range_bytes();
    let is_enough = flow.ranges.bytes() >= needed;
    let [a, b] = flows::parts(&mut flow.ranges, needed);
    if is_enough {
        return Some([pair.front_mut(prediction.header_bytes)?, a, b, &mut []]);
    }
    let (small, large) = pair.front_and_rest()?;
    Some([small.get_mut(..prediction.header_bytes)?, a, b, large?])
}

fn landed(parts: [&mut [u8]; PARTS], bytes: usize) -> Landed<'_> {
    Landed::new(parts.map(|p| &*p), bytes)
}

/// Copies `n` bytes of a frame into buffers of the pool.
pub(crate) fn copy<const N: usize>(
    from: Landed<'_, N>,
    at: usize,
    n: usize,
    pool: &mut Pool,
) -> Result<Chain, DropReason> {
    if n == 0 {
        return Ok(Chain::new());
    }
    let chain = pool.alloc_chain(n, 0, Purpose::Receive);
    let mut chain = chain.map_err(|_| DropReason::NoBuffer)?;
    let mut at = at;
    for part in chain.slices_mut() {
        at = at.saturating_add(from.copy(at, part));
    }
    Ok(chain)
}

/// The packet of a frame: headers in the small buffer, payload in the flow's ranges, then `over`. Returns
/// also whether a posted buffer became full.
fn headed(
    flow: &mut Flow,
    s: &Segment,
    over: Chain,
    pair: &mut BufferPair,
    pool: &mut Pool,
) -> Result<(Chain, bool), DropReason> {
    let Some(head) = pair.take_front(s.header_bytes) else {
        pool.free(over);
        return Err(DropReason::NoBuffer);
    };
    let mut chain = Chain::from(head);
    match flow.fill_into(s, &mut chain, pool) {
        Ok(is_full) => {
            chain.append(over);
            Ok((chain, is_full))
        }
        Err(NoBuffer) => {
            pool.free(chain);
            pool.free(over);
            Err(DropReason::NoBuffer)
        }
    }
}
