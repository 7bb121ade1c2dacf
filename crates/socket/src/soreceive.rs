//! soreceive: a read. The data is detached from the receive buffer as a chain under the shard lock,
//! copied outside it, and given back to the pool with the window update.

use fulmar_mbuf::{Chain, Pool};
use fulmar_tcp::{State, Tcb};

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
