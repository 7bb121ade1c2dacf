//! A device that notes the frames that are sent and hands over those that a test made.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use fulmar_stack::base::{Counters, Instant, Offload};
use fulmar_stack::device::{Burst, Caps, Device, Packet, WakeFd};
use fulmar_stack::mbuf::{Pool, Purpose};

/// A frame, with what is asked of the device or known about it.
pub type Frame = (Vec<u8>, Offload);

/// What passes through a [`Tape`].
#[derive(Default)]
pub struct Wire {
    /// Sent frames, with what was asked of the device.
    pub sent: Vec<Frame>,
    /// Calls into the device that sent something.
    pub bursts: usize,
    /// Frames that the next polls receive.
    pub arriving: VecDeque<Frame>,
    /// The device takes nothing.
    pub is_full: bool,
}

/// The device. Its other side is the [`Wire`].
pub struct Tape {
    caps: Caps,
    wire: Arc<Mutex<Wire>>,
}

impl Tape {
    /// A device of this kind, and what passes through it.
    pub fn new(caps: Caps) -> (Tape, Arc<Mutex<Wire>>) {
        let wire = Arc::default();
        (Tape { caps, wire: Arc::clone(&wire) }, wire)
    }
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
        let mut wire = self.wire.lock().unwrap();
        if wire.is_full {
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
        _: &mut Counters,
    ) -> usize {
        let mut wire = self.wire.lock().unwrap();
        let mut came = 0;
        while came < budget.min(out.capacity())
            && !out.is_full()
            && let Some((bytes, offload)) = wire.arriving.pop_front()
        {
            let mut chain = pool.alloc_chain(bytes.len(), 0, Purpose::Receive).unwrap();
            chain.fill([&bytes[..]]);
            out.push(Packet { chain, offload }).unwrap();
            came += 1;
        }
        came
    }
    fn wake_fd(&self) -> Option<WakeFd> {
        None
    }
}
