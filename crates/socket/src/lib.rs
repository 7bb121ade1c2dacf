//! Socket buffers and the steps on them: sosend, soreceive, readiness, errors.
//!
//! Every step is non-blocking and answers *done*, *wait for space* or *wait for data*; the one loop
//! that waits lives in the room `stack`. Called under the shard lock.

#![forbid(unsafe_code)]

mod error;
pub mod posted;
mod ready;
pub mod sendfile;
pub mod soreceive;
pub mod sosend;

pub use error::SocketError;
pub use ready::Ready;
pub use sosend::Reservation;

use fulmar_tcp::{State, Tcb};

/// The answer of a socket step.
#[derive(Debug)]
pub enum Step<T> {
    /// It is done.
    Done(T),
    /// It needs this many bytes of send space first.
    WaitSpace(usize),
    /// It needs this many bytes of data first.
    WaitData(usize),
}

/// What a stream socket is ready for.
pub fn stream_ready(tcb: &Tcb) -> Ready {
    let mut ready = Ready::NONE;
    let state = tcb.state();
    if matches!(state, State::SynSent | State::SynReceived) {
        return ready;
    }
    if tcb.has_error() {
        ready |= Ready::ERROR | Ready::READABLE | Ready::WRITABLE;
    }
    let queued = tcb.recv_queue_ref().readable();
    if queued > 0 {
        ready |= Ready::SOME;
    }
    let low_water = tcb.recv_low_water();
    let enough = queued >= low_water || (queued > 0 && !soreceive::may_get_more(tcb));
    if enough || tcb.at_eof() || !tcb.can_recv() {
        ready |= Ready::READABLE;
    }
    if tcb.at_eof() {
        ready |= Ready::PEER_CLOSED;
    }
    let queue = tcb.send_queue_ref();
    let usual = sosend::SEND_LOW_WATER_BYTES.min(queue.limit() / 2).max(1);
    let low_water = tcb.send_low_water().unwrap_or(usual);
    if !tcb.can_send() || queue.space() >= low_water {
        ready |= Ready::WRITABLE;
    }
    if state == State::Closed {
        ready |= Ready::CLOSED | Ready::READABLE | Ready::WRITABLE;
    }
    ready
}
