//! The epoll set of the relay, and the tokens of its descriptors and of the shard's sockets.

use std::io;
use std::os::fd::AsFd;

use super::sys::with_descriptor;
use fulmar_stack::base::{Duration, Instant, SlotId};
use fulmar_stack::device::{Interest, WakeFd};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

/// Most events that one call returns.
const MOST_EVENTS: usize = 256;

/// The owner of a descriptor, or of a socket of the shard: the token of its events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Token {
    /// The guest's interface.
    Device,
    /// A descriptor with a handler.
    Handler(SlotId),
    /// A TCP flow.
    Tcp(SlotId),
    /// A published TCP port, or the shard's listener.
    TcpListener(SlotId),
    /// A UDP flow.
    Udp(SlotId),
    /// A published UDP port, or the shard's socket.
    UdpListener(SlotId),
    /// A flow of echo requests.
    Echo(SlotId),
    /// The threads of the other queues.
    Siblings,
    /// A flow of DNS.
    Dns(SlotId),
    /// A connection of the guest for DNS.
    DnsStream(SlotId),
    /// A connection to a DNS server.
    DnsServer(SlotId),
}

/// Bits of a slot's index in an event. A table with more slots would need more memory than the limits allow.
const INDEX_BITS: u32 = 28;

impl Token {
    fn encode(self) -> u64 {
        let none = SlotId { index: 0, generation: 0 };
        let (kind, id) = match self {
            Token::Device => (0, none),
            Token::Handler(id) => (1, id),
            Token::Tcp(id) => (2, id),
            Token::TcpListener(id) => (3, id),
            Token::Udp(id) => (4, id),
            Token::UdpListener(id) => (5, id),
            Token::Echo(id) => (6, id),
            Token::Siblings => (7, none),
            Token::Dns(id) => (8, id),
            Token::DnsStream(id) => (9, id),
            Token::DnsServer(id) => (10, id),
        };
        let index = u64::from(id.index & ((1 << INDEX_BITS) - 1));
        kind << 60 | index << 32 | u64::from(id.generation)
    }

    fn decode(bits: u64) -> Token {
        let index = (bits >> 32) as u32 & ((1 << INDEX_BITS) - 1);
        let id = SlotId { index, generation: bits as u32 };
        match bits >> 60 {
            1 => Token::Handler(id),
            2 => Token::Tcp(id),
            3 => Token::TcpListener(id),
            4 => Token::Udp(id),
            5 => Token::UdpListener(id),
            6 => Token::Echo(id),
            7 => Token::Siblings,
            8 => Token::Dns(id),
            9 => Token::DnsStream(id),
            10 => Token::DnsServer(id),
            _ => Token::Device,
        }
    }
}

/// The epoll set of a relay.
pub(crate) struct Poll {
    epoll: Epoll,
    /// The descriptor of the device and what is waited for, as registered.
    device: Option<WakeFd>,
}

/// The result of [`Poll::wait`].
pub(crate) struct Events {
    list: Vec<EpollEvent>,
    len: usize,
}

impl Default for Events {
    fn default() -> Self {
        Events { list: vec![EpollEvent::empty(); MOST_EVENTS], len: 0 }
    }
}

impl Events {
    /// How many came.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether one of them has this token.
    pub(crate) fn has(&self, wanted: Token) -> bool {
        self.iter().any(|(token, _)| token == wanted)
    }

    /// The events in their order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Token, EpollFlags)> {
        let came = self.list.iter().take(self.len);
        came.map(|event| (Token::decode(event.data()), event.events()))
    }
}

/// The events that a relayed socket is registered for, once for its life.
pub(crate) const EDGES: EpollFlags = EpollFlags::EPOLLIN
    .union(EpollFlags::EPOLLOUT)
    .union(EpollFlags::EPOLLRDHUP)
    .union(EpollFlags::EPOLLPRI)
    .union(EpollFlags::EPOLLET);

impl Poll {
    /// An empty set.
    ///
    /// # Errors
    /// No descriptor.
    pub(crate) fn new() -> io::Result<Poll> {
        Ok(Poll { epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?, device: None })
    }

    /// Watches a socket for whatever becomes possible (edge-triggered).
    pub(crate) fn add_edges(&self, fd: impl AsFd, token: Token) -> io::Result<()> {
        Ok(self.epoll.add(fd, EpollEvent::new(EDGES, token.encode()))?)
    }

    /// Has the edges of a watched descriptor reported again, as far as they still hold.
    pub(crate) fn repeat_edges(&self, fd: impl AsFd, token: Token) -> io::Result<()> {
        Ok(self.epoll.modify(fd, &mut EpollEvent::new(EDGES, token.encode()))?)
    }

    /// Watches a descriptor for readability (level-triggered).
    pub(crate) fn add_readable(&self, fd: impl AsFd, token: Token) -> io::Result<()> {
        Ok(self.epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, token.encode()))?)
    }

    /// Watches a descriptor for readability, once for each arrival (edge-triggered).
    pub(crate) fn add_arrivals(&self, fd: impl AsFd, token: Token) -> io::Result<()> {
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        Ok(self.epoll.add(fd, EpollEvent::new(flags, token.encode()))?)
    }

    /// No longer watches a descriptor.
    pub(crate) fn remove(&self, fd: impl AsFd) {
        // A descriptor that is not in the set is not watched.
        let _ = self.epoll.delete(fd);
    }

    /// Watches the device for the events that it waits for now. To be called before each sleep; the kernel is called on
    /// a change alone.
    pub(crate) fn watch_device(&mut self, wake: Option<WakeFd>) -> io::Result<()> {
        if wake == self.device {
            return Ok(());
        }
        if let Some(old) = self.device.take() {
            with_descriptor(old, |fd| self.remove(fd));
        }
        if let Some(wake) = wake {
            let mut flags = EpollFlags::EPOLLIN;
            if wake.interest == Interest::ReadableOrWritable {
                flags |= EpollFlags::EPOLLOUT;
            }
            let event = EpollEvent::new(flags, Token::Device.encode());
            with_descriptor(wake, |fd| self.epoll.add(fd, event))?;
            self.device = Some(wake);
        }
        Ok(())
    }

    /// Sleeps until something happens or `until` passes; `None`: for as long as it takes.
    pub(crate) fn wait(
        &self,
        events: &mut Events,
        now: Instant,
        until: Option<Instant>,
    ) -> io::Result<usize> {
        let timeout = match until.map(|at| at.since(now)) {
            None => EpollTimeout::NONE,
            Some(Duration::ZERO) => EpollTimeout::ZERO,
            // Rounded up: to wake too early would be to wake twice.
            Some(time) => EpollTimeout::try_from(time + Duration::from_micros(999))
                .unwrap_or(EpollTimeout::MAX),
        };
        events.len = match self.epoll.wait(&mut events.list, timeout) {
            Err(nix::Error::EINTR) => 0,
            came => came?,
        };
        Ok(events.len)
    }
}

/// The tokens of a shard's sockets.
#[derive(Default)]
pub(crate) struct Tokens(Vec<Option<(u32, Token)>>);

impl Tokens {
    /// Gives a socket its token.
    pub(crate) fn set(&mut self, socket: SlotId, token: Token) {
        let at = socket.index as usize;
        if self.0.len() <= at {
            self.0.resize(at + 1, None);
        }
        self.0[at] = Some((socket.generation, token));
    }

    /// Whose a socket is.
    pub(crate) fn of(&self, socket: SlotId) -> Option<Token> {
        let (generation, token) = (*self.0.get(socket.index as usize)?)?;
        (generation == socket.generation).then_some(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_survive_the_round_trip_through_the_kernel() {
        let id = SlotId { index: (1 << INDEX_BITS) - 1, generation: u32::MAX };
        for token in [
            Token::Device,
            Token::Handler(id),
            Token::Tcp(id),
            Token::TcpListener(id),
            Token::Udp(id),
            Token::UdpListener(id),
            Token::Echo(id),
            Token::Siblings,
            Token::Dns(id),
        ] {
            assert_eq!(Token::decode(token.encode()), token);
        }
    }

    #[test]
    fn a_socket_that_is_gone_is_nobodys() {
        let mut tokens = Tokens::default();
        let id = SlotId { index: 3, generation: 1 };
        tokens.set(id, Token::Tcp(id));
        assert_eq!(tokens.of(id), Some(Token::Tcp(id)));
        assert_eq!(tokens.of(SlotId { generation: 2, ..id }), None);
        assert_eq!(tokens.of(SlotId { index: 2, ..id }), None);
    }
}
