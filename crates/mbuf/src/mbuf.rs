//! What a [`Mbuf`] tells about its range, and how the range gets shorter. What touches its bytes or makes
//! the range longer is in `raw.rs`, whose invariants nothing here can break: `off + len` never grows.

use crate::pool::BYTES_PER_DESC;
use crate::raw::Mbuf;
use crate::storage::Purpose;

impl Mbuf {
    /// The least that [`Mbuf::held_bytes`] counts of a received packet: what comes with a descriptor.
    pub const MIN_HELD_BYTES: usize = BYTES_PER_DESC;

    /// Bytes of the range.
    #[inline]
    pub fn len(&self) -> usize {
        self.desc().len as usize
    }

    /// Whether the range has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.desc().len == 0
    }

    /// Bytes of storage before the range. They can be used only if the storage is unique.
    #[inline]
    pub fn headroom(&self) -> usize {
        self.desc().off as usize
    }

    /// Bytes of storage behind the range. They can be used only if the storage is unique, or by
    /// [`crate::Pool::append_tail`].
    #[inline]
    pub fn tailroom(&self) -> usize {
        let d = self.desc();
        (d.room - d.off - d.len) as usize
    }

    /// Bytes of the whole storage: what the pool charges while any reference to it exists.
    #[inline]
    pub fn storage_bytes(&self) -> usize {
        self.desc().room as usize
    }

    /// Bytes that this reference keeps from arriving packets: its storage, and no less than the bytes
    /// of budget that come with a descriptor, so that tiny packets use up neither. None of what is
    /// charged to a sender. (`truesize` of Linux.)
    #[inline]
    pub fn held_bytes(&self) -> usize {
        match self.purpose() {
            Purpose::Send => 0,
            Purpose::Receive | Purpose::Control => self.storage_bytes().max(Mbuf::MIN_HELD_BYTES),
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
