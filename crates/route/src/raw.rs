//! Words that a writer adds to while readers read: memory that grows and never moves.
//!
//! Invariants:
//! - *published once*: a segment's pointer goes from null to a boxed segment through the one
//!   [`Words::grow`] that `&mut Growth` allows, and never changes again.
//! - *alive*: segments are freed by `Drop` only, when nobody can hold a reference to the `Words`.

#![allow(unsafe_code)]

use alloc::boxed::Box;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Words of one segment: 1 MiB.
pub(crate) const SEGMENT_WORDS: usize = 1 << 18;

/// The most segments: 256 MiB in all.
pub(crate) const MAX_SEGMENTS: usize = 256;

type Segment = [AtomicU32; SEGMENT_WORDS];

/// Segments of words, made when they are needed.
pub(crate) struct Words {
    segments: [AtomicPtr<Segment>; MAX_SEGMENTS],
}

/// The right to add segments, and how many there are. One per [`Words`].
pub(crate) struct Growth {
    segments: usize,
}

impl Words {
    pub(crate) fn new() -> (Words, Growth) {
        let none = [const { AtomicPtr::new(ptr::null_mut()) }; MAX_SEGMENTS];
        (Words { segments: none }, Growth { segments: 0 })
    }

    /// The `count` words from `at` on, which lie in one segment; empty if there are none.
    #[inline]
    pub(crate) fn block(&self, at: usize, count: usize) -> &[AtomicU32] {
        let Some(segment) = self.segments.get(at / SEGMENT_WORDS) else { return &[] };
        // Acquire: the zeroes that `grow` wrote.
        let segment = segment.load(Ordering::Acquire);
        // SAFETY: null, or published once and alive while `self` is borrowed; words are atomic.
        let Some(segment) = (unsafe { segment.as_ref() }) else { return &[] };
        let within = at % SEGMENT_WORDS;
        segment.get(within..within.saturating_add(count)).unwrap_or_default()
    }

    /// Adds a segment; the place of its first word. `None` if there are too many.
    pub(crate) fn grow(&self, growth: &mut Growth) -> Option<usize> {
        let slot = self.segments.get(growth.segments)?;
        let zeroes = core::iter::repeat_with(|| AtomicU32::new(0)).take(SEGMENT_WORDS);
        let segment: Box<[AtomicU32]> = zeroes.collect();
        let segment: Box<Segment> = segment.try_into().ok()?;
        let first = growth.segments.saturating_mul(SEGMENT_WORDS);
        growth.segments = growth.segments.saturating_add(1);
        slot.store(Box::into_raw(segment), Ordering::Release);
        Some(first)
    }
}

impl Growth {
    /// Bytes of all segments.
    pub(crate) fn bytes(&self) -> usize {
        self.segments.saturating_mul(size_of::<Segment>())
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        for slot in &mut self.segments {
            let segment = *slot.get_mut();
            if !segment.is_null() {
                // SAFETY: made by `Box::into_raw` in `grow`, published once; `&mut self` means that
                // nobody borrows a word.
                drop(unsafe { Box::from_raw(segment) });
            }
        }
    }
}
