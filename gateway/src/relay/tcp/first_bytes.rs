//! The first bytes of a connection to a name ([`first`](crate::first)): they are read where they lie in the receive
//! queue, and leave it only as far as the reader lets them pass.
//!
//! ```text
//!   receive queue   │ passed │ read and held │ not read yet │
//!                   ▲ bytes_out              ▲ fed
//! ```
//!
//! What is held counts in the guest's window. A guest that leaves a request unfinished is refused after [`PATIENCE`].

use std::collections::VecDeque;
use std::task::Poll;

use fulmar_stack::base::{Duration, Instant, SlotId};
use fulmar_stack::mbuf::Chain;

use super::super::{Context, Shard};
use crate::first::{Expected, Reason, Refusal, Stream, Verdict};

/// For how long bytes are held; at most twice as long, since one timer of a flow watches all that it holds.
const PATIENCE: Duration = Duration::from_secs(30);
/// Most bytes that are read in one call.
const MOST_READ_BYTES: usize = 256 << 10;

/// The reader of one connection, and how far it has come.
pub(super) struct FirstBytes {
    reader: Stream,
    verdict: Verdict,
    /// Bytes that the reader has got or passed over, from the begin of the stream.
    fed: u64,
    /// Since when bytes are held.
    held_since: Option<Instant>,
    /// It is in [`Holding`].
    is_watched: bool,
}

/// What may leave the receive queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum May {
    /// So many bytes from its front; with none, the end of the stream.
    Pass(u64),
    /// Nothing before more has come.
    Wait,
    /// Nothing, ever.
    Refused,
    /// The connection has failed.
    Failed,
}

impl FirstBytes {
    pub(super) fn new(expected: Expected) -> Box<FirstBytes> {
        Box::new(FirstBytes {
            reader: Stream::new(expected),
            verdict: Verdict::Pass(0),
            fed: 0,
            held_since: None,
            is_watched: false,
        })
    }

    /// Reads what has come behind the `sent` bytes that have left the queue.
    pub(super) fn read(&mut self, cx: &mut Context<'_>, socket: SlotId, sent: u64) -> May {
        // Bytes that may pass leave before more is read; the rest of a body may not have come yet.
        if self.fed > sent && self.verdict == Verdict::Pass(self.fed) {
            return self.may(sent, false);
        }
        let held = self.fed.saturating_sub(sent) as usize;
        match cx.stack.tcp_peek_at(socket, held, MOST_READ_BYTES, 1) {
            Ok(Poll::Ready(chain)) if chain.is_empty() => {
                cx.stack.free(chain);
                if has_ended(cx.stack, socket, held) {
                    self.verdict = self.reader.end();
                    return self.may(sent, true);
                }
            }
            Ok(Poll::Ready(chain)) => {
                self.fed += chain.len() as u64;
                self.verdict = over(&chain, |bytes| self.reader.read(bytes));
                cx.stack.free(chain);
                let unread = self.reader.pass_body();
                if unread > 0 {
                    self.fed += unread;
                    self.verdict = Verdict::Pass(self.fed);
                }
            }
            Ok(Poll::Pending) => {}
            Err(_) => return May::Failed,
        }
        self.note_held(cx.now);
        self.may(sent, false)
    }

    fn may(&self, sent: u64, is_end: bool) -> May {
        match &self.verdict {
            Verdict::Refuse(_) => May::Refused,
            Verdict::Pass(to) if is_end && *to >= self.fed => May::Pass(self.fed - sent),
            Verdict::Pass(to) if *to > sent => May::Pass(to - sent),
            Verdict::Pass(_) => May::Wait,
        }
    }

    fn note_held(&mut self, now: Instant) {
        let is_held = matches!(self.verdict, Verdict::Pass(to) if to < self.fed);
        self.held_since = if is_held { self.held_since.or(Some(now)) } else { None };
    }

    /// Reads bytes of the host to the guest. Returns whether that may let bytes of the guest pass, or refuse them.
    pub(super) fn answered(&mut self, answer: &Chain) -> bool {
        if !self.reader.wants_answers() {
            return false;
        }
        let verdict = over(answer, |bytes| self.reader.answered(bytes));
        let is_news = verdict != self.verdict;
        self.verdict = verdict;
        is_news
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.reader.memory_bytes()
    }

    /// Refuses the connection, since too much is kept of all.
    pub(super) fn refuse(&mut self) {
        self.verdict = Verdict::Refuse(Reason::TooMuch.into());
    }

    /// Whether nothing has to be read any more, because all may pass.
    pub(super) fn is_over(&self) -> bool {
        self.verdict == Verdict::ALL && self.reader.is_decided()
    }

    /// Why the connection ends.
    pub(super) fn refusal(&self) -> Refusal {
        match &self.verdict {
            Verdict::Refuse(refusal) => refusal.clone(),
            Verdict::Pass(_) => Reason::Cut.into(),
        }
    }

    /// Whether bytes have been held for too long.
    fn is_late(&self, now: Instant) -> bool {
        self.held_since.is_some_and(|since| now.since(since) >= PATIENCE)
    }
}

/// Gives a reader the pieces of a chain; the last verdict counts.
fn over(chain: &Chain, mut read: impl FnMut(&[u8]) -> Verdict) -> Verdict {
    let mut verdict = read(&[]);
    for slice in chain.slices() {
        verdict = read(slice);
    }
    verdict
}

/// Whether the guest's stream ends behind the first `bytes` of the queue.
fn has_ended(stack: &mut Shard, socket: SlotId, bytes: usize) -> bool {
    let Ok(entry) = stack.tcp_entry(socket) else { return false };
    entry.tcb.peer_closed() && entry.tcb.recv_queue().readable() <= bytes
}

/// The flows that hold bytes, in the order of their time-outs: each is there once.
#[derive(Default)]
pub(super) struct Holding(VecDeque<(Instant, SlotId)>);

impl Holding {
    /// Watches a flow that holds bytes and is not watched yet.
    pub(super) fn watch(&mut self, now: Instant, id: SlotId, first: &mut FirstBytes) {
        if first.held_since.is_some() && !first.is_watched {
            first.is_watched = true;
            self.0.push_back((now + PATIENCE, id));
        }
    }

    /// A flow whose time-out has come.
    pub(super) fn pop(&mut self, now: Instant) -> Option<SlotId> {
        let is_due = self.0.front().is_some_and(|(at, _)| *at <= now);
        if is_due { self.0.pop_front().map(|(_, id)| id) } else { None }
    }

    /// Whether a flow whose time-out came has held bytes for too long. It is watched on if it holds newer ones.
    pub(super) fn is_late(&mut self, now: Instant, id: SlotId, first: &mut FirstBytes) -> bool {
        first.is_watched = false;
        let is_late = first.is_late(now);
        if !is_late {
            self.watch(now, id, first);
        }
        is_late
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.0.front().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(now: Instant) -> Box<FirstBytes> {
        let mut first = FirstBytes::new(Expected::new(["good.example"], 443));
        first.fed = 9;
        first.note_held(now);
        first
    }

    #[test]
    fn bytes_that_are_held_time_out_and_newer_ones_later() {
        let (mut holding, now) = (Holding::default(), Instant::ZERO);
        let id = |index| SlotId { index, generation: 0 };
        let (mut stays, mut renewed) = (held(now), held(now));
        holding.watch(now, id(1), &mut stays);
        holding.watch(now, id(1), &mut stays);
        holding.watch(now, id(2), &mut renewed);
        assert_eq!(holding.0.len(), 2, "each is watched once");
        renewed.verdict = Verdict::Pass(9);
        renewed.note_held(now);
        (renewed.fed, renewed.held_since) = (10, Some(now + PATIENCE / 2));
        assert_eq!(holding.pop(now + (PATIENCE - Duration::from_nanos(1))), None);
        let due = holding.next_deadline().unwrap();
        assert_eq!(
            (holding.pop(due), holding.is_late(due, id(1), &mut stays)),
            (Some(id(1)), true)
        );
        let popped = holding.pop(due);
        assert_eq!((popped, holding.is_late(due, id(2), &mut renewed)), (Some(id(2)), false));
        let due = holding.next_deadline().unwrap();
        assert!(holding.pop(due).is_some() && holding.is_late(due, id(2), &mut renewed));
    }

    #[test]
    fn the_end_of_a_stream_passes_when_all_before_it_does() {
        let mut first = held(Instant::ZERO);
        assert_eq!(first.may(0, true), May::Wait);
        first.verdict = Verdict::Pass(9);
        assert_eq!((first.may(9, true), first.may(4, true)), (May::Pass(0), May::Pass(5)));
        assert_eq!(first.may(9, false), May::Wait);
        first.verdict = Verdict::Refuse(Reason::Cut.into());
        assert_eq!(first.may(0, true), May::Refused);
    }
}
