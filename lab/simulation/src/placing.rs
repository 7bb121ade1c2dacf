//! A device that puts payload straight into posted buffers: it knows flows by their headers, looks at
//! nothing else (not even checksums), and hands up late what it has placed.

use std::collections::VecDeque;

use fulmar_stack::base::{Duration, FlowKey, Instant, SeqNum};
use fulmar_stack::device::{DirectPlacement, Packet, Rng, Unsupported, WritableRanges};
use fulmar_stack::mbuf::{Chain, Pool, Purpose};
use fulmar_stack::wire::dissect::{Headers, Transport};
use fulmar_stack::wire::tcp::Flags;

/// Flows that it knows at once.
const MOST_FLOWS: usize = 4;
/// All headers there can be.
const HEAD_BYTES: usize = 14 + 60 + 60;

struct Expected {
    flow: FlowKey,
    next: SeqNum,
    rooms: WritableRanges,
}

/// See the module's header.
pub struct Placing {
    flows: Vec<Expected>,
    /// Frames that came and are not handed up.
    held: VecDeque<Packet>,
    until: Instant,
    rng: Rng,
}

impl DirectPlacement for Placing {
    fn place(
        &mut self,
        flow: FlowKey,
        next: SeqNum,
        rooms: WritableRanges,
    ) -> Result<(), Unsupported> {
        drop(self.revoke(&flow));
        if self.flows.len() >= MOST_FLOWS {
            return Err(Unsupported);
        }
        self.flows.push(Expected { flow, next, rooms });
        Ok(())
    }

    fn revoke(&mut self, flow: &FlowKey) -> WritableRanges {
        let at = self.flows.iter().position(|e| e.flow == *flow);
        at.map_or_else(WritableRanges::default, |at| self.flows.swap_remove(at).rooms)
    }
}

impl Placing {
    pub fn new(seed: u64) -> Placing {
        Placing {
            flows: Vec::new(),
            held: VecDeque::new(),
            until: Instant::ZERO,
            rng: Rng::new(seed),
        }
    }

    /// When it hands up what it holds.
    pub fn next_deadline(&self) -> Option<Instant> {
        (!self.held.is_empty()).then_some(self.until)
    }

    /// Takes a frame in.
    pub fn take(&mut self, p: Packet, pool: &mut Pool) {
        let p = self.landed(p, pool);
        self.held.push_back(p);
    }

    /// The next frame for the stack, unless it keeps it for a while.
    pub fn hand_up(&mut self, now: Instant) -> Option<Packet> {
        if now < self.until {
            return None;
        }
        if !self.held.is_empty() && self.rng.below(20) == 0 {
            self.until = now + Duration::from_micros(1 + self.rng.below(500));
            return None;
        }
        self.held.pop_front()
    }

    /// A frame that is lost with the device.
    pub fn lose(&mut self) -> Option<Packet> {
        self.held.pop_front()
    }

    /// The frame with its payload in the rooms of its flow, if it is the next one.
    fn landed(&mut self, p: Packet, pool: &mut Pool) -> Packet {
        let mut head = [0; HEAD_BYTES];
        let n = p.chain.copy_to(0, &mut head);
        let Some(s) = segment(&head[..n], p.chain.len()) else { return p };
        let fits = |e: &&mut Expected| e.flow == s.flow && e.next == s.seq && !e.rooms.is_empty();
        let end = s.header_bytes + s.payload_bytes;
        if s.payload_bytes == 0 || p.chain.len() != end {
            return p;
        }
        let Some(expected) = self.flows.iter_mut().find(fits) else { return p };
        let Ok(mut chain) = pool.alloc_chain(s.header_bytes, 0, Purpose::Control) else { return p };
        chain.copy_from(0, &head[..s.header_bytes]);
        let Some(placed) = scatter(&p.chain, s.header_bytes..end, &mut expected.rooms, pool) else {
            pool.free(chain);
            return p;
        };
        expected.next += placed.len() as u32;
        let at = s.header_bytes + placed.len();
        chain.append(placed);
        match pool.clone_range(&p.chain, at, end - at) {
            Ok(rest) => {
                chain.append(rest);
                pool.free(p.chain);
                Packet { chain, offload: p.offload }
            }
            Err(_) => {
                // As if it had never come: what lies in the rooms is written over.
                pool.free(chain);
                p
            }
        }
    }
}

/// Copies the bytes into the rooms as far as these go.
fn scatter(
    from: &Chain,
    bytes: std::ops::Range<usize>,
    rooms: &mut WritableRanges,
    pool: &mut Pool,
) -> Option<Chain> {
    let (mut out, mut at) = (Chain::new(), bytes.start);
    while at < bytes.end {
        let Some(room) = rooms.front_mut() else { break };
        let n = room.len().min(bytes.end - at);
        from.copy_to(at, &mut room.bytes()[..n]);
        match room.split(n, pool) {
            Ok(m) => out.push_back(m),
            Err(_) => break,
        }
        at += n;
        if room.is_empty() {
            rooms.pop_front();
        }
    }
    (!out.is_empty()).then_some(out)
}

struct Segment {
    flow: FlowKey,
    seq: SeqNum,
    header_bytes: usize,
    payload_bytes: usize,
}

/// A TCP segment that carries nothing unusual.
fn segment(head: &[u8], frame_bytes: usize) -> Option<Segment> {
    let h = Headers::parse(head, frame_bytes)?;
    let Transport::Tcp(tcp) = &h.transport else { return None };
    let usual = tcp.flags.without(Flags::PSH) == Flags::ACK;
    let Headers { payload_at: header_bytes, payload_bytes, .. } = h;
    usual.then_some(Segment { flow: h.flow()?, seq: tcp.seq, header_bytes, payload_bytes })
}
