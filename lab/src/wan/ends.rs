//! The two ends of `bench wan`: servers that send, on fulmar or on the kernel, and kernel clients that read.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fulmar::{CongestionControl, Stack};
use fulmar_netns::Netns;

use crate::sys;

/// The sending kernel.
pub(super) const NEAR: Ipv4Addr = Ipv4Addr::new(10, 73, 0, 1);
/// The kernel that reads.
pub(super) const FAR: Ipv4Addr = Ipv4Addr::new(10, 73, 0, 2);
/// The sending fulmar.
pub(super) const FULMAR: Ipv4Addr = Ipv4Addr::new(10, 73, 0, 3);
/// How often an end that waits looks whether it is still wanted.
const PATIENCE: Duration = Duration::from_millis(200);
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
static WRITE: [u8; 64 << 10] = [0; 64 << 10];

/// Who sends, and by which congestion control.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sender {
    /// fulmar, on a link into the wire.
    Fulmar(CongestionControl),
    /// The kernel, on a TAP of the wire, by a name of its own.
    Linux(&'static str),
}

impl Sender {
    /// `fulmar-cubic`, `linux-bbr`.
    pub fn name(self) -> String {
        match self {
            Sender::Fulmar(which) => format!("fulmar-{which}"),
            Sender::Linux(which) => format!("linux-{which}"),
        }
    }
}

/// Where the senders are.
pub(super) struct Near<'a> {
    pub stack: &'a Stack,
    pub kernel: &'a Netns,
}

/// A server that listens.
pub(super) enum Server {
    Fulmar(fulmar::TcpListener, CongestionControl),
    Linux(std::net::TcpListener),
}

impl Server {
    pub fn listen(sender: Sender, near: &Near<'_>, port: u16) -> io::Result<Server> {
        match sender {
            Sender::Fulmar(which) => {
                let at = SocketAddr::new(IpAddr::V4(FULMAR), port);
                let listener = fulmar::TcpListener::bind(near.stack, at)?;
                listener.set_accept_timeout(Some(PATIENCE))?;
                Ok(Server::Fulmar(listener, which))
            }
            Sender::Linux(which) => near.kernel.run(|| {
                let listener = std::net::TcpListener::bind((NEAR, port))?;
                // A connection takes it from its listener.
                let (tcp, name) = (libc::IPPROTO_TCP, libc::TCP_CONGESTION);
                sys::setsockopt(listener.as_fd(), tcp, name, which.as_bytes()).map_err(|e| {
                    io::Error::new(
                        e.kind(),
                        format!("this kernel has no congestion control {which}"),
                    )
                })?;
                sys::set_timeout(listener.as_fd(), libc::SO_RCVTIMEO, PATIENCE)?;
                Ok(Server::Linux(listener))
            }),
        }
    }

    /// Where a client finds it.
    pub fn address(&self) -> io::Result<SocketAddr> {
        match self {
            Server::Fulmar(l, _) => l.local_addr(),
            Server::Linux(l) => l.local_addr(),
        }
    }

    /// The next connection; `None` once `done`.
    fn accept(&self, done: &AtomicBool) -> io::Result<Option<Box<dyn Write + Send>>> {
        while !done.load(Ordering::Relaxed) {
            let accepted = match self {
                Server::Fulmar(l, which) => l.accept().and_then(|(stream, _)| {
                    stream.set_congestion(*which)?;
                    stream.set_write_timeout(Some(PATIENCE))?;
                    Ok(Box::new(stream) as Box<dyn Write + Send>)
                }),
                Server::Linux(l) => l.accept().and_then(|(stream, _)| {
                    stream.set_write_timeout(Some(PATIENCE))?;
                    Ok(Box::new(stream) as Box<dyn Write + Send>)
                }),
            };
            match accepted {
                Ok(stream) => return Ok(Some(stream)),
                Err(e) if is_timeout(&e) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(None)
    }

    /// Accepts one connection and writes until it breaks or `done`.
    pub fn flood(&self, done: &AtomicBool) -> io::Result<()> {
        if let Some(mut stream) = self.accept(done)? {
            write_until(&mut stream, done);
        }
        Ok(())
    }

    /// Accepts connections and writes so many bytes to each, until `done`.
    pub fn answer(&self, bytes: usize, done: &AtomicBool) -> io::Result<()> {
        thread::scope(|scope| {
            while let Some(mut stream) = self.accept(done)? {
                scope.spawn(move || answer(&mut stream, bytes));
            }
            Ok(())
        })
    }
}

fn is_timeout(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Writes so many bytes, unless the connection breaks: the client reports that.
fn answer(stream: &mut impl Write, bytes: usize) {
    let mut left = bytes;
    while left > 0 {
        match stream.write(&WRITE[..left.min(WRITE.len())]) {
            Ok(n) => left -= n,
            Err(e) if is_timeout(&e) => {}
            Err(_) => return,
        }
    }
}

fn write_until(stream: &mut impl Write, done: &AtomicBool) {
    while !done.load(Ordering::Relaxed) {
        match stream.write(&WRITE) {
            Ok(_) => {}
            Err(e) if is_timeout(&e) => {}
            Err(_) => return,
        }
    }
}

/// Reads until `done`; counts from the connection's start on.
pub(super) fn read_flood(
    far: &Netns,
    server: SocketAddr,
    read: &AtomicU64,
    done: &AtomicBool,
) -> io::Result<()> {
    far.run(|| {
        let mut stream = std::net::TcpStream::connect_timeout(&server, CONNECT_PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        sys::reset_on_close(stream.as_fd())?;
        let mut buffer = vec![0; 256 << 10];
        while !done.load(Ordering::Relaxed) {
            match stream.read(&mut buffer) {
                Ok(n) if n > 0 => drop(read.fetch_add(n as u64, Ordering::Relaxed)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                // The server has ended first.
                _ if done.load(Ordering::Relaxed) => return Ok(()),
                Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    })
}

/// Fetches one answer after the other until `done`, the last one to its end: the time of each from the SYN on.
pub(super) fn fetch_many(
    far: &Netns,
    server: SocketAddr,
    done: &AtomicBool,
) -> io::Result<Vec<Duration>> {
    far.run(|| {
        let mut times = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        while !done.load(Ordering::Relaxed) {
            let begun = Instant::now();
            let mut stream = std::net::TcpStream::connect_timeout(&server, CONNECT_PATIENCE)?;
            stream.set_read_timeout(Some(CONNECT_PATIENCE))?;
            while stream.read(&mut buffer)? > 0 {}
            times.push(begun.elapsed());
        }
        Ok(times)
    })
}
