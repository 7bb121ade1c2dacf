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
//! The table is set-associative: a keyed hash of source, destination, protocol and identification
//! chooses one of [`SETS`] sets, and a set holds [`WAYS`] datagrams. In a full set the oldest datagram
//! gives way, of the source of the new one if that source has half of the set. The key is secret, so a
//! stranger cannot aim at the set of a datagram: of `n` datagrams that it begins while an honest one
//! arrives, about `n / SETS` fall into the same set, and the honest one survives fewer than [`WAYS`].
//! With 20,000 spoofed fragments per second and 20 ms between the first and the last fragment that is
//! 98 of 100 honest datagrams.
//!
//! Memory: mbufs are held as they came, but tiny ones are copied together, so that a datagram in
//! small pieces pins neither large buffers nor descriptors. A datagram has at most [`MAX_PIECES`]
//! pieces, and all datagrams together [`Reassembly::new`]'s bytes of storage. Beyond that the oldest
//! of [`SAMPLE`] datagrams from a random place of the table gives way, of the source whose fragment
//! came if that source has most of the sample.
//!
//! Invariants: pieces are sorted and do not overlap; runs are sorted and do not touch; the runs
//! cover what the pieces cover; what a slot costs is counted in the table.
//!
//! Overlap: a fragment that overlaps another one ends its datagram, IPv4's too (RFC 5722, RFC 8200;
//! RFC 791 would let the later bytes win, which serves only those who want to deceive). Its key is
//! remembered until the time is over, so that the rest of it is dropped as well. An exact repetition
//! is dropped by itself.
//!
//! Cost: a hash, unless the fragment is of the same datagram as the last one; a scan of the set; two
//! binary searches in the slot.
//!
//! In a stack of several shards the device must bring all fragments of a datagram to one queue, since only
//! the first of them has ports: a TAP's hash and the program for its queues do. The whole datagram then
//! crosses to its owner.

use alloc::vec::Vec;
use core::net::IpAddr;

use fulmar_base::{
    Counters, DropReason, Duration, Instant, Key as HashKey, KeyUse, Random, Secrets,
};
use fulmar_mbuf::{Chain, Pool, Purpose};
use fulmar_wire::{ipv4, ipv6};

/// Sets of the table; a power of two.
pub(crate) const SETS: usize = 128;
/// Datagrams in a set at most. A sender has one or two under way at a time; the others lost a
/// fragment and wait for the end of their time or for a datagram that needs the place.
pub(crate) const WAYS: usize = 8;
/// Datagrams among which the oldest gives way for its storage, at least.
const SAMPLE: usize = 2 * WAYS;
/// Pieces of one datagram at most: the largest datagram over the least MTU that hosts must take
/// (RFC 1122 section 3.3.2: 576 bytes) has 119.
pub(crate) const MAX_PIECES: usize = 256;
/// How many datagrams of its source may begin in the set of one of IPv4 before a fragment with its
/// identification counts as another one's: after about `8 * SETS` datagrams. At high rates 16 bits come
/// round within the time (RFC 4963).
const MAX_FOLLOWERS: u8 = 8;
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
    /// Datagrams of the same source that have begun in this set since.
    followers: u8,
    expires: Instant,
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

/// Which slot of which set.
type Place = (usize, usize);

/// The table.
#[derive(Debug)]
pub(crate) struct Reassembly {
    /// [`SETS`] of them, each of at most [`WAYS`] datagrams.
    sets: Vec<Vec<Slot>>,
    /// Chooses the set of a datagram.
    hash: HashKey,
    /// Chooses what gives way for its storage.
    random: Random,
    /// The datagram of the last fragment, and its set.
    recent: Option<(Key, usize)>,
    max_bytes: usize,
    held_bytes: usize,
    begun: u64,
    /// Not later than any slot's deadline.
    next_expiry: Option<Instant>,
    /// The first set that may hold a datagram over its time: where [`Reassembly::pop_expired`] goes on.
    expiring: usize,
}

impl Reassembly {
    /// A table for `max_bytes` of storage.
    pub(crate) fn new(max_bytes: usize, secrets: &Secrets) -> Reassembly {
        Reassembly {
            sets: (0..SETS).map(|_| Vec::new()).collect(),
            hash: secrets.key(KeyUse::Reassembly),
            random: secrets.random(KeyUse::Reassembly),
            recent: None,
            max_bytes,
            held_bytes: 0,
            begun: 0,
            next_expiry: None,
            expiring: 0,
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
        let source = source_of(piece.key.src);
        let place = self.place_of(now, &piece, pool, counters);
        let Some(slot) = self.slot_mut(place) else {
            pool.free(piece.chain);
            return Err(DropReason::FragmentTableFull);
        };
        let before = slot.cost_bytes;
        let added = slot.add(piece, pool);
        slot.cost_bytes = slot.runs.iter().map(|r| r.chain.held_bytes().max(r.chain.len())).sum();
        let (after, is_complete) = (slot.cost_bytes, slot.is_complete());
        self.held_bytes = self.held_bytes.saturating_sub(before).saturating_add(after);
        let whole = if is_complete { self.remove(place).map(|s| s.into_whole(pool)) } else { None };
        self.shrink(source, pool, counters);
        added.map(|()| whole)
    }

    /// Where a fragment's datagram is, which may begin with it.
    fn place_of(
        &mut self,
        now: Instant,
        piece: &Piece,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> Place {
        let at = self.set_of(&piece.key);
        let set = self.sets.get(at).map_or(&[][..], Vec::as_slice);
        if let Some((way, slot)) = set.iter().enumerate().find(|(_, s)| s.key == piece.key) {
            if slot.followers <= MAX_FOLLOWERS || piece.key.src.is_ipv6() {
                return (at, way);
            }
            self.discard((at, way), DropReason::FragmentTimeout, pool, counters);
        }
        (at, self.begin(now, at, piece, pool, counters))
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

    /// Begins a datagram in a set, in which the oldest one may have to give way.
    fn begin(
        &mut self,
        now: Instant,
        at: usize,
        piece: &Piece,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> usize {
        let source = source_of(piece.key.src);
        let (mut all, mut own) = (Candidates::default(), Candidates::default());
        for (way, slot) in self.sets.get_mut(at).into_iter().flatten().enumerate() {
            all.add(slot, (at, way), 1);
            if slot.source() == source {
                slot.followers = slot.followers.saturating_add(1);
                own.add(slot, (at, way), 1);
            }
        }
        if all.weight >= WAYS {
            let victim = if own.weight >= WAYS / 2 { own } else { all };
            let full = DropReason::FragmentTableFull;
            victim.oldest.into_iter().for_each(|(_, p)| self.discard(p, full, pool, counters));
        }
        self.begun = self.begun.saturating_add(1);
        let expires = now + piece.lifetime;
        self.next_expiry = Some(self.next_expiry.map_or(expires, |e| e.min(expires)));
        let Some(set) = self.sets.get_mut(at) else { return 0 };
        set.push(Slot::new(piece.key, self.begun, expires));
        set.len().saturating_sub(1)
    }

    /// Frees datagrams until all of them hold no more than they may. A fragment of `source` came.
    fn shrink(&mut self, source: Source, pool: &mut Pool, counters: &mut Counters) {
        while self.held_bytes > self.max_bytes {
            let Some(victim) = self.draw(source) else { return };
            self.discard(victim, DropReason::FragmentTableFull, pool, counters);
        }
    }

    /// The datagram that gives way for its storage: the oldest of some, from a random set on.
    fn draw(&mut self, source: Source) -> Option<Place> {
        let from = self.random.below(SETS as u32) as usize;
        let (mut all, mut own) = (Candidates::default(), Candidates::default());
        for at in (from..SETS).chain(0..from) {
            let set = self.sets.get(at).map_or(&[][..], Vec::as_slice);
            for (way, slot) in set.iter().enumerate().filter(|(_, s)| s.cost_bytes > 0) {
                all.add(slot, (at, way), slot.cost_bytes);
                if slot.source() == source {
                    own.add(slot, (at, way), slot.cost_bytes);
                }
            }
            if all.seen >= SAMPLE {
                break;
            }
        }
        let victim = if own.weight > all.weight / 2 { own } else { all };
        victim.oldest.map(|(_, place)| place)
    }

    /// Frees a slot. What was refused was counted then.
    fn discard(
        &mut self,
        place: Place,
        reason: DropReason,
        pool: &mut Pool,
        counters: &mut Counters,
    ) {
        let Some(slot) = self.remove(place) else { return };
        if slot.refused.is_none() {
            counters.drop_packet(reason);
        }
        slot.free(pool);
    }

    /// The next datagram whose time is over, with what there is of it; not yet counted. Those whose
    /// fragments overlapped were, and go without a word.
    pub(crate) fn pop_expired(&mut self, now: Instant, pool: &mut Pool) -> Option<Whole> {
        if self.next_expiry.is_none_or(|e| now < e) {
            return None;
        }
        while let Some(set) = self.sets.get(self.expiring) {
            let Some(way) = set.iter().position(|s| s.expires <= now) else {
                self.expiring = self.expiring.saturating_add(1);
                continue;
            };
            match self.remove((self.expiring, way)) {
                Some(slot) if slot.refused.is_none() => return Some(slot.into_whole(pool)),
                Some(slot) => slot.free(pool),
                None => {}
            }
        }
        self.expiring = 0;
        self.next_expiry = self.sets.iter().flatten().map(|s| s.expires).min();
        None
    }

    /// When [`Reassembly::pop_expired`] may have something.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.next_expiry
    }

    /// Datagrams in the table, those that were refused included.
    pub(crate) fn len(&self) -> usize {
        self.sets.iter().map(Vec::len).sum()
    }

    /// What they cost, in bytes of storage.
    pub(crate) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Frees everything.
    pub(crate) fn release(&mut self, pool: &mut Pool) {
        self.sets.iter_mut().for_each(|set| set.drain(..).for_each(|s| s.free(pool)));
        (self.held_bytes, self.next_expiry) = (0, None);
    }

    fn slot_mut(&mut self, (set, way): Place) -> Option<&mut Slot> {
        self.sets.get_mut(set)?.get_mut(way)
    }

    fn remove(&mut self, (set, way): Place) -> Option<Slot> {
        let set = self.sets.get_mut(set)?;
        let slot = if way < set.len() { set.swap_remove(way) } else { return None };
        self.held_bytes = self.held_bytes.saturating_sub(slot.cost_bytes);
        Some(slot)
    }
}

/// Datagrams of which one gives way.
#[derive(Clone, Copy, Debug, Default)]
struct Candidates {
    seen: usize,
    weight: usize,
    /// By its serial.
    oldest: Option<(u64, Place)>,
}

impl Candidates {
    fn add(&mut self, slot: &Slot, place: Place, weight: usize) {
        self.seen = self.seen.saturating_add(1);
        self.weight = self.weight.saturating_add(weight);
        let this = (slot.serial, place);
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
            followers: 0,
            expires,
            refused: None,
            total: None,
            pieces: Vec::new(),
            runs: Vec::new(),
            cost_bytes: 0,
            first: None,
            ecn: 0,
            is_group: false,
        }
    }

    fn source(&self) -> Source {
        source_of(self.key.src)
    }

    fn free(self, pool: &mut Pool) {
        self.runs.into_iter().for_each(|r| pool.free(r.chain));
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
                    self.runs.drain(..).for_each(|r| pool.free(r.chain));
                    self.pieces = Vec::new();
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

    /// What is there up to the first gap. The rest is freed.
    fn into_whole(self, pool: &mut Pool) -> Whole {
        let first_bytes = self.pieces.first().map_or(0, |&(_, end)| usize::from(end));
        let mut runs = self.runs.into_iter().map(|r| r.chain);
        let chain = runs.next().unwrap_or_default();
        runs.for_each(|c| pool.free(c));
        Whole {
            key: self.key,
            first: self.first,
            ecn: self.ecn,
            is_group: self.is_group,
            chain,
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

/// What counts as one sender: an IPv4 address, or an IPv6 network of 64 bits, whose owner has all of
/// its addresses.
type Source = (bool, u64);

fn source_of(ip: IpAddr) -> Source {
    match ip {
        IpAddr::V4(a) => (true, u64::from(a.to_bits())),
        IpAddr::V6(a) => (false, (a.to_bits() >> 64) as u64),
    }
}

#[cfg(test)]
mod tests;
