//! Mbufs over memory that another process may change at any moment ([`crate::Lender`]).
//!
//! Such an mbuf hands out no `&[u8]`: [`Mbuf::as_slice`] shows zeroes, as for storage that the kernel alone
//! may read, and is an error. Its bytes are copied out ([`Mbuf::copy_to`]) or handed to a system call by
//! address ([`Mbuf::kernel_part`]).

#![forbid(unsafe_code)]

use crate::Mbuf;
use crate::chain::copy;

impl Mbuf {
    /// Copies bytes of the range from `off` on into `out`; returns how many there were. Zeroes stand for
    /// bytes that the kernel alone may read.
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
