//! Devices over queues of frames in memory, for programs and tests without an operating system below: two that are
//! joined ([`pair`]), and one whose other side is the caller ([`tape`]).
//!
//! Frames are copied on both sides.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use std::sync::{Arc, Mutex, PoisonError};

use crate::base::{Counters, DropReason, Instant, Offload};
use crate::device::{Burst, Caps, Device, Packet, WakeFd};
use crate::mbuf::{Chain, Pool, Purpose};

/// Frames between the ends of a pair in one direction at most; a full queue accepts none.
pub const QUEUE_FRAMES: usize = 1024;

/// A frame from its Ethernet header on, with its offload request or the device's verification.
pub type Frame = (Vec<u8>, Offload);

type Frames = Arc<Mutex<VecDeque<Frame>>>;

/// One end of a wire. It has no descriptor: the caller polls.
#[derive(Debug)]
pub struct Memory {
    caps: Caps,
    sent: Frames,
    arriving: Frames,
}

/// A wire with these ends.
pub fn pair(ends: [Caps; 2]) -> [Memory; 2] {
    let (there, back) = (Frames::default(), Frames::default());
    let [near, far] = ends;
    [
        Memory { caps: near, sent: Arc::clone(&there), arriving: Arc::clone(&back) },
        Memory { caps: far, sent: back, arriving: there },
    ]
}

impl Device for Memory {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn tx_burst(
        &mut self,
        _: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        _: &mut Counters,
    ) -> usize {
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let mut count = 0;
        while sent.len() < QUEUE_FRAMES
            && let Some(packet) = burst.pop_front()
        {
            sent.push_back((packet.chain.to_vec(), packet.offload));
            pool.free(packet.chain);
            count += 1;
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
        let mut arriving = self.arriving.lock().unwrap_or_else(PoisonError::into_inner);
        receive_all(&mut arriving, pool, out, budget, counters)
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        None
    }
}

/// Sent frames from which on a [`Tape`] accepts no further burst, until its caller takes them.
const KEPT_FRAMES: usize = 1 << 16;

/// A frame on its way to the stack.
#[derive(Clone, Debug, Default)]
pub struct Arrival {
    /// From the Ethernet header on.
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

/// Moves up to `budget` frames into the pool and the burst; returns how many came.
fn receive_all<A: Into<Arrival>>(
    arriving: &mut VecDeque<A>,
    pool: &mut Pool,
    out: &mut Burst,
    budget: usize,
    counters: &mut Counters,
) -> usize {
    let before = out.len();
    while out.len() - before < budget
        && !out.is_full()
        && let Some(arrival) = arriving.pop_front()
    {
        receive(arrival.into(), pool, out, counters);
    }
    out.len() - before
}

/// Moves a frame into the pool and the burst, which has space.
fn receive(a: Arrival, pool: &mut Pool, out: &mut Burst, counters: &mut Counters) {
    let purpose = if a.bytes.len() <= CONTROL_BYTES { Purpose::Control } else { Purpose::Receive };
    let (mut chain, mut rest) = (Chain::new(), &a.bytes[..]);
    for n in a.pieces.iter().copied().chain([usize::MAX]) {
        let (piece, others) = rest.split_at(n.min(rest.len()));
        rest = others;
        if piece.is_empty() {
            continue;
        }
        let Ok(mut part) = pool.alloc_chain(piece.len(), 0, purpose) else {
            pool.free(chain);
            return counters.drop_packet(DropReason::NoBuffer);
        };
        part.fill([piece]);
        chain.append(part);
    }
    drop(out.push(Packet { chain, offload: a.offload }));
}

/// The other side of a [`Tape`].
#[derive(Debug, Default)]
pub struct Wire {
    /// Frames that the stack has sent, for the caller to take.
    pub sent: Vec<Frame>,
    /// Calls of the device that sent something.
    pub bursts: usize,
    /// Frames that the next polls receive.
    pub arriving: VecDeque<Arrival>,
    /// The device accepts nothing.
    pub is_full: bool,
}

/// A device that keeps the frames it sends and receives those that the caller made. The caller polls.
#[derive(Debug)]
pub struct Tape {
    caps: Caps,
    wire: Arc<Mutex<Wire>>,
}

/// A device with these capabilities, and its other side.
pub fn tape(caps: Caps) -> (Tape, Arc<Mutex<Wire>>) {
    let wire = Arc::default();
    (Tape { caps, wire: Arc::clone(&wire) }, wire)
}

impl Device for Tape {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn tx_burst(
        &mut self,
        _: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        _: &mut Counters,
    ) -> usize {
        let mut wire = self.wire.lock().unwrap_or_else(PoisonError::into_inner);
        if wire.is_full || wire.sent.len() >= KEPT_FRAMES {
            return 0;
        }
        let count = burst.len();
        wire.bursts += usize::from(count > 0);
        while let Some(p) = burst.pop_front() {
            wire.sent.push((p.chain.to_vec(), p.offload));
            pool.free(p.chain);
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
        let mut wire = self.wire.lock().unwrap_or_else(PoisonError::into_inner);
        receive_all(&mut wire.arriving, pool, out, budget, counters)
    }

    fn arm(&mut self) -> bool {
        self.wire.lock().unwrap_or_else(PoisonError::into_inner).arriving.is_empty()
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::EtherAddr;
    use crate::device::testing::{packet, pool};

    #[test]
    fn a_frame_is_received_in_the_pieces_that_were_asked_for() {
        let (mut device, wire) = tape(Caps::plain(1500, EtherAddr([2, 0, 0, 0, 0, 1])));
        let (mut pool, mut counters) = (pool(), Counters::default());
        let mut came = Burst::with_capacity(4);
        for (pieces, segs) in [(vec![], 1), (vec![2, 3], 3), (vec![0, 9], 1), (vec![1; 6], 6)] {
            let arrival = Arrival { bytes: b"abcdef".to_vec(), pieces, ..Arrival::default() };
            wire.lock().unwrap().arriving.push_back(arrival);
            let now = Instant::ZERO;
            assert_eq!(device.rx_burst(now, &mut pool, &mut came, 9, &mut counters), 1);
            let chain = came.pop_front().unwrap().chain;
            assert_eq!((chain.to_vec(), chain.segs()), (b"abcdef".to_vec(), segs));
            pool.free(chain);
        }
    }

    #[test]
    fn a_full_queue_takes_no_frame_and_loses_none() {
        let caps = Caps::plain(1500, EtherAddr([2, 0, 0, 0, 0, 1]));
        let [mut near, mut far] = pair([caps, caps]);
        let (mut pool, mut counters) = (pool(), Counters::default());
        let mut burst = Burst::with_capacity(QUEUE_FRAMES + 2);
        for n in 0..QUEUE_FRAMES + 2 {
            burst.push(packet(&mut pool, &n.to_be_bytes())).unwrap();
        }
        let now = Instant::ZERO;
        assert_eq!(near.tx_burst(now, &mut pool, &mut burst, &mut counters), QUEUE_FRAMES);
        assert_eq!(near.tx_burst(now, &mut pool, &mut burst, &mut counters), 0);
        let mut came = Burst::with_capacity(QUEUE_FRAMES + 2);
        assert_eq!(far.rx_burst(now, &mut pool, &mut came, 2, &mut counters), 2);
        assert_eq!(near.tx_burst(now, &mut pool, &mut burst, &mut counters), 2);
        assert_eq!(
            far.rx_burst(now, &mut pool, &mut came, usize::MAX, &mut counters),
            QUEUE_FRAMES
        );
        for n in 0..QUEUE_FRAMES + 2 {
            assert_eq!(came.pop_front().unwrap().chain.to_vec(), n.to_be_bytes());
        }
    }
}
