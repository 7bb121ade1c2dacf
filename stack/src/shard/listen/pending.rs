//! Pending connections: SYNs that are not answered before the program has decided.
//!
//! ```text
//!                space in the queue                ┌─ Accept ──────► SYN,ACK; a connection of the program
//!   SYN ──► pending ──► tcp_pending ──► tcp_decide ┼─ Refuse ──────► RST
//!    │        │                                    ├─ Unreachable ─► ICMP error
//!    │        └─ RST of the peer, time-out: gone   └─ Drop ────────► nothing
//!    └──► no space: dropped
//! ```
//!
//! A SYN that repeats one that is pending is absorbed; one with another initial sequence number takes its
//! place. A listener keeps at most `backlog` pending connections, of which one source has at most
//! `per_source`; one that was accepted counts until its handshake is over, since a source may be forged. A
//! SYN cookie would answer the SYN before the decision, so such a listener never sends any.
//!
//! Invariants: an entry is in `entries`, in `by_flow`, and counted in `len` and `sources` of its listener's
//! queue, or in none of them; one that was accepted is counted in `len`, `opening` and `sources` alone.
//! `offered` and `by_age` may name entries that are gone; they are at most twice as long as the backlog.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use core::net::SocketAddr;

use crate::base::{DropReason, FlowKey, Instant, SeqNum, SlotId};
use crate::tcp::EcnField;
use crate::wire::tcp;
use hashbrown::HashMap;

use crate::shard::listen::sources::source_of;
use crate::shard::listen::syn_queue::{ConditionalAccept, ListenerStat};
use crate::shard::secret::Keyed;
use crate::shard::slab::Slab;
use crate::shard::wheel::TimerId;

/// The name of a pending connection in its shard.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PendingId(pub(crate) SlotId);

/// The options of a SYN.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct SynOptions {
    /// Maximum segment size, bytes.
    pub mss: Option<u16>,
    /// Window scale shift as sent.
    pub window_scale: Option<u8>,
    /// SACK-permitted.
    pub sack_permitted: bool,
    /// Timestamps.
    pub timestamps: bool,
    /// ECN was requested (RFC 3168: ECE and CWR; RFC 9768: AE, too).
    pub ecn: bool,
}

impl SynOptions {
    fn of(syn: &tcp::Header) -> SynOptions {
        SynOptions {
            mss: syn.options.mss,
            window_scale: syn.options.window_scale,
            sack_permitted: syn.options.sack_permitted,
            timestamps: syn.options.timestamps.is_some(),
            ecn: syn.flags.contains(tcp::Flags::ECE | tcp::Flags::CWR),
        }
    }
}

/// A connection that the program has to decide about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pending {
    /// Its name.
    pub id: PendingId,
    /// The destination of the SYN.
    pub local: SocketAddr,
    /// Its source.
    pub remote: SocketAddr,
    /// Its options.
    pub syn: SynOptions,
}

/// The decision about a pending connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decision {
    /// The SYN is answered; the connection is the program's from now on, in SYN-RECEIVED.
    Accept,
    /// A reset, which the limit of resets does not hold back.
    Refuse,
    /// Destination unreachable with this code (ICMP type 3, ICMPv6 type 1), within the limit of ICMP errors.
    Unreachable(u8),
    /// Nothing is sent. A repeated SYN is pending anew.
    Drop,
}

/// A SYN that is pending.
pub(crate) struct PendingSyn {
    pub key: FlowKey,
    pub listener: SlotId,
    pub syn: tcp::Header,
    /// The ECN field of its IP packet.
    pub ecn: EcnField,
    /// What our initial sequence number must not be before.
    pub min_iss: Option<SeqNum>,
    /// The program knows of it.
    pub is_taken: bool,
}

/// All pending connections of a shard.
pub(crate) struct PendingTable {
    entries: Slab<PendingSyn>,
    by_flow: HashMap<FlowKey, SlotId, Keyed>,
    hasher: Keyed,
}

/// The pending connections of one listener.
pub(crate) struct PendingQueue {
    pub limits: ConditionalAccept,
    /// Pending connections, and those that were accepted and whose handshake is not over.
    len: usize,
    /// The latter.
    opening: usize,
    /// Pending connections not returned to the program yet.
    untaken: usize,
    /// These, oldest first.
    offered: VecDeque<SlotId>,
    /// All, with their deadlines, oldest first.
    by_age: VecDeque<(Instant, SlotId)>,
    /// How many each source has; none has 0.
    sources: HashMap<u128, usize, Keyed>,
    pub timer: Option<TimerId>,
    pub expired: u64,
    pub reset: u64,
}

impl PendingQueue {
    /// Whether the program has something to take.
    pub(crate) fn is_ready(&self) -> bool {
        self.untaken > 0
    }

    /// Adds its numbers.
    pub(crate) fn stat(&self, stat: ListenerStat) -> ListenerStat {
        ListenerStat {
            pending: self.len - self.opening,
            pending_limit: self.limits.backlog,
            pending_expired: self.expired,
            pending_reset: self.reset,
            ..stat
        }
    }

    /// Whether it is more than half full, or the source of a flow has more than half of its limit.
    pub(crate) fn is_under_pressure(&self, key: &FlowKey) -> bool {
        let of_source = self.sources.get(&source_of(key)).copied().unwrap_or(0);
        self.len > self.limits.backlog / 2 || of_source > self.limits.per_source / 2
    }

    /// A removed entry was accepted: it counts until its handshake is over.
    pub(crate) fn begin_opening(&mut self, entry: &PendingSyn) {
        self.untaken = self.untaken.saturating_sub(usize::from(!entry.is_taken));
        self.opening += 1;
    }

    /// The handshake of an accepted connection is over, or the connection is.
    pub(crate) fn end_opening(&mut self, key: &FlowKey) {
        self.opening = self.opening.saturating_sub(1);
        self.uncount(key);
    }

    /// Takes a removed entry out of the counts.
    pub(crate) fn forget(&mut self, entry: &PendingSyn) {
        self.untaken = self.untaken.saturating_sub(usize::from(!entry.is_taken));
        self.uncount(&entry.key);
    }

    fn uncount(&mut self, key: &FlowKey) {
        self.len = self.len.saturating_sub(1);
        let source = source_of(key);
        if let Some(count) = self.sources.get_mut(&source) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.sources.remove(&source);
            }
        }
    }
}

impl PendingTable {
    /// An empty table.
    pub(crate) fn new(hasher: Keyed) -> PendingTable {
        PendingTable { entries: Slab::default(), by_flow: HashMap::with_hasher(hasher), hasher }
    }

    /// The pending connection of a flow.
    pub(crate) fn find(&self, flow: &FlowKey) -> Option<PendingId> {
        self.by_flow.get(flow).copied().map(PendingId)
    }

    /// What is kept of a pending connection.
    pub(crate) fn get(&self, id: PendingId) -> Option<&PendingSyn> {
        self.entries.get(id.0)
    }

    /// The queue of a new listener.
    pub(crate) fn queue(&self, limits: ConditionalAccept) -> Box<PendingQueue> {
        Box::new(PendingQueue {
            limits,
            len: 0,
            opening: 0,
            untaken: 0,
            offered: VecDeque::new(),
            by_age: VecDeque::new(),
            sources: HashMap::with_hasher(self.hasher),
            timer: None,
            expired: 0,
            reset: 0,
        })
    }

    /// Adds a SYN, or absorbs it.
    pub(crate) fn add(
        &mut self,
        queue: &mut PendingQueue,
        entry: PendingSyn,
        deadline: Instant,
    ) -> Result<(), DropReason> {
        if let Some(old) = self.by_flow.get(&entry.key).and_then(|id| self.entries.get_mut(*id)) {
            if old.syn.seq != entry.syn.seq {
                old.min_iss = entry.min_iss.or(old.min_iss);
                (old.syn, old.ecn) = (entry.syn, entry.ecn);
            }
            return Err(DropReason::SynPending);
        }
        if queue.len >= queue.limits.backlog {
            return Err(DropReason::PendingQueueFull);
        }
        let source = source_of(&entry.key);
        let count = queue.sources.get(&source).copied().unwrap_or(0);
        if count >= queue.limits.per_source {
            return Err(DropReason::SourceLimit);
        }
        queue.sources.insert(source, count + 1);
        let key = entry.key;
        let id = self.entries.insert(entry);
        self.by_flow.insert(key, id);
        self.tidy(queue);
        queue.len += 1;
        queue.untaken += 1;
        queue.offered.push_back(id);
        queue.by_age.push_back((deadline, id));
        Ok(())
    }

    /// Keeps the orders of a queue at most twice as long as its backlog.
    fn tidy(&self, queue: &mut PendingQueue) {
        let most = 2 * queue.limits.backlog;
        if queue.offered.len() >= most {
            queue.offered.retain(|id| self.entries.get(*id).is_some_and(|e| !e.is_taken));
        }
        if queue.by_age.len() >= most {
            queue.by_age.retain(|(_, id)| self.entries.get(*id).is_some());
        }
    }

    pub(crate) fn remove(&mut self, id: SlotId) -> Option<PendingSyn> {
        let entry = self.entries.remove(id)?;
        self.by_flow.remove(&entry.key);
        Some(entry)
    }

    /// The oldest one that the program does not know of.
    pub(crate) fn take(&mut self, queue: &mut PendingQueue) -> Option<Pending> {
        loop {
            let id = queue.offered.pop_front()?;
            let Some(entry) = self.entries.get_mut(id).filter(|e| !e.is_taken) else { continue };
            entry.is_taken = true;
            queue.untaken = queue.untaken.saturating_sub(1);
            return Some(Pending {
                id: PendingId(id),
                local: entry.key.local(),
                remote: entry.key.remote(),
                syn: SynOptions::of(&entry.syn),
            });
        }
    }

    /// Drops those that are overdue; returns the next deadline.
    pub(crate) fn expire(&mut self, queue: &mut PendingQueue, now: Instant) -> Option<Instant> {
        while let Some((deadline, id)) = queue.by_age.front().copied() {
            let is_gone = self.entries.get(id).is_none();
            if !is_gone && deadline > now {
                return Some(deadline);
            }
            queue.by_age.pop_front();
            if let Some(entry) = self.remove(id) {
                queue.forget(&entry);
                queue.expired += 1;
            }
        }
        None
    }

    /// Drops the pending connections of a closed listener.
    pub(crate) fn close(&mut self, queue: &mut PendingQueue) {
        while let Some((_, id)) = queue.by_age.pop_front() {
            self.remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Secrets;
    use crate::shard::secret::Secret;

    const DEADLINE: Instant = Instant::from_millis(1000);

    fn table(limits: ConditionalAccept) -> (PendingTable, Box<PendingQueue>) {
        let table = PendingTable::new(Secret::new(&Secrets::for_simulation(1)).table_hasher());
        let queue = table.queue(limits);
        (table, queue)
    }

    fn syn_of(remote: &str, iss: u32) -> PendingSyn {
        PendingSyn {
            key: FlowKey::new("10.0.0.1:80".parse().unwrap(), remote.parse().unwrap()),
            listener: SlotId { index: 0, generation: 0 },
            syn: tcp::Header { seq: SeqNum(iss), ..tcp::Header::default() },
            ecn: EcnField::NotEct,
            min_iss: None,
            is_taken: false,
        }
    }

    #[test]
    fn a_source_without_pending_connections_takes_no_memory() {
        let limits = ConditionalAccept { per_source: 0, ..ConditionalAccept::default() };
        let (mut table, mut queue) = table(limits);
        let added = table.add(&mut queue, syn_of("192.0.2.1:9", 1), DEADLINE);
        assert_eq!(added, Err(DropReason::SourceLimit));
        assert!(queue.sources.is_empty());
    }

    #[test]
    fn a_syn_that_takes_the_place_of_another_brings_its_ecn_field() {
        let (mut table, mut queue) = table(ConditionalAccept::default());
        let flow = "192.0.2.1:9";
        assert_eq!(table.add(&mut queue, syn_of(flow, 1), DEADLINE), Ok(()));
        let other = PendingSyn { ecn: EcnField::Ce, ..syn_of(flow, 2) };
        assert_eq!(table.add(&mut queue, other, DEADLINE), Err(DropReason::SynPending));
        let id = table.find(&syn_of(flow, 2).key).unwrap();
        let kept = table.get(id).unwrap();
        assert_eq!((kept.syn.seq, kept.ecn), (SeqNum(2), EcnField::Ce));
    }
}
