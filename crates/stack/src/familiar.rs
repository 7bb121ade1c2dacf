//! The next segment of a stream, recognised without reading all of its headers again.
//!
//! Of the frames of a bulk transfer nearly every one follows one of the same stream. What is the same in
//! both, byte by byte, has been checked, and leads to the same connection: so Ethernet, IP and the look-up
//! are passed over ([`Familiar`]), and only what may differ is looked at: lengths, the checksum of the IP
//! header, the TCP header. That is Van Jacobson's header prediction, two layers further down.
//!
//! A stream is remembered once two segments in a row were its own, so that streams which come mixed pay
//! for nothing. What is remembered holds while no connection came or went and `ip` knows of no change.

use fulmar_base::{Instant, Probe, SlotId, Stage};
use fulmar_netdev::Packet;
use fulmar_wire::familiar::Familiar;
use fulmar_wire::{eth, ipv4, tcp};

use crate::shard::Shard;

/// The stream of the last segments.
#[derive(Default)]
pub struct LastStream {
    known: Option<Known>,
    /// The connection of the last segment that was looked up.
    id: Option<SlotId>,
    /// The one before was of the same, so that it is worth while to keep the front of the next one.
    is_run: bool,
    /// The front of the frame that is on its way up.
    front: Option<Familiar>,
}

impl LastStream {
    /// That frame has been dealt with; segments from elsewhere (another shard) have another front.
    #[inline]
    pub(crate) fn forget_front(&mut self) {
        self.front = None;
    }
}

/// How to recognise a stream, and its connection.
struct Known {
    front: Familiar,
    id: SlotId,
    /// What the tables said of their changes.
    changes: (u64, u64),
}

impl<P: Probe> Shard<P> {
    fn table_changes(&self) -> (u64, u64) {
        (self.flow_changes(), self.net.ip.generation())
    }

    /// Takes a segment of the stream that came last; gives anything else back.
    #[inline]
    pub(crate) fn take_familiar(&mut self, now: Instant, p: Packet) -> Option<Packet> {
        let Some((id, header, payload_at)) = self.recognise_stream(&p) else {
            let front = p.chain.front().filter(|_| self.last_stream.is_run);
            self.last_stream.front = front.and_then(|m| Familiar::of(m.as_slice()));
            return Some(p);
        };
        let mut payload = p.chain;
        let stages = [Stage::EtherInput, Stage::IpInput, Stage::Demultiplexed];
        if stages.into_iter().any(|stage| self.ends_at(stage)) {
            self.net.pool.free(payload);
            return None;
        }
        payload.trim_front(payload_at, &mut self.net.pool);
        self.give_to_connection(now, id, &header, payload);
        None
    }

    /// The connection of a segment of the stream that came last, its header, and where its payload begins.
    fn recognise_stream(&self, p: &Packet) -> Option<(SlotId, tcp::Header, usize)> {
        let known = self.last_stream.known.as_ref()?;
        let frame = p.chain.front()?.as_slice();
        let l4 = known.front.recognise(frame, p.chain.len())?;
        // Where it is the receiver who has to sum, the long way does.
        let is_summed = match p.offload.needs_csum {
            true => usize::from(p.offload.csum_start) == l4,
            false => p.offload.csum_valid,
        };
        if !is_summed || known.changes != self.table_changes() {
            return None;
        }
        let ip = frame.get(eth::HEADER_BYTES..)?;
        if known.front.is_v4() && !ipv4::checksum_ok(ip, ipv4::HEADER_BYTES) {
            return None;
        }
        let (header, bytes) = tcp::Header::parse(frame.get(l4..)?).ok()?;
        Some((known.id, header, l4 + bytes))
    }

    /// A segment was looked up and is this connection's.
    #[inline]
    pub(crate) fn note_stream(&mut self, id: SlotId) {
        let changes = self.table_changes();
        let last = &mut self.last_stream;
        last.is_run = last.id == Some(id);
        last.id = Some(id);
        if let Some(front) = last.front.take().filter(|_| last.is_run) {
            last.known = Some(Known { front, id, changes });
        }
    }
}
