//! One flow of questions: a port of the guest and a resolver as the guest knows it.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use fulmar_stack::base::{Duration, Instant, SlotId};
use fulmar_stack::shard::TimerId;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, SockType, send, setsockopt, sockopt};
use smallvec::{SmallVec, smallvec};

use super::super::poll::Token;
use super::super::{Context, host_socket};
use super::message::{self, HEADER_BYTES, Question};
use crate::policy::Protocol;
use crate::stat::{Direction, FlowStat};

/// Most outstanding questions of a flow.
const MOST_ASKED: usize = 256;
/// Questions of the guest that wait for one answer at most: repeated ones of one flow are asked once.
const MOST_WAITING: usize = 64;
/// How long a flow lives from its last answer.
const ANSWERED: Duration = Duration::from_secs(5);
/// How long a question lives that is not answered, as long as other datagrams (nf_conntrack_udp_timeout of Linux).
const UNANSWERED: Duration = Duration::from_secs(30);

/// An outstanding question.
pub(super) struct Asked {
    /// The identifiers that the guest gave to it.
    pub guest_ids: SmallVec<[u16; 1]>,
    /// The identifier toward the servers: random, whatever the guest's are.
    pub id: u16,
    /// The message as the servers have it.
    pub message: Box<[u8]>,
    pub question: Question,
    /// The servers of the question, in order, and the number of servers that were asked.
    pub servers: SmallVec<[SocketAddr; 3]>,
    pub next: usize,
    /// When the next server is asked.
    pub next_at: Option<Instant>,
    ends: Instant,
    /// The answer of a server that has failed, if none does better.
    pub failure: Option<Box<[u8]>>,
}

impl Asked {
    /// The server that was asked last.
    pub(super) fn server(&self) -> Option<SocketAddr> {
        self.servers.get(self.next.checked_sub(1)?).copied()
    }

    pub(crate) fn has_more_servers(&self) -> bool {
        self.next < self.servers.len()
    }

    /// Whether a message answers it: of the same identifier and with the same question, letter by letter.
    fn is_answered_by(&self, answer: &[u8]) -> bool {
        let question = HEADER_BYTES..self.question.end;
        message::id(answer) == Some(self.id)
            && message::is_response(answer)
            && message::has_one_question(answer)
            && answer.get(question.clone()) == self.message.get(question)
    }

    /// Whether it is the same question, whatever its identifier is.
    fn is_like(&self, message: &[u8]) -> bool {
        self.message.get(2..) == message.get(2..)
    }
}

/// Identifiers that an outsider cannot guess: a keyed hash of a count.
#[derive(Default)]
pub(crate) struct Ids {
    key: RandomState,
    count: u64,
}

impl Ids {
    fn next(&mut self) -> u16 {
        self.count = self.count.wrapping_add(1);
        self.key.hash_one(self.count) as u16
    }
}

/// A flow.
pub(super) struct Flow {
    pub guest: SocketAddr,
    /// The resolver as the guest knows it.
    pub peer: SocketAddr,
    /// The first server, for snapshots.
    first: SocketAddr,
    /// A socket for each server that was asked, connected to it, so that the kernel takes answers of no other.
    sockets: SmallVec<[(SocketAddr, OwnedFd); 1]>,
    pub asked: Vec<Asked>,
    /// The guest has sent datagrams other than questions, and no policy refuses them: everything that a server sends is
    /// passed on.
    pub is_opaque: bool,
    /// Answers that may still arrive from other servers to questions that one server has answered.
    pub late: usize,
    pub timer: Option<TimerId>,
    datagrams_out: u64,
    datagrams_in: u64,
    bytes_out: u64,
    bytes_in: u64,
    began: Instant,
    pub moved: Instant,
}

impl Flow {
    pub(super) fn new(
        guest: SocketAddr,
        peer: SocketAddr,
        first: SocketAddr,
        now: Instant,
    ) -> Flow {
        Flow {
            guest,
            peer,
            first,
            sockets: SmallVec::new(),
            asked: Vec::new(),
            is_opaque: false,
            late: 0,
            timer: None,
            datagrams_out: 0,
            datagrams_in: 0,
            bytes_out: 0,
            bytes_in: 0,
            began: now,
            moved: now,
        }
    }

    /// Enters a question that the servers are to be asked, in order. Returns its place; `None`: the same one waits for
    /// its answer, and the guest repeats nothing.
    pub(super) fn ask(
        &mut self,
        message: &[u8],
        question: Question,
        servers: SmallVec<[SocketAddr; 3]>,
        ids: &mut Ids,
        now: Instant,
    ) -> Option<usize> {
        let guest_id = message::id(message)?;
        self.asked.retain(|a| a.ends > now);
        if let Some(at) = self.asked.iter().position(|a| a.is_like(message)) {
            let same = self.asked.get_mut(at)?;
            let is_repeated = same.guest_ids.contains(&guest_id);
            if !is_repeated && same.guest_ids.len() < MOST_WAITING {
                same.guest_ids.push(guest_id);
                return None;
            }
            (same.servers, same.next, same.ends) = (servers, 0, now + UNANSWERED);
            return Some(at);
        }
        if self.asked.len() >= MOST_ASKED {
            self.asked.remove(0);
        }
        let is_used = |id: u16| self.asked.iter().any(|a| a.id == id);
        let id = std::iter::repeat_with(|| ids.next()).find(|id| !is_used(*id))?;
        let mut bytes: Box<[u8]> = message.into();
        bytes.get_mut(..2)?.copy_from_slice(&id.to_be_bytes());
        self.asked.push(Asked {
            guest_ids: smallvec![guest_id],
            id,
            message: bytes,
            question,
            servers,
            next: 0,
            next_at: None,
            ends: now + UNANSWERED,
            failure: None,
        });
        Some(self.asked.len() - 1)
    }

    /// The place of the question that a message answers.
    pub(crate) fn answered_by(&self, answer: &[u8]) -> Option<usize> {
        self.asked.iter().position(|a| a.is_answered_by(answer))
    }

    /// When something is due: another server, or the end.
    pub(super) fn next_deadline(&self) -> Instant {
        let next = self.asked.iter().filter_map(|a| a.next_at).min();
        next.map_or(self.expires(), |next| next.min(self.expires()))
    }

    /// When it ends if no datagram passes.
    pub(super) fn expires(&self) -> Instant {
        let is_over = self.asked.is_empty() && !self.is_opaque;
        self.moved + if is_over { ANSWERED } else { UNANSWERED }
    }

    /// The servers that it has sockets for.
    pub(super) fn reached(&self) -> impl Iterator<Item = SocketAddr> {
        self.sockets.iter().map(|(server, _)| *server)
    }

    pub(crate) fn socket_to(&self, server: SocketAddr) -> Option<&OwnedFd> {
        self.sockets.iter().find(|(to, _)| *to == server).map(|(_, fd)| fd)
    }

    pub(crate) fn count_in(&mut self, bytes: usize, now: Instant) {
        self.datagrams_in += 1;
        self.bytes_in += bytes as u64;
        self.moved = now;
    }

    /// Sends to a server. `id`: the flow's own.
    pub(super) fn send(
        &mut self,
        cx: &mut Context<'_>,
        id: SlotId,
        server: SocketAddr,
        bytes: &[u8],
    ) -> nix::Result<()> {
        let sent = match self.try_to_send(cx, id, server, bytes) {
            // A socket that starts at the host's address of now.
            Err(e) if host_socket::may_be_of_lost_address(e) => {
                self.sockets.retain(|(to, _)| *to != server);
                self.try_to_send(cx, id, server, bytes)
            }
            sent => sent,
        };
        if sent.is_ok() {
            self.datagrams_out += 1;
            self.bytes_out += bytes.len() as u64;
            self.moved = cx.now;
            cx.totals.datagrams_out += 1;
            cx.totals.bytes_out += bytes.len() as u64;
        }
        sent
    }

    fn try_to_send(
        &mut self,
        cx: &Context<'_>,
        id: SlotId,
        server: SocketAddr,
        bytes: &[u8],
    ) -> nix::Result<()> {
        if self.socket_to(server).is_none() {
            let fd = open(server, cx)?;
            cx.poll
                .add_readable(fd.as_fd(), Token::Dns(id))
                .map_err(|e| host_socket::errno_of(&e))?;
            self.sockets.push((server, fd));
        }
        let Some(fd) = self.socket_to(server) else { return Ok(()) };
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        match send(fd.as_raw_fd(), bytes, flags) {
            // The error of an earlier datagram.
            Err(e) if host_socket::may_be_pending(e) => {
                send(fd.as_raw_fd(), bytes, flags).map(drop)
            }
            sent => sent.map(drop),
        }
    }

    /// A snapshot.
    pub(super) fn stat(&self, now: Instant) -> FlowStat {
        FlowStat {
            id: None,
            protocol: Protocol::Udp,
            direction: Direction::Out,
            guest: self.guest,
            peer: self.peer,
            host: self.first,
            name: None,
            rule: None,
            state: "open",
            bytes_out: self.bytes_out,
            bytes_in: self.bytes_in,
            age: now.since(self.began),
            idle: now.since(self.moved),
            tcp: None,
            host_tcp: None,
        }
    }
}

/// A socket of the host for a server.
fn open(server: SocketAddr, cx: &Context<'_>) -> nix::Result<OwnedFd> {
    let fd = host_socket::open(server.is_ipv4(), SockType::Datagram, None)?;
    host_socket::bind_outbound(&fd, server, &cx.settings.outbound)?;
    match server {
        SocketAddr::V4(_) => setsockopt(&fd, sockopt::Ipv4RecvErr, &true)?,
        SocketAddr::V6(_) => setsockopt(&fd, sockopt::Ipv6RecvErr, &true)?,
    }
    host_socket::connect_to(&fd, server)?;
    Ok(fd)
}

/// Whether an errno means that no descriptor is left.
pub(crate) fn is_without_descriptor(errno: Errno) -> bool {
    matches!(errno, Errno::EMFILE | Errno::ENFILE)
}

#[cfg(test)]
mod tests {
    use super::super::message::tests::{answered, asked};
    use super::super::message::{Code, answer_with, parse_question};
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn ask(
        flow: &mut Flow,
        ids: &mut Ids,
        guest_id: u8,
        name: &str,
        now: Instant,
    ) -> Option<usize> {
        let mut message = asked(name);
        message[1] = guest_id;
        let question = parse_question(&message).unwrap();
        flow.ask(&message, question, smallvec![at("192.0.2.53:53")], ids, now)
    }

    fn flow() -> Flow {
        Flow::new(at("10.0.0.2:9"), at("10.0.0.1:53"), at("192.0.2.53:53"), Instant::ZERO)
    }

    #[test]
    fn a_question_is_answered_by_its_identifier_and_its_letters_alone() {
        let (mut flow, mut ids) = (flow(), Ids::default());
        assert_eq!(ask(&mut flow, &mut ids, 7, "Www.Example.org", Instant::ZERO), Some(0));
        let id = flow.asked[0].id.to_be_bytes();
        let with_id = |mut message: Vec<u8>, id: [u8; 2]| {
            message[..2].copy_from_slice(&id);
            message
        };
        let right = with_id(answered("Www.Example.org", &[[192, 0, 2, 1]]), id);
        assert_eq!(flow.answered_by(&right), Some(0));
        let mut other = id;
        other[0] ^= 1;
        assert_eq!(flow.answered_by(&with_id(right.clone(), other)), None, "another identifier");
        let letters = with_id(answered("www.example.org", &[[192, 0, 2, 1]]), id);
        assert_eq!(flow.answered_by(&letters), None, "other letters");
        let mut kind = right.clone();
        kind[HEADER_BYTES + 18] = 28;
        assert_eq!(flow.answered_by(&kind), None, "another type");
        assert_eq!(flow.answered_by(&flow.asked[0].message), None, "no response");
        let refused = answer_with(Code::REFUSED, &flow.asked[0].message).unwrap();
        assert_eq!(flow.answered_by(&refused), Some(0), "an error is an answer");
        for n in 0..flow.asked[0].question.end {
            assert_eq!(flow.answered_by(&right[..n]), None, "{n}");
        }
    }

    #[test]
    fn identifiers_toward_the_server_are_not_the_guests() {
        let (mut flow, mut ids) = (flow(), Ids::default());
        for n in 0..=u8::MAX {
            ask(&mut flow, &mut ids, n, &format!("n{n}.example"), Instant::ZERO);
        }
        let own: std::collections::HashSet<u16> = flow.asked.iter().map(|a| a.id).collect();
        assert_eq!(own.len(), flow.asked.len(), "each its own");
        let same = flow.asked.iter().filter(|a| a.guest_ids[0] == a.id).count();
        assert!(same < 8, "{same}");
    }

    #[test]
    fn outstanding_questions_are_bounded_and_repeated_ones_are_asked_once() {
        let (mut flow, mut ids) = (flow(), Ids::default());
        for n in 0..2 * MOST_ASKED {
            ask(&mut flow, &mut ids, 7, &format!("n{n}.example"), Instant::ZERO);
        }
        assert_eq!(flow.asked.len(), MOST_ASKED);
        let last = format!("n{}.example", 2 * MOST_ASKED - 1);
        for n in 8..=255 {
            ask(&mut flow, &mut ids, n, &last, Instant::ZERO);
        }
        let waiting = flow.asked.last().unwrap();
        assert_eq!((flow.asked.len(), waiting.guest_ids.len()), (MOST_ASKED, MOST_WAITING));
        // The guest repeats a question: it is sent again.
        assert_eq!(ask(&mut flow, &mut ids, 7, &last, Instant::ZERO), Some(MOST_ASKED - 1));
        assert_eq!(
            ask(&mut flow, &mut ids, 7, "late.example", Instant::ZERO + UNANSWERED),
            Some(0)
        );
    }

    #[test]
    fn a_flow_lives_five_seconds_from_its_answer() {
        let (mut flow, mut ids) = (flow(), Ids::default());
        ask(&mut flow, &mut ids, 7, "example.org", Instant::ZERO);
        assert_eq!(flow.expires(), Instant::ZERO + UNANSWERED);
        let now = Instant::ZERO + Duration::from_secs(2);
        flow.asked.clear();
        flow.count_in(50, now);
        assert_eq!(flow.next_deadline(), now + ANSWERED);
    }
}
