//! sosend: a write, in three steps. `reserve` obtains all buffers of the write at once under the
//! shard lock; the caller copies into them outside it; `commit` makes them ready, and the stack then
//! runs the protocol once for everything that fits.
//!
//! Owns nothing between the steps: a [`Reservation`] is the writer's until it is committed or
//! abandoned. Source: the order of checks is that of `sosend_generic`, in FreeBSD and POSIX.

use std::sync::Arc;

use fulmar_mbuf::{Chain, Claim, FairShare, Pool, Purpose, QueueFull, SendQueue, SharedBytes};
use fulmar_tcp::{State, Tcb};

use crate::{SocketError, Step};

/// Space in a send buffer, and the storage that will fill it. `chain.len()` is the length.
#[must_use = "a reservation blocks the send buffer until it is committed or abandoned"]
pub struct Reservation {
    claim: Claim,
    /// To be filled by the writer, whole, or as far as [`Reservation::keep`] says.
    pub chain: Chain,
    keep: usize,
    /// Another write follows at once (MSG_MORE).
    pub more: bool,
}

impl Reservation {
    pub(crate) fn new(claim: Claim, chain: Chain) -> Reservation {
        Reservation { claim, keep: chain.len(), chain, more: false }
    }

    /// Bytes of the reservation that count.
    pub fn len(&self) -> usize {
        self.keep
    }

    /// Only the first `n` bytes were filled; the rest of the space is given back with the commit.
    pub fn keep(&mut self, n: usize) {
        self.keep = self.keep.min(n);
    }

    /// The storage, for whoever cannot commit.
    pub fn into_chain(self) -> Chain {
        self.chain
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.keep == 0
    }
}

/// Below this much free space a writer waits, unless its whole write fits (the field's `sb_lowat`).
pub const SEND_LOW_WATER_BYTES: usize = 2048;

/// Writes up to this size are copied into the tail of the send buffer under the lock: two lock
/// round trips would cost more than the copy.
pub const SMALL_WRITE_BYTES: usize = 512;

/// The checks before a write, in the order of the published `sosend`.
pub(crate) fn check(tcb: &mut Tcb) -> Result<(), SocketError> {
    if tcb.send_error().is_some() {
        // The cause is told once; after that there is only a closed pipe.
        return Err(tcb.take_error().map_or(SocketError::BrokenPipe, Into::into));
    }
    match tcb.state() {
        State::SynSent | State::SynReceived => Err(SocketError::WouldBlock),
        _ => Ok(()),
    }
}

/// Whether a write of `want` bytes has to wait for space. One that has waited goes on only when a
/// third of the buffer is free (as Linux has it), so that it is not woken for crumbs.
fn must_wait(space: usize, limit: usize, want: usize, waited: bool) -> bool {
    let low_water = if waited { limit / 3 } else { SEND_LOW_WATER_BYTES.min(limit / 2) };
    space < want && space < low_water.max(1)
}

/// Whether the send buffer has room for a write of `want` bytes to go on, so that one which waits
/// all the same waits for storage.
pub fn has_space(tcb: &Tcb, want: usize, waited: bool) -> bool {
    let queue = tcb.send_queue_ref();
    let is_full = must_wait(queue.space(), queue.limit(), want, waited);
    tcb.can_send() && queue.may_claim() && !is_full
}

/// Bytes of `want` for which a connection may take storage now: all of them, unless so much of the send
/// share is in use that connections have to share it. 0: fewer than are worth a start.
#[inline]
pub(crate) fn affordable(tcb: &Tcb, pool: &Pool, want: usize) -> usize {
    if pool.is_contended(Purpose::Send) { fair_part(tcb, pool, want) } else { want }
}

#[cold]
fn fair_part(tcb: &Tcb, pool: &Pool, want: usize) -> usize {
    let may = allowance(tcb, pool.share_of(Purpose::Send)).min(want);
    if may < want && may < SEND_LOW_WATER_BYTES { 0 } else { may }
}

/// Bytes of storage that a connection may take of a share: see [`FairShare`].
pub fn allowance(tcb: &Tcb, share: FairShare) -> usize {
    share.allowance(tcb.send_queue_ref().held_bytes(), tcb.is_stalled())
}

/// Takes space for as much of `want` bytes as fits now, and storage for all of it in one go.
/// `waited`: the write has found no space before.
///
/// # Errors
/// The state of the connection, as [`SocketError`]. A dry pool is not an error but a wait.
pub fn reserve(
    tcb: &mut Tcb,
    pool: &mut Pool,
    want: usize,
    waited: bool,
) -> Result<Step<Reservation>, SocketError> {
    match check(tcb) {
        Err(SocketError::WouldBlock) => return Ok(Step::WaitSpace(1)),
        other => other?,
    }
    let queue = tcb.send_queue();
    let (space, limit) = (queue.space(), queue.limit());
    if must_wait(space, limit, want, waited) {
        return Ok(Step::WaitSpace(want.min(SEND_LOW_WATER_BYTES)));
    }
    let bytes = affordable(tcb, pool, want.min(space));
    let Some(chain) = obtain(pool, bytes) else { return Ok(Step::WaitSpace(1)) };
    match tcb.send_queue().claim(chain.len()) {
        Some(claim) => Ok(Step::Done(Reservation::new(claim, chain))),
        None => {
            pool.free(chain);
            Ok(Step::WaitSpace(1))
        }
    }
}

/// Storage for `bytes`, or for as much as the pool still has: a nearly full pool slows writers
/// down rather than stopping them. None for no bytes.
pub(crate) fn obtain(pool: &mut Pool, bytes: usize) -> Option<Chain> {
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

/// Takes a small write under the lock: into the room behind the tail of the send buffer, the rest
/// into an mbuf of its own. `None` if it has to take the long way.
///
/// # Errors
/// As [`reserve`].
pub fn append_small(
    tcb: &mut Tcb,
    pool: &mut Pool,
    bytes: &[u8],
) -> Result<Option<Taken>, SocketError> {
    if bytes.len() > SMALL_WRITE_BYTES {
        return Ok(None);
    }
    match check(tcb) {
        Err(SocketError::WouldBlock) => return Ok(None),
        other => other?,
    }
    let queue = tcb.send_queue();
    if queue.space() < bytes.len() {
        return Ok(None);
    }
    let merged = queue.append_small(bytes, pool);
    let rest = bytes.get(merged..).unwrap_or_default();
    let mbufs = match rest.len() {
        0 => 0,
        n if affordable(tcb, pool, n) < n => 0,
        _ => append_copy(tcb.send_queue(), pool, rest),
    };
    let taken = if mbufs > 0 { bytes.len() } else { merged };
    Ok((taken > 0).then_some(Taken { bytes: taken, mbufs }))
}

/// Copies a few bytes into mbufs of their own; returns how many those are, 0 if there is none.
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

/// Free space of the send buffer, after the checks of a write; 0 while the connection is being made.
///
/// # Errors
/// The state of the connection, as [`SocketError`].
pub fn space(tcb: &mut Tcb) -> Result<usize, SocketError> {
    match check(tcb) {
        Err(SocketError::WouldBlock) => Ok(0),
        other => other.map(|()| tcb.send_queue_ref().space()),
    }
}

/// Appends a finished chain, whole or not at all. It is taken only if the answer is `Done`.
///
/// # Errors
/// As [`space`].
pub fn append(tcb: &mut Tcb, pool: &mut Pool, chain: &mut Chain) -> Result<Step<()>, SocketError> {
    if space(tcb)? < chain.len() {
        return Ok(Step::WaitSpace(chain.len()));
    }
    match tcb.send_queue().append(core::mem::take(chain), pool) {
        Ok(()) => Ok(Step::Done(())),
        Err(QueueFull(back)) => {
            *chain = back;
            Ok(Step::WaitSpace(chain.len()))
        }
    }
}

/// Appends as much of the shared bytes [at, at + want) as fits, by reference; the answer is how many
/// those were. `waited`: the write has found no space before.
///
/// # Errors
/// As [`reserve`].
pub fn share(
    tcb: &mut Tcb,
    pool: &mut Pool,
    owner: &Arc<dyn SharedBytes>,
    (at, want): (usize, usize),
    waited: bool,
) -> Result<Step<Taken>, SocketError> {
    match check(tcb) {
        Err(SocketError::WouldBlock) => return Ok(Step::WaitSpace(1)),
        other => other?,
    }
    let queue = tcb.send_queue();
    let (space, limit) = (queue.space(), queue.limit());
    if must_wait(space, limit, want, waited) {
        return Ok(Step::WaitSpace(want.min(SEND_LOW_WATER_BYTES)));
    }
    let chain = parts(pool, owner, at, affordable(tcb, pool, want.min(space)));
    let taken = Taken { bytes: chain.len(), mbufs: chain.segs() };
    if taken.bytes == 0 {
        return Ok(Step::WaitSpace(1));
    }
    match tcb.send_queue().append(chain, pool) {
        Ok(()) => Ok(Step::Done(taken)),
        Err(QueueFull(chain)) => {
            pool.free(chain);
            Ok(Step::WaitSpace(1))
        }
    }
}

/// What [`share`] or [`append_small`] has appended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taken {
    /// Bytes, at least one.
    pub bytes: usize,
    /// The mbufs taken for them.
    pub mbufs: usize,
}

/// References to shared bytes, as far as the send share allows.
pub(crate) fn parts(
    pool: &mut Pool,
    owner: &Arc<dyn SharedBytes>,
    at: usize,
    bytes: usize,
) -> Chain {
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

/// The bytes are copied: they may be sent.
pub fn commit(tcb: &mut Tcb, pool: &mut Pool, mut r: Reservation) {
    r.chain.trim_back(r.chain.len() - r.keep, pool);
    tcb.set_message_more(r.more);
    tcb.send_queue().commit(r.claim, r.chain, pool);
}

/// The write failed between the steps: the space is given back.
pub fn abandon(tcb: &mut Tcb, pool: &mut Pool, r: Reservation) {
    tcb.send_queue().abandon(r.claim, pool);
    pool.free(r.chain);
}
