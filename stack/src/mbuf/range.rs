//! Accessors of [`Mbuf`], and the operations that shorten its range. Operations that access bytes or extend
//! the range are in `raw.rs`; nothing here can break its invariants, since `off + len` never grows.

use crate::mbuf::pool::BYTES_PER_DESC;
use crate::mbuf::raw::Mbuf;
use crate::mbuf::storage::Purpose;

impl Mbuf {
    /// The minimum of [`Mbuf::truesize`] for a received packet: the bytes of budget per descriptor.
    pub const MIN_TRUESIZE: usize = BYTES_PER_DESC;

    /// Length of the range.
    #[inline]
    pub fn len(&self) -> usize {
        self.desc().len as usize
    }

    /// Whether the range has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.desc().len == 0
    }

    /// Bytes of storage before the range. They are usable only if this is the only reference.
    #[inline]
    pub fn headroom(&self) -> usize {
        self.desc().off as usize
    }

    /// Bytes of storage behind the range. They are usable only if this is the only reference, or through
    /// [`Pool::append_tail`](crate::mbuf::Pool::append_tail).
    #[inline]
    pub fn tailroom(&self) -> usize {
        let d = self.desc();
        (d.capacity - d.off - d.len) as usize
    }

    /// Bytes of the storage, which are charged to the pool while any reference exists.
    #[inline]
    pub fn storage_bytes(&self) -> usize {
        self.desc().capacity as usize
    }

    /// The memory charged to a receiver for this reference (`truesize` of Linux): its storage, and at
    /// least the bytes of budget per descriptor, so that tiny packets exhaust neither. Zero if the
    /// storage is charged to a sender.
    #[inline]
    pub fn truesize(&self) -> usize {
        match self.purpose() {
            Purpose::Send => 0,
            Purpose::Receive | Purpose::Control => self.storage_bytes().max(Mbuf::MIN_TRUESIZE),
        }
    }

    /// Removes up to `n` bytes from the front.
    #[inline]
    pub fn trim_front(&mut self, n: usize) {
        let d = self.desc_mut();
        let n = n.min(d.len as usize) as u32;
        d.off += n;
        d.len -= n;
    }

    /// Removes up to `n` bytes from the back.
    #[inline]
    pub fn trim_back(&mut self, n: usize) {
        let d = self.desc_mut();
        d.len -= n.min(d.len as usize) as u32;
    }

    /// Keeps at most the first `len` bytes.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        let d = self.desc_mut();
        d.len = len.min(d.len as usize) as u32;
    }
}

impl core::fmt::Debug for Mbuf {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Mbuf")
            .field("off", &self.headroom())
            .field("len", &self.len())
            .field("storage", &self.storage_bytes())
            .field("unique", &self.is_unique())
            .finish()
    }
}
