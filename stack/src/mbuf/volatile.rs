//! Memory that another process may write at any time.
//!
//! The bytes behind a `&[u8]` must not change while the reference exists, so no reference to such memory is
//! ever made. A [`VolatileSlice`] is an address and a length. Its only access is
//! [`VolatileSlice::copy_to`], which copies each byte once, with volatile loads, into private memory. All
//! checks are made on the copy.
//!
//! The mapping is not a Rust allocation, so a volatile load of it is defined whatever another process writes
//! (`core::ptr::read_volatile`, "Safety"): the result is arbitrary bytes. Loads are 16 bytes wide where the
//! CPU has such registers, which costs about as much as `memcpy`.

#![allow(unsafe_code)]

use core::marker::PhantomData;
use core::ptr;

#[cfg(all(target_arch = "x86_64", not(miri)))]
type Wide = core::arch::x86_64::__m128i;
#[cfg(all(target_arch = "aarch64", not(miri)))]
type Wide = core::arch::aarch64::uint64x2_t;
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
type Wide = u64;

/// A range of memory that another process may write while it is read.
#[derive(Clone, Copy)]
pub struct VolatileSlice<'a> {
    data: *const u8,
    len: usize,
    memory: PhantomData<&'a ()>,
}

// SAFETY: an address and a length; the memory can be read from any thread.
unsafe impl Send for VolatileSlice<'_> {}
// SAFETY: as above.
unsafe impl Sync for VolatileSlice<'_> {}

impl<'a> VolatileSlice<'a> {
    /// # Safety
    /// The bytes `[data, data + len)` can be read throughout `'a`, and no reference of this process that
    /// may write them exists meanwhile.
    pub unsafe fn new(data: *const u8, len: usize) -> VolatileSlice<'a> {
        VolatileSlice { data, len, memory: PhantomData }
    }

    /// Length of the range.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the range has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, for a system call that reads the range. It must not be dereferenced.
    pub fn as_ptr(&self) -> *const u8 {
        self.data
    }

    /// Copies bytes at `off` into `to` until either ends, and returns their number. Each byte is loaded once.
    pub fn copy_to(&self, off: usize, to: &mut [u8]) -> usize {
        let n = to.len().min(self.len.saturating_sub(off));
        if n > 0 {
            // SAFETY: `off + n <= len`, so the source is inside the range, which can be read; the
            // destination is a `&mut`, which cannot overlap it.
            unsafe { copy(self.data.add(off), to.as_mut_ptr(), n) }
        }
        n
    }
}

impl<'a> From<&'a [u8]> for VolatileSlice<'a> {
    fn from(bytes: &'a [u8]) -> VolatileSlice<'a> {
        VolatileSlice { data: bytes.as_ptr(), len: bytes.len(), memory: PhantomData }
    }
}

/// Copies `n` bytes: an unaligned head, aligned units of [`Wide`], and a tail.
///
/// # Safety
/// `n` bytes can be read at `from` and written at `to`; they do not overlap.
unsafe fn copy(from: *const u8, to: *mut u8, n: usize) {
    let words = n.min(from.addr().next_multiple_of(size_of::<u64>()) - from.addr());
    let wide = n.min(from.addr().next_multiple_of(size_of::<Wide>()) - from.addr());
    // SAFETY: within the caller's ranges. Aligned: the first part ends at a multiple of `u64` and the
    // second at one of `Wide`, unless the bytes end before; each later unit is smaller.
    unsafe {
        let mut done = copy_units::<u8>(from, to, words);
        done += copy_units::<u64>(from.add(done), to.add(done), wide - done);
        done += copy_units::<Wide>(from.add(done), to.add(done), n - done);
        done += copy_units::<u64>(from.add(done), to.add(done), n - done);
        copy_units::<u8>(from.add(done), to.add(done), n - done);
    }
}

/// Copies the whole units in `n` bytes and returns the number of bytes copied.
///
/// # Safety
/// As [`copy`], and `from` is aligned for `T` if there is a unit.
unsafe fn copy_units<T: Copy>(from: *const u8, to: *mut u8, n: usize) -> usize {
    let count = n / size_of::<T>();
    for i in 0..count {
        // SAFETY: the caller's contract; unit `i` ends at or before `n`.
        unsafe {
            let unit = ptr::read_volatile(from.cast::<T>().add(i));
            ptr::write_unaligned(to.cast::<T>().add(i), unit);
        }
    }
    count * size_of::<T>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_exact_at_every_alignment_and_length() {
        let source: std::vec::Vec<u8> = (0..200).map(|i| i as u8 ^ 0x5a).collect();
        for from in 0..40 {
            for len in 0..100 {
                let range = VolatileSlice::from(&source[from..][..len]);
                let mut to = [0; 103];
                assert_eq!(range.copy_to(0, &mut to[3..]), len);
                assert_eq!(&to[3..3 + len], &source[from..from + len]);
                assert!(to[..3].iter().chain(&to[3 + len..]).all(|b| *b == 0), "{from} {len}");
            }
        }
    }

    #[test]
    fn a_copy_is_as_long_as_the_shorter_slice() {
        let source = [1, 2, 3, 4, 5];
        let range = VolatileSlice::from(&source[..]);
        let mut to = [0; 3];
        assert_eq!((range.copy_to(1, &mut to), to), (3, [2, 3, 4]));
        assert_eq!((range.copy_to(4, &mut to), to), (1, [5, 3, 4]));
        assert_eq!((range.copy_to(5, &mut to), range.copy_to(usize::MAX, &mut to)), (0, 0));
    }
}
