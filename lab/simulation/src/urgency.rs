//! A peer that sends urgent data now and then: the wire sets the flag on segments that arrive, with a
//! pointer into their payload or beyond it.

use fulmar_mbuf::Pool;
use fulmar_netdev::{Packet, Rng};
use fulmar_wire::protocol;
use fulmar_wire::tcp::Flags;

use super::moves::{correct, rewritten};

const ETHER_BYTES: usize = 14;
/// Of a TCP header: flags with the length in front, checksum, urgent pointer.
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
        rewritten(p, pool, |head| {
            let Some(at) = segment_at(head) else { return };
            let Some(tcp) = head.get_mut(at..at + TCP_BYTES) else { return };
            let flags = u16::from_be_bytes([tcp[FLAGS], tcp[FLAGS + 1] | Flags::URG.0]);
            for (field, value) in [(FLAGS, flags), (POINTER, pointer)] {
                let new = value.to_be_bytes();
                let old = [tcp[field], tcp[field + 1]];
                tcp[field..field + 2].copy_from_slice(&new);
                correct(tcp, CHECKSUM, &old, &new);
            }
        })
    }
}

/// Where TCP begins in a frame that is no fragment and opens no connection.
fn segment_at(head: &[u8]) -> Option<usize> {
    let ip = head.get(ETHER_BYTES..)?;
    let at = match (head.get(12)?, head.get(13)?) {
        (0x08, 0x00) => {
            let is_whole = ip.get(6)? & 0x3f == 0 && *ip.get(7)? == 0;
            let bytes = usize::from(ip.first()? & 15) * 4;
            (is_whole && *ip.get(9)? == protocol::TCP).then_some(ETHER_BYTES + bytes)?
        }
        (0x86, 0xdd) => (*ip.get(6)? == protocol::TCP).then_some(ETHER_BYTES + 40)?,
        _ => return None,
    };
    let is_usual = head.get(at + FLAGS + 1)? & (Flags::SYN.0 | Flags::RST.0) == 0;
    is_usual.then_some(at)
}
