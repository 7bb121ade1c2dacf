//! Mbufs over posted buffers.

#![forbid(unsafe_code)]

use super::raw::Owner;
use crate::mbuf::Mbuf;
use crate::mbuf::posted::Placed;

impl Mbuf {
    /// The position of the bytes in a posted buffer. `None` if they are not in one.
    #[inline]
    pub fn placed(&self) -> Option<Placed> {
        let Owner::Posted(memory) = &self.record()?.owner else { return None };
        let buffer = memory.id();
        let start = self.desc().data.addr() - buffer.address;
        Some(Placed { buffer, offset: start + self.headroom() })
    }
}
