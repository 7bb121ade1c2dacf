//! A frame with what is still to be done to it, and a bounded run of frames.

use std::collections::VecDeque;
use std::collections::vec_deque;

use fulmar_base::Offload;
use fulmar_mbuf::{Chain, Pool};

/// A whole Ethernet frame, without frame check sequence, and what is still to be done to it.
#[derive(Debug)]
pub struct Packet {
    /// The bytes. The headers up to the transport's lie in the first mbuf of a frame to be sent.
    pub chain: Chain,
    /// What is still to be done; offsets count from the first byte of the Ethernet header.
    pub offload: Offload,
}

impl Packet {
    /// A frame that is complete as it is.
    pub fn new(chain: Chain) -> Packet {
        Packet { chain, offload: Offload::default() }
    }

    /// Whether a receiver need not sum the transport: checked by the device, or never on a wire.
    pub const fn is_checksum_trusted(&self) -> bool {
        self.offload.needs_csum || self.offload.csum_valid
    }

    /// How many packets on the wire the frame stands for; at least 1.
    pub fn wire_packets(&self) -> usize {
        let Some(gso) = self.offload.gso else { return 1 };
        let payload = self.chain.len().saturating_sub(usize::from(gso.header_bytes));
        payload.div_ceil(usize::from(gso.segment_bytes).max(1)).max(1)
    }
}

/// A bounded queue of frames; its memory is obtained once.
#[derive(Debug)]
pub struct Burst {
    packets: VecDeque<Packet>,
    capacity: usize,
}

impl Burst {
    /// An empty burst that holds up to `capacity` frames.
    pub fn with_capacity(capacity: usize) -> Burst {
        Burst { packets: VecDeque::with_capacity(capacity), capacity }
    }

    /// Appends a frame; gives it back when the burst is full.
    #[inline]
    pub fn push(&mut self, p: Packet) -> Result<(), Packet> {
        if self.is_full() {
            return Err(p);
        }
        self.packets.push_back(p);
        Ok(())
    }

    /// Puts a frame back in front; gives it back when the burst is full.
    pub fn push_front(&mut self, p: Packet) -> Result<(), Packet> {
        if self.is_full() {
            return Err(p);
        }
        self.packets.push_front(p);
        Ok(())
    }

    /// Takes the first frame.
    #[inline]
    pub fn pop_front(&mut self) -> Option<Packet> {
        self.packets.pop_front()
    }

    /// Takes the last frame.
    pub fn pop_back(&mut self) -> Option<Packet> {
        self.packets.pop_back()
    }

    /// The first frame.
    pub fn front(&self) -> Option<&Packet> {
        self.packets.front()
    }

    /// The first frame, to be changed.
    pub fn front_mut(&mut self) -> Option<&mut Packet> {
        self.packets.front_mut()
    }

    /// The frame number `i` from the front, to be changed.
    pub fn get_mut(&mut self, i: usize) -> Option<&mut Packet> {
        self.packets.get_mut(i)
    }

    /// The frames in order.
    pub fn iter(&self) -> vec_deque::Iter<'_, Packet> {
        self.packets.iter()
    }

    /// How many frames it holds.
    pub fn len(&self) -> usize {
        self.packets.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Whether no further frame fits.
    pub fn is_full(&self) -> bool {
        self.packets.len() >= self.capacity
    }

    /// How many further frames fit.
    pub fn room(&self) -> usize {
        self.capacity.saturating_sub(self.packets.len())
    }

    /// How many frames it holds at most.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Frees every frame.
    pub fn clear(&mut self, pool: &mut Pool) {
        while let Some(p) = self.packets.pop_front() {
            pool.free(p.chain);
        }
    }
}

impl<'a> IntoIterator for &'a Burst {
    type Item = &'a Packet;
    type IntoIter = vec_deque::Iter<'a, Packet>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
