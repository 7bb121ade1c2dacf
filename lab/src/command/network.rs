//! Which stack `netsend` sends on.

use clap::ValueEnum;
use fulmar::{Cidr, NeighbourState, Stack};
use fulmar_cli::device::{Session, StackArgs};
use fulmar_cli::failure::{During, Failure, Outcome};
use fulmar_nic::{FarEnd, SimConfig};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// The stack's address on the simulated NIC.
const FULMAR_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2));
/// How long a send blocks at most.
const TICK: Duration = Duration::from_millis(100);

/// The options.
#[derive(clap::Args, Clone, Debug)]
pub struct NetworkArgs {
    /// Which stack's sockets: fulmar's, fulmar's on a simulated NIC, or this machine's kernel's (the last two need no
    /// device)
    #[arg(long = "stack", value_enum, default_value_t = Which::Fulmar)]
    which: Which,
    #[command(flatten)]
    stack: StackArgs,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Which {
    Fulmar,
    /// 10.77.0.2, with a simulated host behind the NIC: it has every other address and takes all that is sent to it
    Sim,
    Kernel,
}

/// A stack in use; none: the kernel's.
pub struct Opened {
    stack: Option<Stack>,
    session: Option<Session>,
}

/// A socket with a fixed peer.
pub enum Socket {
    Fulmar(fulmar::UdpSocket),
    Kernel(std::net::UdpSocket),
}

impl Socket {
    /// Sends one datagram, or fails with `WouldBlock` after [`TICK`].
    pub fn send(&self, payload: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Fulmar(socket) => socket.send(payload),
            Socket::Kernel(socket) => socket.send(payload),
        }
    }
}

impl NetworkArgs {
    /// Opens the device and builds the stack, if it is fulmar's.
    pub fn open(&self) -> Outcome<Opened> {
        Ok(match self.which {
            Which::Kernel => Opened { stack: None, session: None },
            Which::Sim => Opened { stack: Some(simulated()?), session: None },
            Which::Fulmar => {
                let session = self.stack.open()?;
                Opened { stack: Some(session.stack().clone()), session: Some(session) }
            }
        })
    }
}

fn simulated() -> Outcome<Stack> {
    let config = SimConfig { far_end: FarEnd::default(), ..SimConfig::default() };
    let (device, _) = fulmar_nic::open(config).map_err(|e| Failure::new(e.to_string()))?;
    let address = Cidr { address: FULMAR_ADDRESS, prefix_len: 24 };
    Stack::builder()
        .device(device)
        .address(address)
        .build()
        .map_err(|e| Failure::new(e.to_string()))
}

impl Opened {
    /// A socket that sends to `to`.
    pub fn connect(&self, to: SocketAddr) -> Outcome<Socket> {
        let any: IpAddr = match to {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let any = SocketAddr::new(any, 0);
        let open = || -> io::Result<Socket> {
            Ok(match &self.stack {
                Some(stack) => {
                    let socket = fulmar::UdpSocket::bind(stack, any)?;
                    socket.set_write_timeout(Some(TICK))?;
                    socket.connect(to)?;
                    Socket::Fulmar(socket)
                }
                None => {
                    let socket = std::net::UdpSocket::bind(any)?;
                    socket.set_write_timeout(Some(TICK))?;
                    socket.connect(to)?;
                    Socket::Kernel(socket)
                }
            })
        };
        open().during(format_args!("cannot send to {to}"))
    }

    /// A neighbour that was asked for and has not answered: what is for it, or goes by it, has not left.
    pub fn silent_neighbour(&self) -> Option<IpAddr> {
        let stat = self.stack.as_ref()?.stat().ok()?;
        let is_silent = |s| matches!(s, NeighbourState::Incomplete | NeighbourState::Failed);
        stat.shard.neighbours.iter().find(|n| is_silent(n.state)).map(|n| n.ip)
    }

    /// Ends the stack: what was accepted is delivered.
    pub fn close(self) {
        drop(self.stack);
        if let Some(session) = self.session {
            session.close();
        }
    }
}
