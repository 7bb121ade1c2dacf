//! The next segment of a stream, recognised without reading all of its headers again.
//!
//! Of the frames of a bulk transfer nearly every one follows one of the same stream. What is the same in
//! both, byte by byte, has been checked, and leads to the same connection: so Ethernet, IP and the look-up
//! are passed over ([`PredictedHeaders`]), and only what may differ is looked at: lengths, the checksum of the IP
//! header, the TCP header. That is Van Jacobson's header prediction, two layers further down.
//!
//! A stream is remembered once two segments in a row were its own, so that streams which come mixed pay
//! for nothing. What is remembered holds while no connection came or went and `ip` knows of no change.

use fulmar_base::SlotId;
use fulmar_netdev::Packet;
use fulmar_wire::predict::PredictedHeaders;
use fulmar_wire::{eth, ipv4, tcp};

/// The stream of the last segments.
#[derive(Default)]
pub struct FlowCache {
    known: Option<Known>,
    /// The connection of the last segment that was looked up.
    id: Option<SlotId>,
    /// The one before was of the same, so that it is worth while to keep the front of the next one.
    is_run: bool,
    /// The front of the frame that is on its way up.
    front: Option<PredictedHeaders>,
}

/// A segment of the stream that came last.
pub struct Predicted {
    /// Its connection.
    pub id: SlotId,
    /// Its header.
    pub header: tcp::Header,
    /// Where its payload begins.
    pub payload_at: usize,
}

impl FlowCache {
    /// Recognises a segment of the stream that came last; keeps the front of any other frame, if that may be
    /// the next of its stream. `changes`: what the tables and `ip` say of theirs.
    #[inline]
    pub fn predict(&mut self, p: &Packet, changes: (u64, u64)) -> Option<Predicted> {
        let found = self.look_at(p, changes);
        if found.is_none() {
            let front = p.chain.front().filter(|_| self.is_run);
            self.front = front.and_then(|m| PredictedHeaders::of(m.as_slice()));
        }
        found
    }

    fn look_at(&self, p: &Packet, changes: (u64, u64)) -> Option<Predicted> {
        let known = self.known.as_ref()?;
        let frame = p.chain.front()?.as_slice();
        let l4 = known.front.predict(frame, p.chain.len())?;
        // Where it is the receiver who has to sum, the long way does.
        let is_summed = match p.offload.needs_csum {
            true => usize::from(p.offload.csum_start) == l4,
            false => p.offload.csum_valid,
        };
        if !is_summed || known.changes != changes {
            return None;
        }
        let ip = frame.get(eth::HEADER_BYTES..)?;
        if known.front.is_v4() && !ipv4::checksum_ok(ip, ipv4::HEADER_BYTES) {
            return None;
        }
        let (header, bytes) = tcp::Header::parse(frame.get(l4..)?).ok()?;
        Some(Predicted { id: known.id, header, payload_at: l4 + bytes })
    }

    /// A segment was looked up and is this connection's.
    #[inline]
    pub fn note(&mut self, id: SlotId, changes: (u64, u64)) {
        self.is_run = self.id == Some(id);
        self.id = Some(id);
        if let Some(front) = self.front.take().filter(|_| self.is_run) {
            self.known = Some(Known { front, id, changes });
        }
    }

    /// That frame has been dealt with; segments from elsewhere (another shard) have another front.
    #[inline]
    pub fn forget_headers(&mut self) {
        self.front = None;
    }
}

/// How to predict a stream, and its connection.
struct Known {
    front: PredictedHeaders,
    id: SlotId,
    /// What the tables said of their changes.
    changes: (u64, u64),
}
