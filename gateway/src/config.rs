//! The configuration of a gateway.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::sync::Arc;

use fulmar_stack::base::{Duration, Secrets};
use fulmar_stack::device::Device;

use crate::first::EncryptedHello;
use crate::guest::GuestNetwork;
use crate::mapping::Mapping;
use crate::names::Ranges;
use crate::policy::Policy;
use crate::ports::Forward;
use crate::published::PublishedPort;
use crate::upstream::Upstream;
use crate::{dhcp, ra};

/// Most queues of a guest's interface: one for each shard of a stack.
pub const MAX_QUEUES: usize = fulmar_stack::shard::MAX_SHARDS;

/// Takes a connection that came from the host's loopback to a published port. It gives back what it does not want:
/// that is relayed like any other connection.
pub type OnLoopback = Box<dyn FnMut(TcpStream, &Arc<PublishedPort>) -> Option<TcpStream> + Send>;

/// The configuration of a gateway.
pub struct Config {
    /// The far end of the guest's interface: a TAP of the guest's namespace, or AF_PACKET on a veth. One device for
    /// each of its queues, from 1 to [`MAX_QUEUES`]; each is served by a thread of its own. Their
    /// [`Caps::wake`](fulmar_stack::device::Caps) is [`Wake::Level`](fulmar_stack::device::Wake).
    pub queues: Vec<Box<dyn Device>>,
    /// Largest IP packet in bytes, as the guest's interface has it.
    pub mtu: usize,
    /// From these all keys are derived. `None`: 32 bytes of the operating system's.
    pub secrets: Option<Secrets>,
    /// The guest's interface: its addresses, and the routers as which the gateway answers.
    pub network: GuestNetwork,
    /// Which protocols are carried.
    pub carries: Carries,
    /// Where the guest's destinations lead.
    pub mapping: Mapping,
    /// Where the host's sockets start.
    pub outbound: Outbound,
    /// The lease of the DHCP server; `None`: no server.
    pub dhcp: Option<dhcp::Lease>,
    /// The lease of the DHCPv6 server; `None`: no server.
    pub dhcp_v6: Option<dhcp::LeaseV6>,
    /// The answer to router solicitations; `None`: there is none.
    pub advertisement: Option<ra::Link>,
    /// Which hosts may write to the guest's UDP ports unasked.
    pub udp_filter: UdpFilter,
    /// Ports of the host that lead into the guest.
    pub publish: Publish,
    /// Bounds of flows, memory and descriptors.
    pub limits: Limits,
    /// One turn of the loop in this many is measured for the account of CPU time; `None`: no account is kept.
    pub account: Option<u32>,
    /// The ranges of which names get addresses of their own; `None`: the guest gets the real addresses of names.
    pub names: Option<Ranges>,
    /// A proxy through which the guest's TCP connections leave, but for those to addresses that a mapping leads to the host
    /// itself. Names are resolved there. Datagrams and echo requests to other hosts are then refused.
    pub upstream: Option<Upstream>,
    /// What a ClientHello with an encrypted part is, on a connection to such an address of a name. Default: refused.
    pub encrypted_hello: EncryptedHello,
    /// Decides about the guest's flows; `None`: all are allowed.
    pub policy: Option<Box<dyn Policy>>,
    /// Takes connections from the host's loopback; `None`: they are relayed like others.
    pub on_loopback: Option<OnLoopback>,
}

impl Config {
    /// A gateway that carries everything, publishes nothing and maps no address.
    pub fn new(queues: Vec<Box<dyn Device>>, network: GuestNetwork) -> Config {
        Config {
            mtu: network.mtu as usize,
            queues,
            secrets: None,
            network,
            carries: Carries::default(),
            mapping: Mapping::default(),
            outbound: Outbound::default(),
            dhcp: None,
            dhcp_v6: None,
            advertisement: None,
            udp_filter: UdpFilter::default(),
            publish: Publish::default(),
            limits: Limits::default(),
            account: None,
            names: None,
            upstream: None,
            encrypted_hello: EncryptedHello::default(),
            policy: None,
            on_loopback: None,
        }
    }
}

/// Which protocols are carried. Default all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Carries {
    /// TCP. Without it the guest's connections are reset.
    pub tcp: bool,
    /// UDP.
    pub udp: bool,
    /// Echo requests.
    pub icmp: bool,
}

impl Default for Carries {
    fn default() -> Self {
        Carries { tcp: true, udp: true, icmp: true }
    }
}

/// Where the host's sockets start. Default: as the host's routes say.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Outbound {
    /// Local IPv4 address.
    pub v4: Option<Ipv4Addr>,
    /// Local IPv6 address.
    pub v6: Option<Ipv6Addr>,
    /// The interface (SO_BINDTODEVICE).
    pub interface: Option<String>,
}

impl Outbound {
    /// The local address for a destination. A destination on the host's own loopback has none.
    pub(crate) fn address_for(&self, to: SocketAddr) -> Option<IpAddr> {
        match to.ip() {
            ip if ip.is_loopback() => None,
            IpAddr::V4(_) => self.v4.map(IpAddr::V4),
            IpAddr::V6(_) => self.v6.map(IpAddr::V6),
        }
    }

    /// The interface for a destination.
    pub(crate) fn interface_for(&self, to: SocketAddr) -> Option<&str> {
        self.interface.as_deref().filter(|_| !to.ip().is_loopback())
    }
}

/// Which hosts may write unasked to a UDP port of the guest that has written to others (RFC 4787 section 5). A policy
/// decides besides.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum UdpFilter {
    /// Every host (endpoint-independent filtering), as to a socket of the host that is not connected.
    #[default]
    None,
    /// Hosts to which the port has written, from any port of theirs (address-dependent filtering).
    Address,
}

/// Ports of the host that lead into the guest.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Publish {
    /// TCP ports.
    pub tcp: Vec<Forward>,
    /// UDP ports.
    pub udp: Vec<Forward>,
    /// To which addresses they can be bound.
    pub addresses: BindAddresses,
}

/// To which addresses a published port can be bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum BindAddresses {
    /// Those that the host has.
    #[default]
    Own,
    /// Any, for an address that the host will have later (IP_FREEBIND).
    Any,
}

/// Bounds of the whole gateway; each of several queues has an equal part. What is refused at a bound is counted
/// ([`Refusal`](crate::stat::Refusal)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// TCP flows at most, those included whose host has not answered; each direction has three quarters of them at
    /// most. Default 65,536; at most five eighths of the descriptors that the system allows (RLIMIT_NOFILE).
    pub tcp_flows: usize,
    /// TCP flows at most whose host has not answered yet; the oldest gives way to the next. Default 4,096.
    pub connecting: usize,
    /// UDP flows at most; the least recently used one gives way. Default 16,384.
    pub udp_flows: usize,
    /// Sockets of the host for UDP ports of the guest at most; the least recently used one gives way. Default 16,384; at
    /// most a quarter of the descriptors.
    pub udp_sockets: usize,
    /// Flows of echo requests at most, by identifier and destination; the oldest gives way. Default 256; at most an
    /// eighth of the descriptors.
    pub echo_flows: usize,
    /// Idle time of a connection whose stream from the guest has ended, and the host's has not, before the guest is
    /// asked whether it still knows it (keepalive). Default 60 s: the guest's kernel forgets a socket that its program
    /// has closed.
    pub half_closed_idle: Duration,
    /// Bytes of packets and streams in all. Default 256 MiB, of which nothing is touched before it is needed.
    pub memory_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            tcp_flows: 65_536,
            connecting: 4096,
            udp_flows: 16_384,
            udp_sockets: 16_384,
            echo_flows: 256,
            half_closed_idle: Duration::from_secs(60),
            memory_bytes: 256 << 20,
        }
    }
}

impl Limits {
    /// The limits of one of several queues: TCP and UDP flows are divided. Echo requests are all the first queue's, and
    /// memory is divided with the pool ([`shard_config`](fulmar::internals::runtime::shard_config)).
    pub(crate) fn part_of(self, queues: usize) -> Limits {
        let part = |of_all: usize| of_all.checked_div(queues).unwrap_or(of_all).max(1);
        Limits {
            tcp_flows: part(self.tcp_flows),
            connecting: part(self.connecting),
            udp_flows: part(self.udp_flows),
            udp_sockets: part(self.udp_sockets),
            echo_flows: self.echo_flows,
            half_closed_idle: self.half_closed_idle,
            memory_bytes: self.memory_bytes,
        }
    }
}
