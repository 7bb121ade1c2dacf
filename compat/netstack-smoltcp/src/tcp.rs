//! TCP connections to any address. "Local" is the guest, and "remote" the server that it wants.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
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
    listener: fulmar_tokio::TcpListener,
}

impl TcpListener {
    pub(crate) fn new(net: &Net) -> io::Result<TcpListener> {
        let options = ListenOptions {
            any_port: true,
            conditional_accept: Some(ConditionalAccept::default()),
            socket: SocketOptions { keepalive: Some(KEEPALIVE), ..SocketOptions::default() },
            ..ListenOptions::default()
        };
        Ok(TcpListener { listener: fulmar_tokio::TcpListener::bind_to(net, EVERY, options)? })
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
                return Poll::Ready(Some((TcpStream { stream, guest, server }, guest, server)));
            }
        }
    }
}

/// A connection.
pub struct TcpStream {
    stream: fulmar_tokio::TcpStream,
    guest: SocketAddr,
    server: SocketAddr,
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
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for TcpStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
