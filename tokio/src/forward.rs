//! A program in place of every server: connections and datagrams to any address.

mod space;
mod udp;

use std::future::Future;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use fulmar::ListenOptions;
use fulmar::tcp::ConditionalAccept;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::{Net, TcpListener, TcpStream};
pub use udp::{UdpFlow, forward_udp};

/// Every address and port of both IP versions.
const EVERY: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);
/// Code 1 of ICMP's type 3: host unreachable.
const HOST_UNREACHABLE: u8 = 1;
/// Code 3 of ICMPv6's type 1: address unreachable.
const ADDRESS_UNREACHABLE: u8 = 3;

/// A connection whose SYN is not answered yet: see [`fulmar::PendingConnection`]. [`forward`] gives each to a task, and
/// [`TcpListener::pending`] returns the next.
///
/// ```
/// # use fulmar::tcp::ConditionalAccept;
/// # use fulmar::{ListenOptions, Stack, devices};
/// # use fulmar_tokio::{Net, TcpListener, TcpStream};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// # let (a, b) = devices::link_pair()?;
/// # let server = Net::new(Stack::builder().device(a).address("10.0.0.1/24".parse()?).unlisted().build()?)?;
/// # let net = Net::new(Stack::builder().device(b).address("10.0.0.2/24".parse()?).unlisted().build()?)?;
/// let options = ListenOptions {
///     conditional_accept: Some(ConditionalAccept::default()),
///     ..ListenOptions::default()
/// };
/// let listener = TcpListener::bind_with(&server, "10.0.0.1:80", options).await?;
/// # tokio::spawn(async move { TcpStream::connect(&net, "10.0.0.1:80").await });
/// let pending = listener.pending().await?;
/// match pending.peer_addr().ip().to_string().as_str() {
///     "10.0.0.2" => drop(pending.accept()?),
///     _ => pending.refuse()?,
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PendingConnection {
    pub(crate) pending: fulmar::PendingConnection,
    pub(crate) net: Net,
}

impl PendingConnection {
    /// The peer's address.
    pub fn peer_addr(&self) -> SocketAddr {
        self.pending.peer_addr()
    }

    /// The destination of the SYN.
    pub fn local_addr(&self) -> SocketAddr {
        self.pending.local_addr()
    }

    /// Accepts it.
    ///
    /// # Errors
    /// As [`fulmar::PendingConnection::accept`].
    pub fn accept(self) -> io::Result<TcpStream> {
        Ok(TcpStream::of(self.pending.accept()?, &self.net))
    }

    /// Resets it: the peer's `connect` fails with `ConnectionRefused`.
    ///
    /// # Errors
    /// As [`fulmar::PendingConnection::refuse`].
    pub fn refuse(self) -> io::Result<()> {
        self.pending.refuse()
    }

    /// Answers as another server has: accepts if it has, refuses if it did, else reports the destination as unreachable.
    /// Returns both connections.
    ///
    /// # Errors
    /// That of the other server. As [`PendingConnection::accept`].
    pub fn answer<S>(self, other: io::Result<S>) -> io::Result<(TcpStream, S)> {
        match other {
            Ok(other) => Ok((self.accept()?, other)),
            Err(e) => {
                let is_refused = e.kind() == ErrorKind::ConnectionRefused;
                let is_v4 = self.local_addr().is_ipv4();
                let code = if is_v4 { HOST_UNREACHABLE } else { ADDRESS_UNREACHABLE };
                if is_refused { self.refuse() } else { self.pending.unreachable(code) }?;
                Err(e)
            }
        }
    }

    /// [`PendingConnection::answer`], then [`relay`](crate::relay).
    ///
    /// # Errors
    /// As these.
    pub fn proxy<S>(
        self,
        other: impl Future<Output = io::Result<S>>,
    ) -> impl Future<Output = io::Result<(u64, u64)>>
    where
        S: AsyncRead + AsyncWrite + Unpin + 'static,
    {
        // Each phase has memory of its own, so that an idle relay keeps nothing of the first.
        let connected = Box::pin(async move { self.answer(other.await) });
        async move {
            let (stream, other) = connected.await?;
            crate::relay(stream, other).await
        }
    }
}

/// Takes every TCP connection to any address and port, and serves each in a task of its own. The stack has
/// [`Builder::any_ip`](fulmar::Builder::any_ip). SYNs wait for the future from the call on. It ends when the stack does.
///
/// ```no_run
/// # use fulmar::{Stack, devices};
/// # use fulmar_tokio::{Net, forward};
/// # use tokio::net::TcpStream;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let net = Net::new(Stack::builder().device(devices::tun("tun0")?).any_ip(true).build()?)?;
/// forward(&net, |pending| async move {
///     let server = pending.local_addr();
///     let done = pending.proxy(TcpStream::connect(server)).await;
///     done.inspect_err(|e| eprintln!("{server}: {e}"))
/// })
/// .await?;
/// # Ok(())
/// # }
/// ```
///
/// A connection that a task drops unanswered is refused by the peer's time-out. Connections that wait for an answer are
/// bounded ([`ConditionalAccept`](fulmar::tcp::ConditionalAccept)). The result of a task is dropped: the closure reports
/// errors.
///
/// # Errors
/// `ENETDOWN`: the device is gone.
pub fn forward<S, F, R>(
    net: &Net,
    mut serve: S,
) -> impl Future<Output = io::Result<()>> + use<S, F, R>
where
    S: FnMut(PendingConnection) -> F,
    F: Future<Output = io::Result<R>> + Send + 'static,
{
    let options = ListenOptions {
        any_port: true,
        conditional_accept: Some(ConditionalAccept::default()),
        ..ListenOptions::default()
    };
    let listener = TcpListener::bind_to(net, EVERY, options);
    async move {
        let listener = listener?;
        loop {
            let serving = serve(listener.pending().await?);
            // The peer has its error.
            tokio::spawn(async move { drop(serving.await) });
        }
    }
}
