//! Takes fields from the front of bytes; `None` past their end.

/// The bytes that are left.
#[derive(Clone, Copy)]
pub(super) struct Walk<'a>(pub &'a [u8]);

impl<'a> Walk<'a> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(front)
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// A number of `n` bytes, of at most eight.
    fn number(&mut self, n: usize) -> Option<u64> {
        Some(self.bytes(n)?.iter().fold(0, |sum, b| sum << 8 | u64::from(*b)))
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        u16::try_from(self.number(2)?).ok()
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        u32::try_from(self.number(4)?).ok()
    }

    /// A vector with a length of one byte.
    pub(super) fn vec8(&mut self) -> Option<&'a [u8]> {
        let n = self.u8()?;
        self.bytes(usize::from(n))
    }

    /// A vector with a length of two bytes.
    pub(super) fn vec16(&mut self) -> Option<&'a [u8]> {
        let n = self.u16()?;
        self.bytes(usize::from(n))
    }

    /// A variable-length integer (RFC 9000 section 16).
    pub(super) fn varint(&mut self) -> Option<u64> {
        let first = *self.0.first()?;
        let n = 1_usize << (first >> 6);
        let bits = 8 * n as u32 - 2;
        Some(self.number(n)? & (u64::MAX >> (64 - bits)))
    }

    /// A variable-length integer that counts bytes.
    pub(super) fn length(&mut self) -> Option<usize> {
        usize::try_from(self.varint()?).ok()
    }
}
