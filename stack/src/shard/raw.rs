//! A hint to the processor. All unsafe code of this room.

/// Asks the processor to have the first `bytes` of a value near when it is read. Changes nothing but
/// the time that takes; nothing at all where the processor has no such instruction.
#[inline]
pub(super) fn fetch<T>(value: &T, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        const LINE_BYTES: usize = 64;
        let start = core::ptr::from_ref(value).cast::<i8>();
        for at in (0..bytes.min(size_of::<T>())).step_by(LINE_BYTES) {
            // SAFETY: a hint, which has no effect on memory and cannot fault; every processor of this
            // architecture has it. The address is within `value`, by the bound of the loop.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.add(at)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (value, bytes);
}
