//! The proxies: the same program over three stacks.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use fulmar::Stack;
use fulmar::device::Device;
use fulmar_tokio::{Net, PacketReceiver, PacketSender};
use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};

use super::world::{MTU, Tun, World};

/// Most packets read from the TUN before other tasks run.
const MOST_PACKETS: usize = 512;

/// A stack, and how packets come to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Proxy {
    /// fulmar, one call for each packet.
    Single,
    /// fulmar, packets that are there are passed together.
    Batched,
    /// fulmar over its own device for a TUN: the kernel joins and splits packets.
    Tun,
    Smoltcp,
    Ipstack,
    /// The program of `Ipstack` over fulmar.
    IpstackFacade,
}

impl Proxy {
    pub(super) const ALL: [Proxy; 6] = [
        Proxy::Single,
        Proxy::Batched,
        Proxy::Tun,
        Proxy::Smoltcp,
        Proxy::Ipstack,
        Proxy::IpstackFacade,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Proxy::Single => "fulmar.single",
            Proxy::Batched => "fulmar.super",
            Proxy::Tun => "fulmar.tun",
            Proxy::Smoltcp => "smoltcp",
            Proxy::Ipstack => "ipstack",
            Proxy::IpstackFacade => "facade.ipstack",
        }
    }

    pub(super) fn title(self) -> &'static str {
        match self {
            Proxy::Single => "fulmar, packet by packet",
            Proxy::Batched => "fulmar, batches",
            Proxy::Tun => "fulmar, its own TUN",
            Proxy::Smoltcp => "netstack-smoltcp 0.2.4",
            Proxy::Ipstack => "ipstack 1.0.1",
            Proxy::IpstackFacade => "ipstack's API over fulmar",
        }
    }

    /// A runtime of one thread. Streams of ipstack wait in their drop for a task, which takes a thread of its own.
    pub(super) fn runtime(self) -> io::Result<Runtime> {
        match self {
            Proxy::Ipstack => Builder::new_multi_thread().worker_threads(1).enable_all().build(),
            _ => Builder::new_current_thread().enable_all().build(),
        }
    }

    /// Starts the proxy's tasks: every connection goes to `server`. Returns the stack of fulmar's.
    pub(super) fn start(self, world: &World, server: SocketAddr) -> io::Result<Option<Stack>> {
        match self {
            Proxy::Single => return passed(world.tun()?, server, true).map(Some),
            Proxy::Batched => return passed(world.tun()?, server, false).map(Some),
            Proxy::Tun => return proxy(world.device()?, server).map(Some),
            Proxy::Smoltcp => smoltcp(world.tun()?, server)?,
            Proxy::Ipstack => ipstack(world.tun()?, server)?,
            Proxy::IpstackFacade => ipstack_facade(world.tun()?, server)?,
        }
        Ok(None)
    }
}

/// fulmar by a channel.
fn passed(tun: Tun, server: SocketAddr, is_single: bool) -> io::Result<Stack> {
    let (device, sender, receiver) = fulmar_tokio::channel(MTU).map_err(io::Error::other)?;
    let tun = Arc::new(tun);
    tokio::spawn(inward(Arc::clone(&tun), sender, is_single));
    tokio::spawn(outward(receiver, tun));
    proxy(Box::new(device), server)
}

/// A stack for every address.
fn proxy(device: Box<dyn Device>, server: SocketAddr) -> io::Result<Stack> {
    let stack = Stack::builder().device(device).any_ip(true).unlisted().build();
    let stack = stack.map_err(io::Error::other)?;
    let net = Net::new(stack.clone())?;
    tokio::spawn(fulmar_tokio::forward(&net, move |pending| {
        pending.proxy(TcpStream::connect(server))
    }));
    Ok(stack)
}

/// From the TUN to the stack.
async fn inward(tun: Arc<Tun>, mut sender: PacketSender, is_single: bool) -> io::Result<()> {
    let mut buf = [0; MTU];
    loop {
        tun.readable().await?;
        let mut count = 0;
        while count < MOST_PACKETS
            && let Some(n) = tun.try_read(&mut buf)?
        {
            match is_single {
                true => sender.send(&buf[..n]).await?,
                false => sender.push(&buf[..n]).await?,
            }
            count += 1;
        }
        sender.flush().await?;
        if count < MOST_PACKETS {
            tun.clear().await?;
        } else {
            tokio::task::yield_now().await;
        }
    }
}

/// From the stack to the TUN.
async fn outward(mut receiver: PacketReceiver, tun: Arc<Tun>) -> io::Result<()> {
    loop {
        tun.write(receiver.recv().await?)?;
    }
}

async fn relay<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, server: SocketAddr) {
    if let Ok(mut other) = TcpStream::connect(server).await {
        const BYTES: usize = 64 << 10;
        let _ =
            tokio::io::copy_bidirectional_with_sizes(&mut stream, &mut other, BYTES, BYTES).await;
    }
}

/// As its README has it.
fn smoltcp(tun: Tun, server: SocketAddr) -> io::Result<()> {
    let builder = netstack_smoltcp::StackBuilder::default().enable_tcp(true).mtu(MTU);
    let (stack, runner, _, listener) = builder.build()?;
    let missing = || io::Error::other("no TCP");
    let (runner, mut listener) = (runner.ok_or_else(missing)?, listener.ok_or_else(missing)?);
    let (mut sink, mut stream) = stack.split();
    let read = Arc::new(tun);
    let tun = Arc::clone(&read);
    tokio::spawn(runner);
    tokio::spawn(async move {
        while let Some(Ok(packet)) = stream.next().await {
            tun.write(&packet)?;
        }
        io::Result::Ok(())
    });
    tokio::spawn(async move {
        let mut buf = vec![0; MTU];
        loop {
            read.readable().await?;
            while let Some(n) = read.try_read(&mut buf)? {
                sink.send(buf[..n].to_vec()).await?;
            }
            read.clear().await?;
        }
        #[allow(unreachable_code)]
        io::Result::Ok(())
    });
    tokio::spawn(async move {
        while let Some((stream, _, _)) = listener.next().await {
            tokio::spawn(relay(stream, server));
        }
    });
    Ok(())
}

mod original {
    pub(super) use ipstack::{IpStack, IpStackConfig, IpStackStream};
}

/// The same text over a crate of the API of ipstack.
macro_rules! ipstack_program {
    ($program:ident, $stack:ident) => {
        fn $program(tun: Tun, server: SocketAddr) -> io::Result<()> {
            let mut config = $stack::IpStackConfig::default();
            config.mtu(MTU as u16).map_err(io::Error::other)?;
            let mut stack = $stack::IpStack::new(config, tun);
            tokio::spawn(async move {
                while let Ok(stream) = stack.accept().await {
                    if let $stack::IpStackStream::Tcp(stream) = stream {
                        tokio::spawn(relay(stream, server));
                    }
                }
            });
            Ok(())
        }
    };
}

ipstack_program!(ipstack, original);
ipstack_program!(ipstack_facade, ipstack_facade);
