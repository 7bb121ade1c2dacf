//! soreceive: a read. The data is detached from the receive buffer as a chain under the shard lock,
//! copied outside it, and given back to the pool with the window update.

use fulmar_mbuf::{Chain, Mbuf, Pool, Purpose};
use fulmar_tcp::{Env, Lent, State, Tcb};

use crate::{SocketError, Step};

/// Detaches up to `max` bytes. An empty chain is the end of the stream.
///
/// # Errors
/// The connection's error, once everything received before it has been read.
pub fn take(tcb: &mut Tcb, pool: &mut Pool, max: usize) -> Result<Step<Chain>, SocketError> {
    match readable(tcb)? {
        Step::Done(0) => Ok(Step::Done(Chain::new())),
        Step::Done(_) => {
            let chain = tcb.recv_queue().take(max, pool);
            // A pool without a single buffer is no end of the stream.
            Ok(if chain.is_empty() { Step::WaitData(1) } else { Step::Done(chain) })
        }
        Step::WaitData(n) => Ok(Step::WaitData(n)),
        Step::WaitSpace(n) => Ok(Step::WaitSpace(n)),
    }
}

/// A loan whose storage is more than so many times its bytes is copied together: it would shrink the
/// window by so much more than it is worth. Frames of more than a quarter of a 64 KiB buffer stay.
const WASTE: usize = 4;

/// As [`take_at_least`], for a reader who keeps the mbufs themselves for a while: they are charged to the
/// window and to the budget until [`Tcb::take_back`]. What wastes most of its storage, or lies in the
/// reserve for control, is copied together first.
///
/// # Errors
/// As [`take`]. [`SocketError::NoBuffer`]: no memory for such a copy, and nothing was taken.
pub fn lend(
    tcb: &mut Tcb,
    env: &mut Env,
    max: usize,
    least: usize,
) -> Result<Step<(Chain, Lent)>, SocketError> {
    let chain = match take_at_least(tcb, env.pool, max, least, 0)? {
        Step::Done(chain) => chain,
        Step::WaitData(n) => return Ok(Step::WaitData(n)),
        Step::WaitSpace(n) => return Ok(Step::WaitSpace(n)),
    };
    let chain = match keepable(chain, env.pool, tcb.is_storage_short()) {
        Ok(chain) => chain,
        Err(chain) => {
            tcb.recv_queue().unread(chain);
            return Err(SocketError::NoBuffer);
        }
    };
    let lent = Lent::of(&chain);
    env.window.lend(lent.storage_bytes);
    tcb.lend(lent, env);
    Ok(Step::Done((chain, lent)))
}

/// The same bytes in storage that a user may keep; the chain back if there is no memory for a copy
/// that is needed.
pub fn keepable(chain: Chain, pool: &mut Pool, is_short: bool) -> Result<Chain, Chain> {
    let waste = if is_short { WASTE / 2 } else { WASTE };
    let worth = chain.len().saturating_mul(waste).max(Mbuf::MIN_HELD_BYTES);
    let is_wasteful = chain.held_bytes() > worth;
    // Only a pool that ran short has put payload into the reserve.
    let is_dry = pool.available(Purpose::Receive) < chain.held_bytes();
    let is_reserve = is_dry && chain.iter().any(|m| m.purpose() == Purpose::Control);
    if !is_wasteful && !is_reserve {
        return Ok(chain);
    }
    match pool.alloc_chain(chain.len(), 0, Purpose::Receive) {
        Ok(mut copy) => {
            let mut from = chain.reader();
            for to in copy.slices_mut() {
                from.read(to);
            }
            pool.free(chain);
            Ok(copy)
        }
        Err(_) if is_reserve => Err(chain),
        Err(_) => Ok(chain),
    }
}

/// As [`take`], but waits until `least` bytes are there or no more will come before some are read.
/// Bytes that a reader has already got in the same call, `done`, are reason enough to end without
/// any: the error stays for the next call.
///
/// # Errors
/// As [`take`].
pub fn take_at_least(
    tcb: &mut Tcb,
    pool: &mut Pool,
    max: usize,
    least: usize,
    done: usize,
) -> Result<Step<Chain>, SocketError> {
    let queued = tcb.recv_queue().readable();
    if done > 0 && queued == 0 && (tcb.has_error() || is_final(tcb)) {
        return Ok(Step::Done(Chain::new()));
    }
    if queued < least && may_get_more(tcb) {
        return Ok(Step::WaitData(least));
    }
    take(tcb, pool, max)
}

/// References to up to `max` bytes from `off` on, which stay in the queue, once at least `least` are
/// there or no more will come; an empty chain is the end of the stream, or that there are no more
/// than `off`.
///
/// # Errors
/// As [`take`].
pub fn peek_at(
    tcb: &mut Tcb,
    pool: &mut Pool,
    off: usize,
    max: usize,
    least: usize,
) -> Result<Step<Chain>, SocketError> {
    let wanted = off.saturating_add(least);
    let queued = tcb.recv_queue().readable();
    if queued < wanted && may_get_more(tcb) {
        return Ok(Step::WaitData(wanted));
    }
    match readable(tcb)? {
        Step::Done(n) if n > off => {
            let chain = tcb.recv_queue().share(off, max, pool);
            Ok(if chain.is_empty() { Step::WaitData(wanted) } else { Step::Done(chain) })
        }
        Step::Done(_) => Ok(Step::Done(Chain::new())),
        Step::WaitData(n) => Ok(Step::WaitData(n)),
        Step::WaitSpace(n) => Ok(Step::WaitSpace(n)),
    }
}

/// No more bytes will ever come.
fn is_final(tcb: &Tcb) -> bool {
    tcb.peer_closed() || !tcb.can_recv() || tcb.state() == State::Closed
}

/// Whether it makes sense to wait for more than is there: more may come, and the window is open for
/// it.
pub(crate) fn may_get_more(tcb: &Tcb) -> bool {
    let has_some = tcb.recv_queue_ref().readable() > 0;
    let is_stuck = has_some && tcb.is_window_shut();
    !(is_final(tcb) || tcb.has_error() || is_stuck)
}

/// Copies bytes without taking them; 0 is the end of the stream.
///
/// # Errors
/// As [`take`].
pub fn peek(tcb: &mut Tcb, into: &mut [u8]) -> Result<Step<usize>, SocketError> {
    match readable(tcb)? {
        Step::Done(0) => Ok(Step::Done(0)),
        Step::Done(_) => Ok(Step::Done(tcb.recv_queue().peek(0, into))),
        wait => Ok(wait),
    }
}

/// How many bytes a read would return now: 0 at the end of the stream.
fn readable(tcb: &mut Tcb) -> Result<Step<usize>, SocketError> {
    let ready = tcb.recv_queue().readable();
    if ready > 0 {
        return Ok(Step::Done(ready));
    }
    if let Some(e) = tcb.take_error() {
        return Err(e.into());
    }
    if tcb.at_eof() || !tcb.can_recv() {
        return Ok(Step::Done(0));
    }
    match tcb.state() {
        State::Closed => Err(SocketError::NotConnected),
        _ => Ok(Step::WaitData(1)),
    }
}
