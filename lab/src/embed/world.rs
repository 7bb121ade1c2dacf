//! A guest behind a TUN, a server, and the proxy between them.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::thread;
use std::time::{Duration, Instant};

use fulmar::device::Device;
use fulmar::devices;
use fulmar_gateway::netns::{Netns, Route};
use nix::sys::resource::{UsageWho, getrusage};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

use super::proxies::Proxy;
use crate::cpu::{self, MachineClock};
use crate::{heap, sys};

pub(super) const MTU: usize = 1500;
/// The interface of the guest.
const TUN: &str = "tun0";
/// The guest's end of the TUN, and its gateway.
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
/// A server that is nowhere.
const FAR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 80);
/// Slow start and the growth of buffers.
const WARM: Duration = Duration::from_millis(300);
/// Bytes of one call of guest and server.
const CALL_BYTES: usize = 256 << 10;
/// Connections without traffic.
const IDLE: usize = 1000;
/// A peer that does not answer so long fails the run.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often an end looks whether the world is over.
const LOOK: Duration = Duration::from_millis(200);

/// Which way the bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    /// From the guest.
    Up,
    /// To the guest.
    Down,
}

impl Direction {
    pub(super) fn name(self) -> &'static str {
        match self {
            Direction::Up => "up",
            Direction::Down => "down",
        }
    }

    pub(super) fn title(self) -> &'static str {
        match self {
            Direction::Up => "from the guest",
            Direction::Down => "to the guest",
        }
    }
}

/// What bytes have cost.
pub(super) struct Cost {
    pub bytes: u64,
    pub elapsed: Duration,
    /// CPU time of the proxy's threads, and that outside of the kernel.
    pub cpu: Duration,
    pub user: Duration,
    /// Busy time of all CPUs.
    pub machine: Duration,
}

/// The namespace of the guest, and the CPU of guest and server.
pub(super) struct World {
    guest: Arc<Netns>,
    far: Option<usize>,
    is_over: Arc<AtomicBool>,
}

/// Progress of guest or server.
#[derive(Default)]
struct Done {
    /// Bytes received.
    bytes: AtomicU64,
    /// CPU time of its thread, and that outside of the kernel, in ns.
    cpu: AtomicU64,
    user: AtomicU64,
}

impl Drop for World {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
    }
}

impl World {
    pub(super) fn new(far: Option<usize>) -> io::Result<World> {
        Ok(World { guest: Arc::new(Netns::new()?), far, is_over: Arc::default() })
    }

    /// A TUN whose kernel's end is the guest's default route.
    pub(super) fn tun(&self) -> io::Result<Tun> {
        let file = self.guest.run(|| bare_tun(TUN))?;
        self.set_up()?;
        Tun::new(file)
    }

    /// The same as fulmar's own device.
    pub(super) fn device(&self) -> io::Result<Box<dyn Device>> {
        let device = self.guest.run(|| devices::tun(TUN).map_err(io::Error::other))?;
        self.set_up()?;
        Ok(device)
    }

    fn set_up(&self) -> io::Result<()> {
        self.guest.set_address(TUN, GUEST.into(), 24)?;
        self.guest.set_up(TUN)?;
        let index = self.guest.if_index(TUN)?;
        self.guest.netlink()?.add_route(&Route::default_through(index, GATEWAY.into()))
    }

    /// One connection of the guest for `time`. The calling thread runs the proxy.
    pub(super) async fn bulk(
        &self,
        proxy: Proxy,
        direction: Direction,
        time: Duration,
    ) -> io::Result<Cost> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        proxy.start(self, listener.local_addr()?)?;
        let is_up = direction == Direction::Up;
        let ends: [Arc<Done>; 2] = Default::default();
        let [server, guest] = ends.clone();
        let (far, is_over) = (self.far, Arc::clone(&self.is_over));
        let server = thread::spawn(move || {
            pin(far)?;
            move_bytes(listener.accept()?.0, !is_up, &server, &is_over)
        });
        let (is_over, netns) = (Arc::clone(&self.is_over), Arc::clone(&self.guest));
        let guest = thread::spawn(move || {
            netns.enter()?;
            pin(far)?;
            let stream = TcpStream::connect_timeout(&FAR, PATIENCE)?;
            move_bytes(stream, is_up, &guest, &is_over)
        });
        tokio::time::sleep(WARM).await;
        let before = Moment::now(&ends)?;
        tokio::time::sleep(time).await;
        let cost = Moment::now(&ends)?.since(&before);
        if cost.bytes == 0 {
            let ends = [server, guest].map(|end| end.is_finished().then(|| end.join()));
            return Err(io::Error::other(format!("no bytes crossed: {ends:?}")));
        }
        Ok(cost)
    }

    /// Bytes of heap and buffers that a proxied connection without traffic takes.
    pub(super) async fn idle(&self, proxy: Proxy) -> io::Result<f64> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let stack = proxy.start(self, listener.local_addr()?)?;
        let stack = stack.ok_or(io::ErrorKind::Unsupported)?;
        let pool =
            || Ok::<_, io::Error>(stack.stat()?.shard.pool.used_bytes.iter().sum::<usize>() as u64);
        let netns = Arc::clone(&self.guest);
        let (ready, is_ready) = tokio::sync::oneshot::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let before = heap::bytes();
        let in_pool = pool()?;
        let peers = thread::spawn(move || {
            netns.enter()?;
            let mut all = Vec::new();
            for _ in 0..IDLE {
                all.push(TcpStream::connect_timeout(&FAR, PATIENCE)?);
                all.push(listener.accept()?.0);
            }
            let _ = ready.send(());
            let _ = ended.recv();
            io::Result::Ok(all)
        });
        is_ready.await.map_err(io::Error::other)?;
        // Timers of the handshakes end.
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let used = heap::bytes().saturating_sub(before) + pool()?.saturating_sub(in_pool);
        drop(end);
        let _ = peers.join();
        Ok(used as f64 / IDLE as f64)
    }
}

/// What all have done until a moment.
struct Moment {
    at: Instant,
    bytes: u64,
    cpu: Duration,
    user: Duration,
    machine: MachineClock,
}

impl Moment {
    fn now(ends: &[Arc<Done>; 2]) -> io::Result<Moment> {
        let sum = |of: fn(&Done) -> &AtomicU64| ends.iter().map(|e| of(e).load(Relaxed)).sum();
        let [cpu, user] = [sum(|end| &end.cpu), sum(|end| &end.user)].map(Duration::from_nanos);
        Ok(Moment {
            at: Instant::now(),
            bytes: sum(|end| &end.bytes),
            cpu: cpu::process_cpu(None)?.saturating_sub(cpu),
            user: user_time(UsageWho::RUSAGE_SELF)?.saturating_sub(user),
            machine: MachineClock::read()?,
        })
    }

    fn since(&self, before: &Moment) -> Cost {
        Cost {
            bytes: self.bytes - before.bytes,
            elapsed: self.at - before.at,
            cpu: self.cpu.saturating_sub(before.cpu),
            user: self.user.saturating_sub(before.user),
            machine: self.machine.since(before.machine).busy,
        }
    }
}

/// The descriptor of a TUN without the virtio-net header, in the calling thread's namespace: each packet crosses alone.
///
/// # Errors
/// No right to `/dev/net/tun`, or an interface that is in use.
pub fn bare_tun(name: &str) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
    let file = options.open("/dev/net/tun")?;
    let flags = (libc::IFF_TUN | libc::IFF_NO_PI) as i16;
    sys::tun_set_iff(file.as_fd(), &CString::new(name)?, flags)?;
    Ok(file)
}

/// CPU time outside of the kernel.
fn user_time(who: UsageWho) -> io::Result<Duration> {
    let time = getrusage(who)?.user_time();
    Ok(Duration::from_secs(time.tv_sec() as u64) + Duration::from_micros(time.tv_usec() as u64))
}

fn pin(cpu: Option<usize>) -> io::Result<()> {
    cpu.map_or(Ok(()), cpu::pin_to)
}

/// Writes, or reads and counts, until the other end or the world is gone.
fn move_bytes(
    mut stream: TcpStream,
    writes: bool,
    done: &Done,
    is_over: &AtomicBool,
) -> io::Result<()> {
    stream.set_read_timeout(Some(LOOK))?;
    stream.set_write_timeout(Some(LOOK))?;
    let mut buf = vec![0x5a; CALL_BYTES];
    while !is_over.load(Relaxed) {
        let moved = if writes { stream.write(&buf) } else { stream.read(&mut buf) };
        done.cpu.store(sys::thread_cpu()?.as_nanos() as u64, Relaxed);
        let user = user_time(UsageWho::RUSAGE_THREAD)?;
        done.user.store(user.as_nanos() as u64, Relaxed);
        match moved {
            Ok(0) => break,
            Ok(n) if !writes => drop(done.bytes.fetch_add(n as u64, Relaxed)),
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// The descriptor of a TUN: each read and each write is one IP packet.
pub(super) struct Tun(AsyncFd<File>);

impl Tun {
    #[allow(deprecated)]
    fn new(file: File) -> io::Result<Tun> {
        AsyncFd::with_interest(file, Interest::READABLE | Interest::WRITABLE).map(Tun)
    }

    /// Waits until a packet is there.
    pub(super) async fn readable(&self) -> io::Result<()> {
        self.0.readable().await?.retain_ready();
        Ok(())
    }

    /// Reads a packet without waiting; `None`: none is there.
    pub(super) fn try_read(&self, buf: &mut [u8]) -> io::Result<Option<usize>> {
        match (&mut self.0.get_ref()).read(buf) {
            Ok(n) => Ok(Some(n)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// The runtime has to look again.
    pub(super) async fn clear(&self) -> io::Result<()> {
        self.0.readable().await?.clear_ready();
        Ok(())
    }

    /// Writes a packet, which the guest's kernel takes at once.
    pub(super) fn write(&self, packet: &[u8]) -> io::Result<()> {
        (&mut self.0.get_ref()).write(packet).map(drop)
    }
}

impl AsyncRead for Tun {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.0.poll_read_ready(cx))?;
            let read = ready.try_io(|fd| fd.get_ref().read(buf.initialize_unfilled()));
            if let Ok(n) = read {
                buf.advance(n?);
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl AsyncWrite for Tun {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        packet: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(self.write(packet).map(|()| packet.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
