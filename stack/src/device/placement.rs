//! The memory that a device fills for a flow ([`DirectPlacement`](crate::device::DirectPlacement)).

use crate::mbuf::WritableRange;

/// The writable ranges of a flow, in stream order: at most two.
#[derive(Default, Debug)]
pub struct WritableRanges {
    first: Option<WritableRange>,
    /// Set only if `first` is.
    second: Option<WritableRange>,
}

impl WritableRanges {
    /// Most ranges of one flow.
    pub const MAX: usize = 2;

    /// Appends a range.
    ///
    /// # Errors
    /// The range, if there are two already.
    pub fn push(&mut self, range: WritableRange) -> Result<(), WritableRange> {
        let free = [&mut self.first, &mut self.second].into_iter().find(|r| r.is_none());
        match free {
            Some(free) => {
                *free = Some(range);
                Ok(())
            }
            None => Err(range),
        }
    }

    /// The range that is filled next.
    #[inline]
    pub fn front_mut(&mut self) -> Option<&mut WritableRange> {
        self.first.as_mut()
    }

    /// Whether there is exactly one range, so that another one can be posted.
    pub fn has_space_for_next(&self) -> bool {
        self.first.is_some() && self.second.is_none()
    }

    /// Removes the first range.
    #[inline]
    pub fn pop_front(&mut self) -> Option<WritableRange> {
        core::mem::replace(&mut self.first, self.second.take())
    }

    /// Both ranges, for a scattered read.
    #[inline]
    pub fn pair_mut(&mut self) -> (Option<&mut WritableRange>, Option<&mut WritableRange>) {
        (self.first.as_mut(), self.second.as_mut())
    }

    /// Bytes of all ranges.
    pub fn bytes(&self) -> usize {
        self.iter().map(WritableRange::len).sum()
    }

    /// The number of ranges.
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// Whether there is no range.
    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// The ranges in stream order.
    pub fn iter(&self) -> impl Iterator<Item = &WritableRange> {
        self.first.iter().chain(&self.second)
    }

    /// The ranges in stream order, mutable.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut WritableRange> {
        self.first.iter_mut().chain(&mut self.second)
    }
}
