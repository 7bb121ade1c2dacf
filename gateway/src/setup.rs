//! Building a gateway: what needs capabilities or files is done here, before the process is contained.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr};

use fulmar::internals::runtime::draw_secrets;
use fulmar_stack::base::Instant;
use fulmar_stack::device::{Device, Wake};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::PoolConfig;
use fulmar_stack::route::{Prefix, Route};
use fulmar_stack::shard::StackConfig;
use fulmar_stack::socket::SocketError;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::config::{Config, Limits, MAX_QUEUES};
use crate::guest::{GuestNetwork, UNROUTED_GATEWAY, UNROUTED_GATEWAY_V6};
use crate::ports::Forward;
use crate::relay::Shard;

/// Why a gateway could not be built. `Display` says what to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum SetupError {
    /// The stack could not be built.
    Stack(fulmar_stack::shard::SetupError),
    /// The device is not readable by itself when frames wait.
    Device,
    /// The number of queues is 0 or above [`MAX_QUEUES`].
    Queues,
    /// A system call of the set-up failed: which one.
    System(&'static str, io::Error),
    /// The stack does not listen.
    Listen(SocketError),
    /// A published port could not be bound.
    Publish(Box<Forward>, io::Error),
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetupError::Stack(e) => write!(f, "{e}"),
            SetupError::Device => f.write_str(
                "a gateway requires a device with a wake-up descriptor; use a TAP or a packet socket",
            ),
            SetupError::Queues => {
                write!(f, "the guest's interface must have 1 to {MAX_QUEUES} queues")
            }
            SetupError::System(what, e) => write!(f, "{what}: {e}{}", advice_on(e)),
            SetupError::Listen(e) => write!(f, "the stack cannot listen: {}", e.sentence()),
            SetupError::Publish(forward, e) => {
                write!(f, "cannot publish port {}{}: {e}", forward.bind, forward.from)?;
                f.write_str(match e.kind() {
                    io::ErrorKind::AddrInUse => {
                        "; another program uses the port: choose another port"
                    }
                    io::ErrorKind::PermissionDenied => {
                        "; choose a port of 1024 or above, or lower net.ipv4.ip_unprivileged_port_start as root"
                    }
                    io::ErrorKind::AddrNotAvailable => "; the address does not belong to the host",
                    _ => advice_on(e),
                })
            }
        }
    }
}

/// Advice about an error of any system call.
fn advice_on(e: &io::Error) -> &'static str {
    match e.raw_os_error() {
        Some(libc::EMFILE) => "; raise the limit with `ulimit -n`, or publish fewer ports",
        _ => "",
    }
}

impl std::error::Error for SetupError {}

/// The configuration of the stack on the guest's link, which answers for every address.
///
/// # Errors
/// No randomness.
pub(crate) fn stack_config(config: &Config) -> Result<StackConfig, SetupError> {
    let secrets = match &config.secrets {
        Some(secrets) => secrets.clone(),
        None => draw_secrets().map_err(|e| SetupError::System("cannot draw random numbers", e))?,
    };
    Ok(StackConfig {
        addresses: routers(&config.network),
        any_ip: true,
        routes: vec![Route::on_link(Prefix::DEFAULT_V4), Route::on_link(Prefix::DEFAULT_V6)],
        mtu: Some(config.mtu),
        pool: PoolConfig::with_budget(config.limits.memory_bytes),
        secrets: Some(secrets),
        max_sockets: config.limits.tcp_flows.saturating_add(64),
        ..StackConfig::default()
    })
}

/// How many queues there are.
///
/// # Errors
/// [`SetupError::Queues`].
pub(crate) fn queue_count(queues: &[Box<dyn Device>]) -> Result<u16, SetupError> {
    match queues.len() {
        n @ 1..=MAX_QUEUES => Ok(n as u16),
        _ => Err(SetupError::Queues),
    }
}

/// Builds shard `number` of `queues` on its device.
///
/// # Errors
/// A device that does not wake by itself, addresses that make no sense, no memory.
pub(crate) fn build_stack(
    config: StackConfig,
    device: Box<dyn Device>,
    now: Instant,
    number: u16,
    queues: u16,
) -> Result<Shard, SetupError> {
    if device.caps().wake != Wake::Level {
        return Err(SetupError::Device);
    }
    Shard::of_several(config, device, now, number, queues).map_err(SetupError::Stack)
}

/// The gateway's own addresses on the guest's link: the guest's routers, or where it has none a link-local address of
/// each IP version.
pub(crate) fn routers(network: &GuestNetwork) -> Vec<IfAddr> {
    let has = |is_v4: bool| network.addresses.iter().any(|(a, _)| a.is_ipv4() == is_v4);
    let v4 = network.gateway_v4.or_else(|| has(true).then_some(UNROUTED_GATEWAY)).map(IpAddr::V4);
    let v6 =
        network.gateway_v6.or_else(|| has(false).then_some(UNROUTED_GATEWAY_V6)).map(IpAddr::V6);
    let alone = |addr: IpAddr| IfAddr { addr, prefix_len: if addr.is_ipv4() { 32 } else { 128 } };
    v4.into_iter().chain(v6).map(alone).collect()
}

/// The first address of the guest's prefix that is not the guest's: the source address of translated IPv6 clients.
/// `None`: its prefixes have no other.
pub(crate) fn nat_source_v6(network: &GuestNetwork) -> Option<Ipv6Addr> {
    let is_guests = |v6: &Ipv6Addr| network.addresses.iter().any(|(a, _)| *a == IpAddr::V6(*v6));
    let in_prefix = |(address, length): &(IpAddr, u8)| match address {
        IpAddr::V6(v6) if !v6.is_unicast_link_local() && *length < 127 => {
            let host_bits = u128::MAX.checked_shr(u32::from(*length)).unwrap_or(0);
            let first = v6.to_bits() & !host_bits;
            (1..=3).map(|n| Ipv6Addr::from_bits(first | n)).find(|a| !is_guests(a))
        }
        _ => None,
    };
    network.addresses.iter().find_map(in_prefix)
}

/// Raises the limit of descriptors to what the system allows: each flow has one. Returns the limit.
pub(crate) fn raise_descriptor_limit() -> u64 {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return u64::MAX };
    match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => hard,
        Err(_) => soft,
    }
}

/// Descriptors that no flow uses: the guest's interface, epoll, published ports, the control socket, metrics.
const OTHER_DESCRIPTORS: u64 = 64;

/// Divides the descriptors of a process between the protocols, so that none of them takes another's: five eighths are
/// for TCP, a quarter for UDP, an eighth for echo requests.
pub(crate) fn divide_descriptors(limits: &mut Limits, descriptors: u64) {
    let eighth = descriptors.saturating_sub(OTHER_DESCRIPTORS).max(8) / 8;
    let part = |eighths: u64| usize::try_from(eighth.saturating_mul(eighths)).unwrap_or(usize::MAX);
    limits.tcp_flows = limits.tcp_flows.min(part(5));
    limits.udp_sockets = limits.udp_sockets.min(part(2));
    limits.echo_flows = limits.echo_flows.min(part(1));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_protocol_takes_the_descriptors_of_another() {
        let divided = |descriptors| {
            let mut limits = Limits::default();
            divide_descriptors(&mut limits, descriptors);
            (limits.tcp_flows, limits.udp_sockets, limits.echo_flows)
        };
        assert_eq!(divided(1024), (600, 240, 120));
        assert_eq!(divided(0), (5, 2, 1));
        let Limits { tcp_flows, udp_sockets, echo_flows, .. } = Limits::default();
        assert_eq!(divided(u64::MAX), (tcp_flows, udp_sockets, echo_flows), "unknown: no bound");
    }
}
