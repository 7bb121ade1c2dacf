//! The receive side of the device link: the burst, GRO and batched look-up of its frames, and how threads
//! wait for the next one.

use crate::base::{Counter, Counters};
use crate::device::Burst;
use crate::device::gro::Gro;
use crate::device::moderation::Moderation;

use crate::shard::config::StackConfig;
use crate::shard::demux::BatchLookup;
use crate::shard::link::net::Net;

/// Frames taken from the device in one burst at most.
pub(in crate::shard) const RX_BATCH: usize = 64;

/// The receive side of a shard.
pub(crate) struct Rx {
    pub burst: Burst,
    /// Joins the segments of a burst; `None`: they stay apart.
    pub gro: Option<Gro>,
    /// Look-ups of the burst that is being handled.
    pub lookup: BatchLookup,
    /// Mean bytes of the frames of the last burst.
    pub frame_bytes: usize,
    /// How threads wait for the device.
    pub moderation: Moderation,
    /// The last poll left nothing in the device, as far as is known.
    pub is_drained: bool,
}

impl Rx {
    pub(crate) fn new(config: &StackConfig) -> Rx {
        Rx {
            burst: Burst::with_capacity(RX_BATCH),
            gro: config.gro.then(Gro::new),
            lookup: BatchLookup::default(),
            frame_bytes: 0,
            moderation: Moderation::new(config.moderation),
            is_drained: true,
        }
    }

    /// Frames of the next burst: enough to hold `enough_bytes` at the recent frame size, limited by the capacity of the
    /// burst.
    pub(crate) fn burst_size(&self, enough_bytes: usize) -> usize {
        (enough_bytes / self.frame_bytes.max(1)).clamp(1, RX_BATCH)
    }

    /// Gives a change of the coalescing delay to a device that has registers for it.
    pub(crate) fn coalesce(&mut self, net: &mut Net) {
        if let Some(step) = self.moderation.take_change() {
            net.counters.count(Counter::MitigationChanges);
            if net.link.caps().coalescing {
                net.link.device().coalesce(step);
            }
        }
    }

    /// Counts a busy poll that has ended.
    pub(crate) fn count_poll(&mut self, counters: &mut Counters) {
        if let Some(took) = self.moderation.take_busy_polled() {
            counters.count(Counter::BusyPolls);
            counters.add(Counter::BusyPollNs, took.as_nanos() as u64);
        }
    }
}
