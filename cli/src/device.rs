//! The options that every command with a device takes, and the stack that comes of them.

use crate::failure::{During, Failure, Outcome};
use crate::gateway::capture::CaptureFile;
use crate::gateway::log::Log;
use crate::metrics;
use crate::route_spec::{self, RouteSpec};
use crate::sandbox::{self, DEFAULT_INTERFACE, FULMAR_ADDRESSES, KERNEL_ADDRESSES};
use fulmar::device::Device;
use fulmar::devices::{FaultSpec, OpenError, ParseSpecError, Spec};
use fulmar::devices::{Shm, ShmConfig, Side};
use fulmar::tcp::{EcnPolicy, TcpConfig};
use fulmar::{Cidr, CongestionControl, ConnectOptions, Stack, TcpStream, devices};
use fulmar_gateway::netns::Netns;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self as unix, UnixListener};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

/// The options of a stack. The short help shows only `--device` and `--addr`.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Device and addresses")]
pub struct StackArgs {
    /// The device: an interface name, tap:NAME, tun:NAME, packet:INTERFACE or shm:NAME
    ///
    /// A plain name is an interface: an existing TAP or TUN is opened as such, any other existing interface through a
    /// packet socket, and a missing one is created as a TAP. tun:NAME carries IP packets without Ethernet. shm:NAME is
    /// memory shared with another process that uses the same NAME; a NAME with a slash is a path.
    #[arg(long, value_name = "DEVICE", default_value = DEFAULT_INTERFACE, value_parser = device)]
    device: Spec,
    /// Address of the stack with its prefix length; may be repeated [default on fulmar0: 10.77.0.2/24, fd77::2/64]
    ///
    /// Required on interfaces other than fulmar0 to fulmar3. In a sandbox, the second command gets 10.77.0.3 and
    /// fd77::3, and so on. Over shm, the listener, or else the first process to start, gets 10.77.0.1 and fd77::1.
    #[arg(long = "addr", value_name = "CIDR")]
    addresses: Vec<Cidr>,
    /// Default gateway; may be given once for each IP version
    #[arg(long = "gateway", value_name = "ADDRESS", hide_short_help = true)]
    gateways: Vec<IpAddr>,
    /// Route: DESTINATION[,via=ROUTER[+ROUTER]...][,mtu=BYTES][,from=SOURCE]; may be repeated. Several routers share
    /// the traffic. A route with a SOURCE prefix is used only for packets with a source address in it
    #[arg(long = "route", value_name = "ROUTE", hide_short_help = true)]
    routes: Vec<RouteSpec>,
    /// Address of the kernel's end of the TAP or TUN [default for a new interface without --addr: 10.77.0.1/24 and
    /// fd77::1/64]
    #[arg(long = "peer-addr", value_name = "CIDR", hide_short_help = true)]
    peer_addresses: Vec<Cidr>,
    /// Over shm: how long to wait for the other process [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = crate::bounds::seconds, hide_short_help = true)]
    peer_timeout: Option<Duration>,
    /// The largest IP packet, in bytes
    #[arg(long, value_name = "BYTES", hide_short_help = true)]
    mtu: Option<usize>,
    /// Number of queues of a tap, tun or packet device, up to 32. Each queue has a shard of the stack with a lock,
    /// memory and a thread of its own, so that threads on different CPUs do not contend
    #[arg(long, value_name = "N", default_value_t = 1, hide_short_help = true,
          value_parser = clap::value_parser!(u16).range(1..=32))]
    queues: u16,
    /// Write all frames to this file (pcapng)
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pcap: Option<PathBuf>,
    /// Impair the traffic of the device: loss=1%,reorder=1%,dup=1%,corrupt=0.1%,delay=5ms,seed=7
    ///
    /// Also jitter=1ms, loss-run=3 (consecutive losses), reorder-by=4 (packets), mtu=1300 (drops larger packets
    /// without an ICMP message), and a bottleneck in each direction: rate=10mbit, queue=64k,
    /// aqm=droptail|codel|codel+ecn|mark:1ms, police=10mbit:64k
    #[arg(long, value_name = "FAULTS", hide_short_help = true)]
    faults: Option<FaultSpec>,
    /// Serve Prometheus metrics on this port of the kernel's loopback interface, or on this address of the kernel
    #[arg(long, value_name = "[ADDRESS:]PORT", value_parser = metrics::address, hide_short_help = true)]
    metrics: Option<SocketAddr>,
}

/// A device by its name; `auto` is an alias of [`DEFAULT_INTERFACE`].
fn device(text: &str) -> Result<Spec, ParseSpecError> {
    if text == "auto" { DEFAULT_INTERFACE } else { text }.parse()
}

/// A device, and how it came to be.
struct Opened {
    /// One for each queue.
    devices: Vec<Box<dyn Device>>,
    /// The TAP or TUN that this command made, whose kernel end is still bare.
    new_tap: Option<String>,
    /// Default addresses where a guess is safe: [`crate::sandbox`]'s addresses on fulmar0, and a pair on a link that
    /// only two processes share.
    defaults: Option<[(IpAddr, u8); 2]>,
    /// Others may be on the same network, so that an address must be claimed.
    is_shared: bool,
}

fn index_of(interface: &str) -> Option<u32> {
    Netns::current().and_then(|here| here.if_index(interface)).ok()
}

/// Whether the interface exists and is down.
fn is_down(here: &Netns, interface: &str) -> bool {
    let all = here.netlink().and_then(|mut netlink| netlink.interfaces());
    all.is_ok_and(|all| all.iter().any(|i| i.name == interface && !i.is_up))
}

/// Opens the device; of the default one, the first interface of the sandbox without a stack, and says which that is.
fn open_free(spec: &Spec, queues: u16) -> Outcome<(Spec, Opened)> {
    let is_default = matches!(spec, Spec::Interface(name) if name == DEFAULT_INTERFACE);
    let is_there = |n: &usize| is_default && index_of(&sandbox::interface(*n)).is_some();
    let others = (1..sandbox::INTERFACES).take_while(is_there);
    let others = others.map(|n| Spec::Interface(sandbox::interface(n)));
    let mut busy = None;
    for spec in [spec.clone()].into_iter().chain(others) {
        match open(&spec, queues) {
            Err(e) if e.source.kind() == io::ErrorKind::ResourceBusy => busy = busy.or(Some(e)),
            opened => return opened.map(|o| (spec, o)).map_err(|e| Failure::new(e.to_string())),
        }
    }
    Err(Failure::new(busy.map_or_else(String::new, |e| e.to_string())))
}

/// The addresses of a stack that is given none.
fn default_addresses(spec: &Spec) -> Option<[(IpAddr, u8); 2]> {
    match spec {
        Spec::Interface(name) | Spec::Tap(name) | Spec::Tun(name) | Spec::Packet(name) => {
            let number = (0..sandbox::INTERFACES).find(|n| sandbox::interface(*n) == *name)?;
            Some(sandbox::addresses(number))
        }
        Spec::Shm(_) => Some(FULMAR_ADDRESSES),
    }
}

/// Opens the device. A TAP or TUN is new if its interface has an index that it had not before: for some
/// milliseconds the kernel shows that of a process that has just ended, under the same name.
fn open(spec: &Spec, queues: u16) -> Result<Opened, OpenError> {
    let name = match spec {
        Spec::Interface(name) | Spec::Tap(name) | Spec::Tun(name) => Some(name),
        _ => None,
    };
    let before = name.and_then(|name| index_of(name));
    let devices = spec.open(queues)?;
    let new_tap = name.filter(|name| index_of(name) != before).cloned();
    let defaults = default_addresses(spec);
    Ok(Opened { devices, new_tap, defaults, is_shared: true })
}

/// Which end of a connection the command is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// It connects.
    Connects,
    /// Others connect to it.
    Listens,
}

/// The process that listens, else the first to start, gets the addresses that are the kernel's over other devices.
fn open_shm(name: &str, role: Role, wait: Option<Duration>) -> Outcome<Opened> {
    let on_wait = |name: &str| eprintln!("waiting for another fulmar with --device shm:{name}");
    let wants = (role == Role::Listens).then_some(Side::First);
    let config = ShmConfig { name: name.to_owned(), wants, wait, on_wait, ..ShmConfig::default() };
    let end = Shm::open(&config).map_err(|e| Failure::new(e.to_string()))?;
    let defaults = match end.side() {
        Side::First => KERNEL_ADDRESSES,
        Side::Second => FULMAR_ADDRESSES,
    };
    let devices: Vec<Box<dyn Device>> = vec![Box::new(end)];
    Ok(Opened { devices, new_tap: None, defaults: Some(defaults), is_shared: false })
}

impl StackArgs {
    /// Whether the device is shared memory: one other process is all that the stack can reach.
    pub fn is_shared_memory(&self) -> bool {
        matches!(self.device, Spec::Shm(_))
    }

    /// Opens the device and builds the stack.
    pub fn open(&self) -> Outcome<Session> {
        self.open_as(Role::Connects)
    }

    /// As [`StackArgs::open`].
    pub fn open_as(&self, role: Role) -> Outcome<Session> {
        self.open_with(role, &TcpArgs::default())
    }

    /// As [`StackArgs::open_as`], with options of TCP.
    pub fn open_with(&self, role: Role, tcp: &TcpArgs) -> Outcome<Session> {
        if self.queues > 1 && self.pcap.is_some() {
            return Err(Failure::new(
                "--pcap cannot be combined with --queues: it captures one queue; omit --queues, or capture with \
                 tcpdump",
            ));
        }
        let metrics = self.metrics.map(metrics::Bound::new).transpose()?;
        let (device, opened) = match &self.device {
            Spec::Shm(name) if self.queues == 1 => {
                (self.device.clone(), open_shm(name, role, self.peer_timeout)?)
            }
            other => open_free(other, self.queues)?,
        };
        let addresses = self.stack_addresses(&opened)?;
        let claimed = if opened.is_shared { addresses.as_slice() } else { &[] };
        let claims = claimed.iter().map(claim).collect::<Outcome<_>>()?;
        if device != self.device {
            let all: Vec<String> = addresses.iter().map(Cidr::to_string).collect();
            eprintln!(
                "fulmar: {} is in use by another stack; using {} on {device}",
                self.device,
                all.join(", ")
            );
        }
        self.configure_kernel(&device, &opened)?;
        let queues = (0..).zip(opened.devices).map(|(n, device)| self.wrap(device, n));
        let queues = queues.collect::<Outcome<_>>()?;
        // `nc`, `ping`: the name under which `fulmar stat` shows the stack.
        let name = std::env::args().nth(1).unwrap_or_else(|| "fulmar".to_owned());
        let mut builder = Stack::builder().devices(queues).name(name);
        for address in addresses {
            builder = builder.address(address);
        }
        for &gateway in &self.gateways {
            builder = builder.gateway(gateway);
        }
        if let Some(mtu) = self.mtu {
            builder = builder.mtu(mtu);
        }
        let TcpConfig { congestion, ecn, .. } = TcpConfig::default();
        builder = builder.tcp(TcpConfig {
            congestion: tcp.congestion.unwrap_or(congestion),
            ecn: tcp.ecn.unwrap_or(ecn),
            ..TcpConfig::default()
        });
        let stack = builder.build().map_err(|e| Failure::new(e.to_string()))?;
        route_spec::add_all(&stack, &self.routes)?;
        if let Some(metrics) = metrics {
            serve_metrics(metrics, &stack)?;
        }
        let is_shared_memory = self.is_shared_memory();
        Ok(Session { stack, is_shared_memory, _claims: claims })
    }

    fn stack_addresses(&self, opened: &Opened) -> Outcome<Vec<Cidr>> {
        if !self.addresses.is_empty() {
            return Ok(self.addresses.clone());
        }
        if let Some(defaults) = opened.defaults {
            return Ok(defaults.map(|(address, prefix_len)| Cidr { address, prefix_len }).to_vec());
        }
        // The other end of an interface that was made just now is as bare as this one.
        Err(Failure::new(match &opened.new_tap {
            Some(_) => {
                "the new interface has no addresses; give the stack and the kernel's end an address each in one \
                 network, such as --addr 10.88.0.2/24 --peer-addr 10.88.0.1/24"
            }
            None => {
                "the stack has no address on this network; give it an unused one, such as --addr 192.0.2.9/24"
            }
        }))
    }

    /// Configures the kernel's end of a TAP or TUN: with the addresses of --peer-addr, else, if this command has made
    /// the interface, with the default ones.
    fn configure_kernel(&self, device: &Spec, opened: &Opened) -> Outcome {
        // A TAP or TUN has the name of its interface, a packet socket a prefix before that.
        let is_tap = |name: &str| opened.devices.first().is_some_and(|d| d.stats().name == name);
        let name = match device {
            Spec::Interface(name) | Spec::Tap(name) | Spec::Tun(name) if is_tap(name) => name,
            _ if self.peer_addresses.is_empty() => return Ok(()),
            _ => {
                return Err(Failure::new("--peer-addr requires a TAP or TUN device; omit it"));
            }
        };
        let addresses = self.kernel_addresses(opened);
        let here = Netns::current().during("cannot find the network namespace")?;
        for a in &addresses {
            here.set_address(name, a.address, a.prefix_len)
                .during(format_args!("cannot set the address {a} on the kernel's end of {name}"))?;
        }
        if addresses.is_empty() && opened.new_tap.is_some() {
            here.set_up(name).during(format_args!("cannot bring {name} up"))?;
        }
        if is_down(&here, name) {
            eprintln!(
                "fulmar: {name} is down and receives nothing; bring it up with `ip link set {name} up`"
            );
        }
        Ok(())
    }

    fn kernel_addresses(&self, opened: &Opened) -> Vec<Cidr> {
        let wants_defaults = self.peer_addresses.is_empty() && self.addresses.is_empty();
        if wants_defaults && opened.defaults.is_some() && opened.new_tap.is_some() {
            return KERNEL_ADDRESSES
                .map(|(address, prefix_len)| Cidr { address, prefix_len })
                .to_vec();
        }
        self.peer_addresses.clone()
    }

    /// Wraps the device in --faults and --pcap. The capture has what the stack sends and receives, before and after the
    /// faults.
    fn wrap(&self, mut device: Box<dyn Device>, queue: u64) -> Outcome<Box<dyn Device>> {
        if let Some(spec) = &self.faults {
            let seed = spec.seed.wrapping_add(queue);
            device = devices::impaired(device, seed, &spec.path, &spec.path);
        }
        match &self.pcap {
            Some(file) => {
                let log = Log::to_stderr("fulmar", true);
                Ok(devices::capture(device, CaptureFile::create(file, &log)?))
            }
            None => Ok(device),
        }
    }
}

/// Serves the metrics of a stack until it ends.
fn serve_metrics(metrics: metrics::Bound, stack: &Stack) -> Outcome {
    let observer = stack.observer();
    let text = move || Some(metrics::exposition(&observer.stat()?.document(), &[]));
    metrics.serve(text).during("cannot start the thread for --metrics")
}

/// Claims an address by an abstract socket name, which belongs to the network namespace and is freed with the process:
/// two stacks with one address on one interface would reset each other's connections, and packet sockets do not exclude
/// each other.
fn claim(address: &Cidr) -> Outcome<UnixListener> {
    let ip = address.address;
    claim_name(&format!("fulmar-address-{ip}")).map_err(|e| match e.kind() {
        io::ErrorKind::AddrInUse => Failure::new(format!(
            "another fulmar command uses the address {ip} here; end it, or choose another address with --addr. \
             Commands on one TAP reach the kernel, but not each other; to connect two commands, use \
             --device shm:NAME, or one `fulmar sandbox` (up to {} commands)",
            sandbox::INTERFACES
        )),
        _ => Failure::io(format_args!("cannot claim the address {ip}"), &e),
    })
}

fn claim_name(name: &str) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&unix::SocketAddr::from_abstract_name(name)?)
}

/// How long a connect over shared memory is repeated while it is refused: the other process may have opened its device
/// and not listen yet.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(1);
/// Time between two of these attempts.
const LISTEN_RETRY: Duration = Duration::from_millis(10);

/// Options of commands that use TCP.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct TcpArgs {
    /// Congestion control: cubic, reno, bbr or dctcp [default: cubic]
    #[arg(long, value_name = "NAME")]
    congestion: Option<CongestionControl>,
    /// Explicit congestion notification: off, accept (only if the peer requests it) or ask (request it) [default:
    /// accept]
    #[arg(long, value_name = "POLICY")]
    ecn: Option<EcnPolicy>,
}

/// A running stack and the end of it.
pub struct Session {
    stack: Stack,
    is_shared_memory: bool,
    /// Held, never read: see [`claim`].
    _claims: Vec<UnixListener>,
}

impl Session {
    /// The stack.
    pub fn stack(&self) -> &Stack {
        &self.stack
    }

    /// Connects, from a chosen local port if one is given.
    pub fn connect(
        &self,
        to: SocketAddr,
        local_port: Option<u16>,
        timeout: Duration,
    ) -> io::Result<TcpStream> {
        let start = Instant::now();
        loop {
            let any: IpAddr = match to {
                SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let local = SocketAddr::new(any, local_port.unwrap_or(0));
            let options = ConnectOptions { local: Some(local), ..ConnectOptions::default() };
            match TcpStream::connect_with(&self.stack, &to, &options, Some(timeout)) {
                Err(e) if self.is_too_early(&e, start) => thread::sleep(LISTEN_RETRY),
                done => return done,
            }
        }
    }

    /// Whether the other process may not listen yet: both open their device at the same moment.
    fn is_too_early(&self, e: &io::Error, start: Instant) -> bool {
        let refused = e.kind() == io::ErrorKind::ConnectionRefused;
        self.is_shared_memory && refused && start.elapsed() < LISTEN_TIMEOUT
    }

    /// Ends the stack: what was accepted is delivered, within the documented time.
    pub fn close(self) {
        drop(self.stack);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_is_the_default_interface() {
        assert_eq!(device("auto"), Ok(Spec::Interface(DEFAULT_INTERFACE.to_owned())));
    }

    #[test]
    fn the_default_addresses_of_both_ends_share_their_networks() {
        for ((ours, n), (kernels, m)) in FULMAR_ADDRESSES.into_iter().zip(KERNEL_ADDRESSES) {
            assert!(n == m && ours != kernels && ours.is_ipv4() == kernels.is_ipv4());
        }
    }
}
