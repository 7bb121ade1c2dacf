//! netperf's sockets on fulmar.

use super::ring::Ring;
use super::socket::{Buffers, Datagrams, Given, Listener, Network, Posted, Stream, TICK, Tuning};
use fulmar::{
    OwnedBytes, RecvBuf, RecvCompletion, SendCompletion, Stack, TcpConfig, TcpListener, TcpStream,
    UdpSocket,
};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// Bytes that a UDP socket of fulmar keeps for its reader unless it is told otherwise.
const DATAGRAM_BUFFER: usize = 256 << 10;

/// A stack of fulmar.
pub struct OnFulmar {
    stack: Stack,
}

impl OnFulmar {
    /// Sockets of this stack.
    pub fn new(stack: Stack) -> OnFulmar {
        OnFulmar { stack }
    }
}

impl Network for OnFulmar {
    fn connect(
        &self,
        to: SocketAddr,
        tuning: &Tuning,
        timeout: Duration,
    ) -> io::Result<Box<dyn Stream>> {
        let stream = TcpStream::connect_timeout(&self.stack, &to, timeout)?;
        tune(&stream, tuning)?;
        Ok(Box::new(stream))
    }

    fn listen(&self, at: SocketAddr, tuning: &Tuning) -> io::Result<Box<dyn Listener>> {
        let listener = TcpListener::bind(&self.stack, at)?;
        listener.set_accept_timeout(Some(TICK))?;
        Ok(Box::new(TunedListener { listener, tuning: *tuning }))
    }

    fn first_buffers(&self, tuning: &Tuning) -> io::Result<Buffers> {
        Ok(first_buffers(tuning))
    }

    fn datagrams(&self, at: SocketAddr, tuning: &Tuning) -> io::Result<Box<dyn Datagrams>> {
        let socket = UdpSocket::bind(&self.stack, at)?;
        socket.set_read_timeout(Some(TICK))?;
        socket.set_write_timeout(Some(TICK))?;
        if let Some(bytes) = tuning.recv_buffer {
            socket.set_recv_buffer(bytes)?;
        }
        let recv = tuning.recv_buffer.unwrap_or(DATAGRAM_BUFFER);
        let send = tuning.send_buffer.unwrap_or(DATAGRAM_BUFFER);
        Ok(Box::new(SizedDatagrams { socket, buffers: Buffers { send, recv } }))
    }

    fn name(&self) -> &'static str {
        "fulmar"
    }
}

fn tune(stream: &TcpStream, tuning: &Tuning) -> io::Result<()> {
    if let Some(bytes) = tuning.send_buffer {
        stream.set_send_buffer(bytes)?;
    }
    if let Some(bytes) = tuning.recv_buffer {
        stream.set_recv_buffer(bytes)?;
    }
    stream.set_nodelay(tuning.nodelay)?;
    stream.set_read_timeout(Some(TICK))?;
    stream.set_write_timeout(Some(TICK))
}

struct TunedListener {
    listener: TcpListener,
    tuning: Tuning,
}

impl Listener for TunedListener {
    fn accept(&self) -> io::Result<(Box<dyn Stream>, SocketAddr)> {
        let (stream, peer) = self.listener.accept()?;
        tune(&stream, &self.tuning)?;
        Ok((Box::new(stream), peer))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    fn buffers(&self) -> Buffers {
        first_buffers(&self.tuning)
    }
}

fn first_buffers(tuning: &Tuning) -> Buffers {
    let config = TcpConfig::default();
    Buffers {
        send: tuning.send_buffer.unwrap_or(config.send_buffer_bytes),
        recv: tuning.recv_buffer.unwrap_or(config.recv_buffer_bytes),
    }
}

impl Stream for TcpStream {
    fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut reader = self;
        Read::read(&mut reader, buffer)
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut writer = self;
        Write::write(&mut writer, bytes)
    }

    fn posted(&self, count: usize, bytes: usize) -> io::Result<Box<dyn Posted + '_>> {
        let mut posted = PostedBuffers { stream: self, under_way: VecDeque::new() };
        for _ in 0..count.max(1) {
            let buffer = RecvBuf::try_with_capacity(bytes).map_err(io::Error::other)?;
            posted.post(buffer)?;
        }
        Ok(Box::new(posted))
    }

    fn given(&self, ring: &mut Ring) -> io::Result<Box<dyn Given + '_>> {
        let buffers = (0..ring.width()).map(|_| (Arc::from(&*ring.advance()), None)).collect();
        Ok(Box::new(GivenBuffers { stream: self, buffers, at: 0 }))
    }

    fn send_file(&self, file: &File, offset: u64, bytes: usize) -> io::Result<usize> {
        let range = offset..offset + bytes as u64;
        match TcpStream::send_file(self, file, range, &[], &[]) {
            Ok(sent) => Ok(sent as usize),
            Err(e) if e.sent > 0 => Ok(e.sent as usize),
            Err(e) => Err(e.error),
        }
    }

    fn shutdown_write(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }

    fn buffers(&self) -> Buffers {
        Buffers {
            send: self.send_buffer().unwrap_or_default(),
            recv: self.recv_buffer().unwrap_or_default(),
        }
    }

    fn retransmits(&self) -> Option<u64> {
        self.info().ok().map(|i| i.retransmits)
    }

    fn segment_bytes(&self) -> Option<u32> {
        self.info().ok().map(|i| i.mss_bytes)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        TcpStream::local_addr(self)
    }
}

/// Posted buffers, in the order in which they were posted.
struct PostedBuffers<'a> {
    stream: &'a TcpStream,
    under_way: VecDeque<RecvCompletion>,
}

impl PostedBuffers<'_> {
    fn post(&mut self, buffer: RecvBuf) -> io::Result<()> {
        self.under_way.push_back(self.stream.recv_posted(buffer)?);
        Ok(())
    }
}

impl Posted for PostedBuffers<'_> {
    fn next(&mut self) -> io::Result<usize> {
        // At the end of the stream they come back one after the other, with nothing.
        let Some(first) = self.under_way.front_mut() else { return Ok(0) };
        let Some(back) = first.wait_timeout(TICK) else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        self.under_way.pop_front();
        let buffer = back?;
        let n = buffer.len();
        if n > 0 {
            self.post(buffer)?;
        }
        Ok(n)
    }
}

/// Each with what tells when it is back.
struct GivenBuffers<'a> {
    stream: &'a TcpStream,
    buffers: Vec<(Arc<[u8]>, Option<SendCompletion>)>,
    at: usize,
}

/// A share in memory that the ring keeps.
struct Share(Arc<[u8]>);

impl AsRef<[u8]> for Share {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Given for GivenBuffers<'_> {
    fn next(&mut self) -> io::Result<usize> {
        let (buffer, out) = &mut self.buffers[self.at];
        if let Some(completion) = out {
            completion.wait(Some(TICK))?;
            *out = None;
        }
        let share = OwnedBytes::from_owner(Share(Arc::clone(buffer)));
        let n = match self.stream.send_owned(share) {
            Ok(completion) => {
                *out = Some(completion);
                buffer.len()
            }
            // A part of it within the tick: the rest is not sent.
            Err(e) if e.sent > 0 => {
                *out = Some(e.rest.completion());
                e.sent
            }
            Err(e) => return Err(e.error),
        };
        self.at = (self.at + 1) % self.buffers.len();
        Ok(n)
    }
}

struct SizedDatagrams {
    socket: UdpSocket,
    buffers: Buffers,
}

impl Datagrams for SizedDatagrams {
    fn connect(&self, to: SocketAddr) -> io::Result<()> {
        self.socket.connect(to)
    }

    fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.send(bytes)
    }

    fn send_to(&self, bytes: &[u8], to: SocketAddr) -> io::Result<usize> {
        self.socket.send_to(bytes, to)
    }

    fn recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.socket.recv_from(buffer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn buffers(&self) -> Buffers {
        self.buffers
    }
}
