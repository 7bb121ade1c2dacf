//! The flows that a device places: the expected sequence number of each, and its posted ranges.

use fulmar_stack::base::{FlowKey, SeqNum};
use fulmar_stack::device::WritableRanges;
use fulmar_stack::mbuf::{Chain, Filled, NoBuffer, Pool, WritableRange};
use fulmar_stack::wire::eth;
use fulmar_stack::wire::predict::PredictedHeaders;
use fulmar_stack::wire::tcp::{self, Flags};

use fulmar_stack::wire::dissect::{Headers, Transport};

/// Most flows that one device places; further flows are delivered without placement.
pub const MAX_FLOWS: usize = 64;

/// Expected headers of a flow's first frame: Ethernet, IPv4 without options, TCP with timestamps.
const USUAL_BYTES: usize = eth::HEADER_BYTES + 20 + 32;
/// The same with IPv6.
const USUAL_BYTES_V6: usize = eth::HEADER_BYTES + 40 + 32;

/// Segments with these flags are not placed.
const SPECIAL: Flags = Flags::SYN.with(Flags::FIN).with(Flags::RST).with(Flags::URG);

/// A TCP segment in a frame.
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
    /// Parses the front of a frame of `frame_bytes`. `None`: not one whole TCP segment, or padding follows it.
    pub fn of(front: &[u8], frame_bytes: usize) -> Option<Segment> {
        Segment::of_headers(&Headers::parse(front, frame_bytes)?, frame_bytes)
    }

    /// As [`Segment::of`], from parsed headers.
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

/// The first `limit` bytes of the ranges.
pub fn parts(ranges: &mut WritableRanges, limit: usize) -> [&mut [u8]; WritableRanges::MAX] {
    let mut left = limit;
    let (first, second) = ranges.pair_mut();
    [first, second].map(|space| {
        let Some(space) = space else { return &mut [][..] };
        let n = space.len().min(left);
        left = left.saturating_sub(n);
        space.bytes().get_mut(..n).unwrap_or(&mut [])
    })
}

/// Received bytes in the ranges of a flow.
#[derive(Debug, Default)]
pub struct Filling {
    /// One part per range.
    parts: [Option<Filled>; WritableRanges::MAX],
    /// These bytes have filled a posted buffer.
    pub is_full: bool,
}

impl Filling {
    /// Bytes in all parts.
    pub fn bytes(&self) -> usize {
        self.parts.iter().flatten().map(Filled::len).sum()
    }

    /// The bytes as a chain.
    ///
    /// # Errors
    /// The pool has no descriptor. The bytes are lost.
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

/// Takes the first `n` bytes of the ranges (or all, if there are fewer) as received, and removes full
/// ranges.
fn fill(ranges: &mut WritableRanges, n: usize) -> Filling {
    let (mut filling, mut left) = (Filling::default(), n);
    for part in &mut filling.parts {
        let Some(space) = ranges.front_mut().filter(|_| left > 0) else { break };
        let bytes = space.len().min(left);
        left = left.saturating_sub(bytes);
        *part = Some(space.fill(bytes));
        if !space.is_empty() {
            break;
        }
        filling.is_full = true;
        drop(ranges.pop_front());
    }
    filling
}

/// One flow. It is kept without ranges until it posts again.
pub struct Flow {
    key: FlowKey,
    /// The sequence number of the first byte of the ranges. `None`: unknown until the stack posts again.
    next: Option<SeqNum>,
    /// The posted ranges.
    pub ranges: WritableRanges,
    /// Header bytes of the last segment: the payload begins after them.
    pub header_bytes: usize,
    /// Payload bytes of the last segment.
    pub last_bytes: usize,
    /// The headers of the last segment, to match the next one against.
    predicted: Option<PredictedHeaders>,
    /// The device has waited for the stack once since ranges were last posted or removed.
    pub has_waited: bool,
}

impl Flow {
    /// Whether the next segment can be placed.
    pub fn is_ready(&self) -> bool {
        self.next.is_some() && !self.ranges.is_empty()
    }

    /// Whether the segment is the next one, and a range is posted.
    pub fn expects(&self, s: &Segment) -> bool {
        self.next == Some(s.seq)
            && s.payload_bytes > 0
            && !self.ranges.is_empty()
            && s.flags.contains(Flags::ACK)
            && !s.flags.intersects(SPECIAL)
    }

    /// The next segment, in a frame of `frame_bytes` with this front. `None`: the headers do not match those
    /// of the last segment.
    #[inline]
    pub fn predict(&self, front: &[u8], frame_bytes: usize) -> Option<Segment> {
        let l4 = self.predicted.as_ref()?.predict(front, frame_bytes)?;
        let (seq, flags, bytes) = tcp::Header::peek(front.get(l4..)?)?;
        let header_bytes = l4.checked_add(bytes)?;
        let payload_bytes = frame_bytes.checked_sub(header_bytes)?;
        let s = Segment { flow: self.key, seq, flags, header_bytes, payload_bytes };
        self.expects(&s).then_some(s)
    }

    /// Keeps the headers of this frame for [`Flow::predict`].
    pub fn learn(&mut self, front: &[u8]) {
        self.predicted = PredictedHeaders::of(front);
    }

    /// Whether the stack may be about to post ranges for this segment: it has revoked its ranges, or it
    /// posted before it received the bytes in between.
    pub fn is_outdated(&self, s: &Segment) -> bool {
        self.ranges.is_empty() || self.next.is_some_and(|next| s.seq.after(next))
    }

    /// Takes the payload of the segment whose first bytes are in the ranges, up to their end.
    pub fn fill(&mut self, s: &Segment) -> Filling {
        let filling = fill(&mut self.ranges, s.payload_bytes);
        self.took(s);
        filling
    }

    /// As [`Flow::fill`], appended to a chain. Returns whether a posted buffer became full.
    ///
    /// # Errors
    /// The pool has no descriptor. The bytes are lost, and nothing is placed until the stack posts again.
    pub fn fill_into(
        &mut self,
        s: &Segment,
        packet: &mut Chain,
        pool: &mut Pool,
    ) -> Result<bool, NoBuffer> {
        let (mut left, mut is_full) = (s.payload_bytes, false);
        while let Some(space) = self.ranges.front_mut().filter(|_| left > 0) {
            let bytes = space.len();
            if left < bytes {
                packet.push_back(space.split(left, pool).inspect_err(|_| self.next = None)?);
                break;
            }
            is_full = true;
            left = left.saturating_sub(bytes);
            if let Some(space) = self.ranges.pop_front() {
                packet.push_back(space.into_mbuf(pool).inspect_err(|_| self.next = None)?);
            }
        }
        self.took(s);
        Ok(is_full)
    }

    /// Advances behind a segment.
    fn took(&mut self, s: &Segment) {
        let bytes = u32::try_from(s.payload_bytes).unwrap_or(0);
        self.next = Some(SeqNum(s.seq.0.wrapping_add(bytes)));
        (self.header_bytes, self.last_bytes) = (s.header_bytes, s.payload_bytes);
        self.has_waited |= self.ranges.is_empty();
    }

    /// A placed frame was lost: nothing is placed until the stack posts again.
    pub fn lose(&mut self) {
        self.next = None;
    }
}

/// The flows by slot.
pub struct Flows {
    slots: [Option<Flow>; MAX_FLOWS],
    /// The slot of the last look-up.
    last: usize,
}

/// The slot of a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The slot of the flow.
    pub slot: usize,
    /// The slot belonged to another flow before.
    pub is_new: bool,
}

impl Default for Flows {
    /// No flow.
    fn default() -> Flows {
        Flows { slots: std::array::from_fn(|_| None), last: 0 }
    }
}

impl Flows {
    /// Sets or replaces the ranges of a flow. `None`: [`MAX_FLOWS`] flows have ranges.
    pub fn set(&mut self, key: FlowKey, next: SeqNum, ranges: WritableRanges) -> Option<Place> {
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
            ranges,
            header_bytes,
            last_bytes,
            predicted,
            has_waited: false,
        });
        self.last = slot;
        Some(Place { slot, is_new: known.is_none() })
    }

    /// One more range behind the last one that is left. `None`: none is left, or there are two.
    pub fn add(&mut self, key: &FlowKey, range: WritableRange) -> Option<Place> {
        let slot = self.slot_of(key)?;
        let flow = self.get_mut(slot).filter(|f| f.is_ready() && f.ranges.has_space_for_next())?;
        flow.ranges.push(range).ok()?;
        flow.has_waited = false;
        Some(Place { slot, is_new: false })
    }

    /// Removes and returns the ranges of a flow.
    pub fn clear(&mut self, key: &FlowKey) -> WritableRanges {
        let flow = self.slot_of(key).and_then(|s| self.get_mut(s));
        flow.map(|f| {
            f.has_waited &= f.ranges.is_empty();
            std::mem::take(&mut f.ranges)
        })
        .unwrap_or_default()
    }

    /// Whether any flow has ranges. Linear in the slots.
    pub fn has_ranges(&self) -> bool {
        self.slots.iter().flatten().any(|f| !f.ranges.is_empty())
    }

    /// An unused slot, else the slot of a flow without ranges.
    fn free_slot(&self) -> Option<usize> {
        let slots = &self.slots;
        let unused = slots.iter().position(Option::is_none);
        let has_no_rooms = |f: &Option<Flow>| f.as_ref().is_some_and(|f| f.ranges.is_empty());
        unused.or_else(|| slots.iter().position(has_no_rooms))
    }

    /// The flow in a slot.
    pub fn get(&self, slot: usize) -> Option<&Flow> {
        self.slots.get(slot)?.as_ref()
    }

    /// The flow in a slot.
    pub fn get_mut(&mut self, slot: usize) -> Option<&mut Flow> {
        self.slots.get_mut(slot)?.as_mut()
    }

    /// Two different flows.
    pub fn both(&mut self, a: usize, b: usize) -> Option<(&mut Flow, &mut Flow)> {
        let [a, b] = self.slots.get_disjoint_mut([a, b]).ok()?;
        Some((a.as_mut()?, b.as_mut()?))
    }

    /// The slot of a flow.
    pub fn slot_of(&self, key: &FlowKey) -> Option<usize> {
        let is_it = |f: &Option<Flow>| f.as_ref().is_some_and(|f| f.key == *key);
        if self.slots.get(self.last).is_some_and(is_it) {
            return Some(self.last);
        }
        self.slots.iter().position(is_it)
    }

    /// The slot of a segment's flow. Zones are ignored: a device is one interface.
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
