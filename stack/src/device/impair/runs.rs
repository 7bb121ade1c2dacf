//! Super-frames on a path without a bottleneck: packets in a row that nothing befalls stay one super-frame, as behind a
//! receiver's GRO. The others are cut out, and draw the random numbers that they would draw among packets.

use crate::base::{Counters, DropReason, Instant};
use crate::mbuf::{Pool, Purpose};

use super::{Impairments, Path, reason};
use crate::device::{Packet, offload};

/// Whether all packets of a super-frame leave at once and are treated alike.
pub(super) fn is_possible(how: &Impairments) -> bool {
    let has_bottleneck = how.rate_bps.is_some() || how.policer.is_some();
    !has_bottleneck && how.mtu.is_none() && how.jitter.is_zero()
}

impl Path {
    /// Sends a super-frame in runs. Packet `victim` is corrupted.
    pub(super) fn send_runs(
        &mut self,
        now: Instant,
        p: Packet,
        victim: Option<u64>,
        pool: &mut Pool,
        counters: &mut Counters,
    ) {
        let packets = p.wire_packets() as u64;
        let (mut rest, mut run) = (Some(p), 0);
        for index in 0..packets {
            let is_victim = victim == Some(index);
            if !is_victim && self.passes(now) {
                run += 1;
                // A packet that has waited for this one goes before the next.
                if self.waiting.iter().any(|w| w.overtakers <= run) {
                    self.send_run(now, &mut rest, core::mem::take(&mut run), pool, counters);
                }
                continue;
            }
            self.send_run(now, &mut rest, core::mem::take(&mut run), pool, counters);
            let Some(mut one) = take_front(&mut rest, 1, pool, counters) else { return };
            if is_victim && offload::finish_checksum(&mut one, pool).is_err() {
                one.discard(DropReason::NoBuffer, pool, counters);
                continue;
            }
            self.own(&mut one, pool);
            self.send_packet(now, one, is_victim, pool, counters);
        }
        self.send_run(now, &mut rest, run, pool, counters);
    }

    /// Whether nothing befalls the next packet. Only then are its random numbers used up.
    fn passes(&mut self, now: Instant) -> bool {
        let before = (self.rng.clone(), self.loses_until);
        let is_struck = self.is_lost(now) || self.rng.happens(self.duplicate) || {
            self.jitter();
            self.rng.happens(self.reorder)
        };
        if is_struck {
            (self.rng, self.loses_until) = before;
        }
        !is_struck
    }

    /// Sends the first `packets` packets, which nothing befalls.
    fn send_run(
        &mut self,
        now: Instant,
        rest: &mut Option<Packet>,
        packets: u32,
        pool: &mut Pool,
        counters: &mut Counters,
    ) {
        if packets == 0 {
            return;
        }
        let Some(mut p) = take_front(rest, packets, pool, counters) else { return };
        self.own(&mut p, pool);
        self.counts.passed += u64::from(packets);
        self.last_due = self.last_due.max(now + self.how.delay);
        self.hold(self.last_due, p, pool, counters);
        self.overtake(packets, pool, counters);
    }

    /// A packet that would pin more than four times its length is copied, if the packets are to be charged for their own
    /// memory. Without memory it keeps its reference.
    pub(super) fn own(&self, p: &mut Packet, pool: &mut Pool) {
        if self.cuts_are != super::Cuts::Shared && p.chain.truesize() > 4 * p.chain.len() {
            let _ = offload::make_unique(&mut p.chain, pool, Purpose::Receive);
        }
    }
}

/// Takes the first `packets` packets of a super-frame. Without memory for their headers all of it is dropped.
fn take_front(
    rest: &mut Option<Packet>,
    packets: u32,
    pool: &mut Pool,
    counters: &mut Counters,
) -> Option<Packet> {
    match offload::split(rest.take()?, packets as usize, pool) {
        Ok((front, behind)) => {
            *rest = behind;
            Some(front)
        }
        Err(unfit) => {
            unfit.packet.discard(reason(unfit.why), pool, counters);
            None
        }
    }
}
