//! What a packet asks of the device that sends it, or what the device that received it has done:
//! plain numbers, so that every room from the transport to the driver can read and shift them.

/// Checksum and segmentation of one packet. Offsets count from the packet's first byte; a layer
/// that prepends a header calls [`Offload::shift`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Offload {
    /// The transport checksum field holds the folded sum of the pseudo header, not inverted; the
    /// sum from `csum_start` to the end is still to be stored at `csum_start + csum_offset`. On
    /// receive: the peer is local and its packet is trusted unsummed.
    pub needs_csum: bool,
    /// First byte that the checksum covers.
    pub csum_start: u16,
    /// Where the checksum lies, from `csum_start`.
    pub csum_offset: u16,
    /// On receive: the device verified the checksum.
    pub csum_valid: bool,
    /// The packet is a super-segment.
    pub gso: Option<Gso>,
}

/// How a super-segment is to be cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gso {
    /// Which headers repeat.
    pub kind: GsoKind,
    /// Payload bytes of every packet but the last.
    pub segment_bytes: u16,
    /// Bytes of headers, from the packet's first byte to its payload.
    pub header_bytes: u16,
    /// The segment carries CWR, which only the first packet keeps (virtio's ECN bit).
    pub ecn: bool,
}

/// What a super-segment is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GsoKind {
    /// TCP over IPv4.
    TcpV4,
    /// TCP over IPv6.
    TcpV6,
    /// UDP datagrams of equal size (UDP_SEGMENT).
    Udp,
}

impl Offload {
    /// Counts `bytes` more in front: a header was prepended.
    #[must_use]
    pub fn shift(mut self, bytes: u16) -> Offload {
        if self.needs_csum {
            self.csum_start = self.csum_start.saturating_add(bytes);
        }
        if let Some(gso) = &mut self.gso {
            gso.header_bytes = gso.header_bytes.saturating_add(bytes);
        }
        self
    }
}
