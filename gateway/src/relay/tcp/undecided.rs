//! SYNs of the guest that the policy has not decided about ([`Decision::Wait`](crate::Decision::Wait)).
//!
//! The policy is asked about all of them again when it has said that it can decide, and every [`AGAIN`], so that it
//! needs no timer of its own. The guest's kernel repeats a SYN meanwhile, which the shard absorbs.

use fulmar_stack::base::{Duration, Instant};
use fulmar_stack::shard::Pending;

use super::super::Context;
use super::super::host_socket::Failure;
use super::super::way::NotCarried;
use super::Tcp;
use super::connect::refuse_syn;
use crate::stat::Refusal;

/// Most SYNs that wait. A further one is dropped, and the guest's kernel repeats it.
pub(super) const MOST_UNDECIDED: usize = 1024;
/// How long a SYN waits: shorter than the shard keeps it, and longer than a minute, which a policy may give a user.
const LONGEST: Duration = Duration::from_secs(70);
/// How often the policy is asked again.
const AGAIN: Duration = Duration::from_secs(1);

/// What waits, and since when.
type Since<S> = Vec<(Instant, S)>;

/// The SYNs.
pub(super) struct Undecided<S = Pending> {
    waiting: Since<S>,
    again_at: Option<Instant>,
}

impl<S> Default for Undecided<S> {
    fn default() -> Self {
        Undecided { waiting: Vec::new(), again_at: None }
    }
}

impl<S> Undecided<S> {
    pub(super) fn add(&mut self, now: Instant, syn: S) -> Result<(), NotCarried> {
        if self.waiting.len() >= MOST_UNDECIDED {
            return Err((Failure::Silence, Refusal::Undecided).into());
        }
        self.waiting.push((now, syn));
        self.again_at.get_or_insert(now + AGAIN);
        Ok(())
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.again_at
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.again_at.is_some_and(|at| at <= now)
    }

    /// Takes all of them: those that have waited too long, and the others.
    fn take(&mut self, now: Instant) -> (Since<S>, Since<S>) {
        self.again_at = None;
        let all = std::mem::take(&mut self.waiting).into_iter();
        all.partition(|(since, _)| now.since(*since) >= LONGEST)
    }

    /// A SYN that was added again keeps its time. `count`: how many there were before.
    fn keep_time(&mut self, count: usize, since: Instant) {
        if let Some((began, _)) = self.waiting.get_mut(count) {
            *began = since;
        }
    }
}

impl Tcp {
    /// Asks the policy again about the SYNs that wait.
    pub(crate) fn decide_again(&mut self, cx: &mut Context<'_>) {
        let (late, others) = self.undecided.take(cx.now);
        for (_, syn) in late {
            refuse_syn(cx, &syn, &(Failure::Refused, Refusal::Undecided).into());
        }
        for (since, syn) in others {
            let count = self.undecided.waiting.len();
            if let Err(why) = self.begin(cx, &syn) {
                refuse_syn(cx, &syn, &why);
            }
            self.undecided.keep_time(count, since);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_is_asked_about_every_second_and_ends_after_a_time() {
        let (mut undecided, begun) = (Undecided::default(), Instant::ZERO);
        undecided.add(begun, 7).unwrap();
        let mut now = begun;
        for _ in 1..70 {
            now = undecided.next_deadline().unwrap();
            assert!(undecided.is_due(now));
            let (late, others) = undecided.take(now);
            assert!(late.is_empty() && !undecided.is_due(now));
            for (since, syn) in others {
                undecided.add(now, syn).unwrap();
                undecided.keep_time(0, since);
            }
        }
        assert_eq!(undecided.take(now + AGAIN).0, [(begun, 7)]);
        assert_eq!((now + AGAIN).since(begun), LONGEST);
    }

    #[test]
    fn what_waits_is_bounded() {
        let mut undecided = Undecided::default();
        for n in 0..MOST_UNDECIDED {
            undecided.add(Instant::ZERO, n).unwrap();
        }
        assert!(undecided.add(Instant::ZERO, 0).is_err());
    }
}
