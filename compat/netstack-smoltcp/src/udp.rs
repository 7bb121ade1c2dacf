//! Datagrams to any address, and from any.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use fulmar::UdpBindOptions;
use fulmar::udp::{RecvMessage, SendMessage};
use fulmar_tokio::Net;
use futures_core::Stream;
use futures_sink::Sink;

use crate::EVERY;

/// Datagrams received in one call.
const BATCH: usize = 8;
/// Longest payload of a datagram.
const MAX_DATAGRAM_BYTES: usize = 65_535;

/// Payload, source, destination.
pub type UdpMsg = (Vec<u8>, SocketAddr, SocketAddr);

/// Receives every datagram.
pub struct UdpSocket {
    socket: Arc<fulmar_tokio::UdpSocket>,
}

impl UdpSocket {
    pub(crate) fn new(net: &Net) -> io::Result<UdpSocket> {
        let options = UdpBindOptions { any_port: true, ..UdpBindOptions::default() };
        let socket = fulmar_tokio::UdpSocket::bind_to(net, EVERY, options)?;
        Ok(UdpSocket { socket: Arc::new(socket) })
    }

    /// A stream of the datagrams that come, and a sink of those to send.
    pub fn split(self) -> (ReadHalf, WriteHalf) {
        let buffers = vec![vec![0; MAX_DATAGRAM_BYTES]; BATCH];
        let socket = Arc::clone(&self.socket);
        let read = ReadHalf { socket, buffers, came: VecDeque::new() };
        (read, WriteHalf { socket: self.socket, held: None })
    }
}

/// Datagrams of the guest.
pub struct ReadHalf {
    socket: Arc<fulmar_tokio::UdpSocket>,
    buffers: Vec<Vec<u8>>,
    came: VecDeque<UdpMsg>,
}

/// Ends with the stack.
impl Stream for ReadHalf {
    type Item = UdpMsg;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<UdpMsg>> {
        let ReadHalf { socket, buffers, came } = self.get_mut();
        while came.is_empty() {
            let mut messages: Vec<_> = buffers.iter_mut().map(|b| RecvMessage::new(b)).collect();
            let Ok(n) = ready!(socket.get_ref().poll_recv_many(cx, &mut messages)) else {
                return Poll::Ready(None);
            };
            let message = |m: &RecvMessage<'_>| Some((m.payload().to_vec(), m.from()?, m.to()?));
            came.extend(messages[..n].iter().filter_map(message));
        }
        Poll::Ready(came.pop_front())
    }
}

/// Datagrams for the guest.
pub struct WriteHalf {
    socket: Arc<fulmar_tokio::UdpSocket>,
    held: Option<UdpMsg>,
}

/// Sends from any address. A datagram without payload is dropped. Errors are `InvalidData` if source and destination are
/// not of one IP version, and the errors of `sendmsg(2)`.
impl Sink<UdpMsg> for WriteHalf {
    type Error = io::Error;

    fn poll_ready(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(cx)
    }

    fn start_send(mut self: Pin<&mut Self>, message: UdpMsg) -> io::Result<()> {
        let (payload, src, dst) = &message;
        if src.is_ipv4() != dst.is_ipv4() {
            let versions = format!("cannot send from {src} to {dst}: two IP versions");
            return Err(io::Error::new(ErrorKind::InvalidData, versions));
        }
        if !payload.is_empty() {
            self.held = Some(message);
        }
        Ok(())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some((payload, src, dst)) = &self.held {
            let message = SendMessage::new(payload).from(*src).to(*dst);
            let sent = ready!(self.socket.get_ref().poll_send_many(cx, &[message]));
            self.held = None;
            sent?;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(cx)
    }
}
