//! The connection to a name with several addresses (RFC 8305): the next address is tried when the earlier ones have
//! failed or were silent for [`DELAY`]; the first that answers is the connection, and the others are given up.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};

use fulmar_stack::base::{Duration, Instant, SlotId};
use nix::errno::Errno;
use smallvec::SmallVec;

use super::super::host_socket;
use super::super::way::{Candidate, Candidates, Grant};

/// The connection attempt delay (RFC 8305 section 5).
pub(super) const DELAY: Duration = Duration::from_millis(250);
/// Attempts under way for one flow.
pub(super) const MOST_ATTEMPTS: usize = 4;
const MOST_RIVALS: usize = MOST_ATTEMPTS - 1;

/// What a flow has left to try, and what it tries beside its socket.
pub(super) struct Race {
    /// In reverse order.
    left: Candidates,
    rivals: SmallVec<[(TcpStream, Candidate); 1]>,
}

/// The attempt that a flow has as its own: socket, address, rule and bounds.
pub(super) type Own<'a> = (&'a mut TcpStream, &'a mut SocketAddr, &'a mut Grant);

/// Makes an attempt the flow's own.
fn replace(own: &mut Own<'_>, stream: TcpStream, of: Candidate) {
    (*own.0, *own.1, *own.2) = (stream, of.to, of.grant);
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
    /// For the addresses after the first, in reverse order. `None`: there are none.
    pub(super) fn new(left: Candidates) -> Option<Box<Race>> {
        (!left.is_empty()).then(|| Box::new(Race { left, rivals: SmallVec::new() }))
    }

    /// The next address to try, if another attempt may be under way.
    pub(super) fn next(&mut self) -> Option<Candidate> {
        if self.rivals.len() < MOST_RIVALS { self.left.pop() } else { None }
    }

    /// The grants of the attempts beside the flow's own.
    pub(super) fn grants(&self) -> impl Iterator<Item = &Grant> {
        self.rivals.iter().map(|(_, of)| &of.grant)
    }

    pub(super) fn add(&mut self, stream: TcpStream, of: Candidate) {
        self.rivals.push((stream, of));
    }

    /// How the race stands. The flow's own socket becomes the one that has connected, or where it has failed one that
    /// still waits.
    pub(super) fn settle(&mut self, own: &mut Own<'_>) -> Standing {
        let of_own = standing(own.0);
        if of_own == Standing::Connected {
            return of_own;
        }
        let mut at = 0;
        while let Some((stream, _)) = self.rivals.get(at) {
            match standing(stream) {
                Standing::Connected => {
                    let (stream, of) = self.rivals.remove(at);
                    replace(own, stream, of);
                    return Standing::Connected;
                }
                Standing::Failed(_) => drop(self.rivals.remove(at)),
                Standing::Waits => at += 1,
            }
        }
        match (of_own, self.rivals.pop()) {
            (Standing::Failed(_), Some((stream, of))) => {
                replace(own, stream, of);
                Standing::Waits
            }
            (_, rival) => {
                self.rivals.extend(rival);
                of_own
            }
        }
    }

    /// Whether an address was not tried yet.
    pub(super) fn has_left(&self) -> bool {
        !self.left.is_empty()
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

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use nix::sys::socket::{Backlog, listen};

    use super::*;
    use crate::config::Outbound;

    fn begin(to: SocketAddr) -> TcpStream {
        host_socket::begin_connection(to, &Outbound::default()).unwrap().stream
    }

    /// A listener that answers, and the kernel's answer has come.
    fn connected() -> (TcpListener, TcpStream, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let stream = begin(to);
        listener.accept().unwrap();
        while standing(&stream) != Standing::Connected {}
        (listener, stream, to)
    }

    /// An address that drops SYNs, because its accept queue is full.
    fn silent() -> (TcpListener, Vec<TcpStream>, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listen(&listener, Backlog::new(0).unwrap()).unwrap();
        let to = listener.local_addr().unwrap();
        let filling = vec![begin(to), begin(to), begin(to)];
        (listener, filling, to)
    }

    /// An attempt that was reset.
    fn failed() -> (TcpStream, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let stream = begin(to);
        let (far, _) = listener.accept().unwrap();
        host_socket::set_stream_options(&far);
        drop(far);
        while stream.peer_addr().is_ok() {}
        (stream, to)
    }

    fn candidate(to: SocketAddr, rule: &str) -> Candidate {
        Candidate { to, grant: Grant { rule: Some(rule.into()), ..Grant::default() } }
    }

    /// A race over these rivals.
    fn race(rivals: Vec<(TcpStream, Candidate)>) -> Race {
        Race { left: Candidates::new(), rivals: rivals.into_iter().collect() }
    }

    #[test]
    fn a_rival_that_connects_takes_the_place_of_a_silent_attempt() {
        let (_full, _filling, silent) = silent();
        let (_listener, winner, at) = connected();
        let (mut own, mut address, mut grant) = (begin(silent), silent, Grant::default());
        assert_eq!(standing(&own), Standing::Waits);
        let rival = (begin(silent), candidate(silent, "a"));
        let mut race = race(vec![rival, (winner, candidate(at, "b"))]);
        let settled = race.settle(&mut (&mut own, &mut address, &mut grant));
        assert_eq!(settled, Standing::Connected);
        assert_eq!((address, own.peer_addr().unwrap()), (at, at));
        assert_eq!(grant.rule.as_deref(), Some("b"), "the rule is that of its address");
    }

    #[test]
    fn a_failed_attempt_gives_way_to_one_that_waits_and_the_last_failure_is_told() {
        let (_full, _filling, silent) = silent();
        let ((mut own, mut address), mut grant) = (failed(), Grant::default());
        let mut with_rival = race(vec![(begin(silent), candidate(silent, "a"))]);
        let how = with_rival.settle(&mut (&mut own, &mut address, &mut grant));
        assert_eq!((how, address), (Standing::Waits, silent));
        let (mut own, mut address) = failed();
        let how = race(Vec::new()).settle(&mut (&mut own, &mut address, &mut grant));
        assert_eq!(how, Standing::Failed(Errno::ECONNRESET));
    }

    #[test]
    fn delays_end_in_order_and_not_before_their_time() {
        let (mut delays, now) = (Delays::default(), Instant::ZERO);
        let id = |index| SlotId { index, generation: 0 };
        delays.push(now, id(1));
        delays.push(now + Duration::from_millis(9), id(2));
        assert_eq!((delays.next_deadline(), delays.pop(now)), (Some(now + DELAY), None));
        assert_eq!(delays.pop(now + DELAY), Some(id(1)));
        assert_eq!(delays.pop(now + DELAY), None);
    }
}
