//! Storage: size classes, purposes, and the traits of memory that a pool does not own.

#![forbid(unsafe_code)]

use crate::mbuf::VolatileSlice;

/// The size classes, in bytes. A slab is divided into blocks of one class.
///
/// 256 B holds headers and small packets, 2 KiB a frame of MTU 1500, 4 KiB a page, 16 KiB a jumbo
/// frame or a TLS record, 64 KiB a super-frame.
pub(crate) const CLASS_BYTES: [usize; 5] = [256, 2 << 10, 4 << 10, 16 << 10, 64 << 10];

/// Number of size classes.
pub(crate) const CLASSES: usize = CLASS_BYTES.len();

/// The class of external storage that is charged to the pool.
pub(crate) const EXTERNAL: u8 = CLASSES as u8;

/// The class of external storage that is not charged.
pub(crate) const LENT: u8 = EXTERNAL + 1;

/// The largest block of a pool, headroom included: 64 KiB.
pub const MAX_MBUF_BYTES: usize = CLASS_BYTES[CLASSES - 1];

/// Bytes of a slab: a huge page on x86-64 and arm64. Smaller under Miri, which is slow per byte.
pub const SLAB_BYTES: usize = if cfg!(miri) { 128 << 10 } else { 2 << 20 };

/// What [`Mbuf::as_slice`](crate::mbuf::Mbuf::as_slice) returns for storage that another process may write.
pub(crate) static ZEROES: [u8; MAX_MBUF_BYTES] = [0; MAX_MBUF_BYTES];

/// The smallest class that holds `bytes`, or `None` above 64 KiB.
#[inline]
pub(crate) fn class_for(bytes: usize) -> Option<usize> {
    let class = CLASS_BYTES.iter().map(|&c| usize::from(bytes > c)).sum();
    (class < CLASSES).then_some(class)
}

/// Whether the smallest class that fits is 16 or 64 KiB and more than half of it would be unused.
#[inline]
pub(crate) fn is_wasteful(bytes: usize) -> bool {
    let fits = |class: usize| CLASS_BYTES[class - 1] < bytes && bytes < CLASS_BYTES[class] / 2;
    fits(3) || fits(4)
}

/// The class of the next mbuf of a chain that needs `bytes` more: the smallest that fits, or the class
/// below if that is wasteful, or the largest class.
pub(crate) fn class_for_part(bytes: usize) -> usize {
    let class = class_for(bytes).unwrap_or(CLASSES - 1);
    if is_wasteful(bytes) { class - 1 } else { class }
}

/// What storage is used for. A pool charges each block to the purpose it was allocated for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Purpose {
    /// Bytes to send or awaiting acknowledgement. Bounded by the send share.
    Send = 0,
    /// Received bytes and receive buffers posted to a device. Bounded by the receive share.
    Receive = 1,
    /// Headers, ACKs, ARP and ICMP. May use the whole budget.
    Control = 2,
}

impl Purpose {
    /// All purposes, in the order of [`PoolStats::used_bytes`](crate::mbuf::PoolStats::used_bytes).
    pub const ALL: [Purpose; 3] = [Purpose::Send, Purpose::Receive, Purpose::Control];
}

/// The pool has no storage or no descriptor left for the purpose.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct NoBuffer;

impl core::fmt::Display for NoBuffer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("the buffer pool has no memory left for this use")
    }
}

impl core::error::Error for NoBuffer {}

/// The owner of memory that does not belong to a pool: a caller's `Vec<u8>`, a device's frame.
///
/// The pool asks for the bytes once, never moves the owner, and drops it exactly once, when the last
/// reference is freed. Other threads may read the bytes.
pub trait External: Send + 'static {
    /// The bytes, at the same address while the owner is borrowed.
    fn bytes(&self) -> &[u8];
}

/// The owner of a memory region that is lent to a pool range by range: a device whose frames stay in
/// memory shared with its peer. Unlike an [`External`] it needs no allocation per range, and another process
/// may write the memory.
pub trait Lender: Send + Sync + 'static {
    /// The bytes of a range, at the same address while the lender exists. Called once per loan. They may
    /// change at any time. `None` if the range is outside the region.
    fn bytes(&self, offset: usize, len: usize) -> Option<VolatileSlice<'_>>;

    /// The last reference to the loan `tag` was freed. Called once per loan, in any thread that uses or
    /// drops the pool; it must not block.
    fn give_back(&self, tag: u32);
}

/// The owner of memory that streams send in place, part by part ([`Pool::share`](crate::mbuf::Pool::share)). It is
/// released when every part is acknowledged and no device reads it. Unlike an [`External`] it can be sent in parts, and
/// it learns if a part was not delivered.
pub trait SharedBytes: Send + Sync + 'static {
    /// The longest contiguous bytes at `at`. Always the same for the same `at`.
    fn piece(&self, at: usize) -> &[u8];

    /// A stream was discarded, for the reason `why` ([`SendQueue::discard`](crate::mbuf::SendQueue::discard)), before a
    /// part in it was acknowledged. Called under the pool's lock before the part is released; may be called twice.
    fn on_undelivered(&self, why: u8);
}

/// The notification of remote frees ([`Pool::await_remote`](crate::mbuf::Pool::await_remote)).
pub trait Kick: Send + Sync + 'static {
    /// Called when the remote-free list becomes non-empty. The caller is any thread that drops an mbuf and may hold any
    /// lock, so this must not block and must not use the pool.
    fn kick(&self);
}

impl External for alloc::vec::Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

impl External for alloc::boxed::Box<[u8]> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_is_the_smallest_that_holds_the_bytes() {
        for bytes in [0, 1, 255, 256, 257, 2048, 2049, 4096, 4097, 16384, 16385, 65536] {
            let class = class_for(bytes).expect("invariant: at most 64 KiB");
            assert!(CLASS_BYTES[class] >= bytes);
            assert!(class == 0 || CLASS_BYTES[class - 1] < bytes);
        }
        assert_eq!(class_for(65537), None);
    }

    #[test]
    fn at_least_half_of_a_16_or_64_kib_block_is_used() {
        for bytes in (1..=MAX_MBUF_BYTES).step_by(if cfg!(miri) { 997 } else { 1 }) {
            let class = class_for_part(bytes);
            assert!(class < 3 || bytes * 2 >= CLASS_BYTES[class], "{bytes}");
        }
    }
}
