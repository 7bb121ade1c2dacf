//! Delivery and completion of the frames of one burst, with their counters.

use fulmar_stack::base::{Counters, DropReason};
use fulmar_stack::device::{Burst, Packet, Tally};
use fulmar_stack::mbuf::Pool;

/// The frames that a receive burst appends to `out`.
pub(super) struct Receiving<'a> {
    pub out: &'a mut Burst,
    pub counters: &'a mut Counters,
    pub tally: Tally,
}

impl<'a> Receiving<'a> {
    pub(super) fn new(out: &'a mut Burst, counters: &'a mut Counters) -> Receiving<'a> {
        Receiving { out, counters, tally: Tally::default() }
    }

    /// Delivers a frame, or counts its drop. The device reads no more frames than `out` has space for.
    #[inline]
    pub(super) fn deliver(&mut self, frame: Result<Packet, DropReason>) {
        match frame {
            Ok(p) => self.tally.receive(p, self.out),
            Err(reason) => self.counters.drop_packet(reason),
        }
    }
}

/// Completes the frames of a transmit burst: counts and frees them.
pub(super) struct Completing<'a> {
    pub pool: &'a mut Pool,
    pub counters: &'a mut Counters,
    pub tally: Tally,
}

impl<'a> Completing<'a> {
    pub(super) fn new(pool: &'a mut Pool, counters: &'a mut Counters) -> Completing<'a> {
        Completing { pool, counters, tally: Tally::default() }
    }

    #[inline]
    pub(super) fn sent(&mut self, p: Packet) {
        self.tally.complete(p, self.pool);
    }

    /// The first `count` frames of the burst were sent.
    pub(super) fn sent_front(&mut self, count: usize, burst: &mut Burst) {
        (0..count).map_while(|_| burst.pop_front()).for_each(|p| self.sent(p));
    }

    pub(super) fn discard(&mut self, p: Packet, reason: DropReason) {
        p.discard(reason, self.pool, self.counters);
    }
}
