//! The words about storage: size classes, purposes, external owners, the one error.

#![forbid(unsafe_code)]

use crate::VolatileSlice;

/// The size classes, in bytes. A slab is cut into blocks of one class.
///
/// 256 B holds headers and small packets, 2 KiB a frame of MTU 1500, 4 KiB a page, 16 KiB a jumbo
/// frame or a TLS record, 64 KiB a super-frame.
pub(crate) const CLASS_BYTES: [usize; 5] = [256, 2 << 10, 4 << 10, 16 << 10, 64 << 10];

/// How many size classes there are.
pub(crate) const CLASSES: usize = CLASS_BYTES.len();

/// The class number that marks storage which the pool does not own but charges.
pub(crate) const EXTERNAL: u8 = CLASSES as u8;

/// The class number that marks storage which the pool neither owns nor charges.
pub(crate) const LENT: u8 = EXTERNAL + 1;

/// The largest storage of one mbuf that a pool can give: 64 KiB, headroom included.
pub const MAX_MBUF_BYTES: usize = CLASS_BYTES[CLASSES - 1];

/// Bytes of one slab: the size of a huge page on x86-64 and arm64. The interpreter that checks the
/// unsafe code gets small ones, because it pays for every byte.
pub const SLAB_BYTES: usize = if cfg!(miri) { 128 << 10 } else { 2 << 20 };

/// The class number that marks storage of someone else, charged, that the kernel alone may read.
pub(crate) const KERNEL_ONLY: u8 = LENT + 1;

/// What [`crate::Mbuf::as_slice`] shows of storage that only the kernel may read, or that another process
/// may write.
pub(crate) static ZEROES: [u8; MAX_MBUF_BYTES] = [0; MAX_MBUF_BYTES];

/// The smallest class that holds `bytes`, or `None` above 64 KiB.
#[inline]
pub(crate) fn class_for(bytes: usize) -> Option<usize> {
    let class = CLASS_BYTES.iter().map(|&c| usize::from(bytes > c)).sum();
    (class < CLASSES).then_some(class)
}

/// Whether the smallest class that fits is a big one (16 or 64 KiB), of which more than half would
/// be wasted.
#[inline]
pub(crate) fn is_wasteful(bytes: usize) -> bool {
    let fits = |class: usize| CLASS_BYTES[class - 1] < bytes && bytes < CLASS_BYTES[class] / 2;
    fits(3) || fits(4)
}

/// The class of the next mbuf of a chain that still needs `bytes`: the largest if more is needed
/// than it holds, else the smallest that fits, unless that is wasteful; then one of the class
/// below, and the chain goes on.
pub(crate) fn class_for_part(bytes: usize) -> usize {
    let class = class_for(bytes).unwrap_or(CLASSES - 1);
    if is_wasteful(bytes) { class - 1 } else { class }
}

/// What storage is used for. A pool charges each block to the purpose that asked for it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Purpose {
    /// Bytes that wait to be sent or acknowledged. Bounded by the send share.
    Send = 0,
    /// Bytes received, and buffers posted to a device. Bounded by the receive share.
    Receive = 1,
    /// Headers, acknowledgements, ARP, ICMP. May use whatever is left of the whole budget.
    Control = 2,
}

impl Purpose {
    /// Every purpose, in the order of [`crate::PoolStats::used_bytes`].
    pub const ALL: [Purpose; 3] = [Purpose::Send, Purpose::Receive, Purpose::Control];
}

/// The pool has no storage or no descriptor left in the share that was asked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct NoBuffer;

impl core::fmt::Display for NoBuffer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("the buffer pool has no memory left for this purpose")
    }
}

impl core::error::Error for NoBuffer {}

/// Memory that a pool does not own: a caller's `Vec<u8>`, a page of a file, a device's frame.
///
/// The pool asks for the bytes once, keeps the owner where it is and drops it exactly once, when
/// the last reference has come home. The bytes are read on other threads too.
pub trait External: Send + 'static {
    /// The bytes, at the same place for as long as the owner is borrowed.
    fn bytes(&self) -> &[u8];
}

/// Whoever lends ranges of one memory, range by range, and wants each back: a device whose peer
/// keeps the frames. Unlike an [`External`] it needs no allocation per range, and the memory may be another
/// process's.
pub trait Lender: Send + Sync + 'static {
    /// The bytes of a range, at the same place for as long as the lender exists. Asked once per
    /// loan; `None`: the memory does not have this range. They may change at any moment.
    fn bytes(&self, offset: usize, len: usize) -> Option<VolatileSlice<'_>>;

    /// The last reference to a loan of this tag has come home. Called once per loan, from wherever
    /// its pool is used or goes; it must be quick.
    fn give_back(&self, tag: u32);
}

/// Memory that somebody gives to streams part by part ([`crate::Pool::share`]) and may go on
/// reading; it is let go when every part is acknowledged and no device reads it any more. Unlike an
/// [`External`] it need not go whole, and it hears of its fate.
pub trait SharedBytes: Send + Sync + 'static {
    /// Bytes that lie together from `at` on, as many as do. Always the same for the same `at`.
    fn piece(&self, at: usize) -> &[u8];

    /// For bytes that nobody in this process may read, since they may vanish or change at any time
    /// (pages of a file): where they are from `at` on, and how many lie together; the address stays
    /// valid, if not what is there, until the owner is dropped. They are then handed to system calls
    /// by address ([`crate::Mbuf::kernel_part`]) and look like zeroes to everybody else. `None`: the
    /// bytes are those of [`SharedBytes::piece`].
    fn kernel_part(&self, at: usize) -> Option<(*const u8, usize)> {
        let _ = at;
        None
    }

    /// A stream ended, for the reason `why` ([`crate::SendQueue::void`]), before a part that it
    /// held was acknowledged. Called at home, before the part is given back; may be called twice.
    fn on_undelivered(&self, why: u8);
}

/// Whoever is told that mbufs were freed away from home ([`crate::Pool::await_remote`]).
pub trait Kick: Send + Sync + 'static {
    /// Mbufs lie on the remote-free list. Called wherever an mbuf may be dropped, under whatever lock:
    /// it must be quick and must not call the pool.
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
    fn a_part_never_wastes_more_than_half_of_a_big_class() {
        for bytes in (1..=MAX_MBUF_BYTES).step_by(if cfg!(miri) { 997 } else { 1 }) {
            let class = class_for_part(bytes);
            assert!(class < 3 || bytes * 2 >= CLASS_BYTES[class], "{bytes}");
        }
    }
}
