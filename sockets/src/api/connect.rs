//! Connections of a program: with and without options that are set before the SYN.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use crate::runtime::Limit;
use fulmar_stack::shard::{FirstData, SocketOptions};

use crate::api::socket::{Socket, check_timeout, each_address, to_io};
use crate::api::stack::Stack;
use crate::api::tcp::{TcpStream, connect, open, owner_of, valid_options};

/// Options of a connection that is to be opened: see [`TcpStream::connect_with`].
///
/// ```
/// use fulmar::{ConnectOptions, SocketOptions};
///
/// let options = ConnectOptions {
///     local: Some("10.0.0.2:0".parse()?),
///     socket: SocketOptions { nodelay: true, ..SocketOptions::default() },
///     ..ConnectOptions::default()
/// };
/// # assert!(options.socket.nodelay);
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
///
/// Fields are added in minor versions: end a literal with `..ConnectOptions::default()`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConnectOptions {
    /// The local end; the unspecified address or port 0: of the stack's choice. With
    /// [`Builder::any_ip`](crate::Builder::any_ip) the address of any host, as a gateway's that keeps the client's.
    pub local: Option<SocketAddr>,
    /// Options of the socket, which hold from the SYN on.
    pub socket: SocketOptions,
}

impl TcpStream {
    /// Connects to the first address that answers. Names are resolved by the system's resolver.
    ///
    /// # Errors
    /// Those of `connect(2)`.
    pub fn connect(stack: &Stack, addr: impl ToSocketAddrs) -> io::Result<TcpStream> {
        each_address(addr, |a| connect(stack, None, a, Limit::Forever, |_| ()))
    }

    /// Connects, within `timeout`. [`TcpStream::connect_with`] does so with options.
    ///
    /// # Errors
    /// `TimedOut`, `InvalidInput` for zero, and the errors of `connect(2)`.
    pub fn connect_timeout(
        stack: &Stack,
        addr: &SocketAddr,
        timeout: Duration,
    ) -> io::Result<TcpStream> {
        check_timeout(timeout)?;
        connect(stack, None, *addr, Limit::For(timeout), |_| ())
    }

    /// Connects with options that are set before the SYN, within `timeout` (`None`: no limit).
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use fulmar::{ConnectOptions, SocketOptions, Stack, TcpListener, TcpStream, devices};
    /// # fn main() -> std::io::Result<()> {
    /// # let (a, b) = devices::link_pair()?;
    /// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse()?).build()?;
    /// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse()?).build()?;
    /// # let listener = TcpListener::bind(&server, "10.0.0.1:80")?;
    /// let options = ConnectOptions {
    ///     local: Some("10.0.0.2:0".parse().unwrap()),
    ///     socket: SocketOptions { nodelay: true, ..SocketOptions::default() },
    /// };
    /// let to = "10.0.0.1:80".parse().unwrap();
    /// let stream = TcpStream::connect_with(&stack, &to, &options, Some(Duration::from_secs(10)))?;
    /// # drop(stream);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`TcpStream::connect_timeout`]; `AddrInUse`; `AddrNotAvailable` for a local address that is not the stack's;
    /// `InvalidInput` for a time to live of 0 or a segment outside 88 to 32,767 bytes.
    pub fn connect_with(
        stack: &Stack,
        addr: &SocketAddr,
        options: &ConnectOptions,
        timeout: Option<Duration>,
    ) -> io::Result<TcpStream> {
        timeout.map_or(Ok(()), check_timeout)?;
        let set = valid_options(options.socket)?;
        let limit = timeout.map_or(Limit::Forever, Limit::For);
        connect(stack, options.local, *addr, limit, |entry| entry.set_options(&set))
    }

    /// Starts a connection and does not wait for the handshake. The returned stream is non-blocking. It is writable
    /// when the handshake has ended; then [`TcpStream::take_error`] has its result.
    ///
    /// # Errors
    /// Errors before the SYN: no route, no free port, `AddrInUse`; `AddrNotAvailable` for a local address that is not the
    /// stack's; `InvalidInput` for a time to live of 0 or a segment outside 88 to 32,767 bytes.
    pub fn connect_nonblocking(
        stack: &Stack,
        addr: &SocketAddr,
        options: &ConnectOptions,
    ) -> io::Result<TcpStream> {
        let set = valid_options(options.socket)?;
        let socket = open(stack, options.local, *addr, |entry| entry.set_options(&set))?;
        socket.set_nonblocking(true);
        Ok(TcpStream { socket })
    }

    /// Connects and sends first data, without waiting for the handshake: with the SYN if the server has given this
    /// stack a Fast Open cookie before (RFC 7413; Linux: MSG_FASTOPEN, macOS: connectx), and otherwise right after the
    /// handshake, in which the SYN asks for a cookie. Returns how many bytes were accepted, all if the send buffer has
    /// space for them. Calls of the stream wait as on any stream; the first call reports if the connection failed.
    ///
    /// `first` is the data; as a [`FirstData`] it can ask for more: with [`FirstData::without_cookie`] the SYN carries data without a cookie.
    ///
    /// **The data may arrive twice**, in two connections (RFC 7413 section 2.1): a request must be one that does no harm
    /// if it is done again. A server that refuses, or a path that loses such SYNs twice in a row, is not tried
    /// again for 15 minutes and then for longer.
    ///
    /// ```
    /// # use fulmar::tcp::FastOpenOptions;
    /// # use fulmar::{ConnectOptions, ListenOptions, Stack, TcpListener, TcpStream, devices};
    /// # use std::io::{Read, Write};
    /// # fn main() -> std::io::Result<()> {
    /// # let (a, b) = devices::link_pair().unwrap();
    /// # let server = Stack::builder().device(a).address("10.0.0.1/24".parse().unwrap()).build().unwrap();
    /// # let stack = Stack::builder().device(b).address("10.0.0.2/24".parse().unwrap()).build().unwrap();
    /// let options = ListenOptions { fast_open: Some(FastOpenOptions::default()), ..Default::default() };
    /// let listener = TcpListener::bind_with(&server, "10.0.0.1:80", options)?;
    /// # std::thread::spawn(move || {
    /// #     for stream in listener.incoming() {
    /// #         let mut stream = stream.unwrap();
    /// #         let mut request = [0; 5];
    /// #         stream.read_exact(&mut request).unwrap();
    /// #         stream.write_all(b"world").unwrap();
    /// #     }
    /// # });
    /// let to = "10.0.0.1:80".parse().unwrap();
    /// for _ in 0..2 {
    ///     let (mut stream, sent) = TcpStream::connect_first(&stack, &to, &ConnectOptions::default(), b"hello")?;
    ///     stream.write_all(&b"hello"[sent..])?;
    ///     let mut answer = [0; 5];
    ///     stream.read_exact(&mut answer)?;
    /// #   assert_eq!(&answer, b"world");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`TcpStream::connect_nonblocking`].
    pub fn connect_first<'a>(
        stack: &Stack,
        addr: &SocketAddr,
        options: &ConnectOptions,
        first: impl Into<FirstData<'a>>,
    ) -> io::Result<(TcpStream, usize)> {
        let set = valid_options(options.socket)?;
        let first = first.into();
        let owner = owner_of(stack, options.local, *addr)?;
        let host = stack.inner.host(owner);
        let opened = host.call(|shard, now| {
            shard
                .tcp_connect_fast(now, *addr, options.local, first, |entry| entry.set_options(&set))
        });
        let (id, accepted) = opened.map_err(to_io)?;
        let socket = Socket::new(Arc::clone(&stack.inner), owner, id);
        Ok((TcpStream { socket }, accepted))
    }
}
