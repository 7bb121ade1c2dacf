//! sosend: writes, in three steps. [`reserve`] allocates all buffers of a write under the shard lock. The
//! caller copies into them outside the lock. [`commit`] makes the bytes ready, after which the stack calls
//! tcp_output once.
//!
//! The writer owns the [`Reservation`] until it is committed or abandoned. Source: the order of the checks is
//! that of FreeBSD's `sosend_generic`.

use alloc::sync::Arc;
use core::ops::Range;
use core::task::Poll;

use crate::mbuf::{Chain, Claim, FairShare, Pool, Purpose, QueueFull, SendQueue, SharedBytes};
use crate::tcp::{State, Tcb};

use crate::socket::SocketError;

/// Claimed space of a send buffer with its storage, `chain.len()` bytes.
#[must_use = "a reservation blocks the send buffer until it is committed or abandoned"]
pub struct Reservation {
    claim: Claim,
    /// Filled by the writer: as a whole, or the first [`Reservation::keep`] bytes.
    pub chain: Chain,
    keep: usize,
    /// Another write follows immediately (`MSG_MORE`).
    pub more: bool,
    /// A record ends with it (`MSG_EOR`).
    pub ends_record: bool,
}

impl Reservation {
    pub(crate) fn new(claim: Claim, chain: Chain) -> Reservation {
        Reservation { claim, keep: chain.len(), chain, more: false, ends_record: false }
    }

    /// Bytes to be committed.
    pub fn len(&self) -> usize {
        self.keep
    }

    /// Limits the commit to the first `n` bytes; it releases the rest of the space.
    pub fn keep(&mut self, n: usize) {
        self.keep = self.keep.min(n);
    }

    /// The storage of a reservation whose connection no longer exists.
    pub fn into_chain(self) -> Chain {
        self.chain
    }

    /// Whether there are no bytes to commit.
    pub fn is_empty(&self) -> bool {
        self.keep == 0
    }
}

/// The low-water mark of the send buffer (`sb_lowat` of BSD): with less space a writer waits, unless its whole
/// write fits.
pub const SEND_LOW_WATER_BYTES: usize = 2048;

/// Writes up to this size are copied into the send buffer under the lock, which costs less than a second
/// acquisition of the lock.
pub const SMALL_WRITE_BYTES: usize = 512;

/// The checks before a write, in the order of `sosend_generic`.
pub(crate) fn check(tcb: &mut Tcb) -> Result<(), SocketError> {
    if tcb.send_error().is_some() {
        // The cause is reported once, and EPIPE afterwards.
        return Err(tcb.take_error().map_or(SocketError::BrokenPipe, Into::into));
    }
    match tcb.state() {
        State::SynSent => Err(SocketError::WouldBlock),
        State::SynReceived if !tcb.is_open_early() => Err(SocketError::WouldBlock),
        _ => Ok(()),
    }
}

/// Whether a write has waited for space before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Attempt {
    /// It has not: space for [`SEND_LOW_WATER_BYTES`] is enough.
    #[default]
    First,
    /// It has: it continues when a third of the buffer is free (as in Linux), so that it is not woken for each
    /// ACK.
    Retry,
}

/// Whether a write of `want` bytes has to wait for space.
fn must_wait(space: usize, limit: usize, want: usize, attempt: Attempt) -> bool {
    let low_water = match attempt {
        Attempt::First => SEND_LOW_WATER_BYTES.min(limit / 2),
        Attempt::Retry => limit / 3,
    };
    space < want && space < low_water.max(1)
}

/// Whether the send buffer has space for a write of `want` bytes. If the write waits nevertheless, it waits
/// for storage.
pub fn has_space(tcb: &Tcb, want: usize, attempt: Attempt) -> bool {
    let queue = tcb.send_queue_ref();
    let is_full = must_wait(tcb.write_space(), queue.limit(), want, attempt);
    tcb.can_send() && queue.may_claim() && !is_full
}

/// The part of `want` bytes for which a connection may allocate storage: all, unless the send share is
/// contended. 0 if it is less than the low-water mark.
#[inline]
pub(crate) fn allowed(tcb: &Tcb, pool: &Pool, want: usize) -> usize {
    if pool.is_contended(Purpose::Send) { fair_part(tcb, pool, want) } else { want }
}

#[cold]
fn fair_part(tcb: &Tcb, pool: &Pool, want: usize) -> usize {
    let may = allowance(tcb, pool.share_of(Purpose::Send)).min(want);
    if may < want && may < SEND_LOW_WATER_BYTES { 0 } else { may }
}

/// Bytes of a share that a connection may allocate: see [`FairShare::allowance`].
pub fn allowance(tcb: &Tcb, share: FairShare) -> usize {
    share.allowance(tcb.send_queue_ref().truesize(), tcb.is_stalled())
}

/// Claims space for as much of `want` bytes as fits, and allocates storage for all of it.
///
/// # Errors
/// The state of the connection, as [`SocketError`]. An exhausted pool is [`Poll::Pending`].
pub fn reserve(
    tcb: &mut Tcb,
    pool: &mut Pool,
    want: usize,
    attempt: Attempt,
) -> Result<Poll<Reservation>, SocketError> {
    match check(tcb) {
        Err(SocketError::WouldBlock) => return Ok(Poll::Pending),
        other => other?,
    }
    let (space, limit) = (tcb.write_space(), tcb.send_queue_ref().limit());
    if must_wait(space, limit, want, attempt) {
        return Ok(Poll::Pending);
    }
    let bytes = allowed(tcb, pool, want.min(space));
    let Some(chain) = alloc_up_to(pool, bytes) else { return Ok(Poll::Pending) };
    match tcb.send_queue().claim(chain.len()) {
        Some(claim) => Ok(Poll::Ready(Reservation::new(claim, chain))),
        None => {
            pool.free(chain);
            Ok(Poll::Pending)
        }
    }
}

/// Allocates `bytes` or less, by halving the request until the pool can serve it. `None` if that fails or
/// `bytes` is 0.
pub(crate) fn alloc_up_to(pool: &mut Pool, bytes: usize) -> Option<Chain> {
    let mut ask = bytes;
    if ask == 0 {
        return None;
    }
    loop {
        if let Ok(chain) = pool.alloc_chain(ask, 0, Purpose::Send) {
            return Some(chain);
        }
        if ask <= SEND_LOW_WATER_BYTES {
            return None;
        }
        ask /= 2;
    }
}

/// Appends a small write under the lock: to the tailroom of the last mbuf, and the rest to a new one. `None`
/// if the general path ([`reserve`]) has to be taken.
///
/// # Errors
/// As [`reserve`].
pub fn append_small(
    tcb: &mut Tcb,
    pool: &mut Pool,
    bytes: &[u8],
) -> Result<Option<Appended>, SocketError> {
    if bytes.len() > SMALL_WRITE_BYTES {
        return Ok(None);
    }
    match check(tcb) {
        Err(SocketError::WouldBlock) => return Ok(None),
        other => other?,
    }
    if tcb.write_space() < bytes.len() {
        return Ok(None);
    }
    let queue = tcb.send_queue();
    let merged = queue.append_small(bytes, pool);
    let rest = bytes.get(merged..).unwrap_or_default();
    let mbufs = match rest.len() {
        0 => 0,
        n if allowed(tcb, pool, n) < n => 0,
        _ => append_copy(tcb.send_queue(), pool, rest),
    };
    let taken = if mbufs > 0 { bytes.len() } else { merged };
    Ok((taken > 0).then_some(Appended { bytes: taken, mbufs }))
}

/// Appends a copy in new mbufs and returns their number, 0 if it failed.
fn append_copy(queue: &mut SendQueue, pool: &mut Pool, bytes: &[u8]) -> usize {
    let Ok(mut chain) = pool.alloc_chain(bytes.len(), 0, Purpose::Send) else { return 0 };
    let mbufs = chain.segs();
    chain.copy_from(0, bytes);
    match queue.append(chain, pool) {
        Ok(()) => mbufs,
        Err(QueueFull(chain)) => {
            pool.free(chain);
            0
        }
    }
}

/// Appends as much of the first data of a connection as fits, before its SYN is sent, and returns how much.
pub fn append_first(tcb: &mut Tcb, pool: &mut Pool, bytes: &[u8]) -> usize {
    let want = allowed(tcb, pool, bytes.len().min(tcb.write_space()));
    let Some(mut chain) = alloc_up_to(pool, want) else { return 0 };
    let taken = chain.len();
    chain.copy_from(0, bytes.get(..taken).unwrap_or(bytes));
    match tcb.send_queue().append(chain, pool) {
        Ok(()) => taken,
        Err(QueueFull(chain)) => {
            pool.free(chain);
            0
        }
    }
}

/// Free space of the send buffer, after the checks of a write. 0 while the connection is being established.
///
/// # Errors
/// The state of the connection, as [`SocketError`].
pub fn space(tcb: &mut Tcb) -> Result<usize, SocketError> {
    match check(tcb) {
        Err(SocketError::WouldBlock) => Ok(0),
        other => other.map(|()| tcb.write_space()),
    }
}

/// Appends a chain as a whole. The chain is empty afterwards only if the result is `Done`.
///
/// # Errors
/// As [`space`].
pub fn append(tcb: &mut Tcb, pool: &mut Pool, chain: &mut Chain) -> Result<Poll<()>, SocketError> {
    if space(tcb)? < chain.len() {
        return Ok(Poll::Pending);
    }
    match tcb.send_queue().append(core::mem::take(chain), pool) {
        Ok(()) => Ok(Poll::Ready(())),
        Err(QueueFull(back)) => {
            *chain = back;
            Ok(Poll::Pending)
        }
    }
}

/// Appends as much of the shared bytes of `part` as fits, by reference.
///
/// # Errors
/// As [`reserve`].
pub fn share(
    tcb: &mut Tcb,
    pool: &mut Pool,
    owner: &Arc<dyn SharedBytes>,
    part: Range<usize>,
    attempt: Attempt,
) -> Result<Poll<Appended>, SocketError> {
    match check(tcb) {
        Err(SocketError::WouldBlock) => return Ok(Poll::Pending),
        other => other?,
    }
    let (space, limit) = (tcb.write_space(), tcb.send_queue_ref().limit());
    let want = part.len();
    if must_wait(space, limit, want, attempt) {
        return Ok(Poll::Pending);
    }
    let chain = share_parts(pool, owner, part.start, allowed(tcb, pool, want.min(space)));
    Ok(append_shared(tcb, pool, chain))
}

/// Appends a chain of shared bytes as a whole, or frees it. An empty one waits for storage.
fn append_shared(tcb: &mut Tcb, pool: &mut Pool, chain: Chain) -> Poll<Appended> {
    let taken = Appended { bytes: chain.len(), mbufs: chain.segs() };
    if taken.bytes == 0 {
        return Poll::Pending;
    }
    match tcb.send_queue().append(chain, pool) {
        Ok(()) => Poll::Ready(taken),
        Err(QueueFull(chain)) => {
            pool.free(chain);
            Poll::Pending
        }
    }
}

/// The bytes appended by [`share`] or [`append_small`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Appended {
    /// Number of bytes.
    pub bytes: usize,
    /// Mbufs allocated for them.
    pub mbufs: usize,
}

/// References to shared bytes, as far as the send share allows.
fn share_parts(pool: &mut Pool, owner: &Arc<dyn SharedBytes>, at: usize, bytes: usize) -> Chain {
    let mut chain = Chain::new();
    while chain.len() < bytes {
        let left = bytes - chain.len();
        let ask = left.min(pool.available(Purpose::Send).max(SEND_LOW_WATER_BYTES));
        match pool.share(owner, at + chain.len(), ask, Purpose::Send) {
            Ok(m) if !m.is_empty() => chain.push_back(m),
            Ok(m) => {
                pool.free_mbuf(m);
                break;
            }
            Err(_) => break,
        }
    }
    chain
}

/// Commits the bytes of a reservation, which may then be sent.
pub fn commit(tcb: &mut Tcb, pool: &mut Pool, mut r: Reservation) {
    r.chain.trim_back(r.chain.len() - r.keep, pool);
    tcb.set_msg_more(r.more);
    tcb.send_queue().commit(r.claim, r.chain, pool);
    if r.ends_record {
        tcb.end_record();
    }
}

/// Releases a reservation without bytes.
pub fn abandon(tcb: &mut Tcb, pool: &mut Pool, r: Reservation) {
    tcb.send_queue().abandon(r.claim, pool);
    pool.free(r.chain);
}
