//! SYNs of the guest that the policy has not decided about ([`Decision::Wait`](crate::Decision::Wait)).
//!
//! The policy is asked about all of them again when it has said that it can decide, and every [`AGAIN`], so that it
//! needs no timer of its own. The guest's kernel repeats a SYN meanwhile, which the shard absorbs.

use fulmar_stack::base::{Duration, Instant};
use fulmar_stack::shard::Pending;

use super::super::Context;
use super::super::host_socket::Failure;
use super::Tcp;
use super::connect::refuse_syn;
use crate::stat::Refusal;

/// Most SYNs that wait. A further one is dropped, and the guest's kernel repeats it.
pub(super) const MOST_UNDECIDED: usize = 1024;
/// How long a SYN waits: shorter than the shard keeps it.
const LONGEST: Duration = Duration::from_secs(60);
/// How often the policy is asked again.
const AGAIN: Duration = Duration::from_secs(1);

/// The SYNs, and when each came.
#[derive(Default)]
pub(super) struct Undecided {
    waiting: Vec<(Instant, Pending)>,
    again_at: Option<Instant>,
}

impl Undecided {
    pub(super) fn add(&mut self, now: Instant, syn: &Pending) -> Result<(), (Failure, Refusal)> {
        if self.waiting.len() >= MOST_UNDECIDED {
            return Err((Failure::Silence, Refusal::Undecided));
        }
        self.waiting.push((now, *syn));
        self.again_at.get_or_insert(now + AGAIN);
        Ok(())
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.again_at
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.again_at.is_some_and(|at| at <= now)
    }
}

impl Tcp {
    /// Asks the policy again about the SYNs that wait.
    pub(crate) fn decide_again(&mut self, cx: &mut Context<'_>) {
        self.undecided.again_at = None;
        for (since, syn) in std::mem::take(&mut self.undecided.waiting) {
            if cx.now.since(since) >= LONGEST {
                refuse_syn(cx, &syn, Failure::Refused, Refusal::Undecided);
                continue;
            }
            let before = self.undecided.waiting.len();
            if let Err((failure, why)) = self.begin(cx, &syn) {
                refuse_syn(cx, &syn, failure, why);
            }
            if let Some((began, _)) = self.undecided.waiting.get_mut(before) {
                *began = since;
            }
        }
    }
}
