//! Hints for devices that can put payload straight where the reader wants it.

use fulmar_base::{FlowKey, SeqNum};
use fulmar_mbuf::Room;

/// Tells a device what it may expect next of one flow, and where its payload goes.
pub struct PlacementHint {
    /// The flow, seen from this stack.
    pub flow: FlowKey,
    /// Sequence number, as on the wire, of the first byte that goes into the buffers.
    pub next_seq: SeqNum,
    /// Where it goes.
    pub placement: Placement,
}

/// Where the payload of a flow goes.
pub enum Placement {
    /// One byte after another into these rooms.
    InOrder(Rooms),
    /// What was expected before holds; behind the last room that the device has of the flow comes one
    /// more. The number in the hint is not looked at. Refused, and the room dropped, if the device has
    /// none left, or two, or has lost track.
    Then(Room),
    /// The stream is made of frames, each with a header that says how long its body is and which
    /// buffer it belongs to; the body goes there, the header is delivered as usual.
    Framed {
        /// Finds the bodies.
        parser: Box<dyn FrameParser>,
        /// Finds the buffers.
        buffers: Box<dyn TagBuffers>,
    },
}

/// The rooms of a flow, in the order in which they are filled: at most two.
#[derive(Default, Debug)]
pub struct Rooms {
    first: Option<Room>,
    /// Set only if `first` is.
    second: Option<Room>,
}

impl Rooms {
    /// The most rooms that a device has of one flow.
    pub const MAX: usize = 2;

    /// Appends a room; gives it back if there are two.
    pub fn push(&mut self, room: Room) -> Result<(), Room> {
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
    pub fn front_mut(&mut self) -> Option<&mut Room> {
        self.first.as_mut()
    }

    /// Whether another room may follow: there is one, and one only.
    pub fn takes_one_more(&self) -> bool {
        self.first.is_some() && self.second.is_none()
    }

    /// Takes the first room off.
    #[inline]
    pub fn pop_front(&mut self) -> Option<Room> {
        core::mem::replace(&mut self.first, self.second.take())
    }

    /// Both, at once, to scatter into.
    #[inline]
    pub fn pair_mut(&mut self) -> (Option<&mut Room>, Option<&mut Room>) {
        (self.first.as_mut(), self.second.as_mut())
    }

    /// Bytes that fit into all of them.
    pub fn bytes(&self) -> usize {
        self.iter().map(Room::len).sum()
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
    pub fn iter(&self) -> impl Iterator<Item = &Room> {
        self.first.iter().chain(&self.second)
    }

    /// In order, for writing.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Room> {
        self.first.iter_mut().chain(&mut self.second)
    }
}

/// Understands the framing of a stream just enough to place bodies.
pub trait FrameParser: Send {
    /// How many bytes of a frame [`FrameParser::body`] needs to see.
    fn header_bytes(&self) -> usize;

    /// Length of the body behind this header in bytes, and the tag of its buffer. `None`: deliver
    /// the frame as usual.
    fn body(&self, header: &[u8]) -> Option<(usize, u64)>;
}

/// Maps the tag in a frame's header to the buffer that waits for its body.
pub trait TagBuffers: Send {
    /// Takes the room of this tag, which receives the body. Asked once per frame.
    fn take(&mut self, tag: u64) -> Option<Room>;
}
