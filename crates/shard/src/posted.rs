//! The posted buffers of a connection beside the machine that fills them, and what a shard keeps for all.

mod placer;
mod run;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;

use fulmar_base::{FlowKey, Instant, SlotId};
use fulmar_ip::Ip;
use fulmar_mbuf::{Chain, RecvBuf};
use fulmar_socket::posted::{CompletionPolicy, Posted};

use crate::outcome::{PostOver, PostToken, RecvOutcome, Untaken};
use crate::sync::{AtomicUsize, Ordering};
use crate::wheel::TimerId;
pub(crate) use run::{is_receiving, with_machine};

/// A buffer to be posted.
pub struct Post {
    /// The connection.
    pub id: SlotId,
    /// The buffer.
    pub buf: RecvBuf,
    /// It is that of a read that waits: so many bytes at its front have come another way, and stay.
    pub read: Option<usize>,
    /// When it is given back although it is not full.
    pub rule: CompletionPolicy,
    /// What stands for it.
    pub token: PostToken,
}

/// How a read goes on whose own buffer may be posted.
#[derive(Debug)]
pub enum ReadOrPost {
    /// This was there; empty at the end of the stream.
    Taken(Chain),
    /// It has to wait, and its buffer may be posted; it is over with so many bytes at the least.
    MayPost(usize),
    /// It is to be done another way.
    Refused,
}

/// The posted buffers of one connection and what the shard knows beside them.
#[derive(Default)]
pub struct RecvEntry {
    pub(crate) machine: Posted<PostToken>,
    pub(crate) timer: Option<TimerId>,
    /// It lies in the shard's list.
    pub(crate) is_listed: bool,
    /// Buffers that are over and not taken.
    untaken: Arc<AtomicUsize>,
    /// Whether the peer is an address of ours, and what `ip` said of its changes when that was looked up.
    is_local: Option<(u64, bool)>,
}

impl RecvEntry {
    /// Whether buffers wait: reads come behind them.
    pub fn is_waiting(&self) -> bool {
        self.machine.is_waiting()
    }

    /// Whether a buffer is there to be taken.
    pub fn has_untaken(&self) -> bool {
        self.untaken.load(Ordering::Relaxed) > 0
    }

    /// Whether the peer is an address of ours: the device has nothing of such a stream.
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

    /// Hands out what is over; how many.
    pub fn hand_out(&mut self, to: &mut Outbox) -> usize {
        let mut count = 0;
        while let Some(f) = self.machine.pop_finished() {
            let outcome = RecvOutcome { buf: Some(f.buf), error: f.error };
            if to.awaited == Some(f.token) {
                to.outcome = Some(outcome);
                to.awaited = None;
            } else {
                let untaken = Untaken::of(&self.untaken);
                to.over.push_back(PostOver { token: f.token, outcome, untaken });
            }
            count += 1;
        }
        count
    }
}

/// Where outcomes go.
#[derive(Default)]
pub struct Outbox {
    /// Those that were not taken from here yet.
    pub over: VecDeque<PostOver>,
    /// The one that the holder of the lock waits for, in this very step.
    pub awaited: Option<PostToken>,
    /// Its outcome.
    pub outcome: Option<RecvOutcome>,
}

/// What a shard keeps for all of them.
#[derive(Default)]
pub struct PostedTable {
    /// Connections to look at, each once.
    pub listed: Vec<SlotId>,
    /// Kept, so that a look allocates nothing.
    pub spare: Vec<SlotId>,
    /// Buffers of closed connections that somebody still refers to.
    pub orphans: Vec<RecvEntry>,
    /// When to look again at the latest.
    pub again_at: Option<Instant>,
    /// Buffers were posted of which the device has not been told.
    pub has_news: bool,
    /// A buffer became full since this was asked last.
    pub has_filled: bool,
    /// What came last for a posted buffer was put there by the device, most of it.
    pub is_placed: bool,
    pub out: Outbox,
}

impl PostedTable {
    /// When to look again at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.again_at
    }

    /// Whether buffers are over that were not taken from here.
    #[inline]
    pub fn has_over(&self) -> bool {
        !self.out.over.is_empty()
    }

    /// Something happened to a connection.
    #[inline]
    pub fn list(&mut self, id: SlotId, posted: &mut Option<Box<RecvEntry>>) {
        if let Some(posted) = posted
            && posted.machine.is_waiting()
            && !core::mem::replace(&mut posted.is_listed, true)
        {
            self.listed.push(id);
        }
    }

    /// Whether a buffer became full since this was asked last: its owner is about to come back with it.
    pub fn take_filled(&mut self) -> bool {
        core::mem::take(&mut self.has_filled)
    }

    pub fn look_by(&mut self, at: Instant) {
        self.again_at = Some(self.again_at.map_or(at, |a| a.min(at)));
    }
}
