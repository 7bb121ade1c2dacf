//! Sequential copies out of a chain.

use super::{Chain, Iter};
use crate::mbuf::Mbuf;

/// A read position in a chain.
#[derive(Clone)]
pub struct Reader<'a> {
    mbufs: Iter<'a>,
    front: Option<&'a Mbuf>,
    /// Bytes of `front` already read.
    done: usize,
}

impl Chain {
    /// A reader at the first byte.
    #[inline]
    pub fn reader(&self) -> Reader<'_> {
        let mut mbufs = self.iter();
        let front = mbufs.next();
        Reader { mbufs, front, done: 0 }
    }
}

impl Reader<'_> {
    /// Skips the next `n` bytes, or all if there are fewer.
    #[inline]
    pub fn skip(&mut self, mut n: usize) {
        while let Some(m) = self.front {
            let left = m.len() - self.done;
            if n < left {
                self.done += n;
                return;
            }
            n -= left;
            self.next_mbuf();
        }
    }

    /// Copies the next bytes into `out` and returns their number.
    #[inline]
    pub fn read(&mut self, out: &mut [u8]) -> usize {
        let mut filled = 0;
        while let (Some(m), Some(space)) = (self.front, out.get_mut(filled..)) {
            if space.is_empty() {
                break;
            }
            let n = m.copy_to(self.done, space);
            filled += n;
            self.done += n;
            if self.done == m.len() {
                self.next_mbuf();
            }
        }
        filled
    }

    #[inline]
    fn next_mbuf(&mut self) {
        (self.front, self.done) = (self.mbufs.next(), 0);
    }
}
