//! What the table has to know of an IP version: how its addresses are cut into chunks, and the memory
//! that look-ups read (`v4.rs`, `v6.rs`).

#![forbid(unsafe_code)]

use super::FibError;

/// An address as a number. Implemented for `u32` (IPv4) and `u128` (IPv6), and for nothing else.
pub trait Key: Copy + Ord + core::fmt::Debug + Sealed + 'static {
    /// Bits of an address.
    const BITS: u8;
}

/// The arithmetic of addresses and chunks.
pub trait Sealed: Sized {
    /// What look-ups read.
    type Shared: Shared<Self, Control = Self::Control> + Send + Sync;
    /// What the writer knows of it.
    type Control: Send;
    const CHUNKS: usize;
    /// The chunk of an address; it grows with the address.
    fn chunk(self) -> usize;
    /// First address of a chunk, and its prefix length.
    fn chunk_prefix(chunk: usize) -> (Self, u8);
    /// The first and the last address with the same `len` leading bits.
    fn block(self, len: u8) -> (Self, Self);
    /// The next address, or `None` after the last.
    fn next(self) -> Option<Self>;
}

/// What look-ups read, and how it changes.
pub trait Shared<K> {
    /// What the writer knows of the memory.
    type Control;
    /// No routes. `advise` is told where the memory is and of how many bytes, before anything is in it.
    fn new(advise: impl FnOnce(*const u8, usize)) -> (Self, Self::Control)
    where
        Self: Sized;
    /// The answer for an address.
    fn lookup(&self, address: K) -> u32;
    /// Answers for a burst of addresses, as many as both slices have.
    fn lookup_burst(&self, addresses: &[K], answers: &mut [u32]);
    /// How many changes were published.
    fn changes(&self) -> u64;
    /// Gives a chunk these ranges: the first starts at the chunk's first address, and each has another
    /// answer than the one before. `units` are those of its present block; those of its new one.
    ///
    /// # Errors
    /// [`FibError::Full`]: the table is as it was.
    fn publish(
        &self,
        control: &mut Self::Control,
        chunk: usize,
        ranges: &[(K, u32)],
        units: u32,
    ) -> Result<u32, FibError>;
    /// Bytes of memory that was touched, and how many of them are free.
    fn bytes(&self, control: &Self::Control) -> (usize, usize);
}

impl Key for u32 {
    const BITS: u8 = 32;
}

impl Key for u128 {
    const BITS: u8 = 128;
}
