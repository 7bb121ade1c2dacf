//! A device over queues of packets in memory, whose other side is the caller: for programs and tests without an operating
//! system below. Packets are copied on both sides.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::{Counters, DropReason, Instant, Medium, Offload};
use crate::device::{Burst, Caps, Device, Packet, WakeFd, plain_ip};
use crate::mbuf::{Chain, Pool, Purpose};

/// Packets of either direction at most; a full queue accepts none.
pub const QUEUE_PACKETS: usize = 1 << 16;

/// A packet as the medium carries it (with its Ethernet header, or from its IP header on), and its offload request or the
/// device's verification.
pub type Frame = (Vec<u8>, Offload);

/// A frame on its way to the stack.
#[derive(Clone, Debug, Default)]
pub struct Arrival {
    /// As the medium carries it.
    pub bytes: Vec<u8>,
    /// The device's verification.
    pub offload: Offload,
    /// Lengths of the mbufs that it is received into; the last has the rest.
    pub pieces: Vec<usize>,
}

impl From<Frame> for Arrival {
    /// In one piece.
    fn from((bytes, offload): Frame) -> Arrival {
        Arrival { bytes, offload, pieces: Vec::new() }
    }
}

/// Longest frame that may use the control reserve of the pool, as an ACK does.
const CONTROL_BYTES: usize = 256;

/// The queues between a [`MemoryDevice`] and its caller.
#[derive(Debug, Default)]
pub struct Wire {
    /// Packets that the stack has sent, for the caller to take.
    pub sent: VecDeque<Frame>,
    /// Calls of the device that sent something.
    pub bursts: usize,
    /// Packets that the next polls receive.
    pub arriving: VecDeque<Arrival>,
    /// The device accepts nothing.
    pub is_full: bool,
}

/// The caller's side of a [`MemoryDevice`]. Clones are handles to the same side.
#[derive(Clone, Debug, Default)]
pub struct MemoryPort(Arc<Mutex<Wire>>);

impl MemoryPort {
    /// Passes a packet to the stack, which receives it in the next [`Shard::step`](crate::shard::Shard::step). False: the
    /// queue is full, and the packet was not taken.
    pub fn push(&self, packet: &[u8]) -> bool {
        let mut wire = self.lock();
        let has_space = wire.arriving.len() < QUEUE_PACKETS;
        if has_space {
            wire.arriving.push_back((packet.to_vec(), Offload::default()).into());
        }
        has_space
    }

    /// Takes the first packet that the stack has sent and that was not taken yet.
    pub fn pop(&self) -> Option<Vec<u8>> {
        self.lock().sent.pop_front().map(|(packet, _)| packet)
    }

    /// The queues.
    pub fn lock(&self) -> MutexGuard<'_, Wire> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A device that keeps the packets it sends and receives those that its caller passes. The caller polls.
#[derive(Debug)]
pub struct MemoryDevice {
    caps: Caps,
    port: MemoryPort,
}

impl MemoryDevice {
    /// A device with these capabilities, and its other side.
    pub fn new(caps: Caps) -> (MemoryDevice, MemoryPort) {
        let port = MemoryPort::default();
        (MemoryDevice { caps, port: port.clone() }, port)
    }
}

impl Device for MemoryDevice {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn tx_burst(
        &mut self,
        _: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        let mut wire = self.port.lock();
        if wire.is_full || wire.sent.len() >= QUEUE_PACKETS {
            return 0;
        }
        let count = burst.len();
        wire.bursts += usize::from(count > 0);
        while let Some(frame) = burst.pop_front() {
            let packet = match self.caps.medium {
                Medium::Ethernet => Ok(frame),
                Medium::Ip => plain_ip::from_frame(frame, pool),
            };
            match packet {
                Ok(p) => {
                    wire.sent.push_back((p.chain.to_vec(), p.offload));
                    pool.free(p.chain);
                }
                Err(reason) => counters.drop_packet(reason),
            }
        }
        count
    }

    fn rx_burst(
        &mut self,
        _: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let mut wire = self.port.lock();
        let before = out.len();
        while out.len() - before < budget
            && !out.is_full()
            && let Some(arrival) = wire.arriving.pop_front()
        {
            match receive(&arrival, self.caps.medium, pool) {
                Ok(p) => drop(out.push(p)),
                Err(reason) => counters.drop_packet(reason),
            }
        }
        out.len() - before
    }

    fn arm(&mut self) -> bool {
        self.port.lock().arriving.is_empty()
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        None
    }
}

/// Copies a packet into the pool.
fn receive(a: &Arrival, medium: Medium, pool: &mut Pool) -> Result<Packet, DropReason> {
    let purpose = if a.bytes.len() <= CONTROL_BYTES { Purpose::Control } else { Purpose::Receive };
    let headroom = if medium == Medium::Ip { plain_ip::HEADER_BYTES } else { 0 };
    let (mut chain, mut rest) = (Chain::new(), &a.bytes[..]);
    for n in a.pieces.iter().copied().chain([usize::MAX]) {
        let (piece, others) = rest.split_at(n.min(rest.len()));
        rest = others;
        if piece.is_empty() {
            continue;
        }
        let Ok(mut part) = pool.alloc_chain(piece.len(), headroom, purpose) else {
            pool.free(chain);
            return Err(DropReason::NoBuffer);
        };
        part.fill([piece]);
        chain.append(part);
    }
    match medium {
        Medium::Ethernet => Ok(Packet { chain, offload: a.offload }),
        Medium::Ip => plain_ip::to_frame(chain, a.offload, pool),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::EtherAddr;
    use crate::device::testing::pool;

    #[test]
    fn a_frame_is_received_in_the_pieces_that_were_asked_for() {
        let caps = Caps::plain(1500, EtherAddr([2, 0, 0, 0, 0, 1]));
        let (mut device, port) = MemoryDevice::new(caps);
        let (mut pool, mut counters) = (pool(), Counters::default());
        let mut came = Burst::with_capacity(4);
        for (pieces, segs) in [(vec![], 1), (vec![2, 3], 3), (vec![0, 9], 1), (vec![1; 6], 6)] {
            let arrival = Arrival { bytes: b"abcdef".to_vec(), pieces, ..Arrival::default() };
            port.lock().arriving.push_back(arrival);
            let now = Instant::ZERO;
            assert_eq!(device.rx_burst(now, &mut pool, &mut came, 9, &mut counters), 1);
            let chain = came.pop_front().unwrap().chain;
            assert_eq!((chain.to_vec(), chain.segs()), (b"abcdef".to_vec(), segs));
            pool.free(chain);
        }
    }

    #[test]
    fn a_packet_of_ip_has_no_link_header_outside() {
        let (mut device, port) = MemoryDevice::new(Caps::plain_ip(1500));
        let (mut pool, mut counters) = (pool(), Counters::default());
        let (mut burst, now) = (Burst::with_capacity(4), Instant::ZERO);
        let mut sent = [0; 24];
        sent[0] = 0x45;
        assert!(port.push(&sent) && port.push(&[0; 24]));
        assert_eq!(device.rx_burst(now, &mut pool, &mut burst, 9, &mut counters), 1);
        assert_eq!(counters.drops(DropReason::IpHeader), 1);
        assert_eq!(burst.front().map(|p| p.chain.len()), Some(24 + plain_ip::HEADER_BYTES));
        assert_eq!(device.tx_burst(now, &mut pool, &mut burst, &mut counters), 1);
        assert_eq!((port.pop().as_deref(), port.pop()), (Some(&sent[..]), None));
    }
}
