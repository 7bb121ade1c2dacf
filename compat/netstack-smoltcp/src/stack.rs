//! The stack as a stream and a sink of packets.

use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use fulmar::icmp::EchoSocket;
use fulmar::tcp::TcpConfig;
use fulmar_tokio::{Net, PacketReceiver};
use futures_core::Stream;
use futures_sink::Sink;
use smoltcp::wire::{IpProtocol, IpVersion, Ipv4Packet, Ipv6Packet};

use crate::inward::Inward;
use crate::{AnyIpPktFrame, IpFilter, IpFilters, Runner, TcpListener, UdpSocket};

/// Builds a [`Stack`].
pub struct StackBuilder {
    enable_udp: bool,
    enable_tcp: bool,
    enable_icmp: bool,
    tcp_recv_buffer_size: Option<u32>,
    tcp_send_buffer_size: Option<u32>,
    mtu: usize,
    ip_filters: IpFilters<'static>,
}

impl Default for StackBuilder {
    fn default() -> Self {
        StackBuilder {
            enable_udp: false,
            enable_tcp: false,
            enable_icmp: false,
            tcp_recv_buffer_size: None,
            tcp_send_buffer_size: None,
            mtu: 1504,
            ip_filters: IpFilters::with_non_broadcast(),
        }
    }
}

impl StackBuilder {
    /// Whether there is a [`UdpSocket`]. Default off.
    pub fn enable_udp(mut self, enable: bool) -> Self {
        self.enable_udp = enable;
        self
    }

    /// Whether there is a [`TcpListener`]. Default off.
    pub fn enable_tcp(mut self, enable: bool) -> Self {
        self.enable_tcp = enable;
        self
    }

    /// Whether echo requests are answered. Needs TCP. Default off.
    pub fn enable_icmp(mut self, enable: bool) -> Self {
        self.enable_icmp = enable;
        self
    }

    /// No effect: the stack has bounds of its own.
    pub fn stack_buffer_size(self, _: usize) -> Self {
        self
    }

    /// No effect, likewise.
    pub fn udp_buffer_size(self, _: usize) -> Self {
        self
    }

    /// No effect, likewise.
    pub fn tcp_buffer_size(self, _: usize) -> Self {
        self
    }

    /// The receive buffer of a connection at first, bytes; it grows as needed. Default 1 MiB.
    pub fn tcp_recv_buffer_size(mut self, size: u32) -> Self {
        self.tcp_recv_buffer_size = Some(size);
        self
    }

    /// The send buffer of a connection at first, bytes; it grows as needed. Default 1 MiB.
    pub fn tcp_send_buffer_size(mut self, size: u32) -> Self {
        self.tcp_send_buffer_size = Some(size);
        self
    }

    /// Replaces the filters. Default [`IpFilters::with_non_broadcast`].
    pub fn set_ip_filters(mut self, filters: IpFilters<'static>) -> Self {
        self.ip_filters = filters;
        self
    }

    /// Adds a filter.
    pub fn add_ip_filter(mut self, filter: IpFilter<'static>) -> Self {
        self.ip_filters.add(filter);
        self
    }

    /// Adds a function as a filter.
    pub fn add_ip_filter_fn<F>(mut self, filter: F) -> Self
    where
        F: Fn(&IpAddr, &IpAddr) -> bool + Send + Sync + 'static,
    {
        self.ip_filters.add_fn(filter);
        self
    }

    /// Longest packet in bytes, 68 to 65,535. Default 1504.
    pub fn mtu(mut self, mtu: usize) -> Self {
        self.mtu = mtu;
        self
    }

    /// Starts the stack: the packets' ends, a future that ends with them, and the sockets that are enabled.
    ///
    /// # Errors
    /// Outside of a tokio runtime; ICMP without TCP; a setting that the stack refuses; too few resources.
    ///
    /// # Panics
    /// In a tokio runtime whose I/O is not enabled.
    #[allow(clippy::type_complexity)]
    pub fn build(
        self,
    ) -> io::Result<(Stack, Option<Runner>, Option<UdpSocket>, Option<TcpListener>)> {
        if self.enable_icmp && !self.enable_tcp {
            return Err(io::Error::new(ErrorKind::InvalidInput, "ICMP requires TCP"));
        }
        let no_runtime = "StackBuilder::build starts tasks: call it in a tokio runtime";
        tokio::runtime::Handle::try_current().map_err(|_| io::Error::other(no_runtime))?;
        let (device, sender, receiver) =
            fulmar_tokio::channel(self.mtu).map_err(io::Error::other)?;
        // After the last handle no packets' end is left that could deliver bytes.
        let stack = fulmar::Stack::builder().exit_drain(Duration::ZERO);
        let stack = stack.device(device).any_ip(true).tcp(self.tcp()).build();
        let net = Net::new(stack.map_err(io::Error::other)?)?;
        let udp = self.enable_udp.then(|| UdpSocket::new(&net)).transpose()?;
        let listener = self.enable_tcp.then(|| TcpListener::new(&net)).transpose()?;
        if self.enable_icmp {
            tokio::spawn(answer(EchoSocket::open(net.stack())?));
        }
        let (inward, task) = Inward::new(sender);
        let runner = self.enable_tcp.then_some(Runner(task));
        let stack = Stack {
            enable_udp: self.enable_udp,
            enable_tcp: self.enable_tcp,
            enable_icmp: self.enable_icmp,
            ip_filters: self.ip_filters,
            held: None,
            inward,
            receiver: Some(receiver),
            _net: net,
        };
        Ok((stack, runner, udp, listener))
    }

    fn tcp(&self) -> TcpConfig {
        let default = TcpConfig::default();
        let bytes = |set: Option<u32>, default| set.map_or(default, |bytes| bytes as usize);
        let recv_buffer_bytes = bytes(self.tcp_recv_buffer_size, default.recv_buffer_bytes);
        let send_buffer_bytes = bytes(self.tcp_send_buffer_size, default.send_buffer_bytes);
        let largest = recv_buffer_bytes.max(send_buffer_bytes);
        TcpConfig {
            recv_buffer_bytes,
            send_buffer_bytes,
            max_buffer_bytes: default.max_buffer_bytes.max(largest),
            ..default
        }
    }
}

/// Answers echo requests in the name of every host, until the stack ends.
async fn answer(echo: EchoSocket) {
    while let Ok(request) = poll_fn(|cx| echo.poll_recv(cx)).await {
        // A reply for which there is no space is lost.
        let _ = echo.reply(&request);
    }
}

/// The packets' end of a stack: a stream of those that it sends, and a sink for those that it receives.
pub struct Stack {
    enable_udp: bool,
    enable_tcp: bool,
    enable_icmp: bool,
    ip_filters: IpFilters<'static>,
    /// A packet for which the stack had no space.
    held: Option<AnyIpPktFrame>,
    inward: Inward,
    /// `None`: the sink was closed.
    receiver: Option<PacketReceiver>,
    /// The stack runs also without sockets.
    _net: Net,
}

impl Stack {
    fn is_enabled(&self, protocol: IpProtocol) -> bool {
        match protocol {
            IpProtocol::Tcp => self.enable_tcp,
            IpProtocol::Udp => self.enable_udp,
            IpProtocol::Icmp | IpProtocol::Icmpv6 => self.enable_icmp,
            IpProtocol::Ipv6Frag => self.enable_tcp || self.enable_udp,
            _ => false,
        }
    }

    fn poll_held(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(packet) = &self.held {
            let pushed = ready!(self.inward.poll_push(cx, packet));
            self.held = None;
            pushed?;
        }
        Poll::Ready(Ok(()))
    }
}

/// Source, destination and protocol of a packet.
fn headers(packet: &[u8]) -> smoltcp::wire::Result<(IpAddr, IpAddr, IpProtocol)> {
    Ok(match IpVersion::of_packet(packet)? {
        IpVersion::Ipv4 => {
            let ip = Ipv4Packet::new_checked(packet)?;
            (ip.src_addr().into(), ip.dst_addr().into(), ip.next_header())
        }
        IpVersion::Ipv6 => {
            let ip = Ipv6Packet::new_checked(packet)?;
            (ip.src_addr().into(), ip.dst_addr().into(), ip.next_header())
        }
    })
}

/// Packets that the stack sends. Ends with the stack.
impl Stream for Stack {
    type Item = io::Result<AnyIpPktFrame>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(receiver) = &mut self.receiver else { return Poll::Ready(None) };
        loop {
            match receiver.get_mut().try_recv() {
                Ok(packet) => return Poll::Ready(Some(Ok(packet.to_vec()))),
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return Poll::Ready(None),
            }
            if ready!(pin!(receiver.readable()).poll(cx)).is_err() {
                return Poll::Ready(None);
            }
        }
    }
}

/// Packets that the stack receives. They are passed together when the task of the sink rests. Those of protocols that are
/// not enabled, and those that a filter refuses, are dropped. Errors: `InvalidInput`: not an IP packet; `BrokenPipe`: the
/// stack has ended.
impl Sink<AnyIpPktFrame> for Stack {
    type Error = io::Error;

    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_held(cx)
    }

    fn start_send(mut self: Pin<&mut Self>, packet: AnyIpPktFrame) -> io::Result<()> {
        if packet.is_empty() {
            return Ok(());
        }
        let invalid =
            |e| io::Error::new(ErrorKind::InvalidInput, format!("invalid IP packet: {e}"));
        let (src, dst, protocol) = headers(&packet).map_err(invalid)?;
        if !self.is_enabled(protocol) || !self.ip_filters.is_allowed(&src, &dst) {
            return Ok(());
        }
        match self.inward.push(&packet) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => self.held = Some(packet),
            done => return done,
        }
        Ok(())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_held(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.receiver = None;
        Poll::Ready(Ok(()))
    }
}
