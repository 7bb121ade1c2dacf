//! The API of a program: stacks, sockets, poll sets, devices.

mod cidr;
mod connect;
pub mod control;
pub mod device;
pub mod devices;
mod driver;
mod echo;
mod error;
mod exit;
mod faults;
mod inner;
pub mod ledger;
mod listener;
mod loan;
mod pending;
mod poll;
mod posted;
mod receive;
mod send;
mod sendfile;
mod socket;
mod stack;
mod stat;
mod tasks;
mod tcp;
mod udp;

pub use crate::runtime::StartError;
pub use cidr::{Cidr, ParseCidrError};
pub use connect::ConnectOptions;
pub use driver::Driver;
pub use echo::{EchoRequest, EchoSocket};
pub use error::SetupError;
/// Time, counters and drop reasons. Its `Instant` counts nanoseconds of the stack's clock and is not that of
/// `std::time`; its `Duration` is.
pub use fulmar_stack::base;
pub use fulmar_stack::base::MtuDiscovery;
pub use fulmar_stack::device as netdev;
pub use fulmar_stack::device::Device;
pub use fulmar_stack::device::moderation::ModerationConfig;
/// An ICMP error to send about a received packet.
pub use fulmar_stack::ip::SentError as IcmpError;
pub use fulmar_stack::ip::{IfAddr, NeighbourState, NextHop, ParsePrefixError, Prefix, Route};
pub use fulmar_stack::mbuf;
pub use fulmar_stack::mbuf::RecvBuf;
pub use fulmar_stack::shard::{
    ConditionalAccept, FastOpenKeys, FastOpenOptions, FirstData, ListenOptions, ListenerStat,
    MIN_BUDGET_BYTES, RecvMessage, SendMessage, SocketOptions, SourceLimits, StackConfig,
    Stat as ShardStat, SynCookies, SynOptions,
};
pub use fulmar_stack::socket::Ready;
pub use fulmar_stack::tcp::{
    Config as TcpConfig, CongestionControl, EcnPolicy, Info as TcpInfo, Keepalive, MtuProbing,
    PathModel, SendTimes, State as TcpState, UnknownCongestionControl, UnknownEcnPolicy,
};
pub use fulmar_stack::udp::{BindOptions as UdpBindOptions, Plpmtud, PlpmtudState};
pub use listener::TcpListener;
pub use loan::{Loan, Slices};
pub use pending::PendingConnection;
pub use poll::{Event, PollSet, Source, Waker};
pub use posted::{RecvCompletion, RecvError, RecvRing, RecvRule};
pub use receive::RecvFlags;
pub use send::{OwnedBytes, SendCompletion, SendFlags, SendOwnedError, SendReservation};
pub use sendfile::{SendFile, SendFileError};
pub use stack::{Builder, Echo, Observer, Stack};
pub use stat::{SocketStat, Stat};
pub use tcp::TcpStream;
pub use udp::UdpSocket;
