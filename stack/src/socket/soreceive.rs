//! soreceive: reads. The bytes are detached from the receive buffer as a chain under the shard lock, copied
//! outside it, and freed together with the window update.

use crate::mbuf::{Chain, Mbuf, Pool, Purpose};
use crate::tcp::{Env, LoanCharge, State, Tcb};
use core::task::Poll;

use crate::socket::SocketError;

/// Bytes for which a read waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Least {
    /// The low-water mark of the socket (SO_RCVLOWAT), or the whole read if that is less.
    LowWater,
    /// One byte: the read does not wait, or has returned bytes already.
    OneByte,
}

/// Maximum ratio of storage to bytes of a loan. Beyond it the bytes are copied to compact storage, since a
/// loan shrinks the window by its storage.
const MAX_WASTE: usize = 4;

/// As [`take_at_least`], but lends the mbufs to the reader: they are charged to the window and to the budget
/// until [`Tcb::take_back`]. Bytes that use less than a quarter of their storage, or that are in memory of
/// the control reserve, are copied to compact storage first.
///
/// # Errors
/// As [`take_at_least`]. [`SocketError::NoBuffer`]: no memory for such a copy; no bytes were detached.
pub fn lend(
    tcb: &mut Tcb,
    env: &mut Env,
    max: usize,
    least: usize,
) -> Result<Poll<(Chain, LoanCharge)>, SocketError> {
    let Poll::Ready(chain) = take_at_least(tcb, env.pool, max, least, 0)? else {
        return Ok(Poll::Pending);
    };
    let chain = match keepable(chain, env.pool, tcb.is_recv_truesize_high()) {
        Ok(chain) => chain,
        Err(chain) => {
            tcb.recv_queue().unread(chain);
            return Err(SocketError::NoBuffer);
        }
    };
    let lent = LoanCharge::of(&chain);
    env.window.lend(lent.storage_bytes);
    tcb.lend(lent, env);
    Ok(Poll::Ready((chain, lent)))
}

/// Copies the bytes to compact storage if their storage is wasteful or belongs to the control reserve, so
/// that the application may keep them. `is_short`: storage of the socket is short, which halves the waste
/// that is accepted. Error, with the chain: no memory for a copy out of the reserve.
pub fn keepable(chain: Chain, pool: &mut Pool, is_short: bool) -> Result<Chain, Chain> {
    let waste = if is_short { MAX_WASTE / 2 } else { MAX_WASTE };
    let worth = chain.len().saturating_mul(waste).max(Mbuf::MIN_TRUESIZE);
    let is_wasteful = chain.truesize() > worth;
    // Payload is in the control reserve only if the receive share was exhausted.
    let is_pool_short = pool.available(Purpose::Receive) < chain.truesize();
    let is_reserve = is_pool_short && chain.iter().any(|m| m.purpose() == Purpose::Control);
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

/// Detaches up to `max` bytes, once `least` bytes are readable or no more can arrive before some are read. An empty
/// chain is the end of the stream. If the same call has already returned `done` > 0 bytes, an error is left for the
/// next call and the chain is empty.
///
/// # Errors
/// The connection's error, after all bytes received before it have been read.
pub fn take_at_least(
    tcb: &mut Tcb,
    pool: &mut Pool,
    max: usize,
    least: usize,
    done: usize,
) -> Result<Poll<Chain>, SocketError> {
    let queued = tcb.recv_queue().readable();
    if done > 0 && queued == 0 && (tcb.has_error() || is_final(tcb)) {
        return Ok(Poll::Ready(Chain::new()));
    }
    if queued < least && may_get_more(tcb) {
        return Ok(Poll::Pending);
    }
    match readable(tcb)? {
        Poll::Ready(0) => Ok(Poll::Ready(Chain::new())),
        Poll::Ready(_) => {
            let chain = tcb.recv_queue().take(max, pool);
            // The chain is also empty if the pool is exhausted, which is not the end of the stream.
            Ok(if chain.is_empty() { Poll::Pending } else { Poll::Ready(chain) })
        }
        Poll::Pending => Ok(Poll::Pending),
    }
}

/// References to up to `max` bytes at `off`, which stay in the queue, once `least` are readable or no more
/// can arrive. An empty chain is the end of the stream, or `off` is beyond the readable bytes.
///
/// # Errors
/// As [`take_at_least`].
pub fn peek_at(
    tcb: &mut Tcb,
    pool: &mut Pool,
    off: usize,
    max: usize,
    least: usize,
) -> Result<Poll<Chain>, SocketError> {
    let wanted = off.saturating_add(least);
    let queued = tcb.recv_queue().readable();
    if queued < wanted && may_get_more(tcb) {
        return Ok(Poll::Pending);
    }
    match readable(tcb)? {
        Poll::Ready(n) if n > off => {
            let chain = tcb.recv_queue().share(off, max, pool);
            Ok(if chain.is_empty() { Poll::Pending } else { Poll::Ready(chain) })
        }
        Poll::Ready(_) => Ok(Poll::Ready(Chain::new())),
        Poll::Pending => Ok(Poll::Pending),
    }
}

/// Whether no more bytes will arrive.
fn is_final(tcb: &Tcb) -> bool {
    tcb.peer_closed() || !tcb.can_recv() || tcb.state() == State::Closed
}

/// Whether more bytes can arrive before some are read: the stream has not ended, and the window is open.
pub(crate) fn may_get_more(tcb: &Tcb) -> bool {
    let has_some = tcb.recv_queue_ref().readable() > 0;
    let is_stuck = has_some && tcb.is_recv_window_closed();
    !(is_final(tcb) || tcb.has_error() || is_stuck)
}

/// Whether everything up to the peer's FIN was read. An error after that is for a writer (as on Linux).
pub fn has_ended(tcb: &Tcb) -> bool {
    tcb.peer_closed() && tcb.at_eof()
}

/// The number of readable bytes, 0 at the end of the stream.
fn readable(tcb: &mut Tcb) -> Result<Poll<usize>, SocketError> {
    let ready = tcb.recv_queue().readable();
    if ready > 0 {
        return Ok(Poll::Ready(ready));
    }
    if has_ended(tcb) {
        return Ok(Poll::Ready(0));
    }
    if let Some(e) = tcb.take_error() {
        return Err(e.into());
    }
    if tcb.at_eof() || !tcb.can_recv() {
        return Ok(Poll::Ready(0));
    }
    match tcb.state() {
        State::Closed => Err(SocketError::NotConnected),
        _ => Ok(Poll::Pending),
    }
}
