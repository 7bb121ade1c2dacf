//! netperf's sockets on the kernel.

use super::ring::Ring;
use super::socket::{Buffers, Datagrams, Given, Listener, Network, Posted, Stream, TICK, Tuning};
use crate::sys;
use crate::uring::PingPong;
use std::fs::File;
use std::io::{self, Read, Write};
use std::mem::offset_of;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// The kernel of this machine, in the network namespace of the calling thread.
pub struct OnKernel;

impl Network for OnKernel {
    fn connect(
        &self,
        to: SocketAddr,
        tuning: &Tuning,
        timeout: Duration,
    ) -> io::Result<Box<dyn Stream>> {
        let domain = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let socket = sys::socket(domain, libc::SOCK_STREAM, 0)?;
        // Before the SYN, which carries the window scale.
        tune(socket.as_fd(), tuning)?;
        sys::set_timeout(socket.as_fd(), libc::SO_SNDTIMEO, timeout)?;
        sys::connect(socket.as_fd(), to).map_err(|e| match e.raw_os_error() {
            Some(libc::EINPROGRESS) => io::ErrorKind::TimedOut.into(),
            _ => e,
        })?;
        ready(TcpStream::from(socket), tuning)
    }

    fn listen(&self, at: SocketAddr, tuning: &Tuning) -> io::Result<Box<dyn Listener>> {
        let listener = TcpListener::bind(at)?;
        tune(listener.as_fd(), tuning)?;
        sys::set_timeout(listener.as_fd(), libc::SO_RCVTIMEO, TICK)?;
        Ok(Box::new(TunedListener { listener, tuning: *tuning }))
    }

    fn first_buffers(&self, tuning: &Tuning) -> io::Result<Buffers> {
        let socket = sys::socket(libc::AF_INET, libc::SOCK_STREAM, 0)?;
        tune(socket.as_fd(), tuning)?;
        Ok(buffers(socket.as_fd()))
    }

    fn datagrams(&self, at: SocketAddr, tuning: &Tuning) -> io::Result<Box<dyn Datagrams>> {
        let socket = UdpSocket::bind(at)?;
        tune(socket.as_fd(), tuning)?;
        socket.set_read_timeout(Some(TICK))?;
        socket.set_write_timeout(Some(TICK))?;
        Ok(Box::new(socket))
    }

    fn name(&self) -> &'static str {
        ""
    }
}

fn tune(socket: BorrowedFd<'_>, tuning: &Tuning) -> io::Result<()> {
    for (name, bytes) in
        [(libc::SO_SNDBUF, tuning.send_buffer), (libc::SO_RCVBUF, tuning.recv_buffer)]
    {
        if let Some(bytes) = bytes {
            let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
            sys::setsockopt(socket, libc::SOL_SOCKET, name, &bytes.to_ne_bytes())?;
        }
    }
    Ok(())
}

fn ready(stream: TcpStream, tuning: &Tuning) -> io::Result<Box<dyn Stream>> {
    stream.set_nodelay(tuning.nodelay)?;
    stream.set_read_timeout(Some(TICK))?;
    stream.set_write_timeout(Some(TICK))?;
    Ok(Box::new(stream))
}

fn buffers(socket: BorrowedFd<'_>) -> Buffers {
    let bytes = |name| {
        let mut value = [0; 4];
        let known = sys::getsockopt(socket, libc::SOL_SOCKET, name, &mut value);
        known.map_or(0, |_| usize::try_from(i32::from_ne_bytes(value)).unwrap_or(0))
    };
    Buffers { send: bytes(libc::SO_SNDBUF), recv: bytes(libc::SO_RCVBUF) }
}

struct TunedListener {
    listener: TcpListener,
    tuning: Tuning,
}

impl Listener for TunedListener {
    fn accept(&self) -> io::Result<(Box<dyn Stream>, SocketAddr)> {
        let (stream, peer) = self.listener.accept()?;
        Ok((ready(stream, &self.tuning)?, peer))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    fn buffers(&self) -> Buffers {
        buffers(self.listener.as_fd())
    }
}

/// The word at `offset` of `struct tcp_info` (linux/tcp.h), if this kernel has it.
fn tcp_info(stream: &TcpStream, offset: usize) -> Option<u32> {
    let mut info = [0; 256];
    let n = sys::getsockopt(stream.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).ok()?;
    let word = info.get(offset..offset + 4).filter(|_| offset + 4 <= n)?;
    Some(u32::from_ne_bytes(word.try_into().ok()?))
}

/// The kernel's nearest to `aio_read`: io_uring, one receive ahead.
impl Posted for PingPong {
    fn next(&mut self) -> io::Result<usize> {
        self.next_within(Some(TICK)).map(<[u8]>::len)
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
        Ok(Box::new(PingPong::new(self.as_fd(), count, bytes, false)?))
    }

    fn given(&self, _ring: &mut Ring) -> io::Result<Box<dyn Given + '_>> {
        let what = "asynchronous writes (-a) are measured on fulmar's own stack only";
        Err(io::Error::new(io::ErrorKind::Unsupported, what))
    }

    fn send_file(&self, file: &File, offset: u64, bytes: usize) -> io::Result<usize> {
        sys::send_file(self.as_fd(), file.as_fd(), offset, bytes)
    }

    fn shutdown_write(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }

    fn buffers(&self) -> Buffers {
        buffers(self.as_fd())
    }

    fn retransmits(&self) -> Option<u64> {
        tcp_info(self, offset_of!(libc::tcp_info, tcpi_total_retrans)).map(u64::from)
    }

    fn segment_bytes(&self) -> Option<u32> {
        tcp_info(self, offset_of!(libc::tcp_info, tcpi_snd_mss))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        TcpStream::local_addr(self)
    }
}

impl Datagrams for UdpSocket {
    fn connect(&self, to: SocketAddr) -> io::Result<()> {
        UdpSocket::connect(self, to)
    }

    fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        UdpSocket::send(self, bytes)
    }

    fn send_to(&self, bytes: &[u8], to: SocketAddr) -> io::Result<usize> {
        UdpSocket::send_to(self, bytes, to)
    }

    fn recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        UdpSocket::recv_from(self, buffer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        UdpSocket::local_addr(self)
    }

    fn buffers(&self) -> Buffers {
        buffers(self.as_fd())
    }
}
