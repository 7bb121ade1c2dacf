//! The receive buffer pair: a small and a large buffer, so that one read receives a frame of any
//! length and a short frame never occupies a large buffer.
//!
//! ```text
//!            0        256                             65,792
//! frame      | headers | rest of the payload             |
//!            +---------+---------------------------------+
//! buffer     | small   | large                           |
//! ```
//!
//! Frames of up to 256 bytes leave in the small buffer. Frames of up to 16 KiB are copied into one
//! buffer of the right size, and the pair is reused (a copy from the L1 cache costs less than
//! 64 KiB of memory that a slow reader keeps). Longer frames leave as the pair itself. A pair is
//! kept by its device between frames, so that the next frame is written to memory that is in the
//! cache.
//!
//! When the pool has no large buffer, the frame is received into scratch memory: a frame that fits a
//! small buffer (an ACK) is copied from there, into the reserve for control if need be. A longer
//! frame is dropped as [`DropReason::NoBuffer`].

use fulmar_stack::base::DropReason;
use fulmar_stack::mbuf::{Chain, Mbuf, Pool, Purpose};

pub(super) const SMALL_BYTES: usize = 256;
pub(super) const LARGE_BYTES: usize = 65_536;
/// Frames up to this length are copied out of the pair.
const COPY_BYTES: usize = 16_384;

/// Replaces the buffers that the pool cannot allocate. Its content is copied out or dropped.
pub(crate) struct Scratch {
    small: [u8; SMALL_BYTES],
    large: Box<[u8]>,
}

impl Scratch {
    pub(crate) fn new() -> Scratch {
        Scratch { small: [0; SMALL_BYTES], large: vec![0; LARGE_BYTES].into_boxed_slice() }
    }
}

/// A receive buffer pair. [`Scratch`] replaces a missing buffer.
#[derive(Default)]
pub(crate) struct BufferPair {
    small: Option<Mbuf>,
    large: Option<Mbuf>,
}

fn space<'a>(m: Option<&'a mut Mbuf>, scratch: &'a mut [u8]) -> &'a mut [u8] {
    let bytes = scratch.len();
    match m {
        Some(m) => m.spare_mut().get_mut(..bytes).unwrap_or(&mut []),
        None => scratch,
    }
}

impl BufferPair {
    /// Allocates missing buffers. Returns whether the pair is complete.
    pub(crate) fn prepare(&mut self, pool: &mut Pool) -> bool {
        if self.small.is_none() {
            let small = pool.alloc(SMALL_BYTES, 0, Purpose::Receive);
            self.small = small.or_else(|_| pool.alloc(SMALL_BYTES, 0, Purpose::Control)).ok();
        }
        if self.large.is_none() {
            self.large = pool.alloc(LARGE_BYTES, 0, Purpose::Receive).ok();
        }
        self.small.is_some() && self.large.is_some()
    }

    /// Memory for the next frame: its first [`SMALL_BYTES`] bytes, and the rest.
    pub(crate) fn parts<'a>(&'a mut self, scratch: &'a mut Scratch) -> [&'a mut [u8]; 2] {
        [
            space(self.small.as_mut(), &mut scratch.small),
            space(self.large.as_mut(), &mut scratch.large),
        ]
    }

    /// As [`BufferPair::parts`], without scratch memory. `None`: a buffer is missing.
    pub(crate) fn own_parts(&mut self) -> Option<[&mut [u8]; 2]> {
        let small = self.small.as_mut()?.spare_mut().get_mut(..SMALL_BYTES)?;
        let large = self.large.as_mut()?.spare_mut().get_mut(..LARGE_BYTES)?;
        Some([small, large])
    }

    /// The received frame of `bytes` bytes.
    ///
    /// # Errors
    /// [`DropReason::NoBuffer`]: the frame is in scratch memory and the pool is empty.
    pub(crate) fn take(
        &mut self,
        bytes: usize,
        scratch: &mut Scratch,
        pool: &mut Pool,
    ) -> Result<Chain, DropReason> {
        if bytes <= SMALL_BYTES {
            let mut small = self.small.take().ok_or(DropReason::NoBuffer)?;
            small.set_len(bytes);
            return Ok(Chain::from(small));
        }
        if bytes <= COPY_BYTES
            && let Some(copy) = copy(self.parts(scratch), bytes, pool)
        {
            return Ok(copy);
        }
        self.give_away(bytes)
    }

    /// As [`BufferPair::take`], for a complete pair.
    ///
    /// # Errors
    /// [`DropReason::NoBuffer`].
    pub(crate) fn take_own(&mut self, bytes: usize, pool: &mut Pool) -> Result<Chain, DropReason> {
        if bytes <= SMALL_BYTES {
            return self.take_front(bytes).map(Chain::from).ok_or(DropReason::NoBuffer);
        }
        if bytes <= COPY_BYTES
            && let Some(parts) = self.own_parts()
            && let Some(copy) = copy(parts, bytes, pool)
        {
            return Ok(copy);
        }
        self.give_away(bytes)
    }

    /// Passes both buffers on as a chain, if both are the pool's.
    fn give_away(&mut self, bytes: usize) -> Result<Chain, DropReason> {
        if self.small.is_none() || self.large.is_none() {
            return Err(DropReason::NoBuffer);
        }
        let mut chain = Chain::new();
        let halves = [(self.small.take(), SMALL_BYTES), (self.large.take(), bytes - SMALL_BYTES)];
        for (half, len) in halves {
            let mut m = half.ok_or(DropReason::NoBuffer)?;
            m.set_len(len);
            chain.push_back(m);
        }
        Ok(chain)
    }
}

// Frames whose payload is placed elsewhere.
impl BufferPair {
    /// The first `bytes` bytes of the small buffer.
    #[inline]
    pub(crate) fn front_mut(&mut self, bytes: usize) -> Option<&mut [u8]> {
        self.small.as_mut()?.spare_mut().get_mut(..bytes)
    }

    /// The small buffer, and the large one if there is one.
    pub(crate) fn front_and_rest(&mut self) -> Option<(&mut [u8], Option<&mut [u8]>)> {
        let small = self.small.as_mut()?.spare_mut().get_mut(..SMALL_BYTES)?;
        let large = self.large.as_mut().and_then(|l| l.spare_mut().get_mut(..LARGE_BYTES));
        Some((small, large))
    }

    /// Puts the front of a frame into the small buffer, as much as fits.
    pub(crate) fn put_front(&mut self, bytes: &[u8]) {
        let Some((small, _)) = self.front_and_rest() else { return };
        let n = bytes.len().min(small.len());
        if let (Some(to), Some(from)) = (small.get_mut(..n), bytes.get(..n)) {
            to.copy_from_slice(from);
        }
    }

    /// The small buffer with the first `bytes` bytes of a frame, at most [`SMALL_BYTES`].
    pub(crate) fn take_front(&mut self, bytes: usize) -> Option<Mbuf> {
        let mut small = self.small.take()?;
        small.set_len(bytes);
        Some(small)
    }

    /// The end of a frame: the first `bytes` bytes of the large buffer.
    ///
    /// # Errors
    /// [`DropReason::NoBuffer`].
    pub(crate) fn take_overflow(
        &mut self,
        bytes: usize,
        pool: &mut Pool,
    ) -> Result<Chain, DropReason> {
        if bytes == 0 {
            return Ok(Chain::new());
        }
        if bytes <= COPY_BYTES
            && let Some((_, Some(large))) = self.front_and_rest()
            && let Some(from) = large.get(..bytes)
            && let Ok(mut copy) = pool.alloc(bytes, 0, Purpose::Receive)
            && let Some(to) = copy.append(bytes)
        {
            to.copy_from_slice(from);
            return Ok(Chain::from(copy));
        }
        let mut large = self.large.take().ok_or(DropReason::NoBuffer)?;
        large.set_len(bytes);
        Ok(Chain::from(large))
    }
}

/// A frame longer than the small buffer, in a buffer of the right size.
fn copy(parts: [&mut [u8]; 2], bytes: usize, pool: &mut Pool) -> Option<Chain> {
    let [small, large] = parts;
    let mut copy = pool.alloc(bytes, 0, Purpose::Receive).ok()?;
    let (front, back) = copy.append(bytes)?.split_at_mut(SMALL_BYTES);
    front.copy_from_slice(small);
    back.copy_from_slice(large.get(..back.len())?);
    Some(Chain::from(copy))
}

#[cfg(test)]
mod tests;
