//! Datagrams that are being put together from their fragments (RFC 791 section 3.2, RFC 8200
//! section 4.5).
//!
//! ```text
//!   payload of the datagram   0 ───────────────────────────────────────────── total
//!   pieces that came          [ 0..1480 )[ 1480..2960 )      [ 4440..5920 )
//!   runs                      [ 0 ............... 2960 )     [ 4440..5920 )
//! ```
//!
//! Enters: the payload of one fragment at a time, with its place ([`Piece`]). Leaves: the payload of
//! a whole datagram ([`Whole`]), or one that is over its time ([`Reassembly::pop_expired`]).
//!
//! Memory: mbufs are held as they came, but tiny ones are copied together, so that a datagram in
//! small pieces pins neither large buffers nor descriptors. The table holds at most
//! [`MAX_DATAGRAMS`] datagrams, half of them of one source, each in at most [`MAX_PIECES`] pieces,
//! and [`Reassembly::new`]'s bytes of storage, half of them of one source. At a bound the oldest
//! datagram gives way: of the same source if that is what has too much, else of all.
//!
//! Invariants: pieces are sorted and do not overlap; runs are sorted and do not touch; the runs
//! cover what the pieces cover; what a slot costs is counted in the table.
//!
//! Overlap: a fragment that overlaps another one ends its datagram, IPv4's too (RFC 5722, RFC 8200;
//! RFC 791 would let the later bytes win, which serves only those who want to deceive). Its key is
//! remembered until the time is over, so that the rest of it is dropped as well. An exact repetition
//! is dropped by itself.
//!
//! Cost: a scan of the slots, beginning with the one that was used last; two binary searches in the
//! slot. A slot's tables are allocated when it is used first, and kept.
//!
//! In a stack of several shards the device must bring all fragments of a datagram to one queue, since only
//! the first of them has ports: a TAP's hash and the program for its queues do. The whole datagram then
//! crosses to its owner.

use alloc::vec::Vec;
use core::net::IpAddr;

use fulmar_base::{Counters, DropReason, Duration, Instant};
use fulmar_mbuf::{Chain, Pool, Purpose};
use fulmar_wire::{ipv4, ipv6};

/// Datagrams in the table at most. A sender has one or two under way at a time; the others lost a
/// fragment and wait for the end of their time or for somebody who needs the place.
pub(crate) const MAX_DATAGRAMS: usize = 64;
/// Of one source (an IPv4 address, an IPv6 network of 64 bits) at most.
pub(crate) const MAX_PER_SOURCE: usize = MAX_DATAGRAMS / 2;
/// Pieces of one datagram at most: the largest datagram over the least MTU that hosts must take
/// (RFC 1122 section 3.3.2: 576 bytes) has 119.
pub(crate) const MAX_PIECES: usize = 256;
/// How many datagrams may begin after one of IPv4 before a fragment with its identification counts
/// as another one's: at high rates 16 bits come round within the time (RFC 4963).
const MAX_AGE_DATAGRAMS: u64 = 1024;
/// Payloads up to this size are copied behind the one before.
const TINY_BYTES: usize = 256;
/// A block that tiny pieces are copied into.
const GATHER_BYTES: usize = 4096;

/// Which datagram a fragment belongs to. IPv6 does not look at the protocol: zero there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    pub(crate) protocol: u8,
    pub(crate) ident: u32,
}

/// The IP header of the first fragment, options and extension headers left out.
#[derive(Clone, Copy, Debug)]
pub(crate) enum First {
    V4(ipv4::Header),
    /// `next_header` is what the fragmentable part starts with.
    V6(ipv6::Header),
}

/// One fragment.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) key: Key,
    /// Where it starts in the datagram's payload. `start` plus the length of `chain` is at most
    /// 65,535; the chain is not empty.
    pub(crate) start: u16,
    /// No fragment follows it.
    pub(crate) is_last: bool,
    /// The header, if this is the first fragment.
    pub(crate) first: Option<First>,
    /// The two ECN bits.
    pub(crate) ecn: u8,
    /// It was sent to more than one station.
    pub(crate) is_group: bool,
    /// How long the rest may take.
    pub(crate) lifetime: Duration,
    /// The payload.
    pub(crate) chain: Chain,
}

/// A datagram, or what there is of it.
#[derive(Debug)]
pub(crate) struct Whole {
    pub(crate) key: Key,
    /// `None` only in a datagram that is over its time.
    pub(crate) first: Option<First>,
    pub(crate) ecn: u8,
    pub(crate) is_group: bool,
    /// The payload; of one that is over its time the first run, which begins with the first
    /// fragment if that has come.
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

/// What is known of one datagram.
#[derive(Debug)]
struct Slot {
    key: Key,
    /// Counts the datagrams that have begun: smaller is older.
    serial: u64,
    expires: Instant,
    is_used: bool,
    /// Fragments overlapped or contradicted each other: the rest is dropped for this reason.
    refused: Option<DropReason>,
    /// Length of the payload, once the last fragment has come.
    total: Option<u16>,
    /// Start and end of each fragment, sorted.
    pieces: Vec<(u16, u16)>,
    runs: Vec<Run>,
    cost_bytes: usize,
    first: Option<First>,
    ecn: u8,
    is_group: bool,
}

/// The table.
#[derive(Debug)]
pub(crate) struct Reassembly {
    slots: Vec<Slot>,
    /// The slot that the last fragment went to.
    recent: usize,
    max_bytes: usize,
    held_bytes: usize,
    begun: u64,
    /// Not later than any slot's deadline.
    next_expiry: Option<Instant>,
}

impl Reassembly {
    /// A table for `max_bytes` of storage.
    pub(crate) fn new(max_bytes: usize) -> Reassembly {
        Reassembly {
            slots: Vec::new(),
            recent: 0,
            max_bytes,
            held_bytes: 0,
            begun: 0,
            next_expiry: None,
        }
    }

    /// Takes a fragment. Returns the datagram that it completes.
    ///
    /// What gives way is counted and freed here (`FragmentTableFull`, `FragmentTimeout`).
    ///
    /// # Errors
    /// The fragment is freed, and to be counted: `FragmentDuplicate`; `FragmentOverlap` and
    /// `FragmentInvalid`, with all that there was of its datagram.
    pub(crate) fn insert(
        &mut self,
        now: Instant,
        piece: Piece,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> Result<Option<Whole>, DropReason> {
        let i = self.slot_for(now, &piece, pool, counters);
        self.recent = i;
        let Some(slot) = self.slots.get_mut(i) else {
            pool.free(piece.chain);
            return Err(DropReason::FragmentTableFull);
        };
        let before = slot.cost_bytes;
        let added = slot.add(piece, pool);
        let whole = slot.is_complete().then(|| slot.take());
        slot.cost_bytes = slot.runs.iter().map(|r| r.chain.held_bytes().max(r.chain.len())).sum();
        let after = slot.cost_bytes;
        let key = slot.key;
        self.held_bytes = self.held_bytes.saturating_sub(before).saturating_add(after);
        if self.held_bytes > self.max_bytes / 2 {
            self.shrink(key.src, pool, counters);
        }
        added.map(|()| whole)
    }

    /// The slot of a fragment's datagram, which may begin with it.
    fn slot_for(
        &mut self,
        now: Instant,
        piece: &Piece,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> usize {
        if let Some(i) = self.find(&piece.key) {
            let begun = self.slots.get(i).map_or(0, |s| s.serial);
            let is_stale = self.begun.saturating_sub(begun) > MAX_AGE_DATAGRAMS;
            if !is_stale || piece.key.src.is_ipv6() {
                return i;
            }
            self.discard(i, DropReason::FragmentTimeout, pool, counters);
        }
        self.begin(now, piece, pool, counters)
    }

    fn find(&self, key: &Key) -> Option<usize> {
        let is_it = |s: &Slot| s.is_used && s.key == *key;
        if self.slots.get(self.recent).is_some_and(is_it) {
            return Some(self.recent);
        }
        self.slots.iter().position(is_it)
    }

    fn begin(
        &mut self,
        now: Instant,
        piece: &Piece,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> usize {
        let source = source_of(piece.key.src);
        let is_same = |s: &Slot| s.is_used && source_of(s.key.src) == source;
        let full = DropReason::FragmentTableFull;
        if self.slots.iter().filter(|s| is_same(s)).count() >= MAX_PER_SOURCE {
            self.discard_oldest(is_same, full, pool, counters);
        } else if self.slots.iter().filter(|s| s.is_used).count() >= MAX_DATAGRAMS {
            self.discard_oldest(|s| s.is_used, full, pool, counters);
        }
        self.begun = self.begun.saturating_add(1);
        let expires = now + piece.lifetime;
        self.next_expiry = Some(self.next_expiry.map_or(expires, |e| e.min(expires)));
        let i = self.slots.iter().position(|s| !s.is_used).unwrap_or(self.slots.len());
        match self.slots.get_mut(i) {
            Some(slot) => slot.restart(piece.key, self.begun, expires),
            None => self.slots.push(Slot::new(piece.key, self.begun, expires)),
        }
        i
    }

    /// Makes room until neither the source nor all of them hold too much.
    fn shrink(&mut self, src: IpAddr, pool: &mut Pool, counters: &mut Counters) {
        let source = source_of(src);
        let is_same = |s: &Slot| s.is_used && source_of(s.key.src) == source;
        let full = DropReason::FragmentTableFull;
        for _ in 0..MAX_DATAGRAMS {
            let own: usize = self.slots.iter().filter(|s| is_same(s)).map(|s| s.cost_bytes).sum();
            if own > self.max_bytes / 2 {
                self.discard_oldest(|s| is_same(s) && s.cost_bytes > 0, full, pool, counters);
            } else if self.held_bytes > self.max_bytes {
                self.discard_oldest(|s| s.cost_bytes > 0, full, pool, counters);
            } else {
                return;
            }
        }
    }

    fn discard_oldest(
        &mut self,
        which: impl Fn(&Slot) -> bool,
        reason: DropReason,
        pool: &mut Pool,
        counters: &mut Counters,
    ) {
        let some = self.slots.iter().enumerate().filter(|(_, s)| which(s));
        if let Some((i, _)) = some.min_by_key(|(_, s)| s.serial) {
            self.discard(i, reason, pool, counters);
        }
    }

    /// Frees a slot. What was refused was counted then.
    fn discard(&mut self, i: usize, reason: DropReason, pool: &mut Pool, counters: &mut Counters) {
        let Some(slot) = self.slots.get_mut(i) else { return };
        if slot.refused.is_none() {
            counters.drop_packet(reason);
        }
        self.held_bytes = self.held_bytes.saturating_sub(slot.cost_bytes);
        slot.clear(pool);
        slot.is_used = false;
    }

    /// The next datagram whose time is over, with what there is of it; not yet counted. Those whose
    /// fragments overlapped were, and go without a word.
    pub(crate) fn pop_expired(&mut self, now: Instant, pool: &mut Pool) -> Option<Whole> {
        if self.next_expiry.is_none_or(|e| now < e) {
            return None;
        }
        for slot in self.slots.iter_mut().filter(|s| s.is_used && s.expires <= now) {
            self.held_bytes = self.held_bytes.saturating_sub(slot.cost_bytes);
            let whole = slot.take();
            slot.clear(pool);
            if slot.refused.is_none() {
                return Some(whole);
            }
        }
        self.next_expiry = self.slots.iter().filter(|s| s.is_used).map(|s| s.expires).min();
        None
    }

    /// When [`Reassembly::pop_expired`] may have something.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.next_expiry
    }

    /// Datagrams in the table, those that were refused included.
    pub(crate) fn len(&self) -> usize {
        self.slots.iter().filter(|s| s.is_used).count()
    }

    /// What they cost, in bytes of storage.
    pub(crate) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Frees everything.
    pub(crate) fn release(&mut self, pool: &mut Pool) {
        self.slots.iter_mut().for_each(|s| s.clear(pool));
        self.slots.clear();
        (self.held_bytes, self.next_expiry) = (0, None);
    }
}

impl Slot {
    fn new(key: Key, serial: u64, expires: Instant) -> Slot {
        Slot {
            key,
            serial,
            expires,
            is_used: true,
            refused: None,
            total: None,
            pieces: Vec::with_capacity(MAX_PIECES),
            runs: Vec::new(),
            cost_bytes: 0,
            first: None,
            ecn: 0,
            is_group: false,
        }
    }

    /// As [`Slot::new`], with the tables that the slot has. It is clear.
    fn restart(&mut self, key: Key, serial: u64, expires: Instant) {
        (self.key, self.serial, self.expires) = (key, serial, expires);
        (self.is_used, self.refused, self.total) = (true, None, None);
        (self.first, self.ecn, self.is_group) = (None, 0, false);
    }

    fn clear(&mut self, pool: &mut Pool) {
        self.runs.drain(..).for_each(|r| pool.free(r.chain));
        self.pieces.clear();
        self.cost_bytes = 0;
    }

    /// Adds a fragment. An error frees it; if it ends the datagram the slot keeps nothing but its
    /// key.
    fn add(&mut self, piece: Piece, pool: &mut Pool) -> Result<(), DropReason> {
        match self.place(&piece) {
            Ok((at, end)) => {
                self.pieces.insert(at, (piece.start, end));
                if piece.is_last {
                    self.total = Some(end);
                }
                self.first = self.first.or(piece.first);
                self.mark(&piece);
                self.join(usize::from(piece.start), piece.chain, pool);
                Ok(())
            }
            Err(reason) => {
                if reason != DropReason::FragmentDuplicate {
                    self.clear(pool);
                    self.refused = Some(reason);
                }
                pool.free(piece.chain);
                Err(reason)
            }
        }
    }

    /// Where a fragment goes among the pieces, and where it ends.
    fn place(&self, piece: &Piece) -> Result<(usize, u16), DropReason> {
        if let Some(reason) = self.refused {
            return Err(reason);
        }
        let end = usize::from(piece.start).saturating_add(piece.chain.len());
        let end = u16::try_from(end).map_err(|_| DropReason::FragmentInvalid)?;
        let at = self.pieces.partition_point(|&(start, _)| start < piece.start);
        let next = self.pieces.get(at);
        if next == Some(&(piece.start, end)) {
            return Err(DropReason::FragmentDuplicate);
        }
        let previous = at.checked_sub(1).and_then(|i| self.pieces.get(i));
        if previous.is_some_and(|&(_, e)| e > piece.start) || next.is_some_and(|&(s, _)| s < end) {
            return Err(DropReason::FragmentOverlap);
        }
        let ends_elsewhere = match self.total {
            Some(total) => piece.is_last || end > total,
            None => piece.is_last && next.is_some(),
        };
        if ends_elsewhere || self.pieces.len() >= MAX_PIECES {
            return Err(DropReason::FragmentInvalid);
        }
        Ok((at, end))
    }

    /// Congestion marked on any fragment marks the datagram (RFC 3168 section 5.3).
    fn mark(&mut self, piece: &Piece) {
        const CONGESTION_EXPERIENCED: u8 = 3;
        if self.ecn != CONGESTION_EXPERIENCED
            && (piece.first.is_some() || piece.ecn == CONGESTION_EXPERIENCED)
        {
            self.ecn = piece.ecn;
        }
        self.is_group |= piece.is_group;
    }

    /// Joins bytes with the runs that they touch.
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

    /// Takes the first run out and gives the slot up.
    fn take(&mut self) -> Whole {
        let chain = self.runs.first_mut().map(|r| core::mem::take(&mut r.chain));
        let first_bytes = self.pieces.first().map_or(0, |&(_, end)| usize::from(end));
        self.runs.retain(|r| !r.chain.is_empty());
        self.is_used = false;
        if self.runs.is_empty() {
            self.pieces.clear();
        }
        Whole {
            key: self.key,
            first: self.first,
            ecn: self.ecn,
            is_group: self.is_group,
            chain: chain.unwrap_or_default(),
            first_bytes,
        }
    }
}

/// Appends bytes: by reference, or copied into the room behind the last ones if they are few or lie
/// in much more storage than they fill. Without a block for the copy they stay as they are.
fn append(to: &mut Chain, chain: Chain, pool: &mut Pool) {
    let bytes = chain.len();
    let is_tiny = bytes <= TINY_BYTES || bytes.saturating_mul(2) <= chain.held_bytes();
    if !is_tiny || bytes > GATHER_BYTES / 2 {
        return to.append(chain);
    }
    if to.back().is_none_or(|m| m.tailroom() < bytes) {
        return gather(to, chain, pool);
    }
    let mut copied = 0_usize;
    if let Some(mut back) = to.back_mut() {
        for piece in chain.slices() {
            copied = copied.saturating_add(back.append_tail(piece, pool));
        }
    }
    if copied == bytes {
        return pool.free(chain);
    }
    // Behind the last bytes somebody else has a reference.
    to.trim_back(copied, pool);
    gather(to, chain, pool);
}

/// Appends bytes in a block with room for more of their kind.
fn gather(to: &mut Chain, chain: Chain, pool: &mut Pool) {
    let bytes = chain.len();
    let Ok(mut m) = pool.alloc(GATHER_BYTES, 0, Purpose::Receive) else {
        return to.append(chain);
    };
    match m.append(bytes) {
        Some(room) => {
            chain.copy_to(0, room);
            to.push_back(m);
            pool.free(chain);
        }
        None => {
            pool.free_mbuf(m);
            to.append(chain);
        }
    }
}

/// What counts as one sender: whoever has an IPv6 network of 64 bits has all of its addresses.
fn source_of(ip: IpAddr) -> (bool, u64) {
    match ip {
        IpAddr::V4(a) => (true, u64::from(a.to_bits())),
        IpAddr::V6(a) => (false, (a.to_bits() >> 64) as u64),
    }
}

#[cfg(test)]
mod tests;
