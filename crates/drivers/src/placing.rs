//! Payload straight into posted buffers, on devices that are told with each read where the frame
//! goes: predictive scatter, as a transaction.
//!
//! ```text
//!             expected headers      room A          room B           overflow
//!   frame   | headers of the flow | payload ─────────────────────────────────── |
//!           +---------------------+-----------+--------------------+-----------+
//!   lands in| small (a pool's)    | rest of A | rest of B          | large     |
//! ```
//!
//! *Begin*: `Placer::aim` guesses the flow of the next frame; its rooms and the `Landing`
//! take it in. *Commit*: the frame shows, headers read, that it is the next segment of that flow with
//! headers of the length that was guessed; then what lies in the rooms becomes the payload of the
//! packet. *Roll back*: everything that landed in rooms is copied out in the order of the frame, to
//! where it belongs (the rooms of its own flow, or a pool's buffers), and wiped, before the next read
//! and before it can be seen. What goes up is the same frame in either case.
//!
//! Where frames come without a guess, the next segment of a flow with rooms is copied there: one
//! copy, as for any receiver, but no more.
//!
//! **Trust.** Between the read and the end of `Placer::take` bytes of one flow may lie in the posted
//! buffer of another one. Its owner has given it away and cannot look; but a buffer over registered
//! memory may be mapped elsewhere. Where owners of posted buffers do not trust each other, guessing
//! is to be switched off (`predict` of the device).
//!
//! Bounds: [`flows::MAX_FLOWS`] flows, two rooms each. Cost: one look at the headers per frame, and
//! per frame in a room one descriptor; nothing while no flow has rooms.

#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

pub mod flows;
mod predict;
mod scatter;
#[cfg(test)]
pub(crate) mod tests;

use fulmar_base::{Counter, Counters, DropReason, FlowKey, Offload, SeqNum};
use fulmar_mbuf::{Chain, NoBuffer, Pool, Purpose, WritableRange};
use fulmar_netdev::{DeviceStats, DirectPlacement, Packet, Rooms, Unsupported};
use fulmar_wire::eth;

use crate::landing::{Landing, SMALL_BYTES};
use crate::vnet;
use flows::{Flow, Flows, Place, Segment};
use predict::Predictor;
use scatter::{Landed, PARTS, wipe};

/// Enough of the front of a frame for Ethernet, IPv4 and TCP headers with all the options there can
/// be, or IPv6 with an extension.
pub(crate) const FRONT_BYTES: usize = 160;

/// From so much payload on copying a frame costs more than a call of its own would.
const LONG_BYTES: usize = 8192;

/// The longest frame that a device hands up, with the tag of a virtual network.
const MAX_FRAME_BYTES: usize = 14 + 4 + 65_535;

/// A guess that was acted on: the parts of the next read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Aim {
    slot: usize,
    header_bytes: usize,
}

/// What placement has done since it was asked last.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// Frames whose payload landed in the posted buffer of their flow.
    pub hits: u64,
    /// Payload bytes of these frames.
    pub hit_bytes: u64,
    /// Frames of flows with rooms that landed elsewhere, and frames in rooms that are not theirs.
    pub misses: u64,
    /// Bytes copied because of that.
    pub moved_bytes: u64,
    /// Misses because frames of several flows come mixed: the next one was another flow's than guessed.
    pub mixed: u64,
    /// Misses of flows that wait for rooms, by a queue that all flows share.
    pub starved: u64,
}

impl Outcome {
    /// Adds it to what a device counts.
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

    /// Counts a frame with so many bytes of payload that landed in the posted buffer of its flow.
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
    /// Whether guesses may be acted on at all.
    is_predicting: bool,
    /// Whether a flow has rooms, or had when it was placed last.
    is_active: bool,
    /// A buffer became full: its owner should hear of it before more frames are taken.
    is_full: bool,
    /// The frames come by a queue that one flow has to itself.
    is_alone: bool,
    outcome: Outcome,
}

impl DirectPlacement for Placer {
    fn place(&mut self, flow: FlowKey, next_seq: SeqNum, rooms: Rooms) -> Result<(), Unsupported> {
        let place = self.flows.set(flow, next_seq, rooms);
        self.placed(place)
    }

    fn place_behind(&mut self, flow: &FlowKey, room: WritableRange) -> Result<(), Unsupported> {
        let place = self.flows.add(flow, room);
        self.placed(place)
    }

    fn unplace(&mut self, flow: &FlowKey) -> Rooms {
        let rooms = self.flows.clear(flow);
        self.is_active = self.flows.has_rooms();
        rooms
    }
}

impl Placer {
    pub fn new(is_predicting: bool) -> Placer {
        Placer {
            flows: Flows::default(),
            predictor: Predictor::new(),
            is_predicting,
            is_active: false,
            is_full: false,
            is_alone: false,
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

    /// Whether no payload is expected: frames need not be inspected.
    pub fn is_idle(&self) -> bool {
        !self.is_active
    }

    /// Whether a buffer became full since this was asked last.
    pub fn take_full(&mut self) -> bool {
        std::mem::take(&mut self.is_full)
    }

    /// What happened since this was asked last.
    pub fn take_outcome(&mut self) -> Outcome {
        std::mem::take(&mut self.outcome)
    }

    /// The flow whose rooms the next frame should land in, if there is one and it pays.
    pub fn aim(&self) -> Option<Aim> {
        if !self.is_active || !self.is_predicting || !self.predictor.is_worth_it() {
            return None;
        }
        let slot = self.predictor.guess()?;
        let flow = self.flows.get(slot).filter(|f| f.is_ready())?;
        Some(Aim { slot, header_bytes: flow.header_bytes.min(FRONT_BYTES) })
    }

    /// The rooms of a flow of which the next frame surely is, if it has any.
    pub fn aim_at(&self, flow: &FlowKey) -> Option<Aim> {
        let slot = self.flows.slot_of(flow).filter(|_| self.is_active && self.is_predicting)?;
        let flow = self.flows.get(slot).filter(|f| f.is_ready())?;
        Some(Aim { slot, header_bytes: flow.header_bytes.min(FRONT_BYTES) })
    }

    /// From now on frames come by the queue of one flow, or by one that all flows share again. Only
    /// those tell anything about what will come by the latter.
    pub fn set_alone(&mut self, is_alone: bool) {
        self.is_alone = is_alone;
    }

    /// A flow comes by a queue of its own from now on: it is no longer guessed.
    pub fn leave_guesses(&mut self, flow: &FlowKey) {
        if let Some(slot) = self.flows.slot_of(flow) {
            self.predictor.forget(slot);
        }
    }

    /// Whether a flow has rooms.
    pub fn has_rooms(&self, flow: &FlowKey) -> bool {
        let flow = self.flows.slot_of(flow).and_then(|slot| self.flows.get(slot));
        flow.is_some_and(|f| !f.rooms.is_empty())
    }

    /// A flow that could be placed now, else one that waits for rooms, for which `suits` holds.
    pub fn find_wanting(&self, suits: impl Fn(&FlowKey) -> bool) -> Option<FlowKey> {
        let suits = |f: &FlowKey| suits(f);
        self.flows.ready().find(suits).or_else(|| self.flows.starved().find(suits))
    }

    /// Whether there are several flows that have rooms or wait for some.
    pub fn is_shared(&self) -> bool {
        self.flows.ready().chain(self.flows.starved()).nth(1).is_some()
    }

    /// As `Placer::aim`, if the frames of that flow are so long that each is worth a call of its own.
    pub fn aim_at_long(&self) -> Option<Aim> {
        let aim = self.aim()?;
        let flow = self.flows.get(aim.slot)?;
        (flow.last_bytes >= LONG_BYTES).then_some(aim)
    }

    /// Where the next frame lands: expected headers, two rooms, overflow. Without an aim the rooms
    /// are empty and the first part is the whole small buffer. `None`: the pool has no buffers.
    pub fn parts<'a>(
        &'a mut self,
        aim: Option<Aim>,
        landing: &'a mut Landing,
    ) -> Option<[&'a mut [u8]; PARTS]> {
        let flow = aim.and_then(|a| self.flows.get_mut(a.slot));
        parts(aim, flow, landing)
    }

    /// The front of a frame of `bytes` bytes that has landed; returns how much of it there is.
    pub fn front(
        &mut self,
        aim: Option<Aim>,
        bytes: usize,
        landing: &mut Landing,
        to: &mut [u8; FRONT_BYTES],
    ) -> usize {
        self.parts(aim, landing).map_or(0, |p| landed(p, bytes).copy(0, to))
    }

    /// The frame of `bytes` bytes that has landed in [`Placer::parts`] of this aim and this landing;
    /// `front` is what [`Placer::front`] read of it. Whatever the answer, no room has a byte
    /// afterwards that is not its flow's.
    ///
    /// # Errors
    /// [`DropReason::NoBuffer`].
    pub fn take(
        &mut self,
        aim: Option<Aim>,
        frame: Frame<'_>,
        landing: &mut Landing,
        pool: &mut Pool,
    ) -> Result<Chain, DropReason> {
        let (slot, owner) = self.who(&frame);
        let is_hit = match (aim, owner) {
            (Some(a), Some((o, s))) => (a.slot, a.header_bytes) == (o, s.header_bytes),
            _ => false,
        };
        if let Some((o, s)) = owner.filter(|_| is_hit) {
            if let Some(flow) = self.flows.get_mut(o) {
                flow.learn(frame.front);
            }
            let hit = self.commit(o, &s, landing, pool);
            return hit.inspect_err(|_| self.wipe(aim, frame.bytes));
        }
        let is_starved = slot.and_then(|s| self.flows.get_mut(s)).is_some_and(Flow::starve);
        let is_miss = slot.is_some() || aim.is_some_and(|a| frame.bytes > a.header_bytes);
        let moved = self.roll_back(aim, owner, frame, landing, pool);
        self.wipe(aim, frame.bytes);
        let (chain, moved_bytes) = moved?;
        if is_miss {
            self.outcome.miss(moved_bytes);
            let aimed = aim.map(|a| a.slot);
            let is_mixed = aimed != slot && (aimed.is_some() || owner.is_some()) && !self.is_alone;
            self.outcome.mixed = self.outcome.mixed.saturating_add(u64::from(is_mixed));
            let is_starved = is_starved && !is_mixed && !self.is_alone;
            self.outcome.starved = self.outcome.starved.saturating_add(u64::from(is_starved));
        }
        Ok(chain)
    }

    /// The frame of `bytes` bytes behind a virtio-net header, as `Placer::take` has it.
    ///
    /// # Errors
    /// [`DropReason::NoBuffer`], [`DropReason::Truncated`], [`DropReason::BadOffload`].
    pub fn packet(
        &mut self,
        aim: Option<Aim>,
        header: &[u8; vnet::HEADER_BYTES],
        bytes: usize,
        landing: &mut Landing,
        pool: &mut Pool,
    ) -> Result<Packet, DropReason> {
        let Some((slot, s, offload)) = self.predicted(aim, header, bytes, landing) else {
            return self.packet_read_in_full(aim, header, bytes, landing, pool);
        };
        if !self.is_alone {
            self.predictor.came(Some(slot), true, s.payload_bytes);
        }
        let chain = self.commit(slot, &s, landing, pool);
        let chain = chain.inspect_err(|_| self.wipe(aim, bytes))?;
        Ok(Packet { chain, offload })
    }

    /// As [`Placer::packet`], of a frame that is not known at first sight.
    #[inline(never)]
    fn packet_read_in_full(
        &mut self,
        aim: Option<Aim>,
        header: &[u8; vnet::HEADER_BYTES],
        bytes: usize,
        landing: &mut Landing,
        pool: &mut Pool,
    ) -> Result<Packet, DropReason> {
        let mut front = [0; FRONT_BYTES];
        let n = self.front(aim, bytes, landing, &mut front);
        let front = front.get(..n).unwrap_or(&[]);
        let offload = match vnet::understand(header, bytes, front) {
            _ if bytes < eth::HEADER_BYTES => Err(DropReason::Truncated),
            understood => understood,
        };
        let offload = offload.inspect_err(|_| self.discard(aim))?;
        let chain = self.take(aim, Frame { bytes, front }, landing, pool)?;
        Ok(Packet { chain, offload })
    }

    /// The segment that was aimed at, if the headers that have landed say so at first sight: they are like
    /// those of the one before.
    #[inline]
    fn predicted(
        &mut self,
        aim: Option<Aim>,
        header: &[u8; vnet::HEADER_BYTES],
        bytes: usize,
        landing: &mut Landing,
    ) -> Option<(usize, Segment, Offload)> {
        let aim = aim?;
        let front = &*landing.front_mut(aim.header_bytes)?;
        let segment = self.flows.get(aim.slot)?.predict(front, bytes)?;
        if segment.header_bytes != aim.header_bytes {
            return None;
        }
        let offload = vnet::understand(header, bytes, front).ok()?;
        Some((aim.slot, segment, offload))
    }

    /// Nothing came, or nothing that can be used: what lies in rooms goes.
    pub fn discard(&mut self, aim: Option<Aim>) {
        self.wipe(aim, MAX_FRAME_BYTES);
    }

    /// The flow that a frame with payload is of, and that flow again with the segment if it is the
    /// next one.
    fn who(&mut self, frame: &Frame<'_>) -> (Option<usize>, Option<(usize, Segment)>) {
        let segment = Segment::of(frame.front, frame.bytes).filter(|s| s.payload_bytes > 0);
        let Some(s) = segment else {
            if frame.bytes > SMALL_BYTES && !self.is_alone {
                self.predictor.came(None, false, frame.bytes);
            }
            return (None, None);
        };
        let slot = self.flows.find(&s);
        let expects = |slot: &usize| self.flows.get(*slot).is_some_and(|f| f.expects(&s));
        let owner = slot.filter(expects).map(|slot| (slot, s));
        if !self.is_alone {
            self.predictor.came(slot, owner.is_some(), s.payload_bytes);
        }
        (slot, owner)
    }

    /// Wipes what a frame of `bytes` bytes has left in the rooms that were aimed at.
    fn wipe(&mut self, aim: Option<Aim>, bytes: usize) {
        let Some(aim) = aim else { return };
        let Some(flow) = self.flows.get_mut(aim.slot) else { return };
        let bytes = bytes.saturating_sub(aim.header_bytes);
        wipe(flows::parts(&mut flow.rooms, aim.room_bytes()), bytes);
    }

    /// The payload lies where it belongs.
    fn commit(
        &mut self,
        slot: usize,
        s: &Segment,
        landing: &mut Landing,
        pool: &mut Pool,
    ) -> Result<Chain, DropReason> {
        let flow = self.flows.get_mut(slot).ok_or(DropReason::NoBuffer)?;
        let fits = flow.rooms.bytes().min(s.payload_bytes);
        let over = landing.take_overflow(s.payload_bytes.saturating_sub(fits), pool)?;
        let (chain, is_full) = headed(flow, s, over, landing, pool)?;
        self.is_full |= is_full;
        self.outcome.hit(fits);
        Ok(chain)
    }

    /// Brings a frame to where it belongs; answers also how many bytes were copied for it.
    fn roll_back(
        &mut self,
        aim: Option<Aim>,
        owner: Option<(usize, Segment)>,
        frame: Frame<'_>,
        landing: &mut Landing,
        pool: &mut Pool,
    ) -> Result<(Chain, usize), DropReason> {
        let elsewhere = owner.filter(|(slot, _)| aim.is_none_or(|a| a.slot != *slot));
        match (aim, elsewhere) {
            (_, Some((slot, s))) => self.move_over(aim, slot, &s, frame, landing, pool),
            (None, None) => Ok((landing.take_own(frame.bytes, pool)?, 0)),
            // Also where the headers of the right flow were longer or shorter than expected: the
            // payload cannot be moved within the memory that it lies in.
            (Some(a), None) => self.copy_out(a, frame, landing, pool),
        }
    }

    /// Copies a frame out of rooms that are not its own, into a pool's buffers.
    fn copy_out(
        &mut self,
        aim: Aim,
        frame: Frame<'_>,
        landing: &mut Landing,
        pool: &mut Pool,
    ) -> Result<(Chain, usize), DropReason> {
        if frame.bytes <= SMALL_BYTES {
            // The small buffer has the front of it already, and room for the rest.
            let mut whole = [0; SMALL_BYTES];
            let parts = self.parts(Some(aim), landing).ok_or(DropReason::NoBuffer)?;
            landed(parts, frame.bytes).copy(0, &mut whole);
            landing.put_front(&whole);
            let copied = frame.bytes.saturating_sub(aim.header_bytes);
            return Ok((landing.take_own(frame.bytes, pool)?, copied));
        }
        let parts = self.parts(Some(aim), landing).ok_or(DropReason::NoBuffer)?;
        let chain = copy(landed(parts, frame.bytes), 0, frame.bytes, pool)?;
        Ok((chain, frame.bytes))
    }

    /// Copies the payload of a flow's next segment into its rooms.
    fn move_over(
        &mut self,
        aim: Option<Aim>,
        slot: usize,
        s: &Segment,
        frame: Frame<'_>,
        landing: &mut Landing,
        pool: &mut Pool,
    ) -> Result<(Chain, usize), DropReason> {
        let (from, to) = match aim {
            Some(a) => self.flows.both(a.slot, slot).map(|(from, to)| (Some(from), to)),
            None => self.flows.get_mut(slot).map(|to| (None, to)),
        }
        .ok_or(DropReason::NoBuffer)?;
        let source = landed(parts(aim, from, landing).ok_or(DropReason::NoBuffer)?, frame.bytes);
        let fits = to.rooms.bytes().min(s.payload_bytes);
        let mut at = s.header_bytes;
        for part in flows::parts(&mut to.rooms, fits) {
            at = at.saturating_add(source.copy(at, part));
        }
        let over = copy(source, at, s.payload_bytes.saturating_sub(fits), pool)?;
        landing.put_front(frame.front);
        let (chain, is_full) = headed(to, s, over, landing, pool)?;
        self.is_full |= is_full;
        Ok((chain, s.payload_bytes))
    }
}

/// A frame of which the headers were read.
#[derive(Clone, Copy)]
pub(crate) struct Frame<'a> {
    /// Length of all of it.
    pub bytes: usize,
    /// As much of it as [`Placer::front`] has read.
    pub front: &'a [u8],
}

impl Aim {
    /// Bytes of a frame that may land in the rooms.
    fn room_bytes(&self) -> usize {
        MAX_FRAME_BYTES.saturating_sub(self.header_bytes)
    }
}

/// See [`Placer::parts`]. `flow`: the one that is aimed at.
fn parts<'a>(
    aim: Option<Aim>,
    flow: Option<&'a mut Flow>,
    landing: &'a mut Landing,
) -> Option<[&'a mut [u8]; PARTS]> {
    let (Some(aim), Some(flow)) = (aim, flow) else {
        let [small, large] = landing.own_parts()?;
        return Some([small, &mut [], &mut [], large]);
    };
    let needed = aim.room_bytes();
    let is_enough = flow.rooms.bytes() >= needed;
    let [a, b] = flows::parts(&mut flow.rooms, needed);
    if is_enough {
        return Some([landing.front_mut(aim.header_bytes)?, a, b, &mut []]);
    }
    let (small, large) = landing.front_and_rest()?;
    Some([small.get_mut(..aim.header_bytes)?, a, b, large?])
}

fn landed(parts: [&mut [u8]; PARTS], bytes: usize) -> Landed<'_> {
    Landed::new(parts.map(|p| &*p), bytes)
}

/// `n` bytes of a frame in a pool's buffers.
fn copy(from: Landed<'_>, at: usize, n: usize, pool: &mut Pool) -> Result<Chain, DropReason> {
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

/// A frame whose headers lie in the small buffer and whose payload in the flow's rooms, as far as it
/// fits, with `over` behind it; answers also whether a buffer became full.
fn headed(
    flow: &mut Flow,
    s: &Segment,
    over: Chain,
    landing: &mut Landing,
    pool: &mut Pool,
) -> Result<(Chain, bool), DropReason> {
    let Some(head) = landing.take_front(s.header_bytes) else {
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
