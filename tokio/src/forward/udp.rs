//! Datagrams to any address: a task for each pair of ends.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use fulmar::UdpBindOptions;
use fulmar::icmp::IcmpError;
use fulmar::stat::DropReason;
use fulmar::udp::{RecvMessage, SendMessage};
use tokio::io::Interest;
use tokio::sync::mpsc::{self, Receiver, Sender};

use super::space::{Share, Space, Waiting};
use crate::relay::with_scratch;
use crate::{Net, UdpSocket};

/// Flows at most.
const MOST_FLOWS: usize = 16_384;
/// Flows that each peer (an IPv4 address, or the upper 64 bits of an IPv6 address) may have while there are fewer than
/// [`MOST_FLOWS`]. Further ones have the threshold of [`super::space`]: those that are free of the first three quarters.
const FLOWS_OF_EACH: usize = 64;
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
        self.next().await.map(Waiting::into_datagram)
    }

    /// As [`UdpFlow::recv`], without the limit of two minutes. `None`: the stack has ended.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<Vec<u8>>> {
        self.waiting.poll_recv(cx).map(|waiting| waiting.map(Waiting::into_datagram))
    }

    async fn next(&mut self) -> Option<Waiting> {
        tokio::time::timeout(IDLE, self.waiting.recv()).await.ok().flatten()
    }

    /// Sends a datagram to the peer, from the destination of its own.
    ///
    /// # Errors
    /// As [`fulmar::UdpSocket::send_to`].
    pub async fn send(&self, datagram: &[u8]) -> io::Result<()> {
        let message = SendMessage::new(datagram).to(self.ends.peer).from(self.ends.local);
        self.socket.send_many(&[message]).await.map(drop)
    }

    /// Counts a datagram that is lost.
    fn count_drop(&self, reason: DropReason) {
        // An error: the stack has ended.
        let _ = self.socket.get_ref().count_drop(reason);
    }

    /// Passes one datagram from a socket of the host to the peer, which loses it if the device is full.
    fn return_one(&self, other: &tokio::net::UdpSocket) -> io::Result<()> {
        with_scratch(|buf| {
            let n = other.try_recv(buf)?;
            let message = SendMessage::new(&buf[..n]).to(self.ends.peer).from(self.ends.local);
            if self.socket.get_ref().send_many(&[message]).is_err() {
                self.count_drop(DropReason::ForwardReturn);
            }
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
                waiting = self.next() => {
                    // The datagram holds its charge until it is sent.
                    let Some(Waiting { datagram, .. }) = &waiting else { return Ok(()) };
                    if let Err(e) = other.send(datagram).await {
                        self.count_drop(DropReason::ForwardFlowEnded);
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

/// Counts the datagrams that the task has not taken.
impl Drop for UdpFlow {
    fn drop(&mut self) {
        self.waiting.close();
        while self.waiting.try_recv().is_ok() {
            self.count_drop(DropReason::ForwardFlowEnded);
        }
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
/// There are at most 16,384 flows. One peer (an IPv4 address, or the upper 64 bits of an IPv6 address) gets at most 6,144,
/// and less when other peers have many; a quarter is a reserve for the first 64 of each peer. A datagram of a further flow is
/// answered by ICMP (administratively prohibited). A flow whose task does not take its datagrams keeps
/// 32 of them. All that wait take at most 32 MiB: one peer gets at most 12 MiB, and less when other peers hold much. A
/// quarter is a reserve for the first 4 KiB of each peer. A drop has its reason in [`fulmar::Stack::stat`].
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
    all: HashMap<Ends, Flow>,
    peers: HashMap<IpAddr, Peer>,
    space: Space,
}

struct Flow {
    to_task: Sender<Waiting>,
    share: Arc<Share>,
}

/// A peer with flows.
struct Peer {
    flows: usize,
    share: Arc<Share>,
}

impl Flows {
    fn new(socket: Arc<UdpSocket>) -> Flows {
        let space = Space::new(WAITING_BYTES);
        Flows { socket, all: HashMap::new(), peers: HashMap::new(), space }
    }

    /// Passes a datagram to its flow, or counts its drop. Returns the flow if it has just begun.
    fn take(&mut self, ends: Ends, datagram: &[u8]) -> Option<UdpFlow> {
        self.pass(ends, datagram).unwrap_or_else(|reason| {
            // An error: the stack has ended.
            let _ = self.socket.get_ref().count_drop(reason);
            None
        })
    }

    fn pass(&mut self, ends: Ends, datagram: &[u8]) -> Result<Option<UdpFlow>, DropReason> {
        let Some(flow) = self.all.get(&ends).filter(|flow| !flow.to_task.is_closed()) else {
            return self.begin(ends, datagram).map(Some);
        };
        if flow.to_task.capacity() == 0 {
            return Err(DropReason::ForwardQueueFull);
        }
        let waiting = self.space.copy(&flow.share, datagram)?;
        // An error: the task has ended meanwhile.
        flow.to_task.try_send(waiting).map_err(|_| DropReason::ForwardFlowEnded)?;
        Ok(None)
    }

    fn begin(&mut self, ends: Ends, first: &[u8]) -> Result<UdpFlow, DropReason> {
        let is_new = !self.all.contains_key(&ends);
        if is_new && let Some(reason) = self.refusal(&ends) {
            // Administratively prohibited: code 13 of ICMP, code 1 of ICMPv6.
            let code = if ends.peer.is_ipv4() { 13 } else { 1 };
            ends.report(&self.socket, first, IcmpError::Unreachable { code });
            return Err(reason);
        }
        let peer = self.peers.get(&ends.source());
        let share = peer.map_or_else(|| self.space.share(), |peer| Arc::clone(&peer.share));
        let first = self.space.copy(&share, first)?;
        let (to_task, waiting) = mpsc::channel(WAITING_DATAGRAMS);
        let _ = to_task.try_send(first);
        let peer = Peer { flows: 0, share: Arc::clone(&share) };
        self.peers.entry(ends.source()).or_insert(peer).flows += usize::from(is_new);
        self.all.insert(ends, Flow { to_task, share });
        Ok(UdpFlow { socket: Arc::clone(&self.socket), ends, waiting })
    }

    /// The limit that a further flow exceeds.
    fn refusal(&self, ends: &Ends) -> Option<DropReason> {
        if self.all.len() >= MOST_FLOWS {
            return Some(DropReason::ForwardFlowsFull);
        }
        let of_peer = self.peers.get(&ends.source()).map_or(0, |peer| peer.flows);
        let free = (MOST_FLOWS - MOST_FLOWS / 4).saturating_sub(self.all.len());
        (of_peer >= free.max(FLOWS_OF_EACH)).then_some(DropReason::ForwardPeerFlows)
    }

    fn remove_ended(&mut self) {
        let peers = &mut self.peers;
        self.all.retain(|ends, flow| {
            let is_over = flow.to_task.is_closed();
            if is_over && let Entry::Occupied(mut peer) = peers.entry(ends.source()) {
                peer.get_mut().flows -= 1;
                if peer.get().flows == 0 {
                    peer.remove();
                }
            }
            !is_over
        });
    }
}

#[cfg(test)]
mod tests {
    use fulmar::Stack;

    use super::*;

    fn ends(peer: u8, port: usize) -> Ends {
        let local = SocketAddr::from(([192, 0, 2, 7], port as u16));
        Ends { peer: ([10, 0, 0, peer], 1000).into(), local }
    }

    #[tokio::test]
    async fn flows_count_until_they_have_ended() {
        let (device, _sender, _receiver) = crate::channel(1400).unwrap();
        let net = Net::new(Stack::builder().device(device).any_ip(true).build().unwrap()).unwrap();
        let options = UdpBindOptions { any_port: true, ..UdpBindOptions::default() };
        let socket = UdpSocket::bind_to(&net, crate::forward::EVERY, options).unwrap();
        let mut flows = Flows::new(Arc::new(socket));
        let drops = |reason| net.stack().stat().unwrap().drops(reason);
        let mut begun = Vec::new();
        let mut of_each = Vec::new();
        for peer in 0..=u8::MAX {
            let before = begun.len();
            begun.extend((0..7000).filter_map(|port| flows.take(ends(peer, port), b"x")));
            of_each.push(begun.len() - before);
        }
        assert_eq!(of_each[..3], [6144, 3072, 1536]);
        let full = of_each.iter().position(|n| *n < FLOWS_OF_EACH).unwrap();
        assert!(full > 60, "{full} peers have flows");
        assert_eq!(begun.len(), MOST_FLOWS);
        assert!(drops(DropReason::ForwardPeerFlows) > 0);
        assert!(drops(DropReason::ForwardFlowsFull) > 0);
        drop(begun);
        flows.remove_ended();
        assert!(flows.all.is_empty() && flows.peers.is_empty());
        for _ in 0..2 {
            drop(flows.take(ends(0, 1), b"x").unwrap());
            assert_eq!(flows.peers[&ends(0, 1).source()].flows, 1);
        }
        flows.remove_ended();
        assert!(flows.all.is_empty() && flows.peers.is_empty());
        let ended = MOST_FLOWS as u64 + 2;
        assert_eq!(drops(DropReason::ForwardFlowEnded), ended);
    }
}
