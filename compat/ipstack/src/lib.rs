//! The API of [ipstack](https://docs.rs/ipstack/1.0.1) over [fulmar], for a program that wants another stack and not
//! another line:
//!
//! ```toml
//! [patch.crates-io]
//! ipstack = { git = "https://github.com/fulmar-net/fulmar" }
//! ```
//!
//! [docs/compat.md](https://github.com/fulmar-net/fulmar/blob/main/docs/compat.md) lists the differences.

#![forbid(unsafe_code)]

mod carry;
mod config;
mod error;
mod idle;
mod packet;
mod streams;

use std::future::ready;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use fulmar::tcp::ConditionalAccept;
use fulmar::{ListenOptions, SocketOptions, Stack};
use fulmar_tokio::{Net, TcpListener, UdpFlow, forward_udp};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc::{self, Receiver, UnboundedReceiver};
use tokio::task::JoinSet;

use carry::Carry;
pub use config::{IpStackConfig, TcpConfig, TcpOptions};
pub use error::{IpStackError, Result};
pub use etherparse::IpNumber;
use idle::Idle;
pub use streams::{IpStackStream, IpStackTcpStream, IpStackUdpStream, IpStackUnknownTransport};

/// Every address and port of both IP versions.
const EVERY: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);
/// Packets of other protocols that wait for [`IpStack::accept`]; further ones are dropped.
const WAITING_PACKETS: usize = 256;

/// A stack in place of every server, for the packets of a device.
pub struct IpStack {
    /// Else an error for the first [`IpStack::accept`].
    open: std::result::Result<Open, Option<io::Error>>,
}

struct Open {
    listener: TcpListener,
    /// At most as `forward_udp` has flows.
    flows: UnboundedReceiver<UdpFlow>,
    unknown: Receiver<IpStackStream>,
    /// Ended by their drop.
    _tasks: JoinSet<io::Result<()>>,
    config: IpStackConfig,
}

impl IpStack {
    /// Starts the tasks that pass packets between a device and a stack. Each read of the device returns one packet, and
    /// each write takes one. The tasks end with the `IpStack`, and when the device fails or reads 0 bytes.
    ///
    /// # Panics
    /// Outside of a tokio runtime whose I/O is enabled.
    pub fn new<Device>(config: IpStackConfig, device: Device) -> IpStack
    where
        Device: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        IpStack { open: Open::new(config, device).map_err(Some) }
    }

    /// The next connection, UDP flow or packet of another protocol. Cancellation safe.
    ///
    /// # Errors
    /// [`IpStackError::AcceptError`]: the device is gone. [`IpStackError::IoError`] once: the stack did not start.
    pub async fn accept(&mut self) -> Result<IpStackStream, IpStackError> {
        match &mut self.open {
            Ok(open) => open.accept().await.ok_or(IpStackError::AcceptError),
            Err(e) => Err(e.take().map_or(IpStackError::AcceptError, IpStackError::IoError)),
        }
    }
}

impl Open {
    fn new<Device>(config: IpStackConfig, device: Device) -> io::Result<Open>
    where
        Device: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let tcp_config = &config.tcp_config;
        let (end, sender, receiver) =
            fulmar_tokio::channel(config.mtu.into()).map_err(io::Error::other)?;
        let tcp = fulmar::tcp::TcpConfig { time_wait: tcp_config.two_msl, ..Default::default() };
        // After the last handle no device is left that could deliver bytes.
        let stack = Stack::builder().exit_drain(std::time::Duration::ZERO);
        let stack = stack.device(end).any_ip(true).tcp(tcp).build();
        let net = Net::new(stack.map_err(io::Error::other)?)?;
        let options = ListenOptions {
            any_port: true,
            conditional_accept: Some(ConditionalAccept::default()),
            socket: SocketOptions {
                nodelay: true,
                max_segment: tcp_config.max_segment(),
                ..SocketOptions::default()
            },
            ..ListenOptions::default()
        };
        let listener = TcpListener::bind_to(&net, EVERY, options)?;
        let (begun, flows) = mpsc::unbounded_channel();
        let datagrams = forward_udp(&net, move |flow| {
            // An error: the stack is dropped.
            ready(begun.send(flow).map_err(io::Error::other))
        });
        let (others, unknown) = mpsc::channel(WAITING_PACKETS);
        let mut tasks = JoinSet::new();
        tasks.spawn(Carry::new(&config, device, sender, receiver, others));
        tasks.spawn(datagrams);
        Ok(Open { listener, flows, unknown, _tasks: tasks, config })
    }

    async fn accept(&mut self) -> Option<IpStackStream> {
        loop {
            tokio::select! {
                pending = self.listener.pending() => {
                    let pending = pending.ok()?;
                    let (guest, server) = (pending.peer_addr(), pending.local_addr());
                    // An error: the peer has reset it.
                    let Ok(stream) = pending.accept() else { continue };
                    let (stream, idle) = (Some(stream), Idle::new(self.config.tcp_config.timeout));
                    let stream = IpStackTcpStream { stream, guest, server, idle };
                    return Some(IpStackStream::Tcp(stream));
                }
                flow = self.flows.recv() => {
                    let (flow, idle) = (flow?, Idle::new(self.config.udp_timeout));
                    return Some(IpStackStream::Udp(IpStackUdpStream { flow, idle }));
                }
                packet = self.unknown.recv() => return packet,
            }
        }
    }
}
