//! Reassembly of fragmented datagrams (RFC 791 section 3.2, RFC 8200 section 4.5).
//!
//! ```text
//!   payload of the datagram   0 ───────────────────────────────────────────── total
//!   fragments received        [ 0..1480 )[ 1480..2960 )      [ 4440..5920 )
//!   runs                      [ 0 ............... 2960 )     [ 4440..5920 )
//! ```
//!
//! Input: the payload of one fragment, with its offset ([`Fragment`]). Output: the payload of a
//! complete datagram ([`Datagram`]), or an expired one ([`Reassembly::pop_expired`]).
//!
//! The table is set-associative: a keyed hash of source, destination, protocol and identification
//! selects one of [`SETS`] sets, and a set holds [`WAYS`] datagrams. In a full set the oldest
//! datagram is evicted; if the new datagram's source occupies half of the set, the oldest one of
//! that source. The key is secret, so an attacker cannot target the set of a datagram: of `n`
//! datagrams that it starts while a legitimate one arrives, about `n / SETS` hit the same set, and
//! the legitimate one survives fewer than [`WAYS`]. With 20,000 spoofed fragments per second and 20
//! ms between the first and the last fragment, 98 of 100 legitimate datagrams survive.
//!
//! Memory: mbufs are queued without copying, except that tiny ones are coalesced, so that a
//! datagram in small fragments pins neither large buffers nor descriptors. A datagram has at most
//! [`MAX_FRAGMENTS`] fragments. The storage of all datagrams is bounded by the argument of
//! [`Reassembly::new`]. Beyond it, the oldest of [`SAMPLE`] datagrams from a random position is
//! evicted; if the new fragment's source has most of the sample, the oldest one of that source.
//!
//! Invariants: pieces are sorted and do not overlap; runs are sorted and not adjacent; runs and
//! pieces cover the same bytes; the table's storage is the sum over its slots.
//!
//! Overlap: an overlapping fragment discards its datagram, with IPv4 as well (RFC 5722, RFC 8200;
//! RFC 791 lets the later bytes win, which only evasion attacks use). The key is kept until the
//! time-out, so that the remaining fragments are dropped as well. Of an exact duplicate only the
//! duplicate is dropped.
//!
//! Cost: a hash, unless the previous fragment was of the same datagram; a scan of the set; two
//! binary searches in the slot.
//!
//! With several shards the device must steer all fragments of a datagram to one queue, since only
//! the first fragment has ports. A TAP's hash and the steering program of its queues do so. The
//! reassembled datagram is then handed over to its owner.

use alloc::vec::Vec;
use core::net::IpAddr;

use crate::base::{
    Counters, DropReason, Duration, Instant, Key as HashKey, KeyUse, Random, Secrets,
};
use crate::mbuf::{Chain, Pool, Purpose};
use crate::wire::{ipv4, ipv6};

/// Sets of the table; a power of two.
pub(crate) const SETS: usize = 128;
/// Datagrams per set. A sender has one or two in flight at a time; the others lost a fragment and
/// remain until the time-out or eviction.
pub(crate) const WAYS: usize = 8;
/// Minimum number of datagrams sampled for eviction.
const SAMPLE: usize = 2 * WAYS;
/// Fragments per datagram. The largest datagram over the smallest MTU that hosts must support (RFC
/// 1122 section 3.3.2: 576 bytes) has 119.
pub(crate) const MAX_FRAGMENTS: usize = 256;
/// An incomplete IPv4 datagram is replaced by a new one with the same identification after this
/// many later datagrams of its source in the same set, that is after about `8 * SETS` datagrams. At
/// high rates the 16-bit identification wraps within the time-out (RFC 4963).
const MAX_SUCCESSORS: u8 = 8;
/// Payloads up to this size are copied behind the previous one.
const TINY_BYTES: usize = 256;
/// Block size for coalesced tiny payloads.
const COALESCE_BYTES: usize = 4096;
/// ECN field of a packet whose transport does not use ECN (RFC 3168 section 5).
const NOT_ECT: u8 = 0;
/// ECN field of a packet that a router has marked: congestion experienced.
const CE: u8 = 3;

/// Identifies a datagram. With IPv6 the protocol is not part of the key: zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    pub(crate) protocol: u8,
    pub(crate) ident: u32,
}

/// The IP header of the first fragment, without options and extension headers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum First {
    V4(ipv4::Header),
    /// `next_header` is that of the fragmentable part.
    V6(ipv6::Header),
}

/// One fragment.
#[derive(Debug)]
pub(crate) struct Fragment {
    pub(crate) key: Key,
    /// Offset in the datagram's payload. `start` plus the length of `chain` is at most 65,535; the
    /// chain is not empty.
    pub(crate) start: u16,
    /// The last fragment.
    pub(crate) is_last: bool,
    /// The IP header, if this is the first fragment.
    pub(crate) first: Option<First>,
    /// The two ECN bits.
    pub(crate) ecn: u8,
    /// The IP or Ethernet destination is a group.
    pub(crate) is_group: bool,
    /// Reassembly time-out.
    pub(crate) lifetime: Duration,
    /// The payload.
    pub(crate) chain: Chain,
}

/// A complete or expired datagram.
#[derive(Debug)]
pub(crate) struct Datagram {
    pub(crate) key: Key,
    /// `None` only in an expired datagram.
    pub(crate) first: Option<First>,
    pub(crate) ecn: u8,
    pub(crate) is_group: bool,
    /// The payload. Of an expired datagram the first run, which starts with the first fragment if
    /// that arrived.
    pub(crate) chain: Chain,
    /// Bytes of the first fragment's payload.
    pub(crate) first_bytes: usize,
}

#[derive(Debug)]
struct Run {
    start: usize,
    chain: Chain,
}

impl Run {
    fn end(&self) -> usize {
        self.start.saturating_add(self.chain.len())
    }
}

/// An incomplete datagram.
#[derive(Debug)]
struct Slot {
    key: Key,
    /// Creation order: smaller is older.
    serial: u64,
    /// Later datagrams of the same source in this set.
    successors: u8,
    expires: Instant,
    /// Why the datagram was discarded: fragments overlapped or were inconsistent. Later fragments
    /// are dropped for the same reason.
    refused: Option<DropReason>,
    /// Length of the payload, once the last fragment has arrived.
    total: Option<u16>,
    /// Start and end of each fragment, sorted.
    pieces: Vec<(u16, u16)>,
    runs: Vec<Run>,
    storage_bytes: usize,
    first: Option<First>,
    ecn: u8,
    /// A fragment with Not-ECT was received.
    has_not_ect: bool,
    is_group: bool,
}

/// Position of a slot in the table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct SlotId {
    set: usize,
    way: usize,
}

/// The reassembly table.
#[derive(Debug)]
pub(crate) struct Reassembly {
    /// [`SETS`] sets of at most [`WAYS`] datagrams each.
    sets: Vec<Vec<Slot>>,
    /// Keys the hash that selects the set.
    hash: HashKey,
    /// Selects the eviction sample.
    random: Random,
    /// Key and set of the last fragment.
    recent: Option<(Key, usize)>,
    max_bytes: usize,
    truesize: usize,
    created: u64,
    /// Lower bound of all deadlines.
    next_expiry: Option<Instant>,
    /// The first set that may have an expired datagram: [`Reassembly::pop_expired`] continues
    /// there.
    expiring: usize,
}

impl Reassembly {
    /// A table with at most `max_bytes` of storage.
    pub(crate) fn new(max_bytes: usize, secrets: &Secrets) -> Reassembly {
        Reassembly {
            sets: (0..SETS).map(|_| Vec::new()).collect(),
            hash: secrets.key(KeyUse::Reassembly),
            random: secrets.random(KeyUse::Reassembly),
            recent: None,
            max_bytes,
            truesize: 0,
            created: 0,
            next_expiry: None,
            expiring: 0,
        }
    }

    /// Inserts a fragment. Returns the datagram that it completes.
    ///
    /// Evicted datagrams are counted and freed here (`FragmentTableFull`, `FragmentTimeout`).
    ///
    /// # Errors
    /// The fragment is freed; the caller counts the drop. `FragmentDuplicate`. `FragmentOverlap`
    /// and `FragmentInvalid`, which also discard the datagram.
    pub(crate) fn insert(
        &mut self,
        now: Instant,
        fragment: Fragment,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> Result<Option<Datagram>, DropReason> {
        let source = source_of(fragment.key.src);
        let slot_id = self.find_or_create(now, &fragment, pool, counters);
        let set = self.sets.get_mut(slot_id.set);
        let Some(slot) = set.and_then(|set| set.get_mut(slot_id.way)) else {
            pool.free(fragment.chain);
            return Err(DropReason::FragmentTableFull);
        };
        let before = slot.storage_bytes;
        let added = slot.add(fragment, pool);
        slot.storage_bytes = slot.runs.iter().map(|r| r.chain.truesize().max(r.chain.len())).sum();
        let (after, is_complete) = (slot.storage_bytes, slot.is_complete());
        self.truesize = self.truesize.saturating_sub(before).saturating_add(after);
        let datagram =
            if is_complete { self.remove(slot_id).map(|s| s.into_datagram(pool)) } else { None };
        self.evict(source, pool, counters);
        added.map(|()| datagram)
    }

    /// Finds or creates the slot of a fragment's datagram.
    fn find_or_create(
        &mut self,
        now: Instant,
        fragment: &Fragment,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> SlotId {
        let at = self.set_of(&fragment.key);
        let set = self.sets.get(at).map_or(&[][..], Vec::as_slice);
        if let Some((way, slot)) = set.iter().enumerate().find(|(_, s)| s.key == fragment.key) {
            if slot.successors <= MAX_SUCCESSORS || fragment.key.src.is_ipv6() {
                return SlotId { set: at, way };
            }
            self.discard(SlotId { set: at, way }, DropReason::FragmentTimeout, pool, counters);
        }
        self.create(now, at, fragment, pool, counters)
    }

    fn set_of(&mut self, key: &Key) -> usize {
        if let Some((recent, set)) = &self.recent
            && recent == key
        {
            return *set;
        }
        let set = self.hash.hash(&key.words()) as usize & (SETS - 1);
        self.recent = Some((*key, set));
        set
    }

    /// Creates a datagram in a set, evicting one from a full set.
    fn create(
        &mut self,
        now: Instant,
        at: usize,
        fragment: &Fragment,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> SlotId {
        let source = source_of(fragment.key.src);
        let (mut all, mut own) = (EvictionSample::default(), EvictionSample::default());
        for (way, slot) in self.sets.get_mut(at).into_iter().flatten().enumerate() {
            all.add(slot, SlotId { set: at, way }, 1);
            if slot.source() == source {
                slot.successors = slot.successors.saturating_add(1);
                own.add(slot, SlotId { set: at, way }, 1);
            }
        }
        if all.weight >= WAYS {
            let victim = if own.weight >= WAYS / 2 { own } else { all };
            let full = DropReason::FragmentTableFull;
            victim.oldest.into_iter().for_each(|(_, p)| self.discard(p, full, pool, counters));
        }
        self.created = self.created.saturating_add(1);
        let expires = now + fragment.lifetime;
        self.next_expiry = Some(self.next_expiry.map_or(expires, |e| e.min(expires)));
        let Some(set) = self.sets.get_mut(at) else { return SlotId { set: at, way: 0 } };
        set.push(Slot::new(fragment.key, self.created, expires));
        SlotId { set: at, way: set.len().saturating_sub(1) }
    }

    /// Evicts datagrams until the storage is within its bound, after a fragment of `source`.
    fn evict(&mut self, source: Source, pool: &mut Pool, counters: &mut Counters) {
        while self.truesize > self.max_bytes {
            let Some(victim) = self.select_victim(source) else { return };
            self.discard(victim, DropReason::FragmentTableFull, pool, counters);
        }
    }

    /// Selects the datagram to evict: the oldest of a sample from a random set on.
    fn select_victim(&mut self, source: Source) -> Option<SlotId> {
        let from = self.random.below(SETS as u32) as usize;
        let (mut all, mut own) = (EvictionSample::default(), EvictionSample::default());
        for at in (from..SETS).chain(0..from) {
            let set = self.sets.get(at).map_or(&[][..], Vec::as_slice);
            for (way, slot) in set.iter().enumerate().filter(|(_, s)| s.storage_bytes > 0) {
                all.add(slot, SlotId { set: at, way }, slot.storage_bytes);
                if slot.source() == source {
                    own.add(slot, SlotId { set: at, way }, slot.storage_bytes);
                }
            }
            if all.seen >= SAMPLE {
                break;
            }
        }
        let victim = if own.weight > all.weight / 2 { own } else { all };
        victim.oldest.map(|(_, slot_id)| slot_id)
    }

    /// Drops a datagram. A refused one was counted when it was refused.
    fn discard(
        &mut self,
        slot_id: SlotId,
        reason: DropReason,
        pool: &mut Pool,
        counters: &mut Counters,
    ) {
        let Some(slot) = self.remove(slot_id) else { return };
        if slot.refused.is_none() {
            counters.drop_packet(reason);
        }
        slot.free(pool);
    }

    /// Removes the next expired datagram, which the caller counts. Datagrams with overlapping
    /// fragments were counted before and are freed silently.
    pub(crate) fn pop_expired(&mut self, now: Instant, pool: &mut Pool) -> Option<Datagram> {
        if self.next_expiry.is_none_or(|e| now < e) {
            return None;
        }
        while let Some(set) = self.sets.get(self.expiring) {
            let Some(way) = set.iter().position(|s| s.expires <= now) else {
                self.expiring = self.expiring.saturating_add(1);
                continue;
            };
            match self.remove(SlotId { set: self.expiring, way }) {
                Some(slot) if slot.refused.is_none() => return Some(slot.into_datagram(pool)),
                Some(slot) => slot.free(pool),
                None => {}
            }
        }
        self.expiring = 0;
        self.next_expiry = self.sets.iter().flatten().map(|s| s.expires).min();
        None
    }

    /// Earliest time at which [`Reassembly::pop_expired`] may return a datagram.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.next_expiry
    }

    /// Datagrams in the table, refused ones included.
    pub(crate) fn len(&self) -> usize {
        self.sets.iter().map(Vec::len).sum()
    }

    /// Storage of all datagrams, bytes.
    pub(crate) fn truesize(&self) -> usize {
        self.truesize
    }

    /// Frees everything.
    pub(crate) fn release(&mut self, pool: &mut Pool) {
        self.sets.iter_mut().for_each(|set| set.drain(..).for_each(|s| s.free(pool)));
        (self.truesize, self.next_expiry) = (0, None);
    }

    fn remove(&mut self, SlotId { set, way }: SlotId) -> Option<Slot> {
        let set = self.sets.get_mut(set)?;
        let slot = if way < set.len() { set.swap_remove(way) } else { return None };
        self.truesize = self.truesize.saturating_sub(slot.storage_bytes);
        Some(slot)
    }
}

/// Eviction candidates.
#[derive(Clone, Copy, Debug, Default)]
struct EvictionSample {
    seen: usize,
    weight: usize,
    /// By its serial.
    oldest: Option<(u64, SlotId)>,
}

impl EvictionSample {
    fn add(&mut self, slot: &Slot, slot_id: SlotId, weight: usize) {
        self.seen = self.seen.saturating_add(1);
        self.weight = self.weight.saturating_add(weight);
        let this = (slot.serial, slot_id);
        self.oldest = Some(self.oldest.map_or(this, |o| o.min(this)));
    }
}

impl Key {
    fn words(&self) -> [u64; 5] {
        let halves = |ip: IpAddr| match ip {
            IpAddr::V4(a) => [1, u64::from(a.to_bits())],
            IpAddr::V6(a) => [(a.to_bits() >> 64) as u64, a.to_bits() as u64],
        };
        let ([s0, s1], [d0, d1]) = (halves(self.src), halves(self.dst));
        [s0, s1, d0, d1, u64::from(self.protocol) << 32 | u64::from(self.ident)]
    }
}

impl Slot {
    fn new(key: Key, serial: u64, expires: Instant) -> Slot {
        Slot {
            key,
            serial,
            successors: 0,
            expires,
            refused: None,
            total: None,
            pieces: Vec::new(),
            runs: Vec::new(),
            storage_bytes: 0,
            first: None,
            ecn: NOT_ECT,
            has_not_ect: false,
            is_group: false,
        }
    }

    fn source(&self) -> Source {
        source_of(self.key.src)
    }

    fn free(self, pool: &mut Pool) {
        self.runs.into_iter().for_each(|r| pool.free(r.chain));
    }

    /// Adds a fragment. On an error it is freed; if the error discards the datagram, the slot keeps
    /// only its key.
    fn add(&mut self, fragment: Fragment, pool: &mut Pool) -> Result<(), DropReason> {
        match self.validate(&fragment) {
            Ok((at, end)) => {
                self.pieces.insert(at, (fragment.start, end));
                if fragment.is_last {
                    self.total = Some(end);
                }
                self.first = self.first.or(fragment.first);
                self.merge_ecn(&fragment);
                self.join(usize::from(fragment.start), fragment.chain, pool);
                Ok(())
            }
            Err(reason) => {
                if reason != DropReason::FragmentDuplicate {
                    self.runs.drain(..).for_each(|r| pool.free(r.chain));
                    self.pieces = Vec::new();
                    self.refused = Some(reason);
                }
                pool.free(fragment.chain);
                Err(reason)
            }
        }
    }

    /// Validates a fragment. Returns its index among the pieces, and its end.
    fn validate(&self, fragment: &Fragment) -> Result<(usize, u16), DropReason> {
        if let Some(reason) = self.refused {
            return Err(reason);
        }
        let end = usize::from(fragment.start).saturating_add(fragment.chain.len());
        let end = u16::try_from(end).map_err(|_| DropReason::FragmentInvalid)?;
        let at = self.pieces.partition_point(|&(start, _)| start < fragment.start);
        let next = self.pieces.get(at);
        if next == Some(&(fragment.start, end)) {
            return Err(DropReason::FragmentDuplicate);
        }
        let previous = at.checked_sub(1).and_then(|i| self.pieces.get(i));
        if previous.is_some_and(|&(_, e)| e > fragment.start) || next.is_some_and(|&(s, _)| s < end)
        {
            return Err(DropReason::FragmentOverlap);
        }
        let is_inconsistent = match self.total {
            Some(total) => fragment.is_last || end > total,
            None => fragment.is_last && next.is_some(),
        };
        let is_full = self.pieces.len() >= MAX_FRAGMENTS;
        if is_inconsistent || is_full || self.mixes_ce_and_not_ect(fragment) {
            return Err(DropReason::FragmentInvalid);
        }
        Ok((at, end))
    }

    /// Whether the datagram would have fragments with CE and with Not-ECT. It must then be dropped
    /// (RFC 3168 section 5.3): its transport would not react to the mark.
    fn mixes_ce_and_not_ect(&self, fragment: &Fragment) -> bool {
        (self.ecn == CE || fragment.ecn == CE) && (self.has_not_ect || fragment.ecn == NOT_ECT)
    }

    /// CE on any fragment sets CE on the datagram (RFC 3168 section 5.3).
    fn merge_ecn(&mut self, fragment: &Fragment) {
        if self.ecn != CE && (fragment.first.is_some() || fragment.ecn == CE) {
            self.ecn = fragment.ecn;
        }
        self.has_not_ect |= fragment.ecn == NOT_ECT;
        self.is_group |= fragment.is_group;
    }

    /// Merges bytes with adjacent runs.
    fn join(&mut self, start: usize, chain: Chain, pool: &mut Pool) {
        let end = start.saturating_add(chain.len());
        let at = self.runs.partition_point(|r| r.start < start);
        let right = match self.runs.get(at) {
            Some(r) if r.start == end => Some(self.runs.remove(at).chain),
            _ => None,
        };
        let left = at.checked_sub(1).and_then(|i| self.runs.get_mut(i));
        let run = match left.filter(|r| r.end() == start) {
            Some(left) => {
                append(&mut left.chain, chain, pool);
                left
            }
            None => {
                self.runs.insert(at, Run { start, chain });
                match self.runs.get_mut(at) {
                    Some(run) => run,
                    None => return,
                }
            }
        };
        if let Some(right) = right {
            append(&mut run.chain, right, pool);
        }
    }

    fn is_complete(&self) -> bool {
        match (self.runs.as_slice(), self.total) {
            ([run], Some(total)) => run.start == 0 && run.end() == usize::from(total),
            _ => false,
        }
    }

    /// The payload up to the first gap. The rest is freed.
    fn into_datagram(self, pool: &mut Pool) -> Datagram {
        let first_bytes = self.pieces.first().map_or(0, |&(_, end)| usize::from(end));
        let mut runs = self.runs.into_iter().map(|r| r.chain);
        let chain = runs.next().unwrap_or_default();
        runs.for_each(|c| pool.free(c));
        Datagram {
            key: self.key,
            first: self.first,
            ecn: self.ecn,
            is_group: self.is_group,
            chain,
            first_bytes,
        }
    }
}

/// Appends bytes by reference. Tiny payloads, and those that waste at least half of their storage,
/// are copied into tailroom or a new block. Without a block they are appended by reference.
fn append(to: &mut Chain, chain: Chain, pool: &mut Pool) {
    let bytes = chain.len();
    let is_tiny = bytes <= TINY_BYTES || bytes.saturating_mul(2) <= chain.truesize();
    if !is_tiny || bytes > COALESCE_BYTES / 2 {
        return to.append(chain);
    }
    if to.back().is_none_or(|m| m.tailroom() < bytes) {
        return append_new_block(to, chain, pool);
    }
    let mut copied = 0_usize;
    if let Some(mut back) = to.back_mut() {
        for slice in chain.slices() {
            copied = copied.saturating_add(back.append_tail(slice, pool));
        }
    }
    if copied == bytes {
        return pool.free(chain);
    }
    // The tailroom is shared: undo and use a new block.
    to.trim_back(copied, pool);
    append_new_block(to, chain, pool);
}

/// Copies bytes into a new block with tailroom for more.
fn append_new_block(to: &mut Chain, chain: Chain, pool: &mut Pool) {
    let bytes = chain.len();
    let Ok(mut m) = pool.alloc(COALESCE_BYTES, 0, Purpose::Receive) else {
        return to.append(chain);
    };
    match m.append(bytes) {
        Some(space) => {
            chain.copy_to(0, space);
            to.push_back(m);
            pool.free(chain);
        }
        None => {
            pool.free_mbuf(m);
            to.append(chain);
        }
    }
}

/// A source for eviction: an IPv4 address, or an IPv6 /64 prefix, whose owner controls all of its
/// addresses.
type Source = (bool, u64);

fn source_of(ip: IpAddr) -> Source {
    match ip {
        IpAddr::V4(a) => (true, u64::from(a.to_bits())),
        IpAddr::V6(a) => (false, (a.to_bits() >> 64) as u64),
    }
}

#[cfg(test)]
mod tests;
