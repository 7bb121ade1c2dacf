//! Mbufs over memory that another process may write at any time ([`Lender`](crate::mbuf::Lender)).
//!
//! Such bytes are never borrowed: [`Mbuf::as_slice`] returns zeroes, and calling it is a bug. They are copied out
//! ([`Mbuf::copy_to`]) or passed to a system call by address ([`Mbuf::kernel_part`]).

#![forbid(unsafe_code)]

use crate::mbuf::Mbuf;
use crate::mbuf::chain::copy;

impl Mbuf {
    /// Copies bytes of the range at `off` into `out` and returns their number.
    #[inline]
    pub fn copy_to(&self, off: usize, out: &mut [u8]) -> usize {
        if self.is_volatile() {
            return self.copy_volatile(off, out);
        }
        self.as_slice().get(off..).map_or(0, |bytes| copy(bytes, out))
    }

    #[inline(never)]
    fn copy_volatile(&self, off: usize, out: &mut [u8]) -> usize {
        self.volatile().map_or(0, |bytes| bytes.copy_to(off, out))
    }

    /// The address and the length of the range, for a system call that reads it. It must not be dereferenced if the
    /// mbuf is volatile. It is valid while the mbuf is borrowed.
    #[inline]
    pub fn kernel_part(&self) -> (*const u8, usize) {
        match self.volatile() {
            Some(bytes) => (bytes.as_ptr(), bytes.len()),
            None => (self.as_slice().as_ptr(), self.len()),
        }
    }
}
