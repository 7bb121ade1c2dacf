//! Datagrams to any address: a task for each pair of ends.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use fulmar::UdpBindOptions;
use fulmar::icmp::IcmpError;
use fulmar::udp::{RecvMessage, SendMessage};
use tokio::io::Interest;
use tokio::sync::mpsc::{self, Receiver, Sender, error::TrySendError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::relay::with_scratch;
use crate::{Net, UdpSocket};

/// Flows at most.
const MOST_FLOWS: usize = 16_384;
/// Flows of one peer at most (an IPv4 address, or the upper 64 bits of an IPv6 address).
const MOST_OF_PEER: usize = 4_096;
/// Datagrams of a flow that wait for its task.
const WAITING_DATAGRAMS: usize = 32;
/// Bytes of all datagrams that wait.
const WAITING_BYTES: usize = 32 << 20;
/// Time without a datagram after which a flow ends: RFC 4787 section 4.3 asks for two minutes at least.
const IDLE: Duration = Duration::from_secs(120);
/// Datagrams received in one call.
const BATCH: usize = 8;
/// Longest payload of a datagram.
const MAX_DATAGRAM_BYTES: usize = 65_535;
/// What an ICMP error quotes of a datagram.
const QUOTED_BYTES: usize = 512;
/// How often flows that have ended are removed.
const SWEEP: Duration = Duration::from_secs(5);

/// The datagrams of one peer to one destination: [`forward_udp`] gives each flow to a task.
///
/// ```
/// # use fulmar::{Stack, devices};
/// # use fulmar_tokio::{Net, UdpSocket, forward_udp};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (a, b) = devices::link_pair()?;
/// # let stack = Stack::builder().device(a).address("10.0.0.1/24".parse()?).any_ip(true).unlisted().build()?;
/// # let net = Net::new(stack)?;
/// # let guest = Stack::builder().device(b).address("10.0.0.2/24".parse()?).gateway("10.0.0.1".parse()?);
/// # let guest = Net::new(guest.unlisted().build()?)?;
/// // A server of every address: it returns what it gets.
/// let serving = forward_udp(&net, |mut flow| async move {
///     while let Some(datagram) = flow.recv().await {
///         flow.send(&datagram).await?;
///     }
///     std::io::Result::Ok(())
/// });
/// # tokio::spawn(serving);
/// # let client = UdpSocket::bind(&guest, "10.0.0.2:0").await?;
/// # client.connect("192.0.2.1:7").await?;
/// # client.send(b"hello").await?;
/// # assert_eq!(client.recv(&mut [0; 100]).await?, 5);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct UdpFlow {
    socket: Arc<UdpSocket>,
    ends: Ends,
    waiting: Receiver<Waiting>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Ends {
    peer: SocketAddr,
    local: SocketAddr,
}

#[derive(Debug)]
struct Waiting {
    datagram: Vec<u8>,
    /// Its share of [`WAITING_BYTES`].
    _permit: OwnedSemaphorePermit,
}

impl UdpFlow {
    /// The peer.
    pub fn peer_addr(&self) -> SocketAddr {
        self.ends.peer
    }

    /// The destination of the peer's datagrams.
    pub fn local_addr(&self) -> SocketAddr {
        self.ends.local
    }

    /// The next datagram of the peer. `None`: none came for two minutes, or the stack has ended. Cancellation safe.
    pub async fn recv(&mut self) -> Option<Vec<u8>> {
        let waiting = tokio::time::timeout(IDLE, self.waiting.recv()).await;
        waiting.ok().flatten().map(|w| w.datagram)
    }

    /// Sends a datagram to the peer, from the destination of its own.
    ///
    /// # Errors
    /// As [`fulmar::UdpSocket::send_to`].
    pub async fn send(&self, datagram: &[u8]) -> io::Result<()> {
        let message = SendMessage::new(datagram).to(self.ends.peer).from(self.ends.local);
        self.socket.send_many(&[message]).await.map(drop)
    }

    /// Passes one datagram from a socket of the host to the peer, which loses it if the device is full.
    fn return_one(&self, other: &tokio::net::UdpSocket) -> io::Result<()> {
        with_scratch(|buf| {
            let n = other.try_recv(buf)?;
            let message = SendMessage::new(&buf[..n]).to(self.ends.peer).from(self.ends.local);
            let _ = self.socket.get_ref().send_many(&[message]);
            Ok(())
        })
    }

    /// Passes datagrams between the peer and a connected socket of the host, until the flow is idle for two minutes. A
    /// port that the socket finds closed is reported to the peer by ICMP.
    ///
    /// # Errors
    /// Those of either socket.
    pub async fn relay(mut self, other: tokio::net::UdpSocket) -> io::Result<()> {
        let mut last = Vec::new();
        let done = loop {
            tokio::select! {
                datagram = self.recv() => {
                    let Some(datagram) = datagram else { return Ok(()) };
                    if let Err(e) = other.send(&datagram).await {
                        break e;
                    }
                    last.clear();
                    last.extend_from_slice(&datagram[..datagram.len().min(QUOTED_BYTES)]);
                }
                ready = other.ready(Interest::READABLE | Interest::ERROR) => {
                    let error = match ready {
                        Ok(ready) if ready.is_error() => taken_error(&other),
                        Ok(_) => self.return_one(&other).err(),
                        Err(e) => Some(e),
                    };
                    match error {
                        Some(e) if e.kind() != ErrorKind::WouldBlock => break e,
                        _ => {}
                    }
                }
            }
        };
        if done.kind() == ErrorKind::ConnectionRefused {
            self.ends.report(&self.socket, &last, IcmpError::PortUnreachable);
        }
        Err(done)
    }
}

/// The error that has come for a socket.
fn taken_error(socket: &tokio::net::UdpSocket) -> Option<io::Error> {
    // The runtime waits for the next one.
    let _ = socket.try_io(Interest::ERROR, || Err::<(), _>(ErrorKind::WouldBlock.into()));
    socket.take_error().unwrap_or_else(Some)
}

impl Ends {
    /// Tells the peer what has become of a datagram.
    fn report(&self, socket: &UdpSocket, datagram: &[u8], error: IcmpError) {
        let _ = socket.get_ref().send_icmp_error(self.peer, self.local, datagram, error, None);
    }

    /// The peer as far as its share goes.
    fn source(&self) -> IpAddr {
        match self.peer.ip() {
            IpAddr::V6(ip) => IpAddr::V6((u128::from(ip) >> 64 << 64).into()),
            v4 => v4,
        }
    }
}

/// Takes every datagram to any address and port, and serves each pair of ends in a task of its own. The stack has
/// [`Builder::any_ip`](fulmar::Builder::any_ip). Datagrams wait for the future from the call on. It ends when the stack does.
///
/// ```no_run
/// # use fulmar::{Stack, devices};
/// # use fulmar_tokio::{Net, forward_udp};
/// # use tokio::net::UdpSocket;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let net = Net::new(Stack::builder().device(devices::tun("tun0")?).any_ip(true).build()?)?;
/// forward_udp(&net, |flow| async move {
///     let to = flow.local_addr();
///     let host = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).await?;
///     host.connect(to).await?;
///     flow.relay(host).await
/// })
/// .await?;
/// # Ok(())
/// # }
/// ```
///
/// There are at most 16,384 flows, 4,096 of one peer; a datagram of a further one is answered by ICMP (administratively
/// prohibited). A flow whose task does not take its datagrams keeps 32 of them.
///
/// # Errors
/// `ENETDOWN`: the device is gone.
pub fn forward_udp<S, F, R>(
    net: &Net,
    serve: S,
) -> impl Future<Output = io::Result<()>> + use<S, F, R>
where
    S: FnMut(UdpFlow) -> F,
    F: Future<Output = io::Result<R>> + Send + 'static,
{
    let options = UdpBindOptions { any_port: true, ..UdpBindOptions::default() };
    let socket = UdpSocket::bind_to(net, super::EVERY, options);
    async move { serve_flows(Arc::new(socket?), serve).await }
}

async fn serve_flows<F, R>(
    socket: Arc<UdpSocket>,
    mut serve: impl FnMut(UdpFlow) -> F,
) -> io::Result<()>
where
    F: Future<Output = io::Result<R>> + Send + 'static,
{
    socket.get_ref().set_nonblocking(true)?;
    let mut flows = Flows::new(socket);
    let mut buffers = vec![vec![0; MAX_DATAGRAM_BYTES]; BATCH];
    let mut sweep = tokio::time::interval(SWEEP);
    loop {
        let mut messages: Vec<_> = buffers.iter_mut().map(|b| RecvMessage::new(b)).collect();
        let socket = Arc::clone(&flows.socket);
        let came = tokio::select! {
            came = socket.recv_many(&mut messages) => came?,
            _ = sweep.tick() => {
                flows.remove_ended();
                continue;
            }
        };
        for message in &messages[..came] {
            if let (Some(peer), Some(local)) = (message.from(), message.to())
                && let Some(flow) = flows.take(Ends { peer, local }, message.payload())
            {
                let serving = serve(flow);
                tokio::spawn(async move { drop(serving.await) });
            }
        }
        // A peer that does not pause leaves time for the others.
        tokio::task::yield_now().await;
    }
}

/// The flows whose tasks run, and some that have ended.
struct Flows {
    socket: Arc<UdpSocket>,
    all: HashMap<Ends, Sender<Waiting>>,
    of_source: HashMap<IpAddr, usize>,
    space: Arc<Semaphore>,
}

impl Flows {
    fn new(socket: Arc<UdpSocket>) -> Flows {
        let space = Arc::new(Semaphore::new(WAITING_BYTES));
        Flows { socket, all: HashMap::new(), of_source: HashMap::new(), space }
    }

    /// Passes a datagram to its flow; returns the flow if it has just begun.
    fn take(&mut self, ends: Ends, datagram: &[u8]) -> Option<UdpFlow> {
        let bytes = datagram.len().max(1) as u32;
        let permit = Arc::clone(&self.space).try_acquire_many_owned(bytes).ok()?;
        let waiting = Waiting { datagram: datagram.to_vec(), _permit: permit };
        let Some(flow) = self.all.get(&ends) else { return self.begin(ends, waiting) };
        match flow.try_send(waiting) {
            Ok(()) | Err(TrySendError::Full(_)) => None,
            Err(TrySendError::Closed(waiting)) => self.begin(ends, waiting),
        }
    }

    fn begin(&mut self, ends: Ends, first: Waiting) -> Option<UdpFlow> {
        let is_new = !self.all.contains_key(&ends);
        let of_source = self.of_source.get(&ends.source()).copied().unwrap_or(0);
        if is_new && (self.all.len() >= MOST_FLOWS || of_source >= MOST_OF_PEER) {
            // Administratively prohibited: code 13 of ICMP, code 1 of ICMPv6.
            let code = if ends.peer.is_ipv4() { 13 } else { 1 };
            ends.report(&self.socket, &first.datagram, IcmpError::Unreachable { code });
            return None;
        }
        let (sender, waiting) = mpsc::channel(WAITING_DATAGRAMS);
        let _ = sender.try_send(first);
        self.all.insert(ends, sender);
        *self.of_source.entry(ends.source()).or_default() += usize::from(is_new);
        Some(UdpFlow { socket: Arc::clone(&self.socket), ends, waiting })
    }

    fn remove_ended(&mut self) {
        let of_source = &mut self.of_source;
        self.all.retain(|ends, flow| {
            if flow.is_closed()
                && let Entry::Occupied(mut count) = of_source.entry(ends.source())
            {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
            !flow.is_closed()
        });
    }
}
