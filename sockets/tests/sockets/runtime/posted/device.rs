//! A device that predicts the flow of the next packet. A test can make it hold back a packet or mark it urgent.

use std::sync::{Arc, Mutex};

use fulmar::internals::drivers::link::SimLink;
use fulmar_stack::base::{Counters, FlowKey, Instant, SeqNum};
use fulmar_stack::device::{
    Burst, Device, DirectPlacement, Packet, Unsupported, WritableRanges, forward_device,
};
use fulmar_stack::mbuf::Pool;
use fulmar_testbed::placing::{Expected, copy, segment};

/// What a device is to do with the next segments that carry data, and what it has done.
#[derive(Default)]
pub struct Notes {
    /// Frames that were guessed right.
    pub right: usize,
    /// And wrong.
    pub wrong: usize,
    /// How often it was asked to place.
    pub asked: usize,
    /// The next segment gets the flag URG and this pointer, as from a peer that sends urgent data.
    pub urgent: Option<u16>,
    /// The next segment stays behind.
    pub holds_next: bool,
    /// The one that stayed behind comes.
    pub lets_go: bool,
}

/// A device that lets the payload of each frame land in the rooms of the flow that it guesses, before it
/// knows whose it is.
pub struct Guesser {
    pub inner: SimLink,
    pub flows: Vec<Expected>,
    pub turn: usize,
    pub fresh: Burst,
    pub held: Option<Packet>,
    pub notes: Arc<Mutex<Notes>>,
}

/// Changes a word of a TCP header and its checksum with it (RFC 1624).
pub fn set_word(frame: &mut [u8], at: usize, value: u16) {
    let word = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    let sum = u32::from(!word(50)) + u32::from(!word(at)) + u32::from(value);
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !(((folded & 0xffff) + (folded >> 16)) as u16);
    frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
    frame[50..52].copy_from_slice(&checksum.to_be_bytes());
}

/// The sequence number of a segment.
fn sequence(frame: &[u8]) -> &[u8] {
    &frame[38..42]
}

impl Guesser {
    /// A frame before it lands, made urgent if that is wished for; nothing if it stays behind.
    fn arrived(&mut self, p: Packet, pool: &mut Pool) -> Option<Packet> {
        let notes = &mut *self.notes.lock().unwrap();
        let mut frame = p.chain.to_vec();
        if segment(&frame).is_none() {
            return Some(p);
        }
        // The sender's loss recovery repeats the segment that stays behind.
        if self.held.as_ref().is_some_and(|held| sequence(&held.chain.to_vec()) == sequence(&frame))
        {
            pool.free(p.chain);
            return None;
        }
        if std::mem::take(&mut notes.holds_next) {
            self.held = Some(p);
            return None;
        }
        let Some(pointer) = notes.urgent.take() else { return Some(p) };
        let flags = u16::from_be_bytes([frame[46], frame[47]]) | 0x20;
        set_word(&mut frame, 46, flags);
        set_word(&mut frame, 52, pointer);
        pool.free(p.chain);
        Some(Packet { chain: copy(&frame, pool), offload: p.offload })
    }

    fn land(&mut self, p: Packet, pool: &mut Pool) -> Packet {
        let frame = p.chain.to_vec();
        // Neither always the flow of the last packet nor always the other.
        self.turn += 1;
        let guessed = (self.turn / 3 + self.turn / 7) % self.flows.len().max(1);
        if let Some(e) = self.flows.get_mut(guessed) {
            // What lands does so before anybody has looked at it.
            let mut rest = &frame[66.min(frame.len())..];
            for room in e.rooms.iter_mut() {
                let n = room.len().min(rest.len());
                room.bytes()[..n].copy_from_slice(&rest[..n]);
                rest = &rest[n..];
            }
        }
        let found = segment(&frame);
        let is_next = |e: &Expected| found.is_some_and(|(f, s, _)| e.is_next(f, s));
        let owner = self.flows.iter().position(is_next);
        if owner != Some(guessed)
            && let Some(e) = self.flows.get_mut(guessed)
        {
            e.rooms.iter_mut().for_each(|r| r.scrub(frame.len()));
        }
        let (Some(owner), Some((_, _, headers))) = (owner, found) else { return p };
        let mut notes = self.notes.lock().unwrap();
        if owner == guessed {
            notes.right += 1
        } else {
            notes.wrong += 1
        }
        let chain = self.flows[owner].place(&frame, headers, pool);
        pool.free(p.chain);
        Packet { chain, offload: p.offload }
    }
}

impl Device for Guesser {
    forward_device!(self => self.inner, except rx_burst, placement);
    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        // Leaves space for the packet that was held back.
        let budget = budget.min(out.space()).saturating_sub(1);
        let before = out.len();
        self.inner.rx_burst(now, pool, &mut self.fresh, budget, counters);
        // Both ends share the notes.
        if self.held.is_some()
            && std::mem::take(&mut self.notes.lock().unwrap().lets_go)
            && let Some(p) = self.held.take()
        {
            out.push(p).expect("there is room");
        }
        while let Some(p) = self.fresh.pop_front() {
            let Some(p) = self.arrived(p, pool) else { continue };
            let p = self.land(p, pool);
            out.push(p).expect("there is room");
        }
        out.len() - before
    }
    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        Some(self)
    }
}

impl DirectPlacement for Guesser {
    fn place(
        &mut self,
        flow: FlowKey,
        next: SeqNum,
        rooms: WritableRanges,
    ) -> Result<(), Unsupported> {
        self.notes.lock().unwrap().asked += 1;
        drop(self.revoke(&flow));
        self.flows.push(Expected { flow, next, rooms });
        Ok(())
    }
    fn revoke(&mut self, flow: &FlowKey) -> WritableRanges {
        let at = self.flows.iter().position(|e| e.flow == *flow);
        at.map_or_else(WritableRanges::default, |at| self.flows.remove(at).rooms)
    }
}
