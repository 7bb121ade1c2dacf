//! The UDP header template of a flow.

use core::net::SocketAddr;

use crate::base::{Gso, GsoKind, Offload};
use crate::wire::checksum::{Sum, added};
use crate::wire::protocol;
use crate::wire::udp::{CHECKSUM_OFFSET, HEADER_BYTES};

/// The constant part of a flow's UDP headers: all but length and checksum. It depends on the
/// addresses and ports only, so it never becomes stale.
#[derive(Clone, Copy, Debug)]
pub struct Template {
    ports: [u8; 4],
    /// Pseudo-header sum without the length.
    pseudo: u16,
}

impl Template {
    /// The template for datagrams from `local` to `remote`. `None` if they are of different IP
    /// versions.
    pub fn new(local: SocketAddr, remote: SocketAddr) -> Option<Template> {
        let mut pseudo = Sum::new();
        pseudo.add_pseudo(local.ip(), remote.ip(), protocol::UDP, 0);
        let ([a, b], [c, d]) = (local.port().to_be_bytes(), remote.port().to_be_bytes());
        (local.is_ipv4() == remote.is_ipv4())
            .then_some(Template { ports: [a, b, c, d], pseudo: pseudo.fold() })
    }

    /// Writes the header of a datagram whose UDP length is `length` bytes, header included. The
    /// result equals that of [`output`](crate::udp::output): the checksum field holds the folded pseudo-header
    /// sum.
    #[inline(always)]
    pub fn emit(&self, length: u16, header: &mut [u8; HEADER_BYTES]) {
        header[0..4].copy_from_slice(&self.ports);
        header[4..6].copy_from_slice(&length.to_be_bytes());
        header[6..8].copy_from_slice(&added([self.pseudo, length]).to_be_bytes());
    }
}

/// The offload request of a datagram; offsets count from its UDP header. With `segment_bytes`, UDP
/// segmentation offload cuts the payload into datagrams of that size, the last one possibly
/// shorter.
#[inline]
pub fn offload_of(payload_bytes: usize, segment_bytes: Option<u16>) -> Offload {
    let is_run = |bytes: &u16| *bytes > 0 && usize::from(*bytes) < payload_bytes;
    Offload {
        needs_csum: true,
        csum_start: 0,
        csum_offset: CHECKSUM_OFFSET as u16,
        gso: segment_bytes.filter(is_run).map(|segment_bytes| Gso {
            kind: GsoKind::Udp,
            segment_bytes,
            header_bytes: HEADER_BYTES as u16,
            ecn: false,
        }),
        ..Offload::default()
    }
}
