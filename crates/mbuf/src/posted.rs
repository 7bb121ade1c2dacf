//! Posted buffers: memory that a receiver gives away before its bytes arrive, and gets back filled.
//!
//! ```text
//!   RecvBuf ──post──► Hold  (the stack: who owns the buffer, how far it is filled)
//!                      └──► Room (a device, or the stack: may write the rest)
//!                            └─split─► Mbuf (what was written: part of a packet, immutable)
//!   Hold ──release, when no room and no mbuf is left──► RecvBuf
//! ```
//!
//! The memory stays at one address from the making of a [`RecvBuf`] to its drop, however often it is
//! posted, so that whoever has to prepare it (a device that registers memory) can recognise it: by
//! address, length and generation, all three ([`BufId`]).
//!
//! Not here: which bytes belong where (room `socket`), and how a device knows (room `netdev`).
//! Cost: a split is a descriptor, a record and one count of the buffer; nothing is charged to the pool
//! and nothing allocated once the pool has grown.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Deref;

pub(crate) mod raw;

pub use raw::{Filled, Lease, Room};
use raw::{Memory, unique_bytes, unique_bytes_mut};

/// Which memory a posted buffer is: what a cache of registrations compares.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BufId {
    /// Address of the first byte.
    pub address: usize,
    /// Bytes.
    pub bytes: usize,
    /// Differs between two allocations that were at the same place one after the other.
    pub generation: u64,
}

/// Where the bytes of an mbuf lie in a posted buffer ([`crate::Mbuf::placed`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placed {
    /// The buffer.
    pub buffer: BufId,
    /// The first byte, from the start of the buffer.
    pub offset: usize,
}

/// The system has no memory for a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoMemory;

impl core::fmt::Display for NoMemory {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("the system has no memory for a receive buffer of this size")
    }
}

impl core::error::Error for NoMemory {}

/// Owned memory to receive into. It is given away to be filled and comes back with what came; it
/// dereferences to the bytes that were received into it last.
pub struct RecvBuf {
    memory: Arc<Memory>,
    filled: usize,
}

impl RecvBuf {
    /// A buffer for `bytes`, page aligned, empty.
    ///
    /// # Panics
    /// If the system has no memory; see [`RecvBuf::try_with_capacity`].
    pub fn with_capacity(bytes: usize) -> RecvBuf {
        RecvBuf::try_with_capacity(bytes).expect("memory for a receive buffer")
    }

    /// As [`RecvBuf::with_capacity`].
    ///
    /// # Errors
    /// [`NoMemory`].
    pub fn try_with_capacity(bytes: usize) -> Result<RecvBuf, NoMemory> {
        let memory = Memory::pages(bytes).ok_or(NoMemory)?;
        Ok(RecvBuf { memory: Arc::new(memory), filled: 0 })
    }

    /// Bytes that fit.
    pub fn capacity(&self) -> usize {
        self.memory.bytes()
    }

    /// Forgets what was received.
    pub fn clear(&mut self) {
        self.filled = 0;
    }

    /// The whole memory, for a user who wants to write to it between two receives.
    pub fn memory_mut(&mut self) -> &mut [u8] {
        unique_bytes_mut(&mut self.memory).unwrap_or_default()
    }

    /// What was received, as a vector: the one that the buffer was made from, or a copy.
    pub fn into_vec(self) -> Vec<u8> {
        let RecvBuf { memory, filled } = self;
        let memory = match Arc::try_unwrap(memory).map(|m| m.into_vec(filled)) {
            Ok(Ok(v)) => return v,
            Ok(Err(memory)) => Arc::new(memory),
            Err(memory) => memory,
        };
        RecvBuf { memory, filled }.to_vec()
    }

    /// Which memory it is.
    pub fn id(&self) -> BufId {
        self.memory.id()
    }

    /// Gives the memory away to be filled from its start. What was received before is forgotten.
    pub fn post(self) -> Hold {
        Hold { memory: self.memory }
    }
}

impl Deref for RecvBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        unique_bytes(&self.memory, 0..self.filled)
    }
}

impl AsRef<[u8]> for RecvBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// The whole capacity of the vector is the buffer's; what was in it counts as room, not as received.
impl From<Vec<u8>> for RecvBuf {
    fn from(v: Vec<u8>) -> RecvBuf {
        RecvBuf { memory: Arc::new(Memory::vec(v)), filled: 0 }
    }
}

impl core::fmt::Debug for RecvBuf {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("RecvBuf")
            .field("filled", &self.filled)
            .field("capacity", &self.capacity())
            .finish()
    }
}

/// A posted buffer, seen by the stack: it gives out the room and gets the buffer back at the end. It
/// gives access to no byte.
pub struct Hold {
    memory: Arc<Memory>,
}

impl Hold {
    /// Bytes of the whole buffer.
    pub fn capacity(&self) -> usize {
        self.memory.bytes()
    }

    /// Which memory it is.
    pub fn id(&self) -> BufId {
        self.memory.id()
    }

    /// The right to write from `from` on. `None` while somebody else has it, while mbufs cover bytes
    /// behind `from`, or if `from` is not in the buffer.
    pub fn room(&mut self, from: usize) -> Option<Room> {
        Room::make(&mut self.memory, from)
    }

    /// Whether rooms or mbufs of the buffer exist.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.memory) > 1
    }

    /// The buffer, its first `filled` bytes (at most all) received; or the hold again while rooms or
    /// mbufs of it exist.
    pub fn release(mut self, filled: usize) -> Result<RecvBuf, Hold> {
        match Arc::get_mut(&mut self.memory) {
            Some(memory) => {
                memory.free();
                let filled = filled.min(memory.bytes());
                Ok(RecvBuf { memory: self.memory, filled })
            }
            None => Err(self),
        }
    }
}

impl core::fmt::Debug for Hold {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Hold")
            .field("capacity", &self.capacity())
            .field("is_shared", &self.is_shared())
            .finish()
    }
}

#[cfg(test)]
mod tests;
