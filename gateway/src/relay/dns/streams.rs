//! DNS over TCP (RFC 7766), where names have addresses of their own: the guest's connections to its resolvers end here.
//!
//! ```text
//!   guest ══► length, question ──► answered here ─────────────────────────────► length, answer ══► guest
//!                                     └─ other types ──► a connection to a server for each question ─┘
//! ```
//!
//! Bounds: [`MOST_STREAMS`] connections of the guest, of which the one that was idle for longest gives way, and
//! [`MOST_CONNECTIONS`] to servers. A connection that has used its part is not read until its answers have left.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::task::Poll;

use fulmar_stack::base::{Duration, Instant, SlotId};
use fulmar_stack::shard::{Reserved, Slab};
use fulmar_stack::socket::{Attempt, Ready, Shutdown};
use nix::sys::epoll::EpollFlags;

use super::message::{self, HEADER_BYTES, Question};
use super::{Addresses, Dns, Key, MOST_QUESTION_BYTES};
use crate::names::messages::{Reply, reply};
use crate::relay::poll::Token;
use crate::relay::{Context, host_socket};
use crate::stat::Refusal;

const MOST_STREAMS: usize = 64;
const MOST_CONNECTIONS: usize = 64;
/// Questions of one connection that have no answer yet.
const MOST_OPEN: usize = 8;
/// Questions that are taken of one connection in one turn.
const MOST_PER_TURN: usize = 64;
/// Answers that wait for space in the guest's window, bytes.
const MOST_UNSENT_BYTES: usize = 128 << 10;
/// How long a connection of the guest may be idle (RFC 7766 section 6.2.3: a few seconds).
const IDLE: Duration = Duration::from_secs(10);
/// The same with questions that have no answer: longer than all servers together may take.
const UNANSWERED: Duration = Duration::from_secs(30);
/// How long a server may take for its answer.
const PATIENCE: Duration = Duration::from_secs(5);
const LENGTH_BYTES: usize = 2;

/// A connection of the guest.
struct Guest {
    socket: SlotId,
    key: Key,
    read: Vec<u8>,
    unsent: Vec<u8>,
    /// Questions that have no answer yet.
    open: usize,
    has_ended: bool,
    moved: Instant,
}

/// A connection to a server, for one question.
struct Asked {
    stream: TcpStream,
    key: Key,
    /// The question as the guest sent it, whose identifier is random already where its program chose it so.
    message: Box<[u8]>,
    question: Question,
    sent: usize,
    read: Vec<u8>,
    /// The servers to ask next, in reverse order.
    left: Addresses,
    ends: Instant,
}

impl Guest {
    /// When it is closed if nothing moves.
    fn ends(&self) -> Instant {
        self.moved + if self.open == 0 { IDLE } else { UNANSWERED }
    }
}

/// The connections.
#[derive(Default)]
pub(super) struct Streams {
    guests: Slab<Guest>,
    asked: Slab<Asked>,
}

impl Streams {
    fn find(&self, key: Key) -> Option<SlotId> {
        self.guests.iter().find(|(_, guest)| guest.key == key).map(|(id, _)| id)
    }

    fn due(&self, now: Instant) -> (Option<SlotId>, Option<SlotId>) {
        let idle = self.guests.iter().find(|(_, guest)| guest.ends() <= now);
        let late = self.asked.iter().find(|(_, asked)| asked.ends <= now);
        (idle.map(|(id, _)| id), late.map(|(id, _)| id))
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let guests = self.guests.iter().map(|(_, guest)| guest.ends());
        guests.chain(self.asked.iter().map(|(_, asked)| asked.ends)).min()
    }
}

/// The key of a connection: the resolver has no port in it, since the keys of datagrams have its port.
pub(super) fn key_of(guest: SocketAddr, resolver: SocketAddr) -> Key {
    (guest, SocketAddr::new(resolver.ip(), 0))
}

/// Whether it is the key of a connection.
pub(super) fn is_stream(key: Key) -> bool {
    key.1.port() == 0
}

impl Dns {
    /// Takes a connection of the guest to a resolver.
    pub(crate) fn accept(
        &mut self,
        cx: &mut Context<'_>,
        socket: SlotId,
        guest: SocketAddr,
        resolver: SocketAddr,
    ) {
        if self.streams.guests.len() >= MOST_STREAMS {
            let oldest = self.streams.guests.iter().min_by_key(|(_, guest)| guest.moved);
            if let Some(oldest) = oldest.map(|(id, _)| id) {
                cx.refuse(Refusal::Displaced);
                self.close_stream(cx, oldest);
            }
        }
        let id = self.streams.guests.insert(Guest {
            socket,
            key: key_of(guest, resolver),
            read: Vec::new(),
            unsent: Vec::new(),
            open: 0,
            has_ended: false,
            moved: cx.now,
        });
        cx.tokens.set(socket, Token::DnsStream(id));
        let interest = Ready::READABLE.with(Ready::WRITABLE).with(Ready::PEER_CLOSED);
        cx.stack.watch(socket, Some(interest));
        cx.stack.notify(socket);
    }

    /// A connection of the guest became ready for something.
    pub(crate) fn stream_ready(&mut self, cx: &mut Context<'_>, id: SlotId) {
        let has_more = (0..MOST_PER_TURN).all(|_| self.read_stream(cx, id));
        self.flush(cx, id);
        if let Some(guest) = self.streams.guests.get(id).filter(|_| has_more) {
            cx.stack.notify(guest.socket);
        }
    }

    /// Takes what the guest has sent, up to one question. False: there is no more to do now.
    fn read_stream(&mut self, cx: &mut Context<'_>, id: SlotId) -> bool {
        let Some(guest) = self.streams.guests.get_mut(id) else { return false };
        if guest.unsent.len() >= MOST_UNSENT_BYTES || guest.open >= MOST_OPEN {
            return false;
        }
        if let Some(question) = take_message(&mut guest.read) {
            let key = guest.key;
            (guest.moved, guest.open) = (cx.now, guest.open + 1);
            // The mapping has the resolver by its port.
            let servers = cx.settings.mapping.servers(SocketAddr::new(key.1.ip(), super::PORT));
            // A connection is answered by itself, not by an ICMP error.
            let _ = self.take_message(cx, key, &question, &servers);
            return true;
        }
        if guest.has_ended {
            return false;
        }
        match cx.stack.tcp_take(guest.socket, LENGTH_BYTES + MOST_QUESTION_BYTES) {
            Ok(Poll::Ready(chain)) => {
                guest.has_ended = chain.is_empty();
                chain.slices().for_each(|slice| guest.read.extend_from_slice(slice));
                let is_too_long = announced(&guest.read).is_some_and(|n| n > MOST_QUESTION_BYTES);
                cx.stack.tcp_read_done(cx.now, guest.socket, chain);
                if is_too_long {
                    self.close_stream(cx, id);
                    return false;
                }
                true
            }
            Ok(Poll::Pending) => false,
            Err(_) => {
                self.close_stream(cx, id);
                false
            }
        }
    }

    /// Sends the guest an answer over its connection.
    pub(super) fn deliver_on_stream(&mut self, cx: &mut Context<'_>, key: Key, bytes: &[u8]) {
        let Some(id) = self.streams.find(key) else { return };
        let Some(guest) = self.streams.guests.get_mut(id) else { return };
        let Ok(length) = u16::try_from(bytes.len()) else { return };
        guest.unsent.extend(length.to_be_bytes());
        guest.unsent.extend_from_slice(bytes);
        cx.totals.bytes_in += bytes.len() as u64;
        guest.open = guest.open.saturating_sub(1);
        // It may not have been read because of that.
        cx.stack.notify(guest.socket);
        self.flush(cx, id);
    }

    /// Moves answers into the send buffer; ends a connection that has got all of them.
    fn flush(&mut self, cx: &mut Context<'_>, id: SlotId) {
        let Some(guest) = self.streams.guests.get_mut(id) else { return };
        while !guest.unsent.is_empty() {
            let (socket, wanted) = (guest.socket, guest.unsent.len());
            match cx.stack.sosend(socket).reserve(cx.now, &[], wanted, Attempt::First) {
                Ok(Poll::Ready(Reserved::Space(mut room))) => {
                    let mut copied = 0;
                    for part in room.chain.slices_mut() {
                        let rest = guest.unsent.get(copied..).unwrap_or_default();
                        let n = part.len().min(rest.len());
                        part.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
                        copied += n;
                    }
                    room.keep(copied);
                    cx.stack.sosend(socket).commit(cx.now, room);
                    guest.unsent.drain(..copied);
                    guest.moved = cx.now;
                    if copied == 0 {
                        return;
                    }
                }
                Ok(_) => return,
                Err(_) => return self.close_stream(cx, id),
            }
        }
        if guest.has_ended && guest.open == 0 {
            let _ = cx.stack.tcp_shutdown(cx.now, guest.socket, Shutdown::Write);
            self.close_stream(cx, id);
        }
    }

    fn close_stream(&mut self, cx: &mut Context<'_>, id: SlotId) {
        let Some(guest) = self.streams.guests.remove(id) else { return };
        cx.stack.close(cx.now, guest.socket);
        // Another connection may have the key next.
        self.lookups.forget(guest.key);
        let of_guest = self.streams.asked.iter().filter(|(_, asked)| asked.key == guest.key);
        for asked in of_guest.map(|(id, _)| id).collect::<Vec<_>>() {
            self.streams.asked.remove(asked);
        }
    }

    /// Asks servers a question of a connection, one after another.
    pub(super) fn ask_over_tcp(
        &mut self,
        cx: &mut Context<'_>,
        key: Key,
        bytes: &[u8],
        question: Question,
        servers: &Addresses,
    ) {
        let mut left = self.failed.last(servers.clone(), cx.now);
        left.reverse();
        if self.streams.asked.len() >= MOST_CONNECTIONS {
            cx.refuse(Refusal::LookupLimit);
            return self.fail_on_stream(cx, key, bytes);
        }
        if let Err(message) = self.begin_asking(cx, key, bytes.into(), question, left) {
            self.fail_on_stream(cx, key, &message);
        }
    }

    /// Connects to the first server to which that is possible.
    ///
    /// # Errors
    /// There is none; the message.
    fn begin_asking(
        &mut self,
        cx: &mut Context<'_>,
        key: Key,
        message: Box<[u8]>,
        question: Question,
        mut left: Addresses,
    ) -> Result<(), Box<[u8]>> {
        while let Some(server) = left.pop() {
            let Ok(begun) = host_socket::begin_connection(server, &cx.settings.outbound) else {
                self.failed.add(server, cx.now);
                continue;
            };
            let asked = Asked {
                stream: begun.stream,
                key,
                message,
                question,
                sent: 0,
                read: Vec::new(),
                left,
                ends: cx.now + PATIENCE,
            };
            let id = self.streams.asked.insert(asked);
            let Some(asked) = self.streams.asked.get(id) else { return Ok(()) };
            if cx.poll.add_edges(&asked.stream, Token::DnsServer(id)).is_err() {
                return self.streams.asked.remove(id).map_or(Ok(()), |asked| Err(asked.message));
            }
            return Ok(());
        }
        Err(message)
    }

    /// A connection to a server became ready for something.
    pub(crate) fn server_ready(&mut self, cx: &mut Context<'_>, id: SlotId, flags: EpollFlags) {
        let Some(asked) = self.streams.asked.get_mut(id) else { return };
        let has_failed =
            flags.contains(EpollFlags::EPOLLERR) && host_socket::outcome(&asked.stream).is_err();
        match if has_failed { Progress::Failed } else { asked.advance() } {
            Progress::Waits => {}
            Progress::Failed => self.ask_next_server(cx, id),
            Progress::Answered(answer) => {
                let Some(asked) = self.streams.asked.remove(id) else { return };
                self.deliver_on_stream(cx, asked.key, &answer);
            }
        }
    }

    fn ask_next_server(&mut self, cx: &mut Context<'_>, id: SlotId) {
        let Some(asked) = self.streams.asked.remove(id) else { return };
        let Asked { key, message, question, left, .. } = asked;
        if let Err(message) = self.begin_asking(cx, key, message, question, left) {
            self.fail_on_stream(cx, key, &message);
        }
    }

    fn fail_on_stream(&mut self, cx: &mut Context<'_>, key: Key, asked: &[u8]) {
        if let Some(answer) = reply(asked, Reply::Failed) {
            self.deliver_on_stream(cx, key, &answer);
        }
    }

    /// Ends what is idle or late.
    pub(super) fn expire_streams(&mut self, cx: &mut Context<'_>) {
        loop {
            match self.streams.due(cx.now) {
                (Some(idle), _) => self.close_stream(cx, idle),
                (_, Some(late)) => self.ask_next_server(cx, late),
                (None, None) => return,
            }
        }
    }
}

enum Progress {
    Waits,
    Answered(Vec<u8>),
    Failed,
}

impl Asked {
    /// Sends and receives what can be now.
    fn advance(&mut self) -> Progress {
        let length = (self.message.len() as u16).to_be_bytes();
        let whole = [&length[..], &self.message].concat();
        while let Some(rest) = whole.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match (&self.stream).write(rest) {
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) => {
                    return Progress::Waits;
                }
                Err(_) => return Progress::Failed,
            }
        }
        let mut bytes = [0; 4096];
        loop {
            if let Some(answer) = take_message(&mut self.read) {
                return if self.is_answered_by(&answer) {
                    Progress::Answered(answer)
                } else {
                    Progress::Failed
                };
            }
            match (&self.stream).read(&mut bytes) {
                Ok(0) => return Progress::Failed,
                Ok(n) => self.read.extend_from_slice(bytes.get(..n).unwrap_or_default()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Progress::Waits,
                Err(_) => return Progress::Failed,
            }
        }
    }

    fn is_answered_by(&self, answer: &[u8]) -> bool {
        let question = HEADER_BYTES..self.question.end;
        message::id(answer) == message::id(&self.message)
            && message::is_response(answer)
            && message::has_one_question(answer)
            && answer.get(question.clone()) == self.message.get(question)
    }
}

/// The length that precedes a message.
fn announced(bytes: &[u8]) -> Option<usize> {
    bytes.first_chunk::<LENGTH_BYTES>().map(|length| usize::from(u16::from_be_bytes(*length)))
}

/// Takes a message that is whole from the front.
fn take_message(bytes: &mut Vec<u8>) -> Option<Vec<u8>> {
    let end = LENGTH_BYTES + announced(bytes)?;
    if bytes.len() < end {
        return None;
    }
    Some(bytes.drain(..end).skip(LENGTH_BYTES).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_taken_whole_and_in_order() {
        let mut bytes = vec![0, 2, 7, 8, 0];
        assert_eq!(take_message(&mut bytes), Some(vec![7, 8]));
        assert_eq!(take_message(&mut bytes), None);
        bytes.extend([1, 9, 0, 0]);
        assert_eq!(take_message(&mut bytes), Some(vec![9]));
        assert_eq!((take_message(&mut bytes), bytes), (Some(vec![]), vec![]));
    }
}
