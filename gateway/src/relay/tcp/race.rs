//! The connection to a name with several addresses (RFC 8305): the next address is tried when the earlier ones have
//! failed or were silent for [`DELAY`]; the first that answers is the connection, and the others are given up.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};

use fulmar_stack::base::{Duration, Instant, SlotId};
use nix::errno::Errno;
use smallvec::SmallVec;

use super::super::{Candidates, host_socket};

/// The connection attempt delay (RFC 8305 section 5).
pub(super) const DELAY: Duration = Duration::from_millis(250);
/// Attempts under way beside the first.
const MOST_RIVALS: usize = 3;

/// What a flow has left to try, and what it tries beside its socket.
pub(super) struct Race {
    /// In reverse order.
    left: Candidates,
    rivals: SmallVec<[(TcpStream, SocketAddr); 1]>,
}

/// How an attempt stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Standing {
    Waits,
    Connected,
    Failed(Errno),
}

/// How the connect of a socket stands. Reading an error clears it.
fn standing(stream: &TcpStream) -> Standing {
    match host_socket::outcome(stream) {
        Err(errno) => Standing::Failed(errno),
        Ok(()) if stream.peer_addr().is_ok() => Standing::Connected,
        Ok(()) => Standing::Waits,
    }
}

impl Race {
    /// For the addresses behind the first. `None`: there are none.
    pub(super) fn new(candidates: &[SocketAddr]) -> Option<Box<Race>> {
        let left: Candidates = candidates.iter().skip(1).rev().copied().collect();
        (!left.is_empty()).then(|| Box::new(Race { left, rivals: SmallVec::new() }))
    }

    /// The next address to try, if another attempt may be under way.
    pub(super) fn next(&mut self) -> Option<SocketAddr> {
        if self.rivals.len() < MOST_RIVALS { self.left.pop() } else { None }
    }

    pub(super) fn add(&mut self, stream: TcpStream, to: SocketAddr) {
        self.rivals.push((stream, to));
    }

    /// How the race stands. The flow's own socket becomes the one that has connected, or where it has failed one that
    /// still waits.
    pub(super) fn settle(&mut self, own: &mut TcpStream, address: &mut SocketAddr) -> Standing {
        let of_own = standing(own);
        if of_own == Standing::Connected {
            return of_own;
        }
        let mut at = 0;
        while let Some((stream, _)) = self.rivals.get(at) {
            match standing(stream) {
                Standing::Connected => {
                    (*own, *address) = self.rivals.remove(at);
                    return Standing::Connected;
                }
                Standing::Failed(_) => drop(self.rivals.remove(at)),
                Standing::Waits => at += 1,
            }
        }
        match (of_own, self.rivals.pop()) {
            (Standing::Failed(_), Some(rival)) => {
                (*own, *address) = rival;
                Standing::Waits
            }
            (_, rival) => {
                self.rivals.extend(rival);
                of_own
            }
        }
    }

    pub(super) fn has_more(&self) -> bool {
        !self.left.is_empty() && self.rivals.len() < MOST_RIVALS
    }
}

/// When flows try their next address: all wait equally long, so the queue is in order.
#[derive(Default)]
pub(super) struct Delays(VecDeque<(Instant, SlotId)>);

impl Delays {
    pub(super) fn push(&mut self, now: Instant, id: SlotId) {
        self.0.push_back((now + DELAY, id));
    }

    pub(super) fn pop(&mut self, now: Instant) -> Option<SlotId> {
        let is_due = self.0.front().is_some_and(|(at, _)| *at <= now);
        if is_due { self.0.pop_front().map(|(_, id)| id) } else { None }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.0.front().map(|(at, _)| *at)
    }
}
