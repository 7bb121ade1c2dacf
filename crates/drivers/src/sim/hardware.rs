//! The hardware: takes descriptors, puts frames on the wire, and writes what arrives into posted
//! buffers. It runs when it is called and then does everything up to that time, in order.

use std::sync::Arc;

use fulmar_base::{Duration, Instant};
use fulmar_netdev::Packet;

use super::SimConfig;
use super::line::Line;
use super::meter::{Board, bump};
use super::peer::{Arrival, Out, Peer};
use super::ring::Ring;
use super::rx::{Buffer, Rx};

/// A frame to be sent.
pub struct TxSlot {
    pub packet: Packet,
    /// Descriptors that it takes.
    pub descriptors: usize,
    /// When the hardware has finished with it.
    pub done_at: Instant,
}

/// What host and hardware share.
pub struct Rings {
    pub tx: Ring<TxSlot>,
    pub rx: Ring<Buffer>,
}

/// See the module's header.
pub struct Hardware {
    pub board: Arc<Board>,
    rx: Rx,
    /// From the NIC, to the NIC.
    lines: [Line; 2],
    delay: Duration,
    mtu: usize,
    peer: Peer,
}

impl Hardware {
    pub fn with_peer(config: &SimConfig, board: Arc<Board>) -> Hardware {
        Hardware {
            board,
            rx: Rx::new(config),
            lines: [Line::new(config.line_rate_bps), Line::new(config.line_rate_bps)],
            delay: config.delay,
            mtu: config.mtu,
            peer: Peer::new(config.far_end.clone(), config.ether),
        }
    }

    /// Does everything up to `now`; returns the bytes that it moved.
    pub fn run(&mut self, now: Instant, rings: &mut Rings) -> u64 {
        let [there, back] = &mut self.lines;
        let mut out = Out {
            rx: &mut self.rx,
            line: back,
            delay: self.delay,
            board: &self.board,
            mtu: self.mtu,
        };
        let mut is_burst = false;
        while out.has_room()
            && let Some(mut slot) = rings.tx.fetch()
        {
            slot.done_at = transmit(now, &slot.packet, there, &mut self.peer, &mut out);
            rings.tx.complete(slot);
            is_burst = true;
        }
        if is_burst {
            self.peer.end_of_burst(&mut out);
        }
        self.peer.run(now, &mut out);
        self.rx.run(now, &mut rings.rx, &self.board)
    }

    /// Whether [`Hardware::run`] would find something to do.
    pub fn is_due(&self, now: Instant, rings: &Rings) -> bool {
        rings.tx.waiting() > 0
            || self.rx.next_due().is_some_and(|t| t <= now && rings.rx.waiting() > 0)
            || self.peer.next_deadline().is_some_and(|t| t <= now)
            || self.peer.is_hungry()
            || self.board.has_commands()
    }

    /// When the hardware has something to do that does not come from the host.
    pub fn next_event(&self) -> Option<Instant> {
        self.peer.next_deadline()
    }

    pub fn rx(&self) -> &Rx {
        &self.rx
    }

    pub fn rx_mut(&mut self) -> &mut Rx {
        &mut self.rx
    }
}

/// Puts one frame on the wire to the peer; returns when it has left.
fn transmit(
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
