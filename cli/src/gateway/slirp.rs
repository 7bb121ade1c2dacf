//! `slirp4netns`: the gateway with the options of slirp4netns(1) 1.3 and its API socket.
//!
//! ```text
//!   caller ── options ──────► Args of `fulmar gateway` ──► Plan ──► serve
//!      ◄── "1" on --ready-fd ── the network is up
//!      ─── end of --exit-fd ──► the gateway ends
//!      ─── --api-socket ──────► api: a thread ──► the relay's loop publishes the port
//! ```
//!
//! The process stays in the foreground. It is contained with or without `--enable-sandbox` and `--enable-seccomp`.
//!
//! Sources: slirp4netns(1) of 1.3.3, and its answers.

mod api;
mod caller;
mod forwards;
#[cfg(test)]
mod tests;

use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use clap::{CommandFactory, Parser};
use fulmar_gateway::netns::Netlink;
use fulmar_gateway::ports::PortSpec;

use super::args::{
    Address, Args, AttachArgs, GuestArgs, Mac, MapArgs, OrNone, PortArgs, interface,
};
use super::detach::{self, Becomes, Process};
use super::plan::{Guest, LEAST_MTU_V6, Plan};
use super::serve::{self, RunMode};
use super::{PASTA_FAILED, follow, refuse};
use crate::bounds::within;
use crate::failure::{During, Failure, Outcome};

pub use caller::Caller;

const NAME: &str = "slirp4netns";
/// The addresses of the gateway and of the guest, as numbers of their network.
const ROUTER: u32 = 2;
const RESOLVER: u32 = 3;
const GUEST: u32 = 100;
/// The network of an IPv6 guest, and the router's address on the link.
const NETWORK_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0);
const PREFIX_LEN_V6: u8 = 64;
const ROUTER_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2);
/// Ethernet's header of a TAP takes the rest of its 65,535 bytes.
const MOST_MTU: u32 = 65_521;

/// Give a network namespace a network without root, with the options of slirp4netns(1)
#[derive(Parser, Clone, Debug)]
#[command(
    name = NAME,
    version = concat!("version 1.3.3 (fulmar ", env!("CARGO_PKG_VERSION"), ")"),
    disable_version_flag = true,
    infer_long_args = true,
    args_override_self = true,
    override_usage = "slirp4netns [OPTION]... PID|PATH TAPNAME",
    after_help = "Examples:
  slirp4netns --configure --mtu=65520 --disable-host-loopback 4242 tap0
  slirp4netns -c --netns-type=path --api-socket=/run/api /run/netns/x tap0

fulmar acts as this command if it is run under the name slirp4netns, or with
--slirp4netns as its first argument. Of a --cidr the address 2 is the gateway
and the host's loopback, 3 the resolver, 100 the guest.

Exit status: 0 at the end; 1: an invalid option, or the set-up failed."
)]
struct Options {
    /// Set up the interface: addresses, default route, MTU
    #[arg(short, long)]
    configure: bool,
    /// Exit when the other end of this descriptor is closed
    #[arg(short, long, value_name = "FD", value_parser = within(0, RawFd::MAX))]
    exit_fd: Option<RawFd>,
    /// Write "1" to this descriptor when the network is up, and close it
    #[arg(short, long, value_name = "FD", value_parser = within(0, RawFd::MAX))]
    ready_fd: Option<RawFd>,
    /// MTU of the interface in bytes
    #[arg(short, long, value_name = "BYTES", default_value_t = 1500, value_parser = within(68, MOST_MTU))]
    mtu: u32,
    /// IPv6, with the network fd00::/64
    #[arg(short = '6', long)]
    enable_ipv6: bool,
    /// Serve the API by which ports are published (add_hostfwd) on this Unix socket
    #[arg(short, long, value_name = "PATH")]
    api_socket: Option<PathBuf>,
    /// The IPv4 network of the guest
    #[arg(long, default_value = "10.0.2.0/24")]
    cidr: Cidr,
    /// Do not let the guest reach the host's loopback interface
    #[arg(long, alias = "no-host-loopback")]
    disable_host_loopback: bool,
    /// Which kind of namespace is given: pid or path
    #[arg(long, value_name = "TYPE", default_value = "pid")]
    netns_type: NetnsType,
    /// Join this user namespace instead of that of the process
    #[arg(long, value_name = "PATH")]
    userns_path: Option<PathBuf>,
    /// Accepted for compatibility: the gateway never keeps access to the file system
    #[arg(long, alias = "create-sandbox")]
    enable_sandbox: bool,
    /// Accepted for compatibility: the gateway always limits its system calls
    #[arg(long)]
    enable_seccomp: bool,
    /// Source address of outgoing IPv4 connections on the host, or the interface that has it
    #[arg(long, value_name = "IPv4|INTERFACE")]
    outbound_addr: Option<String>,
    /// Source address of outgoing IPv6 connections on the host, or the interface that has it
    #[arg(long, value_name = "IPv6|INTERFACE")]
    outbound_addr6: Option<String>,
    /// No resolver at the address 3
    #[arg(long)]
    disable_dns: bool,
    /// Ethernet address of the interface (only with --configure)
    #[arg(long, value_name = "MAC", requires = "configure")]
    macaddress: Option<Mac>,
    /// Which kind of target is given: netns
    #[arg(long, value_name = "TYPE", default_value = "netns", value_parser = target_type)]
    target_type: String,
    /// Print the version
    #[arg(short, long, action = clap::ArgAction::Version)]
    version: Option<bool>,
    /// The process or, with --netns-type=path, the file of the namespace
    #[arg(value_name = "PID|PATH")]
    target: PathBuf,
    /// Name of the interface
    #[arg(value_name = "TAPNAME", value_parser = interface)]
    tap: String,
    /// Ignored, as slirp4netns does
    #[arg(hide = true)]
    rest: Vec<OsString>,
}

/// Which kind of namespace is given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum NetnsType {
    Pid,
    Path,
}

impl FromStr for NetnsType {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<NetnsType, &'static str> {
        match text {
            "pid" => Ok(NetnsType::Pid),
            "path" => Ok(NetnsType::Path),
            "tapfd" => Err("not supported: give the namespace by `pid` or `path`"),
            _ => Err("expected pid or path"),
        }
    }
}

fn target_type(text: &str) -> Result<String, &'static str> {
    match text {
        "netns" => Ok(text.to_owned()),
        "bess" => Err("not supported: fulmar does not serve User Mode Linux"),
        _ => Err("expected netns"),
    }
}

/// The IPv4 network of a guest: it has the address 100.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cidr {
    network: Ipv4Addr,
    prefix_len: u8,
}

impl Cidr {
    /// An address of the network by its number.
    fn host(self, number: u32) -> IpAddr {
        Ipv4Addr::from_bits(self.network.to_bits() | number).into()
    }
}

impl FromStr for Cidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Cidr, String> {
        let malformed = || "expected an IPv4 network such as 10.0.2.0/24".to_owned();
        let (network, prefix_len) = text.split_once('/').ok_or_else(malformed)?;
        let network: Ipv4Addr = network.parse().map_err(|_| malformed())?;
        let prefix_len: u8 = prefix_len.parse().map_err(|_| malformed())?;
        if !(1..=25).contains(&prefix_len) {
            return Err(
                "expected a prefix length from 1 to 25: the guest has the address 100".into()
            );
        }
        let cidr = Cidr { network, prefix_len };
        if network.to_bits().trailing_zeros() < 32 - u32::from(prefix_len) {
            let own =
                Ipv4Addr::from_bits(network.to_bits() >> (32 - prefix_len) << (32 - prefix_len));
            return Err(format!("expected the address of the network, {own}/{prefix_len}"));
        }
        // The address of a host: not of the loopback interface, not multicast.
        Address::from_str(&cidr.host(GUEST).to_string()).map(|_| cidr)
    }
}

/// The address of the IPv6 network with a number.
fn host_v6(number: u16) -> IpAddr {
    let mut segments = NETWORK_V6.segments();
    segments[7] = number;
    Ipv6Addr::from(segments).into()
}

impl Options {
    /// The same gateway by the options of `fulmar gateway`.
    fn gateway_args(&self) -> Outcome<Args> {
        if self.enable_ipv6 && self.mtu < LEAST_MTU_V6 {
            return Err(Failure::new(format!(
                "IPv6 requires an MTU of at least {LEAST_MTU_V6}; raise --mtu, or omit --enable-ipv6"
            )));
        }
        let (netns, command) = self.target()?;
        let mut args = Args {
            attach: AttachArgs {
                netns,
                userns: self.userns_path.clone(),
                config_net: self.configure,
                // Then the caller says when the end is.
                no_netns_quit: self.exit_fd.is_some(),
                ns_ifname: Some(self.tap.clone()),
                ns_mac_addr: self.macaddress,
                ..AttachArgs::default()
            },
            guest: self.guest_args()?,
            map: self.map_args(),
            ports: PortArgs {
                tcp_ports: vec![PortSpec::None],
                udp_ports: vec![PortSpec::None],
                tcp_ns: vec![PortSpec::None],
                udp_ns: vec![PortSpec::None],
                ..PortArgs::default()
            },
            command,
            ..Args::default()
        };
        args.process.foreground = true;
        Ok(args)
    }

    /// The file of the namespace, or the process as the only word of a command.
    fn target(&self) -> Outcome<(Option<PathBuf>, Vec<OsString>)> {
        let target = self.target.as_os_str();
        match self.netns_type {
            // A name without a slash is a file here, not one of ip-netns(8).
            NetnsType::Path => Ok((Some(Path::new(".").join(&self.target)), Vec::new())),
            NetnsType::Pid if target.as_encoded_bytes().iter().all(u8::is_ascii_digit) => {
                Ok((None, vec![target.to_owned()]))
            }
            NetnsType::Pid => Err(Failure::new(format!(
                "invalid process id `{}`: expected a number; a path requires --netns-type=path",
                self.target.display()
            ))),
        }
    }

    fn guest_args(&self) -> Outcome<GuestArgs> {
        let own = |number| Address(self.cidr.host(number), Some(self.cidr.prefix_len));
        let mut guest = GuestArgs {
            ipv4_only: !self.enable_ipv6,
            address: vec![own(GUEST)],
            gateway: vec![self.cidr.host(ROUTER)],
            mtu: Some(self.mtu),
            dhcp_dns: !self.disable_dns,
            ..GuestArgs::default()
        };
        if self.enable_ipv6 {
            guest.address.push(Address(host_v6(GUEST as u16), Some(PREFIX_LEN_V6)));
            guest.gateway.push(ROUTER_V6.into());
        }
        let wanted = [(&self.outbound_addr, true), (&self.outbound_addr6, false)];
        for (text, is_v4) in wanted {
            if let Some(text) = text {
                guest.outbound.push(outbound_address(text, is_v4)?.to_string());
            }
        }
        Ok(guest)
    }

    fn map_args(&self) -> MapArgs {
        let both = |number: u32| {
            let v6 = self.enable_ipv6.then(|| host_v6(number as u16));
            [self.cidr.host(number)].into_iter().chain(v6)
        };
        let host_loopback = both(ROUTER).map(OrNone::Is);
        MapArgs {
            dns_forward: if self.disable_dns { Vec::new() } else { both(RESOLVER).collect() },
            map_host_loopback: match self.disable_host_loopback {
                true => vec![OrNone::None],
                false => host_loopback.collect(),
            },
            ..MapArgs::default()
        }
    }

    fn plan(&self) -> Outcome<Plan> {
        let mut plan = Plan::new(&self.gateway_args()?)?;
        plan.link = vec![(self.cidr.network.into(), self.cidr.prefix_len)];
        if self.enable_ipv6 {
            plan.link.push((NETWORK_V6.into(), PREFIX_LEN_V6));
        }
        Ok(plan)
    }

    /// The descriptors that the options name by their numbers.
    fn descriptors(&self) -> Vec<RawFd> {
        [self.ready_fd, self.exit_fd].into_iter().flatten().collect()
    }

    /// The addresses of the guest to which ports of the host lead.
    fn guest_addresses(&self) -> forwards::Guest {
        let v6 = self.enable_ipv6.then(|| host_v6(GUEST as u16));
        forwards::Guest { v4: self.cidr.host(GUEST), v6 }
    }

    fn caller(&self) -> Outcome<Caller> {
        let socket = self.api_socket.as_deref();
        Caller::new([self.ready_fd, self.exit_fd], socket, self.guest_addresses())
    }

    fn run(&self) -> Outcome<ExitCode> {
        let plan = self.plan()?;
        let is_gateway = Process::current() != Process::Follow;
        let kept = if is_gateway { self.descriptors() } else { Vec::new() };
        let closed = detach::close_inherited(&plan.guest, Becomes::Gateway, &kept);
        closed.during("cannot close inherited descriptors")?;
        match &plan.guest {
            Guest::Existing(target) if is_gateway => {
                serve::serve(&plan, target, NAME, RunMode::Foreground, self.caller()?)
            }
            _ => {
                // Started as /proc/self/exe the process is called `exe`.
                let _ = nix::sys::prctl::set_name(c"slirp4netns");
                follow::run(&plan)
            }
        }
    }
}

/// A source address on the host: as it is given, or the first one of an interface.
fn outbound_address(text: &str, is_v4: bool) -> Outcome<IpAddr> {
    let (option, version) = if is_v4 { ("addr", "IPv4") } else { ("addr6", "IPv6") };
    let refused = |why: &str| Failure::new(format!("--outbound-{option} `{text}`: {why}"));
    match text.parse::<IpAddr>() {
        Ok(address) if address.is_ipv4() == is_v4 => return Ok(address),
        Ok(_) => return Err(refused(&format!("expected an {version} address or an interface"))),
        Err(_) => {}
    }
    let listed = Netlink::open().and_then(|mut n| Ok((n.interfaces()?, n.addresses()?)));
    let (interfaces, addresses) = listed.during("cannot list the host's interfaces")?;
    let Some(interface) = interfaces.iter().find(|i| i.name == text) else {
        return Err(refused(&format!("neither an {version} address nor an interface of the host")));
    };
    let mut own =
        addresses.iter().filter(|a| a.index == interface.index && a.address.is_ipv4() == is_v4);
    let first = own.clone().next();
    let address = own.find(|a| a.is_global).or(first);
    address.map(|a| a.address).ok_or_else(|| refused(&format!("it has no {version} address")))
}

/// The declaration of `slirp4netns`, for its man page.
pub fn command() -> clap::Command {
    Options::command().version(env!("CARGO_PKG_VERSION"))
}

/// The command line of slirp4netns, if this is one: the name of the program, or `--slirp4netns` as the first argument,
/// of `gateway` too.
pub fn line(line: impl Iterator<Item = OsString>) -> Option<Vec<OsString>> {
    const OPTION: &str = "--slirp4netns";
    let line: Vec<OsString> = line.collect();
    let name = line.first().map(Path::new).and_then(Path::file_name);
    if name == Some(OsStr::new(NAME)) {
        return Some(line);
    }
    let words = match line.get(1)?.to_str()? {
        OPTION => 2,
        "gateway" if line.get(2)? == OPTION => 3,
        _ => return None,
    };
    Some([OsString::from(NAME)].into_iter().chain(line.into_iter().skip(words)).collect())
}

/// `slirp4netns`, with the messages and the exit status that its callers expect.
pub fn run(line: Vec<OsString>) -> ExitCode {
    let advice = |_: &str| "`slirp4netns --help` lists the options";
    let options = match Options::try_parse_from(line) {
        Ok(options) => options,
        Err(e) => return refuse(NAME, &e, advice),
    };
    options.run().unwrap_or_else(|failure| {
        eprintln!("{NAME}: {failure}");
        ExitCode::from(PASTA_FAILED)
    })
}
