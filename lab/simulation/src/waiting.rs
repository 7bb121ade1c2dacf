//! How a station waits for its device, by the policy that real threads wait by, on the virtual clock:
//! a thread that holds, or a device with a coalescing register that holds by itself.
//!
//! While a hold lasts arrived frames are not seen; calls of the applications and timers still run
//! the stack, as in a program. What must not happen is that frames wait for longer than the policy's
//! bound: a wake-up would have been lost.

use fulmar_stack::base::{Duration, Instant};
use fulmar_stack::device::moderation::{BusyPoll, ModerationConfig, Next, Profile};
use fulmar_stack::shard::Shard;

use super::scenario::Draw;

/// How a station waits.
#[derive(Clone, Copy, Debug)]
pub struct WaitPlan {
    /// The policy's bounds.
    pub config: ModerationConfig,
    /// The device holds frames back by itself, when told; else a thread sleeps for the time of a hold.
    pub registers: bool,
}

impl WaitPlan {
    /// A plan, or none: then every frame is seen as it comes.
    pub(super) fn draw(d: &mut Draw) -> Option<WaitPlan> {
        let config = ModerationConfig {
            // Wires here are slower than real ones.
            flood_pps: d.log(50, 20_000) as u32,
            max_hold: Duration::from_micros(d.log(20, 2_000)),
            ..ModerationConfig::ADAPTIVE
        };
        let registers = d.percent(50);
        d.percent(60).then_some(WaitPlan { config, registers })
    }
}

/// What a station's device shows, and when.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attention {
    /// A thread sleeps until then.
    held_until: Option<Instant>,
    /// The register: how long the device holds a frame.
    delay: Duration,
    /// When a poll could not take a frame; the time before that does not count.
    kept_from: Option<Instant>,
    /// Longest that a frame has waited beyond the time at which it came.
    pub longest: Duration,
}

impl Attention {
    /// When a frame that comes at `at` is seen.
    pub fn seen_at(&self, at: Instant) -> Instant {
        let at = at + self.delay;
        self.held_until.map_or(at, |until| at.max(until))
    }

    /// The register is set; `None`: nothing is held.
    pub fn coalesce(&mut self, to: Option<Profile>) {
        self.delay = to.map_or(Duration::ZERO, |p| p.receive.delay);
    }

    /// The device is looked at; its oldest frame came then. `None`: there is none, or it cannot be taken.
    pub fn looked(&mut self, now: Instant, oldest: Option<Instant>) {
        match oldest {
            Some(at) => {
                let from = self.kept_from.map_or(at, |kept| kept.max(at));
                self.longest = self.longest.max(now.since(from));
            }
            None => self.kept_from = Some(now),
        }
    }

    /// Whether a hold goes on.
    pub fn is_holding(&self, now: Instant) -> bool {
        self.held_until.is_some_and(|until| now < until)
    }

    /// The last wait was a hold.
    pub fn has_held(&self) -> bool {
        self.held_until.is_some()
    }

    /// A thread sleeps until then, or on the device.
    pub fn hold(&mut self, until: Option<Instant>) {
        self.held_until = until;
    }
}

/// What a thread that has found nothing to do does now: until when it holds. It may set the registers.
pub fn wait(shard: &mut Shard, now: Instant) -> Option<Instant> {
    shard.moderation().start_waiting(now);
    match shard.next_wait(now, BusyPoll::Forbidden) {
        Next::Hold { until } => Some(until),
        Next::BusyPoll { .. } | Next::Arm => None,
    }
}
