//! An end of a simulated link that a test tampers with: frames are held back, lost, changed or copied.

use fulmar::internals::drivers::link::SimLink;
use fulmar_stack::base::{Counters, DropReason, Instant};
use fulmar_stack::device::{Burst, Device, Packet, forward_device};
use fulmar_stack::mbuf::{Pool, Purpose};

/// Frames of a burst at most.
const BURST_FRAMES: usize = 256;

/// The number of frames that the device takes now.
type Space = Box<dyn FnMut(Instant) -> usize + Send>;
/// False: a frame that is sent vanishes.
type Sends = Box<dyn FnMut(&mut Packet) -> bool + Send>;
/// A received frame as the stack gets it; `None`: it is dropped.
type Receives = Box<dyn FnMut(Packet, &mut Pool, &mut Counters) -> Option<Packet> + Send>;

/// See the module's header.
pub struct Tampered {
    inner: SimLink,
    space: Space,
    sends: Sends,
    receives: Receives,
    out: Burst,
    came: Burst,
}

impl Tampered {
    /// An end that does what the link does.
    pub fn new(inner: SimLink) -> Tampered {
        Tampered {
            inner,
            space: Box::new(|_| usize::MAX),
            sends: Box::new(|_| true),
            receives: Box::new(|p, _, _| Some(p)),
            out: Burst::with_capacity(BURST_FRAMES),
            came: Burst::with_capacity(BURST_FRAMES),
        }
    }

    /// The device takes at most this number of the frames that are offered.
    pub fn takes(self, space: impl FnMut(Instant) -> usize + Send + 'static) -> Tampered {
        Tampered { space: Box::new(space), ..self }
    }

    /// `change` may change a frame that is sent, and says whether it is sent at all.
    pub fn sends(self, change: impl FnMut(&mut Packet) -> bool + Send + 'static) -> Tampered {
        Tampered { sends: Box::new(change), ..self }
    }

    /// `change` is shown each received frame and says whether it has changed it.
    pub fn changes(self, mut change: impl FnMut(&mut [u8]) -> bool + Send + 'static) -> Tampered {
        let receives: Receives = Box::new(move |mut p, pool, _| {
            let mut bytes = p.chain.to_vec();
            if change(&mut bytes) {
                let chain = pool.alloc_chain(bytes.len(), 0, Purpose::Receive).expect("buffers");
                pool.free(std::mem::replace(&mut p.chain, chain));
                p.chain.copy_from(0, &bytes);
            }
            Some(p)
        });
        Tampered { receives, ..self }
    }

    /// Received frames are copied into memory of the receiver's pool, as drivers do.
    pub fn copies(self) -> Tampered {
        Tampered { receives: Box::new(copied), ..self }
    }
}

/// A copy of a frame in memory of this pool, a small one in its reserve if need be. `None`: it was dropped and counted.
pub fn copied(p: Packet, pool: &mut Pool, counters: &mut Counters) -> Option<Packet> {
    let len = p.chain.len();
    let copy = pool.alloc_chain(len, 0, Purpose::Receive).or_else(|e| match len {
        0..=256 => pool.alloc_chain(len, 0, Purpose::Control),
        _ => Err(e),
    });
    let Ok(mut copy) = copy else {
        pool.free(p.chain);
        counters.drop_packet(DropReason::NoBuffer);
        return None;
    };
    copy.fill(p.chain.slices());
    pool.free(p.chain);
    Some(Packet { chain: copy, offload: p.offload })
}

impl Device for Tampered {
    forward_device!(self => self.inner, except tx_burst, rx_burst);
    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        let offered = burst.len();
        let taken = if offered > 0 { (self.space)(now) } else { 0 };
        for _ in 0..taken.min(offered).min(BURST_FRAMES) {
            let Some(mut p) = burst.pop_front() else { break };
            if (self.sends)(&mut p) {
                self.out.push(p).expect("as large as a burst");
            } else {
                pool.free(p.chain);
            }
        }
        if !self.out.is_empty() {
            // The link takes every frame.
            self.inner.tx_burst(now, pool, &mut self.out, counters);
        }
        offered - burst.len()
    }
    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let budget = budget.min(out.space());
        let n = self.inner.rx_burst(now, pool, &mut self.came, budget, counters);
        while let Some(p) = self.came.pop_front() {
            if let Some(p) = (self.receives)(p, pool, counters) {
                out.push(p).expect("there is space");
            }
        }
        n
    }
}
