//! A bounded queue of frames, ordered by the time at which each is due.

use alloc::collections::BinaryHeap;
use core::cmp::Reverse;

use crate::base::Instant;

use crate::device::Packet;

struct Held {
    due: Instant,
    serial: u64,
    packet: Packet,
}

impl Held {
    fn key(&self) -> Reverse<(Instant, u64)> {
        Reverse((self.due, self.serial))
    }
}

impl PartialEq for Held {
    fn eq(&self, other: &Held) -> bool {
        self.key() == other.key()
    }
}
impl Eq for Held {}
impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Held) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Held {
    fn cmp(&self, other: &Held) -> core::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

/// Frames that are due at given times; of those with the same time the first pushed leaves first. O(log n) per frame.
pub struct DelayQueue {
    heap: BinaryHeap<Held>,
    serial: u64,
    capacity: usize,
    bytes: usize,
}

impl DelayQueue {
    /// An empty queue for up to `capacity` frames.
    pub fn with_capacity(capacity: usize) -> DelayQueue {
        DelayQueue { heap: BinaryHeap::new(), serial: 0, capacity, bytes: 0 }
    }

    /// Holds a frame until `due`; returns it if the queue is full.
    pub fn push(&mut self, due: Instant, packet: Packet) -> Result<(), Packet> {
        if self.is_full() {
            return Err(packet);
        }
        self.serial += 1;
        self.bytes += packet.chain.len();
        self.heap.push(Held { due, serial: self.serial, packet });
        Ok(())
    }

    /// When the first frame is due.
    pub fn next_due(&self) -> Option<Instant> {
        self.heap.peek().map(|h| h.due)
    }

    /// Takes the first frame that is due at `now`.
    pub fn pop_due(&mut self, now: Instant) -> Option<Packet> {
        if self.next_due()? > now {
            return None;
        }
        let packet = self.heap.pop()?.packet;
        self.bytes -= packet.chain.len();
        Some(packet)
    }

    /// How many frames it holds.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// Whether no further frame fits.
    pub fn is_full(&self) -> bool {
        self.heap.len() >= self.capacity
    }

    /// Bytes of all frames.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::testing::{packet, pool};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn queue_agrees_with_a_sorted_list(ops in proptest::collection::vec((any::<bool>(), 0u64..20), 1..200)) {
            let mut pool = pool();
            let mut queue = DelayQueue::with_capacity(16);
            let mut model: Vec<(u64, u32)> = Vec::new();
            for (n, (is_push, time)) in ops.into_iter().enumerate() {
                if is_push {
                    let p = packet(&mut pool, &(n as u32).to_be_bytes());
                    let accepted = queue.push(Instant::from_nanos(time), p).is_ok();
                    prop_assert_eq!(accepted, model.len() < 16);
                    if accepted {
                        let at = model.partition_point(|(t, _)| *t <= time);
                        model.insert(at, (time, n as u32));
                    }
                } else {
                    let got = queue.pop_due(Instant::from_nanos(time)).map(|p| p.chain.to_vec());
                    let is_due = model.first().is_some_and(|(t, _)| *t <= time);
                    let expected = is_due.then(|| model.remove(0).1.to_be_bytes().to_vec());
                    prop_assert_eq!(got, expected);
                }
                prop_assert_eq!(queue.len(), model.len());
                prop_assert_eq!(queue.bytes(), 4 * model.len());
                prop_assert_eq!(queue.next_due().map(Instant::as_nanos), model.first().map(|m| m.0));
            }
        }
    }
}
