//! A bounded FIFO of frames between a stack and a device.
//!
//! ```text
//!   slots   | 5 | 6 |   |   | 3 | 4 |      a ring; their number is a power of two
//!                         first ──► len
//! ```
//!
//! `push` and `pop_front` are inlined, so that a frame is moved once on its way in and once on its way out. (A further
//! copy would be a vector load right after the word stores of the same bytes, which cannot be forwarded and stalls.)

use alloc::boxed::Box;

use crate::base::{Counters, DropReason, Offload};
use crate::mbuf::{Mbuf, Pool};

use crate::device::{Caps, Packet, offload};

/// A bounded queue of frames; its memory is allocated once.
#[derive(Debug)]
pub struct Burst {
    /// `len` slots from `first` on hold a frame; the others are `None`.
    slots: Box<[Option<Packet>]>,
    /// Free-running; masked to an index.
    first: usize,
    len: usize,
    capacity: usize,
}

impl Burst {
    /// An empty burst that holds up to `capacity` frames.
    pub fn with_capacity(capacity: usize) -> Burst {
        let slots = core::iter::repeat_with(|| None).take(capacity.max(1).next_power_of_two());
        Burst { slots: slots.collect(), first: 0, len: 0, capacity }
    }

    /// The slot of frame number `i`.
    #[inline(always)]
    fn index(&self, i: usize) -> usize {
        self.first.wrapping_add(i) & (self.slots.len() - 1)
    }

    /// Appends a frame; returns it if the burst is full.
    #[inline(always)]
    pub fn push(&mut self, p: Packet) -> Result<(), Packet> {
        if self.is_full() {
            return Err(p);
        }
        let at = self.index(self.len);
        self.slots[at] = Some(p);
        self.len += 1;
        Ok(())
    }

    /// Puts a frame in front of the others; returns it if the burst is full.
    pub fn push_front(&mut self, p: Packet) -> Result<(), Packet> {
        if self.is_full() {
            return Err(p);
        }
        self.first = self.first.wrapping_sub(1);
        let at = self.index(0);
        self.slots[at] = Some(p);
        self.len += 1;
        Ok(())
    }

    /// Takes the first frame.
    #[inline(always)]
    pub fn pop_front(&mut self) -> Option<Packet> {
        self.len = self.len.checked_sub(1)?;
        let at = self.index(0);
        self.first = self.first.wrapping_add(1);
        self.slots[at].take()
    }

    /// Takes the first frame if it is in one mbuf and the device can send it as it is. Returns its mbuf and its offload
    /// request, so that a driver writes a descriptor without moving the whole [`Packet`].
    #[inline(always)]
    pub fn pop_linear(&mut self, caps: &Caps) -> Option<(Mbuf, Offload)> {
        let at = self.index(0);
        let p = self.slots[at].as_mut()?;
        if p.offload.gso.is_some() || offload::check(p, caps).is_err() {
            return None;
        }
        let (frame, offload) = (p.chain.pop_only()?, p.offload);
        // The chain is empty, so no drop is needed.
        core::mem::forget(self.slots[at].take());
        self.len -= 1;
        self.first = self.first.wrapping_add(1);
        Some((frame, offload))
    }

    /// Takes the last frame.
    pub fn pop_back(&mut self) -> Option<Packet> {
        self.len = self.len.checked_sub(1)?;
        let at = self.index(self.len);
        self.slots[at].take()
    }

    /// The first frame.
    #[inline]
    pub fn front(&self) -> Option<&Packet> {
        self.get(0)
    }

    /// The first frame, to be changed.
    pub fn front_mut(&mut self) -> Option<&mut Packet> {
        self.get_mut(0)
    }

    #[inline]
    fn get(&self, i: usize) -> Option<&Packet> {
        // The index wraps: without the check a larger `i` would find another frame.
        if i < self.len { self.slots[self.index(i)].as_ref() } else { None }
    }

    /// The frame number `i` from the front, to be changed.
    pub fn get_mut(&mut self, i: usize) -> Option<&mut Packet> {
        let at = self.index(i);
        if i < self.len { self.slots[at].as_mut() } else { None }
    }

    /// The frames in order.
    pub fn iter(&self) -> Iter<'_> {
        Iter { burst: self, next: 0 }
    }

    /// How many frames it holds.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether no further frame fits.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.len >= self.capacity
    }

    /// How many further frames fit.
    pub fn space(&self) -> usize {
        self.capacity.saturating_sub(self.len)
    }

    /// How many frames it holds at most.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Drops every frame for one reason. Returns how many.
    pub fn discard(
        &mut self,
        reason: DropReason,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> usize {
        let count = self.len;
        while let Some(p) = self.pop_front() {
            p.discard(reason, pool, counters);
        }
        count
    }

    /// Frees every frame.
    pub fn clear(&mut self, pool: &mut Pool) {
        while let Some(p) = self.pop_front() {
            pool.free(p.chain);
        }
    }
}

/// The frames of a burst, in order.
#[derive(Clone, Debug)]
pub struct Iter<'a> {
    burst: &'a Burst,
    next: usize,
}

impl<'a> Iterator for Iter<'a> {
    type Item = &'a Packet;

    fn next(&mut self) -> Option<&'a Packet> {
        let p = self.burst.get(self.next)?;
        self.next += 1;
        Some(p)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.burst.len.saturating_sub(self.next);
        (left, Some(left))
    }
}

impl ExactSizeIterator for Iter<'_> {}

impl<'a> IntoIterator for &'a Burst {
    type Item = &'a Packet;
    type IntoIter = Iter<'a>;
    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mbuf::{PoolConfig, Purpose};
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn frame(pool: &mut Pool, bytes: usize) -> Packet {
        Packet::new(pool.alloc_chain(bytes, 0, Purpose::Send).unwrap())
    }

    fn lengths(burst: &Burst) -> Vec<usize> {
        burst.iter().map(|p| p.chain.len()).collect()
    }

    proptest! {
        /// The model: a queue of lengths.
        #[test]
        fn a_burst_agrees_with_a_queue(
            capacity in 0usize..9,
            ops in proptest::collection::vec((0u8..5, 1usize..200), 1..200),
        ) {
            let mut pool = Pool::new(PoolConfig::with_budget(8 << 20)).unwrap();
            let (mut burst, mut model) = (Burst::with_capacity(capacity), VecDeque::new());
            for (op, bytes) in ops {
                let fits = model.len() < capacity;
                match op {
                    0 | 1 => {
                        let (p, at_end) = (frame(&mut pool, bytes), op == 0);
                        let put = if at_end { burst.push(p) } else { burst.push_front(p) };
                        prop_assert_eq!(put.is_ok(), fits);
                        match put {
                            Err(p) => pool.free(p.chain),
                            Ok(()) if at_end => model.push_back(bytes),
                            Ok(()) => model.push_front(bytes),
                        }
                    }
                    2 | 3 => {
                        let (p, expected) = match op {
                            2 => (burst.pop_front(), model.pop_front()),
                            _ => (burst.pop_back(), model.pop_back()),
                        };
                        prop_assert_eq!(p.as_ref().map(|p| p.chain.len()), expected);
                        p.into_iter().for_each(|p| pool.free(p.chain));
                    }
                    _ => {
                        let at = bytes % 8;
                        let found = burst.get_mut(at).map(|p| p.chain.len());
                        prop_assert_eq!(found, model.get(at).copied());
                    }
                }
                prop_assert_eq!(lengths(&burst), model.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(burst.iter().len(), model.len());
                prop_assert_eq!(burst.front().map(|p| p.chain.len()), model.front().copied());
                prop_assert_eq!((burst.len(), burst.space()), (model.len(), capacity - model.len()));
                prop_assert_eq!(burst.is_full(), model.len() == capacity);
            }
            burst.clear(&mut pool);
            prop_assert!(burst.is_empty());
            prop_assert_eq!(pool.stats().mbufs_in_use, 0);
        }
    }
}
