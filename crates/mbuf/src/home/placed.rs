//! Mbufs whose bytes lie in a posted buffer.

#![forbid(unsafe_code)]

use super::raw::Owner;
use crate::Mbuf;
use crate::posted::Placed;

impl Mbuf {
    /// Where the bytes lie, if that is in a posted buffer.
    #[inline]
    pub fn placed(&self) -> Option<Placed> {
        let Owner::Posted(memory) = &self.record()?.owner else { return None };
        let buffer = memory.id();
        let start = self.desc().data.addr() - buffer.address;
        Some(Placed { buffer, offset: start + self.headroom() })
    }
}
