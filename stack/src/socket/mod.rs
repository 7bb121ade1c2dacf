//! Socket operations on the buffers of a connection: sosend, soreceive, sendfile, posted receive, readiness
//! and errors.
//!
//! Each operation is non-blocking and returns a `Poll`; the caller waits
//! and repeats it. All are called under the shard lock.

#![forbid(unsafe_code)]

mod error;
pub mod posted;
mod ready;
pub mod sendfile;
pub mod soreceive;
pub mod sosend;

pub use error::SocketError;
pub use ready::{Ready, fmt_flags};
pub use soreceive::Least;
pub use sosend::{Attempt, Reservation};

use crate::tcp::{State, Tcb};

/// The directions that shutdown(2) closes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shutdown {
    /// SHUT_RD: no more is read.
    Read,
    /// SHUT_WR: no more is written; the peer gets a FIN.
    Write,
    /// SHUT_RDWR.
    Both,
}

/// The readiness of a stream socket.
pub fn stream_ready(tcb: &Tcb) -> Ready {
    let mut ready = Ready::NONE;
    let state = tcb.state();
    let is_opening = matches!(state, State::SynSent | State::SynReceived);
    if is_opening && !tcb.is_open_early() {
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
    if !tcb.can_send() || tcb.write_space() >= low_water {
        ready |= Ready::WRITABLE;
    }
    if matches!(state, State::Closed | State::TimeWait) {
        ready |= Ready::CLOSED | Ready::READABLE | Ready::WRITABLE;
    }
    ready
}
