//! Devices that carry a stack's frames, ready to be given to [`Builder::device`](crate::Builder::device).
//!
//! [`open`] takes the name of a device, as the command `fulmar` does; the other functions open one kind
//! each.

mod spec;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use fulmar_stack::base::EtherAddr;
use fulmar_stack::device::Device;
use fulmar_stack::device::impaired::Impaired;
use fulmar_stack::device::pcap::PcapWriter;

pub use super::faults::FaultSpec;
pub use crate::drivers::OpenError;
use crate::drivers::link;
pub use crate::drivers::link::{PacketDevice, PacketReceiver, PacketSender, channel};
pub use crate::drivers::packet::{PacketConfig, PacketSocket};
pub use crate::drivers::plain::{PacketIo, Plain, QemuStream, plain, plain_ethernet};
pub use crate::drivers::shm::{Shm, ShmConfig, Side};
pub use crate::drivers::tap::{Tap, TapConfig};
pub use crate::drivers::tun::{Tun, TunConfig};
/// The queue management of a bottleneck: [`Impairments::aqm`].
///
/// ```
/// use fulmar::devices::{Aqm, Impairments};
///
/// let path = Impairments { rate_bps: Some(10_000_000), aqm: Aqm::CODEL, ecn: true, ..Impairments::default() };
/// # assert_ne!(path.aqm, Aqm::DropTail);
/// ```
pub use fulmar_stack::device::impair::Aqm;
/// A bad network, for [`impaired`].
///
/// ```
/// use std::time::Duration;
/// use fulmar::devices::Impairments;
///
/// // A slow line with a short queue, which loses a packet in a thousand.
/// let path = Impairments {
///     rate_bps: Some(2_000_000),
///     queue_bytes: 32 << 10,
///     delay: Duration::from_millis(15),
///     loss: 0.001,
///     cut: 1.0,
///     ..Impairments::default()
/// };
/// # assert_eq!(path.duplicate, 0.0);
/// ```
pub use fulmar_stack::device::impair::Impairments;
/// A limit without a queue: [`Impairments::policer`].
///
/// ```
/// use fulmar::devices::{Impairments, Policer};
///
/// let policer = Policer { rate_bps: 50_000_000, burst_bytes: 64 << 10 };
/// let path = Impairments { policer: Some(policer), cut: 1.0, ..Impairments::default() };
/// # assert!(path.policer.is_some());
/// ```
pub use fulmar_stack::device::impair::Policer;
pub use spec::{ParseSpecError, Spec};

/// A device by its name: `fulmar0` (any interface: a TAP if it is one or does not exist yet, a TUN if it is
/// one, else through a packet socket), `tap:NAME`, `tun:NAME`, `packet:INTERFACE`, `shm:NAME`. See [`Spec`]. A TAP or
/// TUN that another program has open, and an interface that another one has opened by its plain name, are refused
/// (`ResourceBusy`): each serves one program. Programs that share an interface open `packet:INTERFACE`, and need an address
/// each.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = fulmar::devices::open("fulmar0")?;
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// No device has this name, it does not exist, or the rights are missing; the error says what to do.
///
/// `shm:NAME` waits for the other process without a limit: [`ShmConfig::wait`] sets one. As root, a plain name that no
/// interface has makes a TAP, whose other end has no address until the kernel is given one (see [`tap`]).
pub fn open(device: &str) -> Result<Box<dyn Device>, OpenError> {
    let spec: Spec = device.parse().map_err(|e: ParseSpecError| {
        let invalid = std::io::Error::new(std::io::ErrorKind::InvalidInput, e.0);
        OpenError::new(format!("cannot open `{device}`"), invalid, spec::SYNTAX)
    })?;
    spec.open_one()
}

/// A TAP interface of this name, made if there is none; the kernel is at its other end. That end has no address until
/// it is given one, and only after the device is open if this call makes the interface. (The command `fulmar` does it
/// by itself, and a shell of `fulmar sandbox` has it done for `fulmar0`.)
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = fulmar::devices::tap("tap0")?;
/// // Then: `ip addr add 10.0.0.1/24 dev tap0 && ip link set tap0 up`.
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// No permission on `/dev/net/tun`, or an interface that is in use; the error says what to do.
pub fn tap(name: &str) -> Result<Box<dyn Device>, OpenError> {
    let config = TapConfig { name: name.to_owned(), ..TapConfig::default() };
    Ok(Box::new(Tap::open(&config)?))
}

/// A TAP whose descriptor was opened elsewhere: by another process, or in another network namespace, where the
/// interface then is. It was attached with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR.
///
/// # Errors
/// The descriptor is none of such a TAP.
///
/// ```no_run
/// # fn example(received: impl Fn() -> std::os::fd::OwnedFd) -> Result<(), Box<dyn std::error::Error>> {
/// // A helper with the rights to open a TAP has sent it over a Unix socket.
/// let device = fulmar::devices::tap_from_fd(received())?;
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub fn tap_from_fd(fd: OwnedFd) -> Result<Box<dyn Device>, OpenError> {
    Ok(Box::new(Tap::from_fd(fd, &TapConfig::default())?))
}

/// So many queues of one TAP interface, each for a shard of its own: see [`Builder::devices`](crate::Builder::devices).
///
/// # Errors
/// As [`tap`]; an interface that exists must have been made for several queues.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let queues = fulmar::devices::tap_queues("tap0", 4)?;
/// let stack = fulmar::Stack::builder().devices(queues).address("10.0.0.2/24".parse()?).build()?;
/// assert_eq!(stack.shards(), 4);
/// # Ok(())
/// # }
/// ```
pub fn tap_queues(name: &str, queues: u16) -> Result<Queues, OpenError> {
    let config = TapConfig { name: name.to_owned(), ..TapConfig::default() };
    Ok(Tap::open_queues(&config, queues)?.into_iter().map(|t| Box::new(t) as _).collect())
}

/// A TUN interface of this name, made if there is none: IP packets without a link layer, the kernel at its other
/// end. It is point-to-point ([`device::Medium::Ip`](crate::device::Medium::Ip)): every packet goes to the kernel, whatever route or
/// gateway it takes; no ARP packet and no neighbour solicitation is sent or answered. Broadcasts and multicasts
/// go to the kernel, too. Super-packets and checksums are left to the kernel as on a TAP.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = fulmar::devices::tun("tun0")?;
/// // Then: `ip addr add 10.0.0.1/24 dev tun0 && ip link set tun0 up`.
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`tap`].
pub fn tun(name: &str) -> Result<Box<dyn Device>, OpenError> {
    let config = TunConfig { name: name.to_owned(), ..TunConfig::default() };
    Ok(Box::new(Tun::open(&config)?))
}

/// A TUN whose descriptor was opened elsewhere, as [`tap_from_fd`] has it. It was attached with IFF_TUN, IFF_NO_PI
/// and IFF_VNET_HDR.
///
/// # Errors
/// The descriptor is none of such a TUN.
///
/// ```no_run
/// # fn example(received: impl Fn() -> std::os::fd::OwnedFd) -> Result<(), Box<dyn std::error::Error>> {
/// // A helper with the rights to open a TUN has sent it over a Unix socket.
/// let device = fulmar::devices::tun_from_fd(received())?;
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub fn tun_from_fd(fd: OwnedFd) -> Result<Box<dyn Device>, OpenError> {
    Ok(Box::new(Tun::from_fd(fd, &TunConfig::default())?))
}

/// So many queues of one TUN interface, each for a shard of its own: see [`Builder::devices`](crate::Builder::devices).
///
/// # Errors
/// As [`tun`]; an interface that exists must have been made for several queues.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let queues = fulmar::devices::tun_queues("tun0", 4)?;
/// let stack = fulmar::Stack::builder().devices(queues).address("10.0.0.2/24".parse()?).build()?;
/// assert_eq!(stack.shards(), 4);
/// # Ok(())
/// # }
/// ```
pub fn tun_queues(name: &str, queues: u16) -> Result<Queues, OpenError> {
    let config = TunConfig { name: name.to_owned(), ..TunConfig::default() };
    Ok(Tun::open_queues(&config, queues)?.into_iter().map(|t| Box::new(t) as _).collect())
}

/// A packet socket on an Ethernet interface that exists. The stack appears on that network as a
/// station of its own, whose Ethernet address follows from that of the interface
/// ([`PacketConfig::ether`] sets another).
///
/// Several stacks may share an interface this way, each with IP addresses of its own; to reach each other they need
/// Ethernet addresses of their own, too. **Nothing finds out if two have the same IP address:** each answers for it,
/// and resets the connections of the other. The command `fulmar` refuses an address that another of its processes has claimed; a program has to see to
/// it itself.
///
/// # Errors
/// No such interface, or no `CAP_NET_RAW`; the error says what to do.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = fulmar::devices::packet("eth0")?;
/// // An address of the network of eth0 that no other host has.
/// let builder = fulmar::Stack::builder().device(device).address("192.168.1.77/24".parse()?);
/// let stack = builder.gateway("192.168.1.1".parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub fn packet(interface: &str) -> Result<Box<dyn Device>, OpenError> {
    let config = PacketConfig { interface: interface.to_owned(), ..PacketConfig::default() };
    Ok(Box::new(PacketSocket::open(&config)?))
}

/// So many packet sockets on an Ethernet interface, each for a shard of its own: see
/// [`Builder::devices`](crate::Builder::devices). The kernel gives each frame to one of them.
///
/// # Errors
/// As [`packet`].
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let queues = fulmar::devices::packet_queues("eth0", 4)?;
/// let stack = fulmar::Stack::builder().devices(queues).address("192.168.1.77/24".parse()?).build()?;
/// assert_eq!(stack.shards(), 4);
/// # Ok(())
/// # }
/// ```
pub fn packet_queues(interface: &str, queues: u16) -> Result<Queues, OpenError> {
    let config = PacketConfig { interface: interface.to_owned(), ..PacketConfig::default() };
    let sockets = PacketSocket::open_queues(&config, queues)?;
    Ok(sockets.into_iter().map(|s| Box::new(s) as _).collect())
}

/// Memory shared with another process on this host, which calls this with the same name: a path
/// (with a slash), or a plain name. Waits until it does. The [`Side`] says who
/// came first, so that the two can choose different addresses: they must. [`guide::shm`](crate::guide::shm) says what the other process can
/// do: it reads everything in the pool of this stack, and it can change received payload until that is copied.
///
/// # Errors
/// The other process is another user's or speaks another version, or the name cannot be used; the
/// error says what to do. [`Shm::open`] can also give up after a time.
///
/// ```no_run
/// use fulmar::devices::{self, Side};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (device, side) = devices::shm("camera")?;
/// let address = match side {
///     Side::First => "10.0.0.1/24",
///     Side::Second => "10.0.0.2/24",
/// };
/// let stack = fulmar::Stack::builder().device(device).address(address.parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub fn shm(name: &str) -> Result<(Box<dyn Device>, Side), OpenError> {
    let config = ShmConfig { name: name.to_owned(), ..ShmConfig::default() };
    let end = Shm::open(&config)?;
    let side = end.side();
    Ok((Box::new(end), side))
}

/// Both ends of a link.
pub type Pair = (Box<dyn Device>, Box<dyn Device>);

/// Two devices joined directly: a stack on each talks to the other without a kernel between. Each device of the
/// process's first 16 million pairs has a station address of its own.
///
/// When one stack ends, the device of the other is gone for good: every call on it, `bind` included, fails with
/// `NetworkDown` (`ENETDOWN`).
///
/// # Errors
/// Too many open descriptors.
///
/// ```
/// use std::time::Duration;
/// use fulmar::{Stack, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (a, b) = devices::link_pair()?;
/// let one = Stack::builder().device(a).address("10.0.0.1/24".parse()?).build()?;
/// let _other = Stack::builder().device(b).address("10.0.0.2/24".parse()?).build()?;
/// one.ping("10.0.0.2".parse()?, 56, Duration::from_secs(5))?;
/// # Ok(())
/// # }
/// ```
pub fn link_pair() -> Result<Pair, OpenError> {
    static PAIRS: AtomicU32 = AtomicU32::new(0);
    let [_, a, b, c] = PAIRS.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let ether = [1, 2].map(|side| EtherAddr([2, 0, a, b, c, side]));
    let (a, b) = link::pair(&link::LinkConfig { ether, ..link::LinkConfig::default() })?;
    Ok((Box::new(a), Box::new(b)))
}

/// The queues of an interface.
pub type Queues = Vec<Box<dyn Device>>;

/// The same device, with every frame written to `out` as pcapng, for Wireshark and tshark.
///
/// ```no_run
/// use std::fs::File;
/// use fulmar::devices;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = devices::capture(devices::open("fulmar0")?, File::create("fulmar.pcapng")?);
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub fn capture(device: impl Device + 'static, out: impl Write + Send + 'static) -> Box<dyn Device> {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let uptime = std::time::Duration::from_nanos(crate::runtime::now().as_nanos());
    Box::new(PcapWriter::new(device, out, since_epoch.saturating_sub(uptime)))
}

/// The same device behind a bad network: loss, reordering, delay, a bottleneck, the same for the same seed. `tx` is
/// what happens to sent packets, `rx` to received ones.
///
/// ```
/// use std::time::Duration;
/// use fulmar::devices::{self, Impairments};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// let path = Impairments { loss: 0.01, delay: Duration::from_millis(20), ..Impairments::default() };
/// let device = devices::impaired(device, 7, &path, &path);
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub fn impaired(
    device: impl Device + 'static,
    seed: u64,
    tx: &Impairments,
    rx: &Impairments,
) -> Box<dyn Device> {
    Box::new(Impaired::new(device, seed, tx, rx))
}
