//! Mbufs over memory that another process may write at any time ([`crate::mbuf::Lender`]).
//!
//! Such bytes are never borrowed: [`Mbuf::as_slice`] returns zeroes, as for storage that only the kernel may
//! read, and calling it is a bug. They are copied out ([`Mbuf::copy_to`]) or passed to a system call by
//! address ([`Mbuf::kernel_part`]).

#![forbid(unsafe_code)]

use crate::mbuf::Mbuf;
use crate::mbuf::chain::copy;

impl Mbuf {
    /// Copies bytes of the range at `off` into `out` and returns their number. Bytes that only the kernel
    /// may read are copied as zeroes.
    #[inline]
    pub fn copy_to(&self, off: usize, out: &mut [u8]) -> usize {
        if self.is_opaque() {
            return self.copy_opaque(off, out);
        }
        self.as_slice().get(off..).map_or(0, |bytes| copy(bytes, out))
    }

    #[inline(never)]
    fn copy_opaque(&self, off: usize, out: &mut [u8]) -> usize {
        match self.volatile() {
            Some(bytes) => bytes.copy_to(off, out),
            None => self.as_slice().get(off..).map_or(0, |zeroes| copy(zeroes, out)),
        }
    }
}
