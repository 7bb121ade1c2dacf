//! The flows that a device places: what it expects next of each, and where that goes.

use fulmar_base::{FlowKey, SeqNum};
use fulmar_mbuf::{Chain, Filled, NoBuffer, Pool, WritableRange};
use fulmar_netdev::Rooms;
use fulmar_wire::eth;
use fulmar_wire::predict::PredictedHeaders;
use fulmar_wire::tcp::{self, Flags};

use fulmar_wire::dissect::{Headers, Transport};

/// Flows that one device places at once; further ones are delivered as usual.
pub const MAX_FLOWS: usize = 64;

/// After so many frames without a posted buffer the flow is taken to post no more: 64 MiB, as they come in bulk.
const PATIENCE: u16 = 1024;

/// Ethernet header, IP header without options, TCP header with timestamps, which nearly every
/// connection has: what is expected of a flow of which nothing has come yet.
const USUAL_BYTES: usize = eth::HEADER_BYTES + 20 + 32;
/// The same with IPv6.
const USUAL_BYTES_V6: usize = eth::HEADER_BYTES + 40 + 32;

/// What ends or bends a stream is for the stack alone.
const SPECIAL: Flags = Flags::SYN.with(Flags::FIN).with(Flags::RST).with(Flags::URG);

/// A TCP segment as a frame shows it.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    flow: FlowKey,
    seq: SeqNum,
    flags: Flags,
    /// Bytes of all headers: where the payload begins in the frame.
    pub header_bytes: usize,
    /// Bytes of payload, up to the end of the frame.
    pub payload_bytes: usize,
}

impl Segment {
    /// Reads it from the front of a frame of `frame_bytes`; nothing if it is no whole TCP segment,
    /// or bytes follow that are not of it.
    pub fn of(front: &[u8], frame_bytes: usize) -> Option<Segment> {
        Segment::of_headers(&Headers::parse(front, frame_bytes)?, frame_bytes)
    }

    /// As [`Segment::of`], of headers that were read already.
    pub fn of_headers(seen: &Headers, frame_bytes: usize) -> Option<Segment> {
        let Transport::Tcp(h) = seen.transport else { return None };
        let is_exact = seen.payload_at.checked_add(seen.payload_bytes) == Some(frame_bytes);
        is_exact.then(|| Segment {
            flow: seen.network.flow([h.src_port, h.dst_port]),
            seq: h.seq,
            flags: h.flags,
            header_bytes: seen.payload_at,
            payload_bytes: seen.payload_bytes,
        })
    }
}

/// The first `limit` bytes of the rooms.
pub fn parts(rooms: &mut Rooms, limit: usize) -> [&mut [u8]; Rooms::MAX] {
    let mut left = limit;
    let (first, second) = rooms.pair_mut();
    [first, second].map(|room| {
        let Some(room) = room else { return &mut [][..] };
        let n = room.len().min(left);
        left = left.saturating_sub(n);
        room.bytes().get_mut(..n).unwrap_or(&mut [])
    })
}

/// Bytes that lie in the rooms of a flow.
#[derive(Debug, Default)]
pub struct Filling {
    /// Part by part, a part per room.
    parts: [Option<Filled>; Rooms::MAX],
    /// A buffer became full with them.
    pub is_full: bool,
}

impl Filling {
    /// How many.
    pub fn bytes(&self) -> usize {
        self.parts.iter().flatten().map(Filled::len).sum()
    }

    /// The bytes as a part of a packet.
    ///
    /// # Errors
    /// The pool has no descriptor; the bytes are lost.
    pub fn into_chain(self, pool: &mut Pool) -> Result<Chain, NoBuffer> {
        let mut chain = Chain::new();
        for part in self.parts.into_iter().flatten() {
            match part.into_mbuf(pool) {
                Ok(m) => chain.push_back(m),
                Err(e) => {
                    pool.free(chain);
                    return Err(e);
                }
            }
        }
        Ok(chain)
    }
}

/// Takes the first `n` bytes of the rooms (or all, if there are less) as what has been received, and
/// lets go of rooms that are full.
fn fill(rooms: &mut Rooms, n: usize) -> Filling {
    let (mut filling, mut left) = (Filling::default(), n);
    for part in &mut filling.parts {
        let Some(room) = rooms.front_mut().filter(|_| left > 0) else { break };
        let bytes = room.len().min(left);
        left = left.saturating_sub(bytes);
        *part = Some(room.fill(bytes));
        if !room.is_empty() {
            break;
        }
        filling.is_full = true;
        drop(rooms.pop_front());
    }
    filling
}

/// One flow. Between hints it has no rooms, but what was learnt of it stays.
pub struct Flow {
    key: FlowKey,
    /// The number of the byte that goes to the start of the rooms. `None`: what is in the rooms and
    /// what was taken from them no longer agree, until the stack says where it stands.
    next: Option<SeqNum>,
    /// Where the payload goes.
    pub rooms: Rooms,
    /// Bytes of all headers in front of the payload, as the last segment had them.
    pub header_bytes: usize,
    /// Payload of the last segment that was taken, in bytes.
    pub last_bytes: usize,
    /// How to predict the next frame without reading all of its headers.
    predicted: Option<PredictedHeaders>,
    /// Frames with payload that came since it had rooms last.
    starved: u16,
    /// The device has waited once, since rooms came or went last, for the stack to catch up.
    pub has_waited: bool,
}

impl Flow {
    /// Whether the next segment has somewhere to go.
    pub fn is_ready(&self) -> bool {
        self.next.is_some() && !self.rooms.is_empty()
    }

    /// Whether the segment is the next one, and there is room.
    pub fn expects(&self, s: &Segment) -> bool {
        self.next == Some(s.seq)
            && s.payload_bytes > 0
            && !self.rooms.is_empty()
            && s.flags.contains(Flags::ACK)
            && !s.flags.intersects(SPECIAL)
    }

    /// The segment in a frame of `frame_bytes` with this front, if it is like the one before and the next
    /// one.
    #[inline]
    pub fn predict(&self, front: &[u8], frame_bytes: usize) -> Option<Segment> {
        let l4 = self.predicted.as_ref()?.predict(front, frame_bytes)?;
        let (seq, flags, bytes) = tcp::Header::peek(front.get(l4..)?)?;
        let header_bytes = l4.checked_add(bytes)?;
        let payload_bytes = frame_bytes.checked_sub(header_bytes)?;
        let s = Segment { flow: self.key, seq, flags, header_bytes, payload_bytes };
        self.expects(&s).then_some(s)
    }

    /// Frames like this one, all headers of which were read, are this flow's.
    pub fn learn(&mut self, front: &[u8]) {
        self.predicted = PredictedHeaders::of(front);
    }

    /// Whether the stack may be about to say something that fits the segment better: it has taken its
    /// rooms back, or what it said last was said before it saw what lies between.
    pub fn is_outdated(&self, s: &Segment) -> bool {
        self.rooms.is_empty() || self.next.is_some_and(|next| s.seq.after(next))
    }

    /// Takes the payload of the segment, of which the first bytes lie in the rooms, as many as fit.
    pub fn fill(&mut self, s: &Segment) -> Filling {
        let filling = fill(&mut self.rooms, s.payload_bytes);
        self.took(s);
        filling
    }

    /// As [`Flow::fill`], as parts of a packet; answers also whether a buffer became full.
    ///
    /// # Errors
    /// The pool has no descriptor; the bytes are lost, and nothing more is expected until the next hint.
    pub fn fill_into(
        &mut self,
        s: &Segment,
        packet: &mut Chain,
        pool: &mut Pool,
    ) -> Result<bool, NoBuffer> {
        let (mut left, mut is_full) = (s.payload_bytes, false);
        while let Some(room) = self.rooms.front_mut().filter(|_| left > 0) {
            let bytes = room.len();
            if left < bytes {
                packet.push_back(room.split(left, pool).inspect_err(|_| self.next = None)?);
                break;
            }
            is_full = true;
            left = left.saturating_sub(bytes);
            if let Some(room) = self.rooms.pop_front() {
                packet.push_back(room.into_mbuf(pool).inspect_err(|_| self.next = None)?);
            }
        }
        self.took(s);
        Ok(is_full)
    }

    /// Moves on behind a segment.
    fn took(&mut self, s: &Segment) {
        let bytes = u32::try_from(s.payload_bytes).unwrap_or(0);
        self.next = Some(SeqNum(s.seq.0.wrapping_add(bytes)));
        (self.header_bytes, self.last_bytes) = (s.header_bytes, s.payload_bytes);
        self.has_waited |= self.rooms.is_empty();
    }

    /// A frame with payload came that has not been placed; whether for want of rooms.
    pub fn starve(&mut self) -> bool {
        let is_starved = self.rooms.is_empty();
        self.starved = if is_starved { self.starved.saturating_add(1) } else { 0 };
        is_starved
    }

    /// Whether rooms are still to be hoped for, although frames came that found none.
    fn is_starved(&self) -> bool {
        self.rooms.is_empty() && (1..=PATIENCE).contains(&self.starved)
    }

    /// A frame was lost after it had been taken: nothing more is expected until the next hint.
    pub fn lose(&mut self) {
        self.next = None;
    }
}

/// The flows by slot.
pub struct Flows {
    slots: [Option<Flow>; MAX_FLOWS],
    /// The slot that was asked for last.
    last: usize,
}

/// Where a hint has gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The slot of the flow.
    pub slot: usize,
    /// The slot was another flow's before.
    pub is_new: bool,
}

impl Default for Flows {
    /// No flow.
    fn default() -> Flows {
        Flows { slots: std::array::from_fn(|_| None), last: 0 }
    }
}

impl Flows {
    /// Sets or replaces what is expected of a flow. `None`: too many flows have rooms.
    pub fn set(&mut self, key: FlowKey, next: SeqNum, rooms: Rooms) -> Option<Place> {
        let known = self.slot_of(&key);
        let slot = known.or_else(|| self.free_slot())?;
        let place = self.slots.get_mut(slot)?;
        let (header_bytes, last_bytes, predicted) = match place {
            Some(flow) if known.is_some() => (flow.header_bytes, flow.last_bytes, flow.predicted),
            _ if key.remote_ip().is_ipv6() => (USUAL_BYTES_V6, 0, None),
            _ => (USUAL_BYTES, 0, None),
        };
        let next = Some(next);
        *place = Some(Flow {
            key,
            next,
            rooms,
            header_bytes,
            last_bytes,
            predicted,
            starved: 0,
            has_waited: false,
        });
        self.last = slot;
        Some(Place { slot, is_new: known.is_none() })
    }

    /// One more room behind the last one that is left. `None`: none is left, or there are two.
    pub fn add(&mut self, key: &FlowKey, room: WritableRange) -> Option<Place> {
        let slot = self.slot_of(key)?;
        let flow = self.get_mut(slot).filter(|f| f.is_ready() && f.rooms.takes_one_more())?;
        flow.rooms.push(room).ok()?;
        flow.has_waited = false;
        Some(Place { slot, is_new: false })
    }

    /// Takes the rooms of a flow back.
    pub fn clear(&mut self, key: &FlowKey) -> Rooms {
        let flow = self.slot_of(key).and_then(|s| self.get_mut(s));
        flow.map(|f| {
            f.has_waited &= f.rooms.is_empty();
            std::mem::take(&mut f.rooms)
        })
        .unwrap_or_default()
    }

    /// Whether any flow has rooms.
    pub fn has_rooms(&self) -> bool {
        self.slots.iter().flatten().any(|f| !f.rooms.is_empty())
    }

    /// A slot that no flow has ever had, else one of a flow without rooms.
    fn free_slot(&self) -> Option<usize> {
        let slots = &self.slots;
        let unused = slots.iter().position(Option::is_none);
        let has_no_rooms = |f: &Option<Flow>| f.as_ref().is_some_and(|f| f.rooms.is_empty());
        unused.or_else(|| slots.iter().position(has_no_rooms))
    }

    /// The flow in a slot.
    pub fn get(&self, slot: usize) -> Option<&Flow> {
        self.slots.get(slot)?.as_ref()
    }

    /// The flow in a slot, to be changed.
    pub fn get_mut(&mut self, slot: usize) -> Option<&mut Flow> {
        self.slots.get_mut(slot)?.as_mut()
    }

    /// Two different flows.
    pub fn both(&mut self, a: usize, b: usize) -> Option<(&mut Flow, &mut Flow)> {
        let [a, b] = self.slots.get_disjoint_mut([a, b]).ok()?;
        Some((a.as_mut()?, b.as_mut()?))
    }

    /// The flows that are ready for their next segment.
    pub fn ready(&self) -> impl Iterator<Item = FlowKey> {
        self.slots.iter().flatten().filter(|f| f.is_ready()).map(|f| f.key)
    }

    /// The flows that had rooms not long ago and have none now.
    pub fn starved(&self) -> impl Iterator<Item = FlowKey> {
        self.slots.iter().flatten().filter(|f| f.is_starved()).map(|f| f.key)
    }

    /// The slot of a flow.
    pub fn slot_of(&self, key: &FlowKey) -> Option<usize> {
        let is_it = |f: &Option<Flow>| f.as_ref().is_some_and(|f| f.key == *key);
        if self.slots.get(self.last).is_some_and(is_it) {
            return Some(self.last);
        }
        self.slots.iter().position(is_it)
    }

    /// The flow that a segment belongs to. A device knows no zones; it is one interface.
    pub fn find(&mut self, s: &Segment) -> Option<usize> {
        let mut key = s.flow;
        let mut is_it = |f: &Option<Flow>| {
            f.as_ref().is_some_and(|f| {
                key.zone = f.key.zone;
                f.key == key
            })
        };
        if !self.slots.get(self.last).is_some_and(&mut is_it) {
            self.last = self.slots.iter().position(is_it)?;
        }
        Some(self.last)
    }
}
