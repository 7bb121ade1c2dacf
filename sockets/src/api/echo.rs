//! Echo requests to addresses of other hosts.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::runtime::Request;
use fulmar_stack::ip::{EchoId, InvokingPacket, SentError};
use fulmar_stack::socket::Ready;

use crate::api::socket::Socket;
use crate::api::stack::Stack;

/// An ICMP echo request ("ping") to an address that is not the stack's own.
///
/// ```
/// # use std::time::Duration;
/// # use fulmar::{Stack, devices};
/// use fulmar::icmp::EchoSocket;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let stack = Stack::builder().device(a).address("10.0.0.1/24".parse()?).any_ip(true).unlisted().build()?;
/// # let echo = EchoSocket::open(&stack)?;
/// # let guest = Stack::builder().device(b).address("10.0.0.2/24".parse()?).gateway("10.0.0.1".parse()?).unlisted().build()?;
/// # let guest = std::thread::spawn(move || guest.ping("192.0.2.1".parse().unwrap(), 56, Duration::from_secs(5)));
/// let request = echo.recv()?;
/// println!("{} asks {} with {} bytes", request.from, request.to, request.payload.len());
/// # assert_eq!((request.to, request.payload.len()), ("192.0.2.1".parse()?, 56));
/// # echo.reply(&request)?;
/// # guest.join().unwrap()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct EchoRequest {
    /// Source address.
    pub from: IpAddr,
    /// Destination address.
    pub to: IpAddr,
    /// Identifier.
    pub ident: u16,
    /// Sequence number.
    pub seq: u16,
    /// Time to live or hop limit as received.
    pub ttl: u8,
    /// The bytes to echo.
    pub payload: Vec<u8>,
}

/// Takes the echo requests to addresses that are not the stack's own, in a stack with
/// [`Builder::any_ip`](crate::Builder::any_ip). There is one for each stack. It queues 256 requests of together 256 KiB; later ones are
/// dropped (`echo_buffer_full`).
///
/// ```
/// # use std::time::Duration;
/// # use fulmar::{Stack, devices};
/// use fulmar::icmp::EchoSocket;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let stack = Stack::builder().device(a).address("10.0.0.1/24".parse()?).any_ip(true).unlisted().build()?;
/// let echo = EchoSocket::open(&stack)?;
/// # let guest = Stack::builder().device(b).address("10.0.0.2/24".parse()?).gateway("10.0.0.1".parse()?).unlisted().build()?;
/// # let guest = std::thread::spawn(move || guest.ping("192.0.2.1".parse().unwrap(), 56, Duration::from_secs(5)));
/// loop {
///     let request = echo.recv()?;
///     // Here a gateway asks the host itself.
///     echo.reply(&request)?;
/// #   break;
/// }
/// # assert_eq!(guest.join().unwrap()?.from, "192.0.2.1".parse::<std::net::IpAddr>()?);
/// # Ok(())
/// # }
/// ```
pub struct EchoSocket {
    pub(crate) socket: Arc<Socket>,
}

impl EchoSocket {
    /// Opens it.
    ///
    /// # Errors
    /// `AddrInUse`: the stack has one.
    pub fn open(stack: &Stack) -> io::Result<EchoSocket> {
        // Whatever shard a request comes to, this is where it is brought.
        let socket = stack.new_socket_on(0, |shard| shard.icmp().listen())?;
        Ok(EchoSocket { socket })
    }

    /// Waits for an echo request.
    ///
    /// # Errors
    /// `WouldBlock` if non-blocking, or after the read time-out.
    pub fn recv(&self) -> io::Result<EchoRequest> {
        let s = &*self.socket;
        let r =
            s.wait(Ready::READABLE, s.read_limit(), |shard, _| shard.icmp().receive_request(s.id))?;
        Ok(self.copied(r))
    }

    /// With a payload of its own.
    pub(crate) fn copied(&self, r: fulmar_stack::ip::EchoRequest) -> EchoRequest {
        let payload = r.payload.to_vec();
        self.socket.host().post(Request::Free(r.payload));
        let (from, to, ident, seq) = (r.src, r.dst, r.ident, r.seq);
        EchoRequest { from, to, ident, seq, ttl: r.hop_limit, payload }
    }

    /// Answers a request, from the address of its destination.
    ///
    /// # Errors
    /// `HostUnreachable`, `EMSGSIZE`, `ENOBUFS`.
    pub fn reply(&self, request: &EchoRequest) -> io::Result<()> {
        let EchoRequest { from, to, ident, seq, payload, .. } = request;
        let echo = EchoId { ident: *ident, seq: *seq };
        let id = self.socket.id;
        self.socket.call(|shard, now| shard.icmp().send_reply(now, id, *to, *from, echo, payload))
    }

    /// Sends an ICMP error about a request, in the name of `router`; `None`: of the host that was asked. Within
    /// the stack's limit of ICMP errors.
    ///
    /// # Errors
    /// The stack is gone.
    pub fn send_icmp_error(
        &self,
        about: &EchoRequest,
        error: SentError,
        router: Option<IpAddr>,
    ) -> io::Result<()> {
        let EchoRequest { from, to, ident, seq, payload, .. } = about;
        let echo = EchoId { ident: *ident, seq: *seq };
        let about = InvokingPacket::echo_request(*from, *to, echo, payload, payload.len());
        self.socket.call(|shard, now| {
            shard.icmp().send_error(now, &about, error, router);
            Ok(())
        })
    }

    /// `recv` returns `WouldBlock` instead of waiting.
    ///
    /// # Errors
    /// Never.
    pub fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        self.socket.set_nonblocking(on);
        Ok(())
    }

    /// `recv` gives up with `WouldBlock` after this time.
    ///
    /// # Errors
    /// `InvalidInput` for zero.
    pub fn set_read_timeout(&self, t: Option<Duration>) -> io::Result<()> {
        self.socket.set_read_timeout(t)
    }
}

impl fmt::Debug for EchoSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EchoSocket").finish_non_exhaustive()
    }
}
