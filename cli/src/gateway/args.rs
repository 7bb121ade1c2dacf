//! The options of a gateway, with the names and meanings of pasta(1).

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use fulmar_gateway::config::MAX_QUEUES;
use fulmar_gateway::ports::PortSpec;

use crate::bounds::within;

/// A value, or the word `none`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OrNone<T> {
    /// `none`.
    None,
    /// A value.
    Is(T),
}

impl<T: FromStr> FromStr for OrNone<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, T::Err> {
        if text == "none" { Ok(OrNone::None) } else { text.parse().map(OrNone::Is) }
    }
}

/// An Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mac(pub [u8; 6]);

impl FromStr for Mac {
    type Err = String;

    fn from_str(text: &str) -> Result<Mac, String> {
        let bytes = text.split(':').map(|part| match part.len() {
            2 => u8::from_str_radix(part, 16).ok(),
            _ => None,
        });
        let bytes: Option<Vec<u8>> = bytes.collect();
        let mac: Option<[u8; 6]> = bytes.and_then(|b| b.try_into().ok());
        match mac {
            Some(mac) if mac[0] & 1 == 0 && mac != [0; 6] => Ok(Mac(mac)),
            _ => Err("expected a unicast Ethernet address such as 02:00:00:00:00:01".into()),
        }
    }
}

/// An address, with the length of its prefix if it is given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address(pub IpAddr, pub Option<u8>);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        let (address, length) = text.split_once('/').map_or((text, None), |(a, l)| (a, Some(l)));
        let address: IpAddr =
            address.parse().map_err(|_| format!("invalid IP address `{address}`"))?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let length = match length {
            Some(length) => Some(within(1, bits)(length)?),
            None => None,
        };
        let is_host =
            !address.is_unspecified() && !address.is_multicast() && !address.is_loopback();
        if is_host {
            Ok(Address(address, length))
        } else {
            Err(format!("`{address}` cannot be assigned to a host: expected a unicast address"))
        }
    }
}

/// Reads a netmask: a number of bits, or four numbers with dots.
fn netmask(text: &str) -> Result<u8, String> {
    if let Ok(mask) = text.parse::<std::net::Ipv4Addr>() {
        let bits = mask.to_bits();
        return match bits.leading_ones() + bits.trailing_zeros() {
            32 if bits != 0 => Ok(bits.leading_ones() as u8),
            _ => Err(format!("invalid netmask `{text}`: expected one-bits followed by zero-bits")),
        };
    }
    within(1, 32)(text).map_err(|_| {
        "expected a number of bits from 1 to 32, or a mask such as 255.255.255.0".into()
    })
}

/// MTU in bytes; 0: none is announced. The least of IPv4 is 68 (RFC 791), of IPv6 1280 (RFC 8200 section 5).
fn mtu(text: &str) -> Result<u32, String> {
    if text == "0" {
        return Ok(0);
    }
    within(68, 65_535)(text).map_err(|_| "expected 0, or a number of bytes from 68 to 65535".into())
}

/// Queues: each has a thread, and more threads than CPUs are of no use.
pub fn queues(text: &str) -> Result<u16, String> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let most = cpus.min(MAX_QUEUES) as u16;
    within(1, most)(text).map_err(|_| match most {
        1 => "expected 1, because this process can use 1 CPU".into(),
        most => format!(
            "expected a number from 1 to {most}: at most one queue per CPU, and at most {MAX_QUEUES}"
        ),
    })
}

/// Name of an interface: up to 15 bytes (linux/if.h IFNAMSIZ).
pub fn interface(text: &str) -> Result<String, String> {
    let is_allowed = |b: u8| b.is_ascii_graphic() && b != b'/' && b != b':';
    let is_name = (1..=15).contains(&text.len())
        && text.bytes().all(is_allowed)
        && text != "."
        && text != "..";
    if is_name {
        Ok(text.into())
    } else {
        Err("expected an interface name: 1 to 15 bytes without `/`, `:` and spaces".into())
    }
}

/// Connect a network namespace to the host's network without root, with the options of pasta(1)
#[derive(clap::Args, Clone, Debug, Default)]
#[command(
    infer_long_args = true,
    after_help = "Examples:
  fulmar gateway --config-net               a shell in a namespace of its own
  fulmar gateway --config-net 4242          for the namespace of process 4242
  fulmar gateway --config-net --netns PATH  for the namespace of a file
  fulmar gateway --config-net -t 8080:80 -- PROGRAM
                              the host's port 8080 leads to port 80 of PROGRAM

fulmar acts as this command if it is run under the name pasta, or with --pasta
as its first argument. Options for ports and addresses accumulate if repeated;
for any other option, the last one takes effect.

Exit status: with PROGRAM, that of the program, or 125 (no network), 126 (not
executable), 127 (no such program). Otherwise 0 once the network is up, or with
--foreground at the end. 1 or 2: an invalid option, or the set-up failed."
)]
pub struct Args {
    #[command(flatten)]
    pub(crate) attach: AttachArgs,
    #[command(flatten)]
    pub(crate) guest: GuestArgs,
    #[command(flatten)]
    pub(crate) map: MapArgs,
    #[command(flatten)]
    pub(crate) ports: PortArgs,
    #[command(flatten)]
    pub(crate) carry: CarryArgs,
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
    /// The process to attach to, or a program to run in new namespaces (default: your shell)
    #[arg(trailing_var_arg = true, value_name = "PID|PROGRAM")]
    pub(crate) command: Vec<OsString>,
}

#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Namespaces")]
pub struct AttachArgs {
    /// Attach to this network namespace; a NAME without `/` is looked up in /run/netns
    #[arg(long, value_name = "PATH|NAME", overrides_with = "netns")]
    pub netns: Option<PathBuf>,
    /// Join this user namespace first
    #[arg(long, value_name = "PATH", overrides_with = "userns")]
    pub userns: Option<PathBuf>,
    /// Join no user namespace (the default with --netns)
    #[arg(long, overrides_with = "netns_only")]
    pub netns_only: bool,
    /// Do not exit when the file of the namespace is removed
    #[arg(long, overrides_with = "no_netns_quit")]
    pub no_netns_quit: bool,
    /// Configure addresses, routes and MTU in the namespace; otherwise the guest configures them by DHCP and NDP
    #[arg(long, overrides_with = "config_net")]
    pub config_net: bool,
    /// With --config-net: copy only the default route, not all of the host's routes
    #[arg(long, requires = "config_net", overrides_with = "no_copy_routes")]
    pub no_copy_routes: bool,
    /// With --config-net: copy only one address of each IP version
    #[arg(long, requires = "config_net", overrides_with = "no_copy_addrs")]
    pub no_copy_addrs: bool,
    /// Name of the interface in the namespace (default: the name of the host's interface, or tap0)
    #[arg(short = 'I', long, value_name = "NAME", value_parser = interface, overrides_with = "ns_ifname")]
    pub ns_ifname: Option<String>,
    /// Ethernet address of the interface in the namespace
    #[arg(long, value_name = "ADDRESS", overrides_with = "ns_mac_addr")]
    pub ns_mac_addr: Option<Mac>,
}

#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Addresses")]
pub struct GuestArgs {
    /// IPv4 only
    #[arg(short = '4', long, conflicts_with = "ipv6_only", overrides_with = "ipv4_only")]
    pub ipv4_only: bool,
    /// IPv6 only
    #[arg(short = '6', long, overrides_with = "ipv6_only")]
    pub ipv6_only: bool,
    /// An address of the guest (default: the host's)
    #[arg(short, long, value_name = "ADDRESS[/BITS]")]
    pub address: Vec<Address>,
    /// Netmask of the IPv4 address
    #[arg(short = 'n', long, value_name = "MASK|BITS", value_parser = netmask, overrides_with = "netmask")]
    pub netmask: Option<u8>,
    /// The guest's router (default: the host's)
    #[arg(short, long, value_name = "ADDRESS")]
    pub gateway: Vec<IpAddr>,
    /// MTU in bytes; 0 leaves it unset [default: 65520]
    #[arg(short, long, value_name = "BYTES", value_parser = mtu, overrides_with = "mtu")]
    pub mtu: Option<u32>,
    /// Ethernet address of the gateway
    #[arg(short = 'M', long, value_name = "ADDRESS", overrides_with = "mac_addr")]
    pub mac_addr: Option<Mac>,
    /// Interface of the host whose addresses and routes the guest gets (default: that of the default route)
    #[arg(short, long, value_name = "NAME", value_parser = interface, overrides_with = "interface")]
    pub interface: Option<String>,
    /// Source address of outgoing connections on the host, or their interface
    #[arg(short, long, value_name = "ADDRESS|NAME")]
    pub outbound: Vec<String>,
    /// Interface of outgoing IPv4 connections on the host
    #[arg(long, value_name = "NAME", value_parser = interface, overrides_with = "outbound_if4")]
    pub outbound_if4: Option<String>,
    /// Interface of outgoing IPv6 connections on the host
    #[arg(long, value_name = "NAME", value_parser = interface, overrides_with = "outbound_if6")]
    pub outbound_if6: Option<String>,
    /// Address of a DNS resolver to announce to the guest, or `none`
    #[arg(short = 'D', long, value_name = "ADDRESS")]
    pub dns: Vec<OrNone<IpAddr>>,
    /// DNS search domains to announce to the guest, separated by spaces, or `none`
    #[arg(short = 'S', long, value_name = "LIST")]
    pub search: Vec<String>,
    /// Announce the resolvers by DHCP, DHCPv6 and router advertisements
    #[arg(long, overrides_with = "dhcp_dns")]
    pub dhcp_dns: bool,
    /// Announce the search domains in the same way
    #[arg(long, overrides_with = "dhcp_search")]
    pub dhcp_search: bool,
}

#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Special addresses")]
pub struct MapArgs {
    /// Address at which the guest reaches the host's resolver
    #[arg(long, value_name = "ADDRESS")]
    pub dns_forward: Vec<IpAddr>,
    /// The host's resolver (default: those of /etc/resolv.conf)
    #[arg(long, value_name = "ADDRESS")]
    pub dns_host: Vec<IpAddr>,
    /// Address at which the guest reaches the host's loopback interface (default: the router's), or `none`
    #[arg(long, value_name = "ADDRESS")]
    pub map_host_loopback: Vec<OrNone<IpAddr>>,
    /// Do not map the router's address to the host's loopback interface
    #[arg(long, overrides_with = "no_map_gw")]
    pub no_map_gw: bool,
    /// Address at which the guest reaches the host's own address, if the guest has the same one, or `none`
    #[arg(long, value_name = "ADDRESS")]
    pub map_guest_addr: Vec<OrNone<IpAddr>>,
}

#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Published ports")]
pub struct PortArgs {
    /// TCP ports of the host to forward into the namespace: none, auto (ports with a listener inside), all, or a
    /// list of [ADDRESS[%INTERFACE]/]FIRST[-LAST][:[TO_ADDRESS/]TO[-TO_LAST]], with exclusions ~FIRST[-LAST]
    /// [default: auto]
    #[arg(short, long, value_name = "PORTS")]
    pub tcp_ports: Vec<PortSpec>,
    /// UDP ports of the host to forward into the namespace [default: auto]
    #[arg(short, long, value_name = "PORTS")]
    pub udp_ports: Vec<PortSpec>,
    /// TCP ports of the namespace's loopback interface to forward to the host's [default: auto]
    #[arg(short = 'T', long, value_name = "PORTS")]
    pub tcp_ns: Vec<PortSpec>,
    /// UDP ports of the namespace's loopback interface to forward to the host's [default: auto]
    #[arg(short = 'U', long, value_name = "PORTS")]
    pub udp_ns: Vec<PortSpec>,
    /// Serve pesto(1) on this Unix socket: it shows and changes the published ports while the gateway runs
    #[arg(short = 'c', long, value_name = "SOCKET", overrides_with = "conf_path")]
    pub conf_path: Option<PathBuf>,
    /// Publish ports on addresses that the host does not have (yet) (IP_FREEBIND)
    #[arg(long, overrides_with = "freebind")]
    pub freebind: bool,
    /// Deliver datagrams to a UDP port of the guest only from hosts that the port has sent to (address-dependent
    /// filtering)
    #[arg(long, overrides_with = "udp_filter")]
    pub udp_filter: bool,
    /// Deliver connections from the host's loopback interface on the namespace's loopback interface, not on the
    /// guest's address
    #[arg(long, overrides_with = "host_lo_to_ns_lo")]
    pub host_lo_to_ns_lo: bool,
    /// No interface for the namespace: only ports between its loopback interface and the host's (-t, -u, -T, -U)
    #[arg(long, overrides_with = "splice_only")]
    pub splice_only: bool,
    /// Carry connections from the host's loopback interface through the guest's interface, as all others
    #[arg(long, overrides_with = "no_splice")]
    pub no_splice: bool,
}

#[derive(clap::Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Protocols and services")]
pub struct CarryArgs {
    /// No TCP
    #[arg(long, overrides_with = "no_tcp")]
    pub no_tcp: bool,
    /// No UDP
    #[arg(long, overrides_with = "no_udp")]
    pub no_udp: bool,
    /// No echo requests
    #[arg(long, overrides_with = "no_icmp")]
    pub no_icmp: bool,
    /// No DHCP server
    #[arg(long, overrides_with = "no_dhcp")]
    pub no_dhcp: bool,
    /// No DHCPv6 server
    #[arg(long, overrides_with = "no_dhcpv6")]
    pub no_dhcpv6: bool,
    /// No answers to neighbour solicitations (only with --ipv4-only)
    #[arg(long, overrides_with = "no_ndp")]
    pub no_ndp: bool,
    /// No router advertisements
    #[arg(long, overrides_with = "no_ra")]
    pub no_ra: bool,
}

#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Process")]
pub struct ProcessArgs {
    /// Queues of the guest's interface, each served by its own thread; at most one per CPU [default: 1]
    #[arg(long, value_name = "N", value_parser = queues, overrides_with = "queues")]
    pub queues: Option<u16>,
    /// Do not detach
    #[arg(short, long, overrides_with = "foreground")]
    pub foreground: bool,
    /// Write the process id to this file once the network is up
    #[arg(short = 'P', long, value_name = "FILE", overrides_with = "pid")]
    pub pid: Option<PathBuf>,
    /// Log to this file instead of the system log
    #[arg(short, long, value_name = "FILE", overrides_with = "log_file")]
    pub log_file: Option<PathBuf>,
    /// Truncate the log file when it reaches this size [default: 1048576]
    #[arg(long, value_name = "BYTES", value_parser = within(4096u64, 1 << 40), overrides_with = "log_size")]
    pub log_size: Option<u64>,
    /// Write the packets of the guest's interface to this file (pcapng)
    #[arg(short, long, value_name = "FILE", overrides_with = "pcap")]
    pub pcap: Option<PathBuf>,
    /// Serve Prometheus metrics on this port of the host's loopback interface, or on this address of the host
    #[arg(long, value_name = "[ADDRESS:]PORT", value_parser = crate::metrics::address, overrides_with = "metrics")]
    pub metrics: Option<SocketAddr>,
    /// Run as this user after the set-up (default: nobody, if started as root)
    #[arg(long, value_name = "UID|LOGIN[:GROUP]", overrides_with = "runas")]
    pub runas: Option<String>,
    /// Log errors only
    #[arg(short, long, overrides_with = "quiet")]
    pub quiet: bool,
    /// Log the configuration
    #[arg(short, long, overrides_with = "debug")]
    pub debug: bool,
    /// Same as --debug
    #[arg(long, overrides_with = "trace")]
    pub trace: bool,
    /// Accepted for compatibility: set-up messages always go to standard error
    #[arg(short = 'e', long, overrides_with = "stderr")]
    pub stderr: bool,
}
