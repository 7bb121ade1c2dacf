//! Checksum and segmentation offload of a packet: the request to the sending device, or the result of
//! the receiving one.

/// The offload state of one packet (`csum_start`, `gso_size`, ... of an sk_buff). Offsets are relative
/// to the first byte of the packet; a layer that prepends a header calls [`Offload::shift`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Offload {
    /// Transmit: the checksum field holds the folded pseudo-header sum, not complemented; the device
    /// stores the checksum of `csum_start` to the end at `csum_start + csum_offset`
    /// (`CHECKSUM_PARTIAL`). Receive: the packet comes from a local peer and was never checksummed.
    pub needs_csum: bool,
    /// Offset of the first byte that the checksum covers.
    pub csum_start: u16,
    /// Offset of the checksum field from `csum_start`.
    pub csum_offset: u16,
    /// Receive: the device verified the checksum (`CHECKSUM_UNNECESSARY`).
    pub csum_valid: bool,
    /// Set if the packet is a super-segment.
    pub gso: Option<Gso>,
}

/// How a super-segment is segmented.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gso {
    /// The protocols of the headers that are replicated.
    pub kind: GsoKind,
    /// Payload bytes of every segment but the last.
    pub segment_bytes: u16,
    /// Bytes of headers in front of the payload.
    pub header_bytes: u16,
    /// CWR is set, which only the first segment keeps (`VIRTIO_NET_HDR_GSO_ECN`).
    pub ecn: bool,
}

/// The protocol of a super-segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GsoKind {
    /// TCP over IPv4.
    TcpV4,
    /// TCP over IPv6.
    TcpV6,
    /// UDP datagrams of equal size (`UDP_SEGMENT`).
    Udp,
}

impl Offload {
    /// Adjusts the offsets for `bytes` of prepended header.
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

    /// Adjusts the offsets for `bytes` of removed header, the inverse of [`Offload::shift`].
    #[must_use]
    pub fn unshift(mut self, bytes: u16) -> Offload {
        if self.needs_csum {
            self.csum_start = self.csum_start.saturating_sub(bytes);
        }
        if let Some(gso) = &mut self.gso {
            gso.header_bytes = gso.header_bytes.saturating_sub(bytes);
        }
        self
    }
}
