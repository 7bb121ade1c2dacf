//! Posted buffers: memory of a receiver that is posted before its bytes arrive and completed when it is
//! filled.
//!
//! ```text
//!   RecvBuf ──post──► PostedBuf  (the stack's handle of the posted buffer)
//!                      └──► WritableRange (a device or the stack writes to it)
//!                            └─split─► Mbuf (bytes written: part of a packet, immutable)
//!   PostedBuf ──release, when no WritableRange and no Mbuf is left──► RecvBuf
//! ```
//!
//! The memory of a [`RecvBuf`] does not move until its drop, however often it is posted. A device that
//! registers memory recognises it by address, length and generation ([`BufId`]).
//!
//! `socket` decides which bytes belong in which buffer, and `device` passes that to devices.
//! Cost: a split is a descriptor, a record and a reference count of the buffer. Nothing is charged to the
//! pool, and nothing is allocated once the pool has grown.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Deref;

pub(crate) mod raw;

pub use raw::{Filled, WritableRange};
use raw::{Memory, unique_bytes, unique_bytes_mut};

/// The identity of the memory of a buffer: the key of a registration cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BufId {
    /// Address of the first byte.
    pub address: usize,
    /// Length of the memory.
    pub bytes: usize,
    /// Differs for each allocation at the same address.
    pub generation: u64,
}

/// The position of an mbuf in a posted buffer ([`Mbuf::placed`](crate::mbuf::Mbuf::placed)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placed {
    /// The buffer.
    pub buffer: BufId,
    /// Offset of the first byte in the buffer.
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

/// An owned receive buffer. It is posted by value and returned with the bytes received, to which it
/// dereferences.
pub struct RecvBuf {
    memory: Arc<Memory>,
    filled: usize,
}

impl RecvBuf {
    /// Allocates an empty, page-aligned buffer of `bytes`.
    ///
    /// # Panics
    /// If the system is out of memory; see [`RecvBuf::try_with_capacity`].
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

    /// Length of the memory.
    pub fn capacity(&self) -> usize {
        self.memory.bytes()
    }

    /// Discards the bytes received.
    pub fn clear(&mut self) {
        self.filled = 0;
    }

    /// The whole memory, for writing between two receives.
    pub fn memory_mut(&mut self) -> &mut [u8] {
        unique_bytes_mut(&mut self.memory).unwrap_or_default()
    }

    /// The bytes received, as a vector: the one that the buffer was made from, or a copy.
    pub fn into_vec(self) -> Vec<u8> {
        let RecvBuf { memory, filled } = self;
        let memory = match Arc::try_unwrap(memory).map(|m| m.into_vec(filled)) {
            Ok(Ok(v)) => return v,
            Ok(Err(memory)) => Arc::new(memory),
            Err(memory) => memory,
        };
        RecvBuf { memory, filled }.to_vec()
    }

    /// The identity of the memory.
    pub fn id(&self) -> BufId {
        self.memory.id()
    }

    /// Posts the memory, to be filled from its start. Bytes received before are discarded.
    pub fn post(self) -> PostedBuf {
        PostedBuf { memory: self.memory }
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

/// The buffer has the whole capacity of the vector; the contents of the vector are discarded.
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

/// The stack's handle of a posted buffer: it provides the writable range, and the buffer when it is
/// completed. It gives no access to the bytes.
pub struct PostedBuf {
    memory: Arc<Memory>,
}

impl PostedBuf {
    /// Length of the buffer.
    pub fn capacity(&self) -> usize {
        self.memory.bytes()
    }

    /// The identity of the memory.
    pub fn id(&self) -> BufId {
        self.memory.id()
    }

    /// The writable range from `from` to the end. `None` while there is another one, while mbufs cover
    /// bytes behind `from`, or if `from` is beyond the buffer.
    pub fn writable_range(&mut self, from: usize) -> Option<WritableRange> {
        WritableRange::make(&mut self.memory, from)
    }

    /// Whether a writable range or mbufs of the buffer exist.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.memory) > 1
    }

    /// Completes the buffer with its first `filled` bytes (at most all) received. Returns the handle while a
    /// writable range or mbufs of the buffer exist.
    pub fn release(mut self, filled: usize) -> Result<RecvBuf, PostedBuf> {
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

impl core::fmt::Debug for PostedBuf {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("PostedBuf")
            .field("capacity", &self.capacity())
            .field("is_shared", &self.is_shared())
            .finish()
    }
}

#[cfg(test)]
mod tests;
