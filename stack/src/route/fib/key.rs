//! What differs between the IP versions: the arithmetic of addresses and chunks, and what look-ups read (`v4.rs`,
//! `v6.rs`).

/// An address as an integer: `u32` (IPv4) or `u128` (IPv6).
pub(crate) trait Key: Copy + Ord + core::fmt::Debug + 'static {
    /// What look-ups read.
    type Tables: Lookup<Self> + Default;
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

/// What look-ups read. Initially every answer is 0.
pub(crate) trait Lookup<K> {
    /// The answer for an address.
    fn lookup(&self, address: K) -> u32;
    /// Replaces the ranges of a chunk: starts and answers. The first starts at the chunk's first
    /// address; adjacent ranges have different answers. `units` is the length of the current block, 0
    /// if the chunk has none. Returns the length of the new one.
    fn set(&mut self, chunk: usize, ranges: &[(K, u32)], units: u32) -> u32;
}
