//! A device that does not cut super-frames, in front of one that does: for comparing a stack with
//! and without segmentation offload (TSO) on the same device.
//!
//! Frames pass unchanged both ways; only what the device says of itself differs. Checksums stay as
//! they were.

use fulmar::device::{Caps, Device, forward_device};

/// The wrapper.
pub struct WithoutTso {
    inner: Box<dyn Device>,
    caps: Caps,
}

impl WithoutTso {
    /// Hides the segmentation offload of `inner`.
    pub fn new(inner: Box<dyn Device>) -> WithoutTso {
        let caps = Caps { tso: None, udp_gso: false, ..*inner.caps() };
        WithoutTso { inner, caps }
    }
}

impl Device for WithoutTso {
    forward_device!(self => self.inner, except caps);

    fn caps(&self) -> &Caps {
        &self.caps
    }
}
