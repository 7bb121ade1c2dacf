//! The options that every command with a device takes, and the stack that comes of them.

use crate::failure::{During, Failure, Outcome};
use crate::faults::FaultSpec;
use crate::route_spec::{self, RouteSpec};
use crate::sandbox::{DEFAULT_INTERFACE, FULMAR_ADDRESSES, KERNEL_ADDRESSES};
use fulmar::devices::fault::Rates;
use fulmar::devices::shm_device::{Shm, ShmConfig, Side};
use fulmar::devices::sim::{FarEnd, SimConfig};
use fulmar::{Cidr, Device, Stack, TcpStream, devices};
use fulmar_netns::Netns;
use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self as unix, UnixListener};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

/// The options.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Device and addresses")]
pub struct StackArgs {
    /// tap:NAME, packet:INTERFACE, shm:NAME (memory shared with another process that names the
    /// same; with a slash it is a path), sim (a simulated network card with a simulated host behind
    /// it, which has every other address, takes all that is sent to it and on port 19 sends without
    /// end), or auto: a TAP called fulmar0, else the interface fulmar0
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceSpec,
    /// An address of the stack with its prefix length; may be repeated [default: 10.77.0.2/24 and
    /// fd77::2/64; of a shm, who listens or comes first has
    /// 10.77.0.1/24 and fd77::1/64]
    #[arg(long = "addr", value_name = "CIDR")]
    addresses: Vec<Cidr>,
    /// Where packets to other networks go; one for each version of IP
    #[arg(long = "gateway", value_name = "ADDRESS")]
    gateways: Vec<IpAddr>,
    /// A route, over several routers if it names several, for some sources if it names them:
    /// 192.0.2.0/24,via=10.77.0.1+10.77.0.3,mtu=1400,from=10.77.0.2/32; may be repeated
    #[arg(long = "route", value_name = "ROUTE")]
    routes: Vec<RouteSpec>,
    /// Give the kernel's end of the TAP this address [default, with a new TAP and without --addr:
    /// 10.77.0.1/24 and fd77::1/64]
    #[arg(long = "peer-addr", value_name = "CIDR")]
    peer_addresses: Vec<Cidr>,
    /// The largest IP packet, in bytes
    #[arg(long, value_name = "BYTES")]
    mtu: Option<usize>,
    /// So many queues of the device, up to 32, each with a part of the stack of its own: lock, memory
    /// and thread, so that threads of several CPUs do not wait for each other. For tap, packet and sim
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=32))]
    queues: u16,
    /// Write every frame to this file (pcapng)
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Make the device a bad network: loss=1%,reorder=1%,dup=1%,corrupt=0.1%,delay=5ms,seed=7
    #[arg(long, value_name = "FAULTS")]
    faults: Option<FaultSpec>,
}

/// Which device.
#[derive(Clone, PartialEq, Eq, Debug)]
enum DeviceSpec {
    Auto,
    Tap(String),
    Packet(String),
    Shm(String),
    Sim,
}

impl FromStr for DeviceSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceSpec, String> {
        match text.split_once(':') {
            None if text == "auto" => Ok(DeviceSpec::Auto),
            None if text == "sim" => Ok(DeviceSpec::Sim),
            Some(("tap", name)) => interface_name(name).map(DeviceSpec::Tap),
            Some(("packet", name)) => interface_name(name).map(DeviceSpec::Packet),
            Some(("shm", name)) if !name.is_empty() => Ok(DeviceSpec::Shm(name.to_owned())),
            _ => Err(format!(
                "`{text}` is not a device: write tap:NAME, packet:INTERFACE, shm:NAME, sim or auto"
            )),
        }
    }
}

/// Linux names interfaces with 1 to 15 bytes, no slash, no space (IFNAMSIZ; dev_valid_name).
fn interface_name(name: &str) -> Result<String, String> {
    let fits = (1..=15).contains(&name.len()) && name != "." && name != "..";
    let clean = !name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace());
    if fits && clean {
        return Ok(name.to_owned());
    }
    Err(format!("`{name}` cannot be the name of an interface (1 to 15 characters)"))
}

/// A device, and how it came to be.
struct Opened {
    /// One for each queue.
    devices: Vec<Box<dyn Device>>,
    /// The TAP that this command made, whose kernel end is still bare.
    new_tap: Option<String>,
    /// Addresses that are a safe guess: those of [`crate::sandbox`] on fulmar0, and on a link that
    /// only two processes share.
    defaults: Option<[(IpAddr, u8); 2]>,
    /// Others may be on the same network, so that an address must be claimed.
    is_shared: bool,
}

impl Opened {
    fn interface(devices: Vec<Box<dyn Device>>, name: &str, new_tap: Option<String>) -> Opened {
        let defaults = (name == DEFAULT_INTERFACE).then_some(FULMAR_ADDRESSES);
        Opened { devices, new_tap, defaults, is_shared: true }
    }
}

impl DeviceSpec {
    fn open(&self, listens: bool, queues: u16) -> Outcome<Opened> {
        match self {
            DeviceSpec::Tap(name) => open_tap(name, queues),
            DeviceSpec::Packet(name) => open_packet(name, queues),
            DeviceSpec::Shm(_) if queues > 1 => Err(Failure::new(
                "memory shared with another process is one queue; leave --queues out",
            )),
            DeviceSpec::Shm(name) => open_shm(name, listens),
            DeviceSpec::Sim => open_sim(queues),
            DeviceSpec::Auto => open_default(queues),
        }
    }
}

fn exists(interface: &str) -> bool {
    Netns::current().and_then(|here| here.if_index(interface)).is_ok()
}

fn open_tap(name: &str, queues: u16) -> Outcome<Opened> {
    let new_tap = (!exists(name)).then(|| name.to_owned());
    let devices = devices::tap_queues(name, queues).map_err(|e| Failure::new(e.to_string()))?;
    Ok(Opened::interface(devices, name, new_tap))
}

fn open_packet(name: &str, queues: u16) -> Outcome<Opened> {
    let devices = devices::packet_queues(name, queues).map_err(|e| Failure::new(e.to_string()))?;
    Ok(Opened::interface(devices, name, None))
}

/// Whoever listens (else whoever came first) has the addresses that the kernel has elsewhere: those
/// that others call.
fn open_shm(name: &str, listens: bool) -> Outcome<Opened> {
    let on_wait = |name: &str| eprintln!("waiting for another fulmar with --device shm:{name}");
    let wants = listens.then_some(Side::First);
    let config = ShmConfig { name: name.to_owned(), wants, on_wait, ..ShmConfig::default() };
    let end = Shm::open(&config).map_err(|e| Failure::new(e.to_string()))?;
    let defaults = match end.side() {
        Side::First => KERNEL_ADDRESSES,
        Side::Second => FULMAR_ADDRESSES,
    };
    let devices: Vec<Box<dyn Device>> = vec![Box::new(end)];
    Ok(Opened { devices, new_tap: None, defaults: Some(defaults), is_shared: false })
}

/// Nobody else is on the wire of a simulated card. What its far end sends is made, not left over.
fn open_sim(queues: u16) -> Outcome<Opened> {
    let far_end = FarEnd { verify: true, ..FarEnd::default() };
    let config = SimConfig { far_end, ..SimConfig::default() };
    let opened = devices::sim_queues(&config, queues).map_err(|e| Failure::new(e.to_string()))?;
    let (devices, _) = opened;
    Ok(Opened { devices, new_tap: None, defaults: Some(FULMAR_ADDRESSES), is_shared: false })
}

/// fulmar0 as whatever it is; where it is nothing yet, as a TAP.
fn open_default(queues: u16) -> Outcome<Opened> {
    match open_tap(DEFAULT_INTERFACE, queues) {
        Err(_) if exists(DEFAULT_INTERFACE) => open_packet(DEFAULT_INTERFACE, queues),
        Err(failure) => Err(Failure::new(format!(
            "{failure}; or start this command as `fulmar sandbox -- fulmar ...`"
        ))),
        opened => opened,
    }
}

impl StackArgs {
    /// Whether one other process is all that the stack can reach, and ends it.
    pub fn is_shared_memory(&self) -> bool {
        matches!(self.device, DeviceSpec::Shm(_))
    }

    /// Opens the device and builds the stack.
    pub fn open(&self) -> Outcome<Session> {
        self.open_as(false)
    }

    /// As [`StackArgs::open`]. `listens`: others will call this one.
    pub fn open_as(&self, listens: bool) -> Outcome<Session> {
        if self.queues > 1 && self.pcap.is_some() {
            return Err(Failure::new(
                "--pcap writes the frames of one queue; leave --queues out, or capture with tcpdump",
            ));
        }
        let opened = self.device.open(listens, self.queues)?;
        let addresses = self.stack_addresses(&opened)?;
        let claimed = if opened.is_shared { addresses.as_slice() } else { &[] };
        let claims = claimed.iter().map(claim).collect::<Outcome<_>>()?;
        self.configure_kernel(&opened)?;
        let queues = (0..).zip(opened.devices).map(|(n, device)| self.wrap(device, n));
        let queues = queues.collect::<Outcome<_>>()?;
        let mut builder = Stack::builder().devices(queues).name(command_name());
        for address in addresses {
            builder = builder.address(address);
        }
        for &gateway in &self.gateways {
            builder = builder.gateway(gateway);
        }
        if let Some(mtu) = self.mtu {
            builder = builder.mtu(mtu);
        }
        let stack = builder.build().map_err(|e| Failure::new(e.to_string()))?;
        route_spec::add_all(&stack, &self.routes)?;
        let is_shared_memory = self.is_shared_memory();
        Ok(Session { stack, is_shared_memory, _claims: claims })
    }

    fn stack_addresses(&self, opened: &Opened) -> Outcome<Vec<Cidr>> {
        if !self.addresses.is_empty() {
            return Ok(self.addresses.clone());
        }
        if let Some(defaults) = opened.defaults {
            return Ok(defaults.map(cidr).to_vec());
        }
        Err(Failure::new(
            "the stack needs an address on this network; give it one that nobody else has, \
             such as --addr 192.0.2.9/24",
        ))
    }

    /// The kernel's end of a TAP: what the user asked for; if the TAP is ours, something that
    /// works. Interfaces that stood before are left as they were.
    fn configure_kernel(&self, opened: &Opened) -> Outcome {
        let name = match (&self.device, &opened.new_tap) {
            (_, Some(name)) | (DeviceSpec::Tap(name), None) => name,
            _ if self.peer_addresses.is_empty() => return Ok(()),
            _ => return Err(Failure::new("--peer-addr is for a TAP; this device is none")),
        };
        let addresses = self.kernel_addresses(opened);
        let here = Netns::current().during("cannot find the network namespace")?;
        for a in &addresses {
            let what = format_args!("cannot give the kernel's end of {name} the address {a}");
            here.set_address(name, a.address, a.prefix_len).during(what)?;
        }
        if addresses.is_empty() && opened.new_tap.is_some() {
            here.set_up(name).during(format_args!("cannot bring {name} up"))?;
        }
        Ok(())
    }

    fn kernel_addresses(&self, opened: &Opened) -> Vec<Cidr> {
        let wants_defaults = self.peer_addresses.is_empty() && self.addresses.is_empty();
        if wants_defaults && opened.defaults.is_some() && opened.new_tap.is_some() {
            return KERNEL_ADDRESSES.map(cidr).to_vec();
        }
        self.peer_addresses.clone()
    }

    /// The capture stands outside the faults: it shows what the stack sends and receives.
    fn wrap(&self, mut device: Box<dyn Device>, queue: u64) -> Outcome<Box<dyn Device>> {
        if let Some(spec) = &self.faults {
            let seed = spec.seed.wrapping_add(queue);
            device = devices::faulty(device, seed, rates(spec), rates(spec));
        }
        match &self.pcap {
            Some(file) => Ok(devices::capture(device, create(file)?)),
            None => Ok(device),
        }
    }
}

fn cidr((address, prefix_len): (IpAddr, u8)) -> Cidr {
    Cidr { address, prefix_len }
}

fn create(file: &Path) -> Outcome<File> {
    File::create(file).during(format_args!("cannot write {}", file.display()))
}

fn rates(spec: &FaultSpec) -> Rates {
    Rates {
        drop: spec.loss,
        duplicate: spec.duplicate,
        reorder: spec.reorder,
        corrupt: spec.corrupt,
        delay: spec.delay,
        ..Rates::default()
    }
}

/// Two stacks with one address on one interface would reset each other's connections, and packet
/// sockets do not exclude each other. So each claims its addresses by a name that belongs to the
/// network namespace and goes with the process.
fn claim(address: &Cidr) -> Outcome<UnixListener> {
    let ip = address.address;
    let name = unix::SocketAddr::from_abstract_name(format!("fulmar-address-{ip}"));
    name.and_then(|n| UnixListener::bind_addr(&n)).map_err(|e| match e.kind() {
        io::ErrorKind::AddrInUse => Failure::new(format!(
            "another fulmar command has the address {ip} here; end it, or give this one \
             another with --addr"
        )),
        _ => Failure::io(format_args!("cannot claim the address {ip}"), &e),
    })
}

/// `nc`, `ping` ...: the name under which `fulmar stat` shows the stack.
fn command_name() -> String {
    std::env::args().nth(1).unwrap_or_else(|| "fulmar".to_owned())
}

/// How long the other end of shared memory may take from its first sign of life until it listens,
/// and how often a caller tries meanwhile.
const GRACE: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(10);

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
            let done = match local_port {
                None => TcpStream::connect_timeout(&self.stack, &to, timeout),
                Some(port) => TcpStream::connect_from(&self.stack, port, &to, timeout),
            };
            match done {
                Err(e) if self.is_too_early(&e, start) => thread::sleep(RETRY),
                done => return done,
            }
        }
    }

    /// Both ends of shared memory come to life at the same moment: who calls may be faster than who
    /// is about to listen.
    fn is_too_early(&self, e: &io::Error, start: Instant) -> bool {
        let refused = e.kind() == io::ErrorKind::ConnectionRefused;
        self.is_shared_memory && refused && start.elapsed() < GRACE
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
    fn devices_are_named_by_kind_and_interface() {
        assert_eq!("auto".parse(), Ok(DeviceSpec::Auto));
        assert_eq!("sim".parse(), Ok(DeviceSpec::Sim));
        assert_eq!("tap:t0".parse(), Ok(DeviceSpec::Tap("t0".into())));
        assert_eq!("packet:eth0".parse(), Ok(DeviceSpec::Packet("eth0".into())));
        assert_eq!("shm:/tmp/a:b".parse(), Ok(DeviceSpec::Shm("/tmp/a:b".into())));
        for wrong in [
            "",
            "shm",
            "shm:",
            "tap",
            "tap:",
            "tun:t0",
            "tap:a/b",
            "tap:..",
            "tap:sixteen-letters-",
        ] {
            assert!(wrong.parse::<DeviceSpec>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_default_addresses_of_both_ends_share_their_networks() {
        for ((ours, n), (kernels, m)) in FULMAR_ADDRESSES.into_iter().zip(KERNEL_ADDRESSES) {
            assert!(n == m && ours != kernels && ours.is_ipv4() == kernels.is_ipv4());
        }
    }

    #[test]
    fn faults_strike_in_both_directions_alike() {
        let spec: FaultSpec = "loss=2%,corrupt=1%".parse().unwrap();
        let rates = rates(&spec);
        assert!((rates.drop - 0.02).abs() < 1e-9 && (rates.corrupt - 0.01).abs() < 1e-9);
        assert_eq!(rates.delay, Duration::ZERO);
    }
}
