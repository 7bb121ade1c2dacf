//! The hardware: takes descriptors, puts frames on the wire, and writes what arrives into posted
//! buffers. It runs when it is called and then does everything up to that time, in order.

use std::sync::Arc;

use fulmar_stack::base::{Duration, Instant};
use fulmar_stack::device::Packet;

use super::SimConfig;
use super::cut::cut;
use super::line::Line;
use super::meter::{Board, bump};
use super::peer::{Arrival, Out, Peer};
use super::ring::Ring;
use super::rx::{Rx, RxRing};
use super::table::FlowTable;
use super::wire::{Frames, WireEnd};

/// A frame to be sent.
pub struct TxSlot {
    pub packet: Packet,
    /// Descriptors that it takes.
    pub descriptors: usize,
    /// When the hardware has finished with it.
    pub done_at: Instant,
}

/// The state that host and hardware share.
pub struct Rings {
    pub tx: Ring<TxSlot>,
    pub rx: RxRing,
}

impl Rings {
    pub fn new(config: &SimConfig) -> Rings {
        Rings { tx: Ring::new(config.tx_descriptors), rx: RxRing::new(config) }
    }
}

/// The other end of the wire.
enum Far {
    Peer(Box<Peer>),
    Nic { end: WireEnd, outbox: Frames },
}

/// See the module's header.
pub struct Hardware {
    pub board: Arc<Board>,
    pub table: Arc<FlowTable>,
    rx: Rx,
    /// From the NIC, to the NIC; the latter is the other NIC's own, if there is one.
    lines: [Line; 2],
    delay: Duration,
    mtu: usize,
    far: Far,
}

impl Hardware {
    pub fn with_peer(config: &SimConfig, board: Arc<Board>) -> Hardware {
        let peer = Peer::new(config.far_end.clone(), config.ether);
        Hardware::new(config, board, Far::Peer(Box::new(peer)))
    }

    pub fn on_wire(config: &SimConfig, board: Arc<Board>, end: WireEnd) -> Hardware {
        Hardware::new(config, board, Far::Nic { end, outbox: Frames::new() })
    }

    fn new(config: &SimConfig, board: Arc<Board>, far: Far) -> Hardware {
        let table = Arc::new(FlowTable::new());
        Hardware {
            board,
            rx: Rx::new(config, Arc::clone(&table)),
            table,
            lines: [Line::new(config.line_rate_bps), Line::new(config.line_rate_bps)],
            delay: config.delay,
            mtu: config.mtu,
            far,
        }
    }

    /// Does everything up to `now`; returns the bytes that it moved.
    pub fn run(&mut self, now: Instant, rings: &mut Rings) -> u64 {
        let moved = match &mut self.far {
            Far::Peer(_) => self.run_peer(now, &mut rings.tx),
            Far::Nic { .. } => self.run_wire(now, &mut rings.tx),
        };
        moved + self.rx.run(now, &mut rings.rx, &self.board)
    }

    fn run_peer(&mut self, now: Instant, tx: &mut Ring<TxSlot>) -> u64 {
        let Far::Peer(peer) = &mut self.far else { return 0 };
        let [there, back] = &mut self.lines;
        let mut out = Out {
            rx: &mut self.rx,
            line: back,
            delay: self.delay,
            board: &self.board,
            mtu: self.mtu,
            moved_bytes: 0,
        };
        let mut is_burst = false;
        while out.has_space()
            && let Some(slot) = tx.front()
        {
            slot.done_at = to_peer(now, &slot.packet, there, peer, &mut out);
            tx.complete_front();
            is_burst = true;
        }
        if is_burst {
            peer.end_of_burst(&mut out);
        }
        peer.run(now, &mut out);
        out.moved_bytes
    }

    fn run_wire(&mut self, now: Instant, tx: &mut Ring<TxSlot>) -> u64 {
        let Far::Nic { end, outbox } = &mut self.far else { return 0 };
        let mut moved = 0;
        // The last frame may be a super-frame, so the lane holds a little more than its bound.
        while tx.waiting() > 0 && end.space() > outbox.len() {
            let Some(slot) = tx.front() else { break };
            slot.done_at = now;
            let [line, _] = &mut self.lines;
            let (mut packets, delay) = (0, self.delay);
            let is_sent = cut(&slot.packet, &mut self.rx.spare, |frame| {
                let left = line.transmit(now, frame.len(), 1, 0);
                slot.done_at = left;
                packets += 1;
                outbox.push_back((left + delay, frame));
            });
            bump(&self.board.counts.tx_packets, packets);
            bump(&self.board.counts.tx_malformed, u64::from(!is_sent));
            moved += 2 * slot.packet.chain.len() as u64;
            tx.complete_front();
        }
        if end.has_peer() {
            end.send(outbox, &mut self.rx.spare);
        }
        outbox.clear();
        end.receive(&mut self.rx.lane, &mut self.rx.spare);
        moved
    }

    /// Whether [`Hardware::run`] would find something to do.
    pub fn is_due(&self, now: Instant, rings: &Rings) -> bool {
        let far = match &self.far {
            Far::Peer(_) => {
                (rings.tx.waiting() > 0 && self.rx.has_space()) || self.board.has_commands()
            }
            Far::Nic { end, .. } => {
                (rings.tx.waiting() > 0 && end.space() > 0)
                    || (end.has_frames() && self.rx.has_space())
            }
        };
        far || self.next_event().is_some_and(|t| t <= now)
            || (self.rx.next_due().is_some_and(|t| t <= now) && rings.rx.has_buffers())
    }

    /// When the hardware has something to do that does not come from the host.
    pub fn next_event(&self) -> Option<Instant> {
        match &self.far {
            Far::Peer(p) => p.next_event(self.lines[1].busy_until(), self.rx.has_space()),
            Far::Nic { .. } => None,
        }
    }

    /// When the hardware asks for the host's attention.
    pub fn interrupt_at(&self, rx: &RxRing) -> Option<Instant> {
        self.rx.interrupt_at(rx, self.board.rx_coalesce.get())
    }

    /// When the next frame arrives that is on its way.
    pub fn next_due(&self) -> Option<Instant> {
        self.rx.next_due()
    }

    /// Whether something is still at the other end.
    pub fn has_carrier(&self) -> bool {
        match &self.far {
            Far::Peer(_) => true,
            Far::Nic { end, .. } => end.has_peer(),
        }
    }
}

/// Puts one frame on the wire to the peer; returns when it has left.
fn to_peer(
    now: Instant,
    p: &Packet,
    line: &mut Line,
    peer: &mut Peer,
    out: &mut Out<'_>,
) -> Instant {
    let packets = p.wire_packets();
    bump(&out.board.counts.tx_packets, packets as u64);
    let headers = p.offload.gso.map_or(0, |g| usize::from(g.header_bytes));
    let left = line.transmit(now, p.chain.len(), packets, headers);
    // The headers lie in the first mbuf: that is the contract of a packet.
    let front = p.chain.front().map_or(&[][..], |m| m.as_slice());
    let arrival = Arrival { at: left + out.delay, front, chain: &p.chain, gso: p.offload.gso };
    peer.input(&arrival, out);
    left
}
