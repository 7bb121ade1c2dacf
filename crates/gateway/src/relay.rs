//! The relay: between the connections and datagrams of a guest, which end in a shard, and the host's sockets.
//!
//! Each transport is a layer with a table of its flows ([`tcp`]). What they share is passed to them as a
//! [`Context`].

pub mod poll;
#[allow(unsafe_code)]
mod sys;

use std::time;

use fulmar_base::Instant;
use fulmar_shard::Shard;

use crate::config::{Carries, Limits, OnLoopback, Outbound};
use crate::mapping::Mapping;
use crate::policy::{Attempt, Decision, Policy};
use crate::stat::{Refusal, Totals};
use poll::{Owners, Poll};

/// The clock of the shard: it starts a little above zero, since zero is the past.
#[derive(Clone, Copy, Debug)]
pub struct Clock(time::Instant);

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Clock {
        Clock(time::Instant::now())
    }

    /// What time it is.
    pub fn now(&self) -> Instant {
        Instant::from_nanos(1_000_000 + self.0.elapsed().as_nanos() as u64)
    }

    /// How long it runs.
    pub fn uptime(&self) -> time::Duration {
        self.0.elapsed()
    }
}

/// What was decided when the gateway was set up.
pub struct Settings {
    pub carries: Carries,
    pub mapping: Mapping,
    pub outbound: Outbound,
    pub limits: Limits,
    pub policy: Option<Box<dyn Policy>>,
    pub on_loopback: Option<OnLoopback>,
}

impl Settings {
    /// Whether the policy lets a flow leave.
    pub fn allows(&mut self, attempt: &Attempt<'_>) -> bool {
        self.policy.as_mut().is_none_or(|p| p.decide(attempt) == Decision::Allow)
    }
}

/// What the layers of the relay share.
pub struct Context<'a> {
    pub now: Instant,
    pub stack: &'a mut Shard,
    pub poll: &'a Poll,
    pub owners: &'a mut Owners,
    pub settings: &'a mut Settings,
    pub totals: &'a mut Totals,
}

impl Context<'_> {
    /// Something was not carried.
    pub fn refuse(&mut self, why: Refusal) {
        self.totals.refusals.count(why);
    }
}
