//! quinn's socket: QUIC over a stack.

use std::collections::BTreeMap;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use fulmar::udp::{MtuDiscovery, RecvMessage, SendMessage};
use quinn::udp::{EcnCodepoint, RecvMeta, Transmit};

use crate::UdpSocket;

/// Payload of a run of datagrams at most: that of the longest IPv4 packet.
const MOST_RUN_BYTES: usize = 65_507;
/// Datagrams of a run at most, as on Linux before 6.9. With quinn's smallest limit of a datagram, 1,200 bytes, its buffers
/// hold every run that can come.
const MOST_SEGMENTS: usize = 64;

/// A UDP socket for [`quinn::Endpoint::new_with_abstract_socket`]: with GSO, GRO, ECN, and the address that a datagram was
/// sent to. Once the stack is down, quinn's endpoint fails: its connections end, and a
/// call of `Endpoint::wait_idle` that is under way does not return.
///
/// ```
/// # use std::sync::Arc;
/// # use fulmar::{Stack, devices};
/// # use fulmar_tokio::{Net, QuinnSocket, UdpSocket};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// # let (device, _peer) = devices::link_pair()?;
/// let net = Net::new(Stack::builder().device(device).address("10.0.0.1/24".parse()?).build()?)?;
/// let socket = QuinnSocket::new(UdpSocket::bind(&net, "10.0.0.1:0").await?)?;
/// let (config, runtime) = (quinn::EndpointConfig::default(), Arc::new(quinn::TokioRuntime));
/// let endpoint = quinn::Endpoint::new_with_abstract_socket(config, None, socket, runtime)?;
/// # drop(endpoint);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct QuinnSocket {
    socket: UdpSocket,
    /// IPv4 peers have mapped addresses, as on the kernel's IPv6 sockets.
    is_v6: bool,
    waiting: Arc<Waiting>,
    /// Wakes all that wait: the socket itself wakes one task.
    waker: Waker,
    next_poller: AtomicU64,
}

impl QuinnSocket {
    /// Sets the options that QUIC needs: no fragments, path MTU discovery by quinn, runs of datagrams at once.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn new(socket: UdpSocket) -> io::Result<Arc<QuinnSocket>> {
        let inner = socket.get_ref();
        inner.set_nonblocking(true)?;
        inner.set_gro(true)?;
        inner.set_mtu_discovery(MtuDiscovery::Probe)?;
        let is_v6 = socket.local_addr()?.is_ipv6();
        let waiting = Arc::<Waiting>::default();
        let waker = Arc::clone(&waiting).into();
        Ok(Arc::new(QuinnSocket { socket, is_v6, waiting, waker, next_poller: AtomicU64::new(0) }))
    }

    /// The socket.
    pub fn get_ref(&self) -> &UdpSocket {
        &self.socket
    }

    /// Fills in what quinn wants to know.
    fn describe(&self, message: &RecvMessage<'_>) -> Option<RecvMeta> {
        let len = message.payload().len();
        let mapped = |ip: IpAddr| match ip {
            IpAddr::V4(v4) if self.is_v6 => v4.to_ipv6_mapped().into(),
            ip => ip,
        };
        let mut addr = message.from()?;
        if self.is_v6 && addr.is_ipv4() {
            addr = SocketAddr::new(mapped(addr.ip()), addr.port());
        }
        Some(RecvMeta {
            addr,
            len,
            stride: message.segment_bytes().map_or(len, usize::from),
            ecn: EcnCodepoint::from_bits(message.tos()),
            dst_ip: message.to().map(|to| mapped(to.ip())),
        })
    }
}

impl quinn::AsyncUdpSocket for QuinnSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn quinn::UdpPoller>> {
        let id = self.next_poller.fetch_add(1, Ordering::Relaxed);
        Box::pin(Poller { socket: self, id })
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let Transmit { destination, ecn, contents, segment_size, src_ip } = transmit;
        let segment = segment_size.and_then(|n| u16::try_from(n).ok()).filter(|n| *n > 0);
        let most = segment.map_or(usize::MAX, |n| {
            let n = usize::from(n);
            n * (MOST_RUN_BYTES / n).clamp(1, MOST_SEGMENTS)
        });
        for (i, run) in contents.chunks(most).enumerate() {
            let mut message = SendMessage::new(run).to(*destination);
            if let Some(segment) = segment.filter(|n| usize::from(*n) < run.len()) {
                message = message.segmented(segment);
            }
            if let Some(ecn) = ecn {
                message = message.tos(*ecn as u8);
            }
            if let Some(ip) = src_ip {
                message = message.from(SocketAddr::new(*ip, 0));
            }
            match self.socket.get_ref().send_many(&[message]) {
                Ok(_) => {}
                // quinn would repeat the parts that went: the rest counts as lost.
                Err(e) if is_full(&e) => return if i == 0 { Err(e) } else { Ok(()) },
                Err(e) if is_fatal(&e) => return Err(e),
                // As over the kernel: no route, or too long for the path. QUIC treats it as lost.
                Err(_) => {}
            }
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        // As many as quinn asks for; on the stack.
        let asked = bufs.len().min(meta.len()).min(quinn::udp::BATCH_SIZE);
        let mut space = bufs.iter_mut().map(|buf| &mut buf[..]);
        let mut messages: [RecvMessage<'_>; quinn::udp::BATCH_SIZE] =
            std::array::from_fn(|_| RecvMessage::new(space.next().unwrap_or_default()));
        let messages = messages.get_mut(..asked).unwrap_or_default();
        loop {
            let came = match self.socket.get_ref().poll_recv_many(cx, messages) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(came)) => came,
                Poll::Ready(Err(e)) if is_fatal(&e) => return Poll::Ready(Err(e)),
                // About one that was sent to a connected peer.
                Poll::Ready(Err(_)) => continue,
            };
            let described = messages.iter().take(came).filter_map(|m| self.describe(m));
            return Poll::Ready(Ok(meta.iter_mut().zip(described).map(|(to, m)| *to = m).count()));
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        MOST_SEGMENTS
    }

    fn max_receive_segments(&self) -> usize {
        MOST_SEGMENTS
    }

    fn may_fragment(&self) -> bool {
        false
    }
}

fn is_full(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::WouldBlock
}

/// Whether the stack or the socket is gone.
fn is_fatal(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::NetworkDown || e.raw_os_error() == Some(EBADF)
}

/// The number of a socket that is closed, or is not this process's.
const EBADF: i32 = 9;

/// The tasks of connections that wait for space, by the number of their poller.
#[derive(Debug, Default)]
struct Waiting(Mutex<BTreeMap<u64, Waker>>);

impl Waiting {
    fn with<R>(&self, f: impl FnOnce(&mut BTreeMap<u64, Waker>) -> R) -> R {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Wake for Waiting {
    fn wake(self: Arc<Self>) {
        // Outside of the lock: a waker may poll.
        let woken = self.with(std::mem::take);
        woken.into_values().for_each(Waker::wake);
    }
}

/// A connection that may wait.
#[derive(Debug)]
struct Poller {
    socket: Arc<QuinnSocket>,
    id: u64,
}

impl quinn::UdpPoller for Poller {
    fn poll_writable(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let QuinnSocket { socket, waiting, waker, .. } = &*self.socket;
        let poll = || socket.poll_send_ready(&mut Context::from_waker(waker));
        if let Poll::Ready(done) = poll() {
            return Poll::Ready(done);
        }
        let before = waiting.with(|tasks| tasks.insert(self.id, cx.waker().clone()));
        drop(before);
        // It may have been woken before the task was there to be found.
        poll()
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        let waker = self.socket.waiting.with(|tasks| tasks.remove(&self.id));
        drop(waker);
    }
}
