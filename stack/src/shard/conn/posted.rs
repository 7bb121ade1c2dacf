//! The posted buffers of a connection, and the connections of a shard that have some. The state machine that fills the
//! buffers is [`Posted`](crate::socket::posted::Posted).

mod placer;
mod run;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::base::{FlowKey, Instant, SlotId};
use crate::ip::Ip;
use crate::mbuf::RecvBuf;
use crate::socket::posted::{CompletionPolicy, Posted};

use crate::shard::outcome::{PostCompletion, PostToken, RecvOutcome, Unclaimed};
use crate::shard::sync::{AtomicUsize, Ordering};
use crate::shard::wheel::TimerId;
pub(crate) use run::{BurstEnd, with_machine};

/// A buffer to be posted.
pub struct Post {
    /// The connection.
    pub id: SlotId,
    /// The buffer.
    pub buf: RecvBuf,
    /// When it completes although it is not full.
    pub rule: CompletionPolicy,
    /// Identifies the buffer.
    pub token: PostToken,
}

/// The posted buffers of one connection.
#[derive(Default)]
pub struct RecvEntry {
    pub(crate) machine: Posted<PostToken>,
    timer: Option<TimerId>,
    /// The connection is in the shard's list.
    is_listed: bool,
    /// Completions not claimed yet.
    unclaimed: Arc<AtomicUsize>,
    /// Whether the peer is an address of ours, with the generation of `ip` at the look-up.
    is_local: Option<(u64, bool)>,
}

impl RecvEntry {
    /// Whether buffers wait: reads queue after them.
    pub fn is_waiting(&self) -> bool {
        self.machine.is_waiting()
    }

    /// Whether a completion waits to be claimed.
    pub fn has_unclaimed(&self) -> bool {
        self.unclaimed.load(Ordering::Relaxed) > 0
    }

    /// Whether the peer is an address of ours: such a stream does not pass the device.
    #[inline]
    pub fn is_local(&mut self, ip: &Ip, flow: &FlowKey) -> bool {
        let changes = ip.generation();
        match self.is_local {
            Some((known, is_local)) if known == changes => is_local,
            _ => self.look_up_peer(ip, flow),
        }
    }

    #[cold]
    fn look_up_peer(&mut self, ip: &Ip, flow: &FlowKey) -> bool {
        self.is_local.insert((ip.generation(), ip.is_local(flow.remote_ip()))).1
    }

    /// Moves the completions to `to`; returns how many.
    pub fn take_completions(&mut self, to: &mut CompletionQueue) -> usize {
        let mut count = 0;
        while let Some(f) = self.machine.pop_finished() {
            let outcome = RecvOutcome { buf: Some(f.buf), error: f.error };
            if to.awaited == Some(f.token) {
                to.outcome = Some(outcome);
                to.awaited = None;
            } else {
                let unclaimed = Unclaimed::of(&self.unclaimed);
                to.completed.push_back(PostCompletion { token: f.token, outcome, unclaimed });
            }
            count += 1;
        }
        count
    }
}

/// Completions of a shard.
#[derive(Default)]
pub struct CompletionQueue {
    /// Completions in order.
    pub completed: VecDeque<PostCompletion>,
    /// The buffer that the caller of this step waits for: its completion bypasses the queue.
    pub awaited: Option<PostToken>,
    /// Its completion.
    pub outcome: Option<RecvOutcome>,
}

impl CompletionQueue {
    /// The completion that the caller of the step waits for, if it is there; it waits no more.
    pub fn take_awaited(&mut self) -> Option<RecvOutcome> {
        self.awaited = None;
        self.outcome.take()
    }
}

/// Posted receive of a shard.
#[derive(Default)]
pub(crate) struct PostedTable {
    /// Connections with new events, each once.
    pub listed: Vec<SlotId>,
    /// An empty list, kept for its allocation.
    pub spare: Vec<SlotId>,
    /// Buffers of closed connections whose memory is still referred to.
    pub orphans: Vec<RecvEntry>,
    /// When to poll again at the latest.
    pub poll_at: Option<Instant>,
    /// Buffers were posted that the device does not know yet.
    pub has_new_posts: bool,
    /// A buffer became full since [`PostedTable::take_filled`].
    pub has_filled: bool,
    /// Most of the last bytes of a posted buffer were placed by the device.
    pub is_placed: bool,
    pub out: CompletionQueue,
}

impl PostedTable {
    /// When to poll again at the latest.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.poll_at
    }

    /// Whether completions wait in the queue.
    #[inline]
    pub(crate) fn has_completions(&self) -> bool {
        !self.out.completed.is_empty()
    }

    /// Puts a connection with a new event into the list.
    #[inline]
    pub(crate) fn list(&mut self, id: SlotId, posted: &mut Option<Box<RecvEntry>>) {
        if let Some(posted) = posted
            && posted.machine.is_waiting()
            && !core::mem::replace(&mut posted.is_listed, true)
        {
            self.listed.push(id);
        }
    }

    /// Whether a buffer became full since the last call: its owner is about to post again.
    pub(crate) fn take_filled(&mut self) -> bool {
        core::mem::take(&mut self.has_filled)
    }

    pub(crate) fn poll_by(&mut self, at: Instant) {
        self.poll_at = Some(self.poll_at.map_or(at, |a| a.min(at)));
    }
}
