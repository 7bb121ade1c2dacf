//! The memory that a device fills for a flow ([`crate::DirectPlacement`]).

use fulmar_mbuf::WritableRange;

/// The rooms of a flow, in the order in which they are filled: at most two.
#[derive(Default, Debug)]
pub struct Rooms {
    first: Option<WritableRange>,
    /// Set only if `first` is.
    second: Option<WritableRange>,
}

impl Rooms {
    /// The most rooms that a device has of one flow.
    pub const MAX: usize = 2;

    /// Appends a room; gives it back if there are two.
    pub fn push(&mut self, room: WritableRange) -> Result<(), WritableRange> {
        let free = [&mut self.first, &mut self.second].into_iter().find(|r| r.is_none());
        match free {
            Some(free) => {
                *free = Some(room);
                Ok(())
            }
            None => Err(room),
        }
    }

    /// The room that is filled next.
    #[inline]
    pub fn front_mut(&mut self) -> Option<&mut WritableRange> {
        self.first.as_mut()
    }

    /// Whether another room may follow: there is one, and one only.
    pub fn takes_one_more(&self) -> bool {
        self.first.is_some() && self.second.is_none()
    }

    /// Takes the first room off.
    #[inline]
    pub fn pop_front(&mut self) -> Option<WritableRange> {
        core::mem::replace(&mut self.first, self.second.take())
    }

    /// Both, at once, to scatter into.
    #[inline]
    pub fn pair_mut(&mut self) -> (Option<&mut WritableRange>, Option<&mut WritableRange>) {
        (self.first.as_mut(), self.second.as_mut())
    }

    /// Bytes that fit into all of them.
    pub fn bytes(&self) -> usize {
        self.iter().map(WritableRange::len).sum()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// In order.
    pub fn iter(&self) -> impl Iterator<Item = &WritableRange> {
        self.first.iter().chain(&self.second)
    }

    /// In order, for writing.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut WritableRange> {
        self.first.iter_mut().chain(&mut self.second)
    }
}
