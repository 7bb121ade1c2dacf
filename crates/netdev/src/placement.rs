//! Hints for devices that can put payload straight where the reader wants it.

use fulmar_base::FlowKey;
use fulmar_mbuf::{Chain, Mbuf};

/// Asks a device to place the payload of one flow.
pub struct PlacementHint {
    /// The flow, seen from this stack.
    pub flow: FlowKey,
    /// Stream offset of the first byte that goes into the buffers.
    pub next_offset: u64,
    /// Where it goes.
    pub placement: Placement,
}

/// Where the payload of a flow goes.
pub enum Placement {
    /// One byte after another into the spare room of these mbufs, which nobody else refers to.
    /// They come back in the chains of received packets.
    InOrder(Chain),
    /// The stream is made of frames, each with a header that says how long its body is and which
    /// buffer it belongs to; the body goes there, the header is delivered as usual.
    Framed {
        /// Finds the bodies.
        parser: Box<dyn FrameParser>,
        /// Finds the buffers.
        buffers: Box<dyn TagBuffers>,
    },
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
    /// Takes the buffer of this tag; its spare room receives the body. Asked once per frame.
    fn take(&mut self, tag: u64) -> Option<Mbuf>;
}
