//! A one-entry flow cache with header prediction below TCP.
//!
//! In a bulk transfer nearly every frame has the flow of the frame before. Header bytes that are equal in both
//! were checked with the first and lead to the same connection: Ethernet, IP and the look-up are skipped
//! ([`PredictedHeaders`]), and only the fields that may differ are checked: lengths, the checksum of the IP
//! header, the TCP header. That is Van Jacobson's header prediction, extended to the layers below TCP.
//!
//! A flow is cached after two segments in a row, so that interleaved flows pay nothing. An entry is valid while
//! the generations of the flow table and of `ip` stay the same.

use crate::base::SlotId;
use crate::device::Packet;
use crate::ip::Origin;
use crate::tcp::EcnField;
use crate::wire::predict::PredictedHeaders;
use crate::wire::{eth, ipv4, tcp};

/// The flow of the last segments.
#[derive(Default)]
pub(crate) struct FlowCache {
    known: Option<Known>,
    /// The connection of the last segment that was looked up.
    id: Option<SlotId>,
    /// The segment before was of the same connection, so that the headers of the next one are kept.
    is_run: bool,
    /// The headers of the frame that is being handled, and where it comes from.
    headers: Option<(Origin, PredictedHeaders)>,
}

/// A segment of the cached flow.
pub(crate) struct Predicted {
    /// Its connection.
    pub id: SlotId,
    /// Its header.
    pub header: tcp::Header,
    /// The ECN field of its IP header.
    pub ecn: EcnField,
    /// Offset of its payload in the frame.
    pub payload_at: usize,
}

impl FlowCache {
    /// Fast path: parses a segment of the cached flow. Keeps the headers of any other frame, if it may be the
    /// next of its flow.
    #[inline]
    pub(crate) fn predict(
        &mut self,
        origin: Origin,
        p: &Packet,
        generations: Generations,
    ) -> Option<Predicted> {
        let found = self.parse_cached(origin, p, generations);
        if found.is_none() {
            let headers = p.chain.front().filter(|_| self.is_run);
            let headers = headers.and_then(|m| PredictedHeaders::of(m.as_slice()));
            self.headers = headers.map(|headers| (origin, headers));
        }
        found
    }

    fn parse_cached(
        &self,
        origin: Origin,
        p: &Packet,
        generations: Generations,
    ) -> Option<Predicted> {
        let known = self.known.as_ref()?;
        let frame = p.chain.front()?.as_slice();
        let l4 = known.headers.predict(frame, p.chain.len())?;
        // The slow path computes a checksum that the device has not verified.
        let is_summed = match p.offload.needs_csum {
            true => usize::from(p.offload.csum_start) == l4,
            false => p.offload.csum_valid,
        };
        if !is_summed || known.generations != generations || known.origin != origin {
            return None;
        }
        let ip = frame.get(eth::HEADER_BYTES..)?;
        if known.headers.is_v4() && !ipv4::checksum_ok(ip, ipv4::HEADER_BYTES) {
            return None;
        }
        let (header, bytes) = tcp::Header::parse(frame.get(l4..)?).ok()?;
        // A SYN may begin another connection.
        if header.flags.contains(tcp::Flags::SYN) {
            return None;
        }
        let ecn = EcnField::of_bits(known.headers.ecn());
        Some(Predicted { id: known.id, header, ecn, payload_at: l4 + bytes })
    }

    /// A segment was looked up and belongs to this connection.
    #[inline]
    pub(crate) fn note(&mut self, id: SlotId, generations: Generations) {
        self.is_run = self.id == Some(id);
        self.id = Some(id);
        if let Some((origin, headers)) = self.headers.take().filter(|_| self.is_run) {
            self.known = Some(Known { origin, headers, id, generations });
        }
    }

    /// The frame was handled; segments from elsewhere (another shard) have other headers.
    #[inline]
    pub(crate) fn forget_headers(&mut self) {
        self.headers = None;
    }
}

/// The state that the cached flow depends on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Generations {
    /// Of the flow table.
    pub flows: u64,
    /// Of the addresses and routes of `ip`.
    pub ip: u64,
}

/// The cached flow.
struct Known {
    /// The device's frames may not have the source addresses that those over loopback have.
    origin: Origin,
    headers: PredictedHeaders,
    id: SlotId,
    /// Generations at the look-up.
    generations: Generations,
}
