//! A peer that sends urgent data now and then: the wire sets the flag on segments that arrive, with a
//! pointer into their payload or beyond it.

use fulmar_stack::device::{Packet, Rng};
use fulmar_stack::mbuf::Pool;
use fulmar_stack::wire::dissect::Network;
use fulmar_stack::wire::protocol;
use fulmar_stack::wire::tcp::{Flags, Header};

use super::moves::{correct, rewritten};

/// Offsets in a TCP header: data offset and flags, checksum, urgent pointer (RFC 9293 section 3.1).
const FLAGS: usize = 12;
const CHECKSUM: usize = 16;
const POINTER: usize = 18;
const TCP_BYTES: usize = 20;

/// See the module's header.
pub struct Urgency {
    percent: u64,
    rng: Rng,
}

impl Urgency {
    pub fn new(percent: u64, seed: u64) -> Urgency {
        Urgency { percent, rng: Rng::new(seed) }
    }

    /// The frame, made urgent or as it is; `None` without memory for one that may not be written to.
    pub fn strike(&mut self, p: Packet, pool: &mut Pool) -> Option<Packet> {
        if self.percent == 0 || self.rng.below(100) >= self.percent {
            return Some(p);
        }
        // Within a full segment mostly, and beyond it.
        let pointer = 1 + self.rng.below(3_000) as u16;
        let frame_bytes = p.chain.len();
        rewritten(p, pool, |head| {
            let Some(at) = segment_at(head, frame_bytes) else { return };
            let Some(tcp) = head.get_mut(at..at + TCP_BYTES) else { return };
            let flags = u16::from_be_bytes([tcp[FLAGS], tcp[FLAGS + 1] | Flags::URG.0 as u8]);
            for (field, value) in [(FLAGS, flags), (POINTER, pointer)] {
                let new = value.to_be_bytes();
                let old = [tcp[field], tcp[field + 1]];
                tcp[field..field + 2].copy_from_slice(&new);
                correct(tcp, CHECKSUM, &old, &new);
            }
        })
    }
}

/// The offset of the TCP header in a frame that is not a fragment and does not open a connection.
fn segment_at(head: &[u8], frame_bytes: usize) -> Option<usize> {
    let network = Network::parse(head, frame_bytes).filter(|n| n.protocol == protocol::TCP)?;
    let (_, flags, _) = Header::peek(head.get(network.l4..)?)?;
    (!flags.intersects(Flags::SYN | Flags::RST)).then_some(network.l4)
}
