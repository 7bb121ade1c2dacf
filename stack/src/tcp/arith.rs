//! Division that cannot fail.

/// Quotient and remainder. A divisor of 0 is treated as 1.
#[inline]
pub(crate) fn div_rem(n: u64, by: u64) -> (u64, u64) {
    (n.checked_div(by).unwrap_or(n), n.checked_rem(by).unwrap_or(0))
}
