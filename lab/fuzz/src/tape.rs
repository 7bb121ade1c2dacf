//! A device whose other side is the script: frames in a queue each way.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fulmar_stack::base::{Counters, DropReason, Instant, Offload};
use fulmar_stack::device::{Burst, Caps, Device, Packet, WakeFd};
use fulmar_stack::mbuf::{Chain, Pool, Purpose};

/// A frame on its way to the stack.
pub struct Arrival {
    /// From the Ethernet header on.
    pub bytes: Vec<u8>,
    /// What the device says of it.
    pub offload: Offload,
    /// Lengths of the mbufs that it lands in; the last takes what is left.
    pub pieces: Vec<usize>,
}

/// What lies on both sides of the device.
#[derive(Default)]
pub struct Wire {
    /// Frames that the stack has sent, with what it asked of the device.
    pub sent: Vec<(Vec<u8>, Offload)>,
    /// Frames that wait for the stack.
    pub arriving: VecDeque<Arrival>,
    /// The device takes nothing.
    pub is_full: bool,
}

/// Both ends hold it.
pub type SharedWire = Arc<Mutex<Wire>>;

/// Locks it.
pub fn lock(wire: &SharedWire) -> MutexGuard<'_, Wire> {
    wire.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The device.
pub struct Tape {
    caps: Caps,
    wire: SharedWire,
}

impl Tape {
    /// A device over `wire`.
    pub fn new(caps: Caps, wire: &SharedWire) -> Tape {
        Tape { caps, wire: Arc::clone(wire) }
    }
}

/// The bytes in memory of the pool, in the pieces that the script asks for.
fn land(a: &Arrival, pool: &mut Pool) -> Option<Chain> {
    let (mut chain, mut rest) = (Chain::new(), &a.bytes[..]);
    let lengths = a.pieces.iter().copied().chain(std::iter::once(usize::MAX));
    for n in lengths {
        let (piece, behind) = rest.split_at(n.min(rest.len()));
        rest = behind;
        if piece.is_empty() {
            continue;
        }
        let purpose = if a.bytes.len() <= 256 { Purpose::Control } else { Purpose::Receive };
        let Ok(mut part) = pool.alloc_chain(piece.len(), 0, purpose) else {
            pool.free(chain);
            return None;
        };
        part.fill([piece]);
        chain.append(part);
    }
    Some(chain)
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
        let mut wire = lock(&self.wire);
        if wire.is_full {
            return 0;
        }
        let count = burst.len();
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
        let mut wire = lock(&self.wire);
        let before = out.len();
        while out.len() - before < budget && !out.is_full() {
            let Some(a) = wire.arriving.pop_front() else { break };
            match land(&a, pool) {
                Some(chain) => {
                    let pushed = out.push(Packet { chain, offload: a.offload });
                    assert!(pushed.is_ok(), "invariant: the burst has room");
                }
                None => counters.drop_packet(DropReason::NoBuffer),
            }
        }
        out.len() - before
    }

    fn arm(&mut self) -> bool {
        lock(&self.wire).arriving.is_empty()
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        None
    }
}
