//! TCP connections to any address. "Local" is the guest, and "remote" the server that it wants.

use std::io::{self, ErrorKind, IoSlice};
use std::net::{Shutdown, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use fulmar::tcp::ConditionalAccept;
use fulmar::{Keepalive, ListenOptions, SocketOptions};
use fulmar_tokio::Net;
use futures_core::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::EVERY;

/// Keepalive: the connections of a guest that is gone fail after two hours, as with the original.
const KEEPALIVE: Keepalive =
    Keepalive { idle: Duration::from_secs(28), interval: Duration::from_secs(28), count: 257 };

/// A stream of connections, with the address of the guest and that of the server.
pub struct TcpListener {
    listener: fulmar::TcpListener,
    net: Net,
}

impl TcpListener {
    pub(crate) fn new(net: Net) -> io::Result<TcpListener> {
        let options = ListenOptions {
            any_port: true,
            conditional_accept: Some(ConditionalAccept::default()),
            socket: SocketOptions { keepalive: Some(KEEPALIVE), ..SocketOptions::default() },
            ..ListenOptions::default()
        };
        let listener = fulmar::TcpListener::bind_with(net.stack(), EVERY, options)?;
        Ok(TcpListener { listener, net })
    }
}

/// A SYN is answered when it is taken. Ends with the stack.
impl Stream for TcpListener {
    type Item = (TcpStream, SocketAddr, SocketAddr);

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Ok(pending) = ready!(self.listener.poll_pending(cx)) else {
                return Poll::Ready(None);
            };
            let (guest, server) = (pending.peer_addr(), pending.local_addr());
            // An error: the peer has reset it.
            if let Ok(stream) = pending.accept() {
                let stream = TcpStream { stream, guest, server, _net: self.net.clone() };
                return Poll::Ready(Some((stream, guest, server)));
            }
        }
    }
}

/// A connection.
pub struct TcpStream {
    stream: fulmar::TcpStream,
    guest: SocketAddr,
    server: SocketAddr,
    /// The stack's task lives as long as its connections.
    _net: Net,
}

impl TcpStream {
    /// The guest's address.
    pub fn local_addr(&self) -> &SocketAddr {
        &self.guest
    }

    /// The address that the guest connects to.
    pub fn remote_addr(&self) -> &SocketAddr {
        &self.server
    }
}

impl AsyncRead for TcpStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let most = buf.remaining();
        self.stream.poll_read_to(cx, most, |bytes| buf.put_slice(bytes)).map_ok(drop)
    }
}

impl AsyncWrite for TcpStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.stream.poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream.poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.stream.shutdown(Shutdown::Write) {
            // The guest has ended the connection.
            Err(e) if e.kind() == ErrorKind::NotConnected => Poll::Ready(Ok(())),
            done => Poll::Ready(done),
        }
    }
}
