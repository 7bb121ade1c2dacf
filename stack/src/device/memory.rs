//! Two devices joined by queues of frames in memory: a wire for programs and tests without an operating system below.
//!
//! Frames are copied on both sides. Each queue holds [`QUEUE_FRAMES`]; a full one takes nothing.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use std::sync::{Arc, Mutex, PoisonError};

use crate::base::{Counters, DropReason, Instant, Offload};
use crate::device::{Burst, Caps, Device, Packet, WakeFd};
use crate::mbuf::{Pool, Purpose};

/// Frames on their way in one direction at most.
pub const QUEUE_FRAMES: usize = 1024;

type Frames = Arc<Mutex<VecDeque<(Vec<u8>, Offload)>>>;

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
        let before = out.len();
        while out.len() - before < budget
            && !out.is_full()
            && let Some((frame, offload)) = arriving.pop_front()
        {
            match pool.alloc_chain(frame.len(), 0, Purpose::Receive) {
                Ok(mut chain) => {
                    chain.fill([&frame[..]]);
                    drop(out.push(Packet { chain, offload }));
                }
                Err(_) => counters.drop_packet(DropReason::NoBuffer),
            }
        }
        out.len() - before
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
