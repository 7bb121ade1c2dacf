//! One end of the link as a device.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

use fulmar_stack::base::{Counters, DropReason, Duration, Instant, OwnerKey};
use fulmar_stack::device::{
    Attachment, Burst, Caps, Device, DeviceStats, DirectPlacement, Interest, Packet, Peek, Tally,
    WakeFd, offload,
};
use fulmar_stack::mbuf::{Backing, Chain, Lender, Pool, Purpose};

use super::bell::{Bell, News};
use super::layout::{
    self, CLOSED, FRAMES, PIECES, Piece, RETURNED, Record, SENT, STATE, Violation,
};
use super::loans::Loans;
use super::meet::{self, Met};
use super::places::Places;
use super::{ShmConfig, Side};
use crate::drivers::{OpenError, vnet};
use fulmar_stack::wire::dissect::{Headers, Transport};

/// Frames up to this size are copied whole: the copy costs less than a loan, and the slot is returned
/// immediately.
const COPIED_BYTES: usize = 2048;

/// Bytes copied from a longer frame to parse its headers: a block of the smallest class.
const FRONT_BYTES: usize = 256;

/// Interval at which a polling end asks the kernel whether the other process lives.
const LOOK: Duration = Duration::from_millis(10);

/// One end of memory that two processes share: [`shm`](crate::devices::shm) with its options.
///
/// ```
/// use std::time::Duration;
/// use fulmar::Stack;
/// use fulmar::devices::{Shm, ShmConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // Both ends in one process, as in a test.
/// let (a, b) = Shm::pair(&ShmConfig { pool_bytes: 16 << 20, ..ShmConfig::default() })?;
/// let one = Stack::builder().device(a).address("10.0.0.1/24".parse()?).budget_bytes(16 << 20).build()?;
/// let _other = Stack::builder().device(b).address("10.0.0.2/24".parse()?).budget_bytes(16 << 20).build()?;
/// one.ping("10.0.0.2".parse()?, 56, Duration::from_secs(5))?;
/// # Ok(())
/// # }
/// ```
pub struct Shm {
    loans: Arc<Loans>,
    lender: Arc<dyn Lender>,
    side: Side,
    outbox: Outbox,
    region: Option<Backing>,
    /// The last burst was not sent completely.
    is_blocked: bool,
    is_armed: bool,
    /// When the kernel was last asked whether the other process lives.
    looked: Instant,
    end: Option<End>,
    places: Places,
    /// The process that has the mapping: a forked child does not.
    pid: u32,
    caps: Caps,
    stats: DeviceStats,
}

impl std::fmt::Debug for Shm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shm").field("side", &self.side).finish_non_exhaustive()
    }
}

/// How the link ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// The other process has ended, or has dropped its device. Frames that it sent are still received.
    Gone(i32),
    /// The other process violated the protocol: nothing more is read. It may still read what it was sent
    /// until it is dead, so sent frames are kept.
    Violation,
}

/// Sent frames whose slots are not returned yet.
struct Outbox {
    frames: Box<[Option<Chain>]>,
    /// Free slots, a stack: the one returned last is in the cache.
    slots: Vec<u32>,
    sent: u64,
    reaped: u64,
    /// Memory in the region for copies of frames from outside it.
    staging: Pool,
}

impl Shm {
    /// Connects to the other process, or waits for it, up to [`ShmConfig::wait`].
    ///
    /// # Errors
    /// A sentence: no peer connected in time; the name cannot be bound; the other process belongs to another
    /// user, has another version, or offers memory that is not safe to read.
    pub fn open(config: &ShmConfig) -> Result<Shm, OpenError> {
        Shm::new(meet::meet(config)?, config)
    }

    /// Both ends in one process, for tests and benches.
    ///
    /// # Errors
    /// ENOMEM, EMFILE, ENFILE.
    pub fn pair(config: &ShmConfig) -> Result<(Shm, Shm), OpenError> {
        let (a, b) = meet::meet_oneself(config)?;
        Ok((Shm::new(a, config)?, Shm::new(b, config)?))
    }

    pub(super) fn new(met: Met, config: &ShmConfig) -> Result<Shm, OpenError> {
        let Met { side, socket, own, peer, region, staging, mtu } = met;
        let bell = Bell::new(socket).map_err(|e| {
            OpenError::new("cannot watch the other process", e, "raise the limit on open files")
        })?;
        let loans = Arc::new(Loans::new(peer, own, bell));
        let slots = (0..FRAMES as u32).rev().collect();
        let frames = (0..FRAMES).map(|_| None).collect();
        let (index, name) = match side {
            Side::First => (0, "shm0"),
            Side::Second => (1, "shm1"),
        };
        Ok(Shm {
            lender: Arc::clone(&loans) as Arc<dyn Lender>,
            loans,
            side,
            outbox: Outbox { frames, slots, sent: 0, reaped: 0, staging },
            region: Some(region),
            is_blocked: false,
            is_armed: false,
            looked: Instant::ZERO,
            end: None,
            places: Places::new(),
            pid: std::process::id(),
            caps: Caps {
                tx_csum: true,
                tso: Some(65_535),
                udp_gso: true,
                rx_gro: true,
                max_segs: PIECES,
                ..Caps::plain(mtu, config.ether[index])
            },
            stats: DeviceStats { name: name.to_owned(), ..DeviceStats::default() },
        })
    }

    /// Which end this is.
    pub fn side(&self) -> Side {
        self.side
    }

    fn end_for(&mut self, v: Violation) {
        self.end = Some(End::Violation);
        self.stats.path =
            format!("closed, because the other process violated the protocol: {}", v.sentence());
        self.loans.bell.hang_up();
    }

    /// Asks the kernel whether the other process lives, at most once per interval.
    fn look(&mut self, now: Instant) {
        if now < self.looked + LOOK && self.looked <= now {
            return;
        }
        self.looked = now;
        self.look_now();
    }

    fn look_now(&mut self) {
        if self.end.is_none() && !self.loans.bell.is_alive() {
            let in_order = self.loans.peer.load(STATE, Relaxed) == CLOSED;
            self.end = Some(End::Gone(if in_order { libc::EPIPE } else { libc::ECONNRESET }));
        }
    }

    /// Frames queued in the ring; 0 after a violation of the protocol.
    fn pending(&mut self) -> u64 {
        if self.end == Some(End::Violation) {
            return 0;
        }
        let taken = self.loans.taken.load(Relaxed);
        layout::pending(&self.loans.peer, SENT, taken).unwrap_or_else(|v| {
            self.end_for(v);
            0
        })
    }
}

// Sending.
impl Shm {
    /// Puts frames into the ring while slots are free, and publishes them together.
    fn move_out(&mut self, pool: &mut Pool, burst: &mut Burst, counters: &mut Counters) -> usize {
        let (mut taken, mut tally) = (0, Tally::default());
        while let Some(p) = burst.front() {
            if let Err(reason) = offload::check(p, &self.caps) {
                if let Some(p) = burst.pop_front() {
                    p.discard(reason, pool, counters);
                }
                taken += 1;
                continue;
            }
            let Some(&slot) = self.outbox.slots.last() else { break };
            let Some((record, copy)) = self.outbox.describe(p, slot, &self.loans) else { break };
            let Some(p) = burst.pop_front() else { break };
            tally.add(&p);
            record.write(&self.loans.own, self.outbox.sent);
            let chain = match copy {
                None => p.chain,
                Some(copy) => {
                    pool.free(p.chain);
                    copy
                }
            };
            self.outbox.keep(slot, chain);
            taken += 1;
        }
        if tally.frames > 0 {
            self.loans.own.store(SENT, self.outbox.sent, Release);
            self.stats.tx_crossings += 1;
            self.stats.wakes += u64::from(self.loans.bell.ring(&self.loans.peer, News::Frames));
        }
        tally.sent(counters, &mut self.stats);
        taken
    }

    /// A burst was blocked: asks the other end to ring for space, then uses the slots that it returned before it could
    /// see the request.
    fn request_space(
        &mut self,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        self.loans.bell.arm(&self.loans.own, Interest::ReadableOrWritable);
        self.reap(pool);
        let taken = self.move_out(pool, burst, counters);
        self.is_blocked = !burst.is_empty();
        taken
    }

    /// Frees the frames whose slots were returned. Returns how many.
    fn reap(&mut self, pool: &mut Pool) -> usize {
        match self.end {
            None => {}
            Some(End::Gone(_)) => return self.outbox.free_all(pool),
            Some(End::Violation) if self.loans.bell.is_alive() => return 0,
            Some(End::Violation) => return self.outbox.free_all(pool),
        }
        let before = self.outbox.reaped;
        if let Err(v) = self.outbox.reap(&self.loans, pool) {
            self.end_for(v);
        }
        self.loans.reaped.store(self.outbox.reaped, Relaxed);
        (self.outbox.reaped - before) as usize
    }
}

impl Outbox {
    /// The record of a frame; a frame outside the region is copied into it. `None`: no space for the copy
    /// until frames are returned.
    fn describe(
        &mut self,
        p: &Packet,
        slot: u32,
        loans: &Loans,
    ) -> Option<(Record, Option<Chain>)> {
        let request = vnet::request(&p.offload);
        if let Some(record) = place(&p.chain, slot, request, loans) {
            return Some((record, None));
        }
        let mut copy = self.staging.alloc_chain(p.chain.len(), 0, Purpose::Control).ok()?;
        let mut from = p.chain.reader();
        copy.slices_mut().for_each(|to| {
            from.read(to);
        });
        match place(&copy, slot, request, loans) {
            Some(record) => Some((record, Some(copy))),
            None => {
                self.staging.free(copy);
                None
            }
        }
    }

    fn keep(&mut self, slot: u32, chain: Chain) {
        self.slots.pop();
        if let Some(place) = self.frames.get_mut(slot as usize) {
            *place = Some(chain);
        }
        self.sent += 1;
    }

    fn reap(&mut self, loans: &Loans, pool: &mut Pool) -> Result<(), Violation> {
        for _ in 0..layout::pending(&loans.peer, RETURNED, self.reaped)? {
            let slot = layout::read_return(&loans.peer, self.reaped)?;
            // Checked: only a slot in flight is returned.
            let chain =
                self.frames.get_mut(slot).and_then(Option::take).ok_or(Violation::SlotNotOut)?;
            self.reaped += 1;
            self.slots.push(slot as u32);
            pool.free(chain);
        }
        Ok(())
    }

    /// Frees sent frames: the other process is dead and reads none.
    fn free_all(&mut self, pool: &mut Pool) -> usize {
        if self.slots.len() == FRAMES {
            return 0;
        }
        let mut count = 0;
        for (slot, frame) in self.frames.iter_mut().enumerate() {
            if let Some(chain) = frame.take() {
                self.slots.push(slot as u32);
                pool.free(chain);
                count += 1;
            }
        }
        count
    }
}

/// The record of a frame that is wholly in the region.
fn place(
    chain: &Chain,
    slot: u32,
    request: [u8; vnet::HEADER_BYTES],
    loans: &Loans,
) -> Option<Record> {
    let mut record = Record::new(slot, request);
    for m in chain.iter().filter(|m| !m.is_empty()) {
        let at = u32::try_from(loans.own.offset_of(m)?).ok()?;
        if !record.push(Piece { at, len: m.len() as u32 }) {
            return None;
        }
    }
    Some(record)
}

// Receiving.
impl Shm {
    /// Receives one frame from the ring. `Ok(None)`: it was dropped and counted.
    fn take(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> Result<Option<Packet>, Violation> {
        let taken = self.loans.taken.load(Relaxed);
        let record = Record::read(&self.loans.peer, taken)?;
        if !self.loans.is_free(record.slot) {
            return Err(Violation::SlotInUse);
        }
        self.loans.taken.store(taken + 1, Relaxed);
        match self.packet_of(&record, pool) {
            Ok(packet) => Ok(Some(packet)),
            Err(reason) => {
                counters.drop_packet(reason);
                Ok(None)
            }
        }
    }

    /// The frame: placed; or its headers copied and its payload lent; or copied. Every byte that a layer
    /// parses is read once, into memory of this process. The slot is returned here unless the payload is
    /// lent.
    fn packet_of(&mut self, record: &Record, pool: &mut Pool) -> Result<Packet, DropReason> {
        let may_lend = record.len() > COPIED_BYTES && self.loans.has_space();
        if may_lend || !self.places.is_idle() {
            let mut front = [0; FRONT_BYTES];
            let n = Reader::new(record, 0).copy(&self.loans, &mut front);
            let front = front.get(..n).unwrap_or_default();
            if let Some(chain) = self.places.place_frame(record, front, &self.loans, pool) {
                return packet(record, chain, pool);
            }
            if may_lend && let Some(headers) = headers_before_payload(record, front) {
                let chain = self.lend_payload(record, headers, pool);
                return packet(record, chain.ok_or(DropReason::NoBuffer)?, pool);
            }
        }
        let chain = copy(record, 0..record.len(), &self.loans, pool);
        self.loans.send_back(record.slot);
        packet(record, chain.ok_or(DropReason::NoBuffer)?, pool)
    }

    /// The copied headers, and the rest of the frame by reference. The slot is returned with the last
    /// reference. `None`: no buffer.
    fn lend_payload(&mut self, record: &Record, headers: &[u8], pool: &mut Pool) -> Option<Chain> {
        let mut head = alloc(headers.len(), pool)?;
        head.copy_from(0, headers);
        self.loans.begin(record.slot);
        let rest = self.lend(record, headers.len(), pool);
        self.loans.give_back(record.slot);
        match rest {
            Some(rest) => {
                head.append(rest);
                Some(head)
            }
            None => {
                pool.free(head);
                None
            }
        }
    }

    /// The bytes of a frame from `from` on, by reference.
    fn lend(&self, record: &Record, from: usize, pool: &mut Pool) -> Option<Chain> {
        let mut chain = Chain::new();
        let mut skip = from;
        for p in record.pieces() {
            let cut = skip.min(p.len as usize);
            skip -= cut;
            if cut == p.len as usize {
                continue;
            }
            self.loans.add(record.slot);
            let (at, len) = (p.at as usize + cut, p.len - cut as u32);
            match pool.lent(&self.lender, at, len, record.slot) {
                Ok(m) => chain.push_back(m),
                Err(_) => {
                    self.loans.give_back(record.slot);
                    pool.free(chain);
                    return None;
                }
            }
        }
        Some(chain)
    }
}

/// The packet of a frame, with the sender's offload request; its first mbuf has all headers.
fn packet(record: &Record, chain: Chain, pool: &mut Pool) -> Result<Packet, DropReason> {
    let front = chain.front().map_or(&[][..], |m| m.as_slice());
    match vnet::parse(&record.request, record.len(), front) {
        Ok(offload) => Ok(Packet { chain, offload }),
        Err(reason) => {
            pool.free(chain);
            Err(reason)
        }
    }
}

/// The headers of a frame whose payload is neither parsed nor summed by the stack: an unfragmented TCP segment
/// or UDP datagram whose checksum is not verified. `None`: the whole frame is copied.
fn headers_before_payload<'a>(record: &Record, front: &'a [u8]) -> Option<&'a [u8]> {
    let seen = Headers::parse(front, record.len())?;
    let offload = vnet::parse(&record.request, record.len(), front).ok()?;
    let checksum_end = match offload.needs_csum {
        true => usize::from(offload.csum_start) + usize::from(offload.csum_offset) + 2,
        false => 0,
    };
    let is_opaque = matches!(seen.transport, Transport::Tcp(_) | Transport::Udp(_))
        && (offload.needs_csum || offload.csum_valid)
        && checksum_end <= seen.payload_at;
    front.get(..seen.payload_at).filter(|_| is_opaque)
}

/// Allocates buffers for received bytes. If the receive share is used up, frames as small as ACKs use the
/// reserve, since ACKs free memory.
fn alloc(bytes: usize, pool: &mut Pool) -> Option<Chain> {
    match pool.alloc_chain(bytes, 0, Purpose::Receive) {
        Err(_) if bytes <= FRONT_BYTES => pool.alloc_chain(bytes, 0, Purpose::Control).ok(),
        chain => chain.ok(),
    }
}

/// A copy of bytes of a frame. `None`: no buffer.
pub(super) fn copy(
    record: &Record,
    range: std::ops::Range<usize>,
    loans: &Loans,
    pool: &mut Pool,
) -> Option<Chain> {
    let mut chain = alloc(range.len(), pool)?;
    let mut from = Reader::new(record, range.start);
    chain.slices_mut().for_each(|to| {
        from.copy(loans, to);
    });
    Some(chain)
}

/// Reads the pieces of a frame in order.
pub(super) struct Reader<'a> {
    pieces: &'a [Piece],
    /// Bytes of the first piece already read.
    within: usize,
}

impl<'a> Reader<'a> {
    /// Starts at byte `from` of the frame.
    pub(super) fn new(record: &'a Record, from: usize) -> Reader<'a> {
        let mut reader = Reader { pieces: record.pieces(), within: 0 };
        reader.walk(from, |_, _| {});
        reader
    }

    /// Copies the next bytes until either side ends, and returns their number.
    pub(super) fn copy(&mut self, loans: &Loans, to: &mut [u8]) -> usize {
        let mut done = 0;
        self.walk(to.len(), |at, n| {
            if let (Some(bytes), Some(to)) = (loans.peer.bytes(at, n), to.get_mut(done..)) {
                done += bytes.copy_to(0, to);
            }
        });
        done
    }

    fn walk(&mut self, mut bytes: usize, mut visit: impl FnMut(usize, usize)) {
        while bytes > 0
            && let [first, rest @ ..] = self.pieces
        {
            let n = bytes.min(first.len as usize - self.within);
            visit(first.at as usize + self.within, n);
            bytes -= n;
            self.within += n;
            if self.within == first.len as usize {
                (self.pieces, self.within) = (rest, 0);
            }
        }
    }
}

impl Device for Shm {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn attach(&mut self, _owner: &OwnerKey) -> Attachment {
        let peek = Some(Arc::clone(&self.loans) as Arc<dyn Peek>);
        Attachment { region: self.region.take(), peek }
    }

    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        self.is_blocked = false;
        if self.outbox.slots.len() <= FRAMES / 2 {
            self.reap(pool);
        }
        if self.end.is_some() {
            return burst.discard(DropReason::DeviceGone, pool, counters);
        }
        let mut taken = self.move_out(pool, burst, counters);
        if !burst.is_empty() {
            self.stats.tx_refusals += 1;
            self.look(now);
            self.reap(pool);
            self.outbox.staging.drain_remote();
            taken += self.move_out(pool, burst, counters);
        }
        self.is_blocked = !burst.is_empty();
        if self.is_blocked && self.is_armed {
            taken += self.request_space(pool, burst, counters);
        }
        self.loans.wants_space.store(self.is_blocked, Relaxed);
        taken
    }

    fn tx_reap(&mut self, _now: Instant, pool: &mut Pool) -> usize {
        self.reap(pool)
    }

    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        let pending = self.pending();
        if pending == 0 {
            self.look(now);
            self.reap(pool);
            return 0;
        }
        self.stats.rx_crossings += 1;
        let mut tally = Tally::default();
        for _ in 0..pending.min(budget.min(out.space()) as u64) {
            match self.take(pool, counters) {
                Ok(Some(p)) => tally.receive(p, out),
                Ok(None) => {}
                Err(v) => {
                    counters.drop_packet(DropReason::ShmInvalid);
                    self.end_for(v);
                    break;
                }
            }
            if self.places.take_full() {
                break;
            }
        }
        self.places.count(counters, &mut self.stats);
        self.reap(pool);
        self.stats.wakes += u64::from(self.loans.notify_space());
        tally.received(counters, &mut self.stats);
        tally.frames as usize
    }

    fn arm(&mut self) -> bool {
        self.is_armed = true;
        let interest = match self.is_blocked {
            true => Interest::ReadableOrWritable,
            false => Interest::Readable,
        };
        self.loans.bell.arm(&self.loans.own, interest);
        self.look_now();
        self.end.is_none() && !self.loans.is_pending()
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.is_armed) {
            self.loans.bell.disarm(&self.loans.own);
            self.loans.bell.swallow();
            self.look_now();
        }
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        Some(WakeFd::readable(self.loans.bell.fd()))
    }

    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        Some(&mut self.places)
    }

    /// Reported after the frames sent before the end were received.
    fn lost(&self) -> Option<i32> {
        match self.end? {
            End::Violation => Some(libc::EPROTO),
            End::Gone(errno) => {
                let taken = self.loans.taken.load(Relaxed);
                let rest = layout::pending(&self.loans.peer, SENT, taken);
                (!matches!(rest, Ok(1..))).then_some(errno)
            }
        }
    }

    fn stats(&self) -> DeviceStats {
        self.stats.clone()
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        if std::process::id() != self.pid {
            // A forked child: no mapping, and the connection is the parent's.
            std::mem::forget(Arc::clone(&self.loans));
            self.outbox.frames.iter_mut().for_each(|f| std::mem::forget(f.take()));
            return;
        }
        self.loans.own.store(STATE, CLOSED, Release);
        self.loans.bell.hang_up();
    }
}
