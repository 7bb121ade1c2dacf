//! Sequential writes of fields into a buffer.

use crate::wire::WireError;

/// Two fields of 16 bits in network byte order.
pub(crate) fn pair(upper: u16, lower: u16) -> [u8; 4] {
    let ([a, b], [c, d]) = (upper.to_be_bytes(), lower.to_be_bytes());
    [a, b, c, d]
}

/// The unwritten rest of a buffer.
pub(crate) struct Writer<'a>(pub(crate) &'a mut [u8]);

impl Writer<'_> {
    /// Writes `piece` and advances.
    ///
    /// Errors: [`WireError::Truncated`] if it does not fit.
    #[inline]
    pub(crate) fn put<const N: usize>(&mut self, piece: [u8; N]) -> Result<(), WireError> {
        let (head, tail) =
            core::mem::take(&mut self.0).split_first_chunk_mut().ok_or(WireError::Truncated)?;
        *head = piece;
        self.0 = tail;
        Ok(())
    }
}
