//! Identifications of fragmented IPv4 datagrams. A stack draws them at random, so that they tell nothing of other traffic
//! (docs/secrets.md), and two datagrams may draw the same. Where a fragment of the first is left at the receiver, those
//! of the second complete it, and the transport drops the mixture (RFC 4963).

use std::collections::HashMap;

use fulmar_stack::base::{Duration, Instant};
use fulmar_stack::device::Packet;
use fulmar_stack::wire::{eth, ipv4};

/// Fragments are in flight or wait at the receiver for at most this time: the time-out of reassembly is 30 s.
const LIFETIME: Duration = Duration::from_secs(60);

/// Identifications of the datagrams that one station has sent in fragments.
#[derive(Default)]
pub struct Idents {
    /// When each identification was sent last.
    sent: HashMap<u16, Instant>,
    /// Datagrams with the identification of an earlier datagram.
    met: u64,
}

impl Idents {
    /// The station sends a frame.
    pub fn leaves(&mut self, now: Instant, p: &Packet) {
        let mut head = [0; eth::HEADER_BYTES + ipv4::HEADER_BYTES];
        if p.chain.copy_to(0, &mut head) < head.len() || head[12..14] != eth::IPV4.to_be_bytes() {
            return;
        }
        let packet = &head[eth::HEADER_BYTES..];
        let Ok(h) = ipv4::Header::parse(packet, p.chain.len() - eth::HEADER_BYTES) else { return };
        if h.more_fragments && h.fragment_offset == 0 {
            self.note(now, h.ident);
        }
    }

    fn note(&mut self, now: Instant, ident: u16) {
        let before = self.sent.insert(ident, now);
        self.met += u64::from(before.is_some_and(|at| now.since(at) < LIFETIME));
    }

    /// Datagrams that may have been mixed with another.
    pub fn met(&self) -> u64 {
        self.met
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_datagrams_that_are_fragmented_at_the_same_time_meet() {
        let mut idents = Idents::default();
        let at = Instant::from_millis;
        for (ms, ident) in [(0, 1), (1, 2), (61_000, 1), (62_000, 3)] {
            idents.note(at(ms), ident);
        }
        assert_eq!(idents.met(), 0);
        idents.note(at(63_000), 1);
        assert_eq!(idents.met(), 1);
    }
}
