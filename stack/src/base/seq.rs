//! TCP sequence numbers, compared modulo 2^32 (RFC 9293 section 3.4).

/// A TCP sequence number. It has no `Ord`, since the order is circular: [`SeqNum::before`] and the other
/// comparisons are valid for numbers less than 2^31 apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct SeqNum(pub u32);

impl SeqNum {
    /// `self < other`, modulo 2^32.
    pub const fn before(self, other: SeqNum) -> bool {
        (self.0.wrapping_sub(other.0) as i32) < 0
    }

    /// `self <= other`, modulo 2^32.
    pub const fn before_eq(self, other: SeqNum) -> bool {
        !other.before(self)
    }

    /// `self > other`, modulo 2^32.
    pub const fn after(self, other: SeqNum) -> bool {
        other.before(self)
    }

    /// `self >= other`, modulo 2^32.
    pub const fn after_eq(self, other: SeqNum) -> bool {
        !self.before(other)
    }

    /// The later of two numbers.
    pub const fn max(self, other: SeqNum) -> SeqNum {
        if self.before(other) { other } else { self }
    }

    /// The earlier of two numbers.
    pub const fn min(self, other: SeqNum) -> SeqNum {
        if self.before(other) { self } else { other }
    }

    /// Bytes from `earlier` to `self`, zero if `earlier` is later.
    pub const fn since(self, earlier: SeqNum) -> u32 {
        let d = self.0.wrapping_sub(earlier.0);
        if (d as i32) < 0 { 0 } else { d }
    }

    /// Signed distance from `other` to `self`.
    pub const fn distance(self, other: SeqNum) -> i32 {
        self.0.wrapping_sub(other.0) as i32
    }
}

impl core::ops::Add<u32> for SeqNum {
    type Output = SeqNum;
    fn add(self, n: u32) -> SeqNum {
        SeqNum(self.0.wrapping_add(n))
    }
}

impl core::ops::Sub<u32> for SeqNum {
    type Output = SeqNum;
    fn sub(self, n: u32) -> SeqNum {
        SeqNum(self.0.wrapping_sub(n))
    }
}

impl core::ops::AddAssign<u32> for SeqNum {
    fn add_assign(&mut self, n: u32) {
        self.0 = self.0.wrapping_add(n);
    }
}

impl core::fmt::Display for SeqNum {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons_wrap_around() {
        let a = SeqNum(u32::MAX - 1);
        let b = a + 3;
        assert_eq!(b, SeqNum(1));
        assert!(a.before(b) && b.after(a) && !b.before(a));
        assert!(a.before_eq(a) && a.after_eq(a));
        assert_eq!(b.since(a), 3);
        assert_eq!(a.since(b), 0);
        assert_eq!(a.distance(b), -3);
        assert_eq!(a.max(b), b);
        assert_eq!(a.min(b), a);
    }
}
