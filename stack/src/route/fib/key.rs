//! The IP version specific part of the table: chunk arithmetic, and the memory that look-ups read
//! (`v4.rs`, `v6.rs`).

#![forbid(unsafe_code)]

use super::FibError;

/// An address as an integer: `u32` (IPv4) or `u128` (IPv6). Sealed.
pub trait Key: Copy + Ord + core::fmt::Debug + Sealed + 'static {
    /// Bits of an address.
    const BITS: u8;
}

/// Arithmetic of addresses and chunks.
pub trait Sealed: Sized {
    /// Memory that look-ups read.
    type Shared: Shared<Self, Control = Self::Control> + Send + Sync;
    /// The writer's record of it.
    type Control: Send;
    const CHUNKS: usize;
    /// The chunk of an address, monotonic in the address.
    fn chunk(self) -> usize;
    /// First address of a chunk, and its prefix length.
    fn chunk_prefix(chunk: usize) -> (Self, u8);
    /// The first and the last address with the same `len` leading bits.
    fn block(self, len: u8) -> (Self, Self);
    /// The next address, or `None` after the last.
    fn next(self) -> Option<Self>;
}

/// Memory that look-ups read, and its updates.
pub trait Shared<K> {
    /// The writer's allocation state of the memory.
    type Control;
    /// An empty table. `advise` is called with the address and length of the memory before its
    /// first use.
    fn new(advise: impl FnOnce(*const u8, usize)) -> (Self, Self::Control)
    where
        Self: Sized;
    /// The answer for an address.
    fn lookup(&self, address: K) -> u32;
    /// Looks up a burst of addresses, up to the shorter length of both slices.
    fn lookup_burst(&self, addresses: &[K], answers: &mut [u32]);
    /// Number of published updates.
    fn generation(&self) -> u64;
    /// Replaces the ranges of a chunk. The first starts at the chunk's first address; adjacent
    /// ranges have different answers. `units` is the length of the current block. Returns the
    /// length of the new one.
    ///
    /// # Errors
    /// [`FibError::Full`]: the table is unchanged.
    fn publish(
        &self,
        control: &mut Self::Control,
        chunk: usize,
        ranges: &[(K, u32)],
        units: u32,
    ) -> Result<u32, FibError>;
    /// Bytes of memory touched, and how many of them are free.
    fn bytes(&self, control: &Self::Control) -> (usize, usize);
}

impl Key for u32 {
    const BITS: u8 = 32;
}

impl Key for u128 {
    const BITS: u8 = 128;
}
