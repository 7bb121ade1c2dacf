//! A running stack and how it is built.

use std::any::Any;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant as StdInstant};

use crate::runtime::{Account, Ledger, Limit, WatchedShard};
use fulmar_stack::base::{Medium, Secrets, with_zone};
use fulmar_stack::device::Device;
use fulmar_stack::device::moderation::ModerationConfig;
use fulmar_stack::ip::{IfAddr, NextHop, Route};
use fulmar_stack::mbuf::PoolConfig;
use fulmar_stack::shard::StackConfig;
use fulmar_stack::socket::{Ready, SocketError};

use crate::api::cidr::Cidr;
#[cfg(feature = "stat")]
use crate::api::control::Control;
use crate::api::error::SetupError;
use crate::api::exit;
use crate::api::inner::Inner;
use crate::api::ledger;
use crate::api::poll::PollSet;
use crate::api::socket::{Socket, check_timeout, explain_unreachable, to_io};
use crate::api::stat::{Observer, Stat};
use crate::tcp::TcpConfig;

/// A running TCP/IP stack. Cloning copies a handle; sockets keep the stack alive.
///
/// When the last handle and the last socket are dropped, or when the process ends, accepted bytes are still
/// delivered, for at most [`Builder::exit_drain`].
///
/// ```
/// # use std::time::Duration;
/// # use fulmar::{Stack, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, peer) = devices::link_pair()?;
/// # let _peer = Stack::builder().device(peer).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// let stack = Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// let echo = stack.ping("10.0.0.1".parse()?, 56, Duration::from_secs(5))?;
/// println!("{} answers after {:?}", echo.from, echo.rtt);
/// stack.close(Duration::from_secs(1))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Stack {
    pub(crate) inner: Arc<Inner>,
    /// The shard of new sockets; `None`: as the thread that opens them.
    pub(crate) home: Option<u16>,
}

impl std::fmt::Debug for Stack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stack").field("name", &self.inner.name).finish_non_exhaustive()
    }
}

/// The answer to an echo request: [`Stack::ping`].
///
/// ```
/// # use std::time::Duration;
/// # use fulmar::{Stack, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, peer) = devices::link_pair()?;
/// # let _peer = Stack::builder().device(peer).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.2/24".parse()?).unlisted().build()?;
/// let echo = stack.ping("10.0.0.1".parse()?, 56, Duration::from_secs(5))?;
/// println!("{} bytes from {}: ttl={} time={:?}", echo.bytes, echo.from, echo.ttl, echo.rtt);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Echo {
    /// The address that answered.
    pub from: IpAddr,
    /// Time from the request to the answer.
    pub rtt: Duration,
    /// Time to live or hop limit of the answer.
    pub ttl: u8,
    /// Payload bytes of the answer.
    pub bytes: usize,
}

impl Stack {
    /// A builder with default settings.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The name given to the builder.
    pub fn name(&self) -> &str {
        self.inner.name()
    }

    /// Sends an ICMP echo request with `payload_len` bytes of payload, and waits for the reply.
    ///
    /// # Errors
    /// `TimedOut`; `InvalidInput` for a time-out of zero; `HostUnreachable` or `NetworkUnreachable`; `EMSGSIZE` above
    /// 65,507 bytes (IPv6: 65,527); `InvalidData` if the payload of the reply differs.
    pub fn ping(&self, to: IpAddr, payload_len: usize, timeout: Duration) -> io::Result<Echo> {
        check_timeout(timeout)?;
        self.ask_for_echo(to, payload_len, timeout).map_err(explain_unreachable)
    }

    fn ask_for_echo(&self, to: IpAddr, payload_len: usize, timeout: Duration) -> io::Result<Echo> {
        // Whatever shard the answer comes to, this is where it is brought.
        let socket = self.new_socket_on(0, |shard| shard.icmp().open())?;
        let payload: Vec<u8> = (0..payload_len).map(|i| i as u8).collect();
        let to = with_zone(to, 0, 0);
        let start = StdInstant::now();
        socket.call(|shard, now| shard.icmp().send_request(now, socket.id, to, 1, &payload))?;
        let echo = socket
            .wait(Ready::READABLE, Limit::For(timeout), |shard, _| {
                shard.icmp().receive_reply(socket.id)
            })
            .map_err(|e| match e.kind() {
                io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
                _ => e,
            })?;
        let rtt = start.elapsed();
        let chain = echo.outcome.map_err(to_io)?;
        let same = chain.to_vec() == payload;
        let bytes = chain.len();
        socket.host().post(crate::runtime::Request::Free(chain));
        if !same {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the echo reply differs from the request",
            ));
        }
        Ok(Echo { from: echo.from, rtt, ttl: echo.hop_limit, bytes })
    }

    /// A new poll set for sockets of this stack.
    ///
    /// # Errors
    /// Too many open descriptors.
    pub fn poll_set(&self) -> io::Result<PollSet> {
        PollSet::new(self)
    }

    /// A snapshot: sockets, drops, buffers, device, neighbours, routes.
    ///
    /// # Errors
    /// `EBADF` in a forked child.
    pub fn stat(&self) -> io::Result<Stat> {
        Stat::of(&self.inner)
    }

    /// A handle that takes snapshots and does not keep the stack alive.
    pub fn observer(&self) -> Observer {
        Observer::of(&self.inner)
    }

    /// Why the stack is permanently down: the device is gone, or a thread panicked in the stack or in a driver.
    ///
    /// If the device is gone, calls fail with `ENETDOWN` (`EPROTO`: the process at its other end broke the protocol);
    /// received bytes can still be read.
    ///
    /// A panic propagates to its caller. Every other call, waiting calls included, fails with `ENETDOWN`; the device is
    /// closed, and lent and posted memory is returned. The process may build another stack over the same interface once
    /// this one is dropped.
    pub fn failure(&self) -> Option<String> {
        let panicked = self.inner.hosts().find_map(|host| host.failure()).map(str::to_owned);
        panicked.or_else(|| self.inner.hosts().find_map(|host| device_failure(host)))
    }

    /// Closes every socket and waits until the accepted bytes are acknowledged, for at most `timeout`. Afterwards calls
    /// on them fail, and dropping the stack waits no more. The stack itself goes on until its last handle and its last
    /// socket are dropped: new sockets can be opened in it.
    ///
    /// # Errors
    /// `TimedOut`: bytes are still unacknowledged, and are lost if the stack is dropped now. `EBADF` in a forked child.
    /// A connection that was reset or timed out before is not an error here; its socket has reported it.
    pub fn close(&self, timeout: Duration) -> io::Result<()> {
        if !self.inner.is_ours() {
            return Err(to_io(SocketError::BadHandle));
        }
        if self.inner.close(timeout) {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, "sent bytes are not acknowledged yet"))
    }

    /// Whether every accepted byte is acknowledged, also of closed sockets. The drop of the last handle and socket does not
    /// wait then. True as well if the stack is down.
    ///
    /// # Errors
    /// `EBADF` in a forked child.
    pub fn is_drained(&self) -> io::Result<bool> {
        let is_drained = |host: &Arc<crate::runtime::Host>| {
            host.call(|shard, _| {
                let is_sent = shard.is_drained(None) && shard.device().stats().tx_held == 0;
                Ok(is_sent || shard.down().is_some())
            })
        };
        match self.inner.hosts().try_fold(true, |all, host| Ok(all && is_drained(host)?)) {
            Err(SocketError::NetworkDown) => Ok(true),
            done => done.map_err(to_io),
        }
    }

    /// How long the drop of the last handle and socket waits: [`Builder::exit_drain`].
    pub fn exit_drain(&self) -> Duration {
        self.inner.exit_drain
    }

    /// Adds an address with its on-link prefix while the stack runs, as a DHCP client does. An address that the stack has
    /// gets the new prefix.
    ///
    /// # Errors
    /// `InvalidInput`: not a unicast address, an MTU that is too small for IPv6, or a full table of routes.
    pub fn add_address(&self, address: Cidr) -> io::Result<()> {
        let address = IfAddr::from(address);
        let done = self.inner.in_each(|shard, _| shard.ip().add_address(address))?;
        done.map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e.to_string()))
    }

    /// Removes an address while the stack runs. Its connections send nothing more, and fail after their time-out, as on
    /// Linux; sockets bound to it fail with `AddrNotAvailable` or `NetworkUnreachable` when they send.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn remove_address(&self, address: IpAddr) -> io::Result<()> {
        match self.inner.in_each(|shard, _| shard.ip().remove_address(address))? {
            true => Ok(()),
            false => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Adds a route while the stack runs; connections use it from their next packet on. The next hop is the address of a
    /// gateway, or a [`NextHop`].
    ///
    /// # Errors
    /// `InvalidInput`: a gateway of the other IP version, or a table that is full.
    pub fn add_route(&self, to: Cidr, hop: impl Into<NextHop>) -> io::Result<()> {
        let route = route(to, hop.into());
        let done = self.inner.in_each(|shard, _| shard.ip().add_route(route))?;
        done.map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e.to_string()))
    }

    /// Removes a route while the stack runs.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn remove_route(&self, to: Cidr) -> io::Result<()> {
        let done = self.inner.in_each(|shard, _| shard.ip().remove_route(to.into()))?;
        done.map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Adds a route over several next hops of equal cost while the stack runs. Each flow uses one of them, chosen by a
    /// hash of its addresses and ports, while that next hop is up and answers. `table` 0 is the main one, others are
    /// for the sources that [`Stack::set_source_policy`] names; a route to one next hop is a slice of one.
    ///
    /// # Errors
    /// `InvalidInput`: no next hop or more than 64, another IP version, or a full table.
    pub fn add_route_over(&self, table: u32, to: Cidr, hops: &[NextHop]) -> io::Result<()> {
        let add =
            |shard: &mut WatchedShard, _| shard.ip().add_multipath_route_to(table, to.into(), hops);
        let done = self.inner.in_each(add)?;
        done.map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e.to_string()))
    }

    /// Removes a route of a table while the stack runs.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn remove_route_from(&self, table: u32, to: Cidr) -> io::Result<()> {
        let remove = |shard: &mut WatchedShard, _| shard.ip().remove_route_from(table, to.into());
        self.inner.in_each(remove)?.map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Adds a policy rule: packets from a block of source addresses use `table` first, and the main table where
    /// `table` has no route. `None` removes the rule.
    ///
    /// # Errors
    /// `InvalidInput`: more than 256 rules.
    pub fn set_source_policy(&self, source: Cidr, table: Option<u32>) -> io::Result<()> {
        match self.inner.in_each(|shard, _| shard.ip().set_source_policy(source.into(), table))? {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::InvalidInput, "too many rules")),
        }
    }

    /// Sets whether a router is up. While it is down, flows use the other next hops of the route, then a less
    /// specific route; without any they fail with `ENETUNREACH`.
    ///
    /// # Errors
    /// `EBADF` in a forked child.
    pub fn set_gateway_up(&self, via: IpAddr, is_up: bool) -> io::Result<()> {
        self.inner.in_each(|shard, _| shard.ip().set_gateway_up(via, is_up)).map(drop)
    }

    /// Changes how waiting threads wait for the device: see [`Builder::moderation`].
    ///
    /// # Errors
    /// `EBADF` in a forked child.
    pub fn set_moderation(&self, config: ModerationConfig) -> io::Result<()> {
        self.inner.hosts().try_for_each(|host| host.set_moderation(config)).map_err(to_io)
    }

    /// Measures one entry of a thread into the stack out of `every`; `None` switches the account off. The
    /// figures are kept until [`Stack::clear_account`].
    pub fn set_account(&self, every: Option<u32>) {
        self.inner.host(0).ledger().set_every(every);
    }

    /// The CPU time of each stage so far, with the counts of packets, bytes, copies, buffers and crossings of the same
    /// time; `None` while the account is off ([`Builder::account`], [`Stack::set_account`]).
    ///
    /// # Errors
    /// `EBADF` in a forked child.
    pub fn account(&self) -> io::Result<Option<Account>> {
        Ok(self.stat()?.account)
    }

    /// Sets the times of the stages to zero, after a warm-up. The counts go on ([`Account::since`]).
    pub fn clear_account(&self) {
        self.inner.host(0).ledger().clear();
    }

    /// The number of shards: one per device queue ([`Builder::devices`]). A shard has its own queue, buffers,
    /// sockets and lock; threads that use different shards share nothing.
    pub fn shards(&self) -> u16 {
        self.inner.hosts.len() as u16
    }

    /// A handle that opens sockets in one shard. Other handles open them in the shard of the calling thread
    /// (threads are assigned to shards round-robin), a TCP listener in all shards, and a UDP socket on a given
    /// port in a shard that the port determines.
    ///
    /// A program of one thread per shard gives each thread such a handle, and has it bind listeners and
    /// UDP sockets of its own, on the same ports.
    ///
    /// # Errors
    /// `InvalidInput`: there are fewer shards.
    pub fn on_shard(&self, shard: u16) -> io::Result<Stack> {
        if shard < self.shards() {
            return Ok(Stack { inner: Arc::clone(&self.inner), home: Some(shard) });
        }
        let what = format!("invalid shard: expected a number below {}", self.shards());
        Err(io::Error::new(io::ErrorKind::InvalidInput, what))
    }

    /// The shard in which the calling thread opens sockets.
    pub(crate) fn shard_of_thread(&self) -> u16 {
        match (self.home, self.shards()) {
            (Some(shard), _) => shard,
            (None, 1) => 0,
            (None, n) => (crate::runtime::thread_number() % u64::from(n)) as u16,
        }
    }

    /// The shard for a UDP socket on this port: always the same, so that two sockets with one port meet.
    pub(crate) fn shard_of_port(&self, port: u16) -> u16 {
        match (self.home, port) {
            (None, 1..) => port % self.shards(),
            _ => self.shard_of_thread(),
        }
    }

    /// The lock around the shard of this handle, for benches that drive the shard themselves.
    #[cfg(feature = "internals")]
    #[doc(hidden)]
    pub fn host(&self) -> &Arc<crate::runtime::Host> {
        self.inner.host(self.home.unwrap_or(0))
    }

    pub(crate) fn new_socket(
        &self,
        open: impl FnOnce(&mut WatchedShard) -> Result<fulmar_stack::base::SlotId, SocketError>,
    ) -> io::Result<Arc<Socket>> {
        self.new_socket_on(self.shard_of_thread(), open)
    }

    pub(crate) fn new_socket_on(
        &self,
        shard: u16,
        open: impl FnOnce(&mut WatchedShard) -> Result<fulmar_stack::base::SlotId, SocketError>,
    ) -> io::Result<Arc<Socket>> {
        let id = self.inner.host(shard).call(|shard, _| open(shard)).map_err(to_io)?;
        Ok(Socket::new(Arc::clone(&self.inner), shard, id))
    }
}

/// Builds a stack. A device and an address are needed ([`Builder::device`], [`Builder::address`]); everything
/// else has a default, documented at [`StackConfig`](crate::config::StackConfig).
///
/// ```
/// # use std::net::IpAddr;
/// # use fulmar::{Stack, devices};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// let stack = Stack::builder()
///     .name("camera")
///     .device(device)
///     .address("10.77.0.2/24".parse()?)
///     .address("fd77::2/64".parse()?)
///     .gateway("10.77.0.1".parse()?)
///     .route("192.168.0.0/16".parse()?, "10.77.0.9".parse::<IpAddr>()?)
///     .budget_bytes(16 << 20)
///     .build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct Builder {
    devices: Vec<Box<dyn Device>>,
    name: Option<String>,
    addresses: Vec<Cidr>,
    secrets: Option<Secrets>,
    is_unlisted: bool,
    every: Option<u32>,
    config: StackConfig,
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder")
            .field("name", &self.name)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Builder {
    /// The device that carries the frames: one of [`devices`](crate::devices), or one of your own. Its Ethernet
    /// address must be unique on its network. A device without a descriptor ([`Device::wake_fd`]) is polled
    /// each millisecond while threads wait.
    pub fn device(mut self, device: impl Device + 'static) -> Self {
        self.devices = vec![boxed(device)];
        self
    }

    /// An address of the stack, with its on-link prefix. May be called several times.
    pub fn address(mut self, address: Cidr) -> Self {
        self.addresses.push(address);
        self
    }

    /// The default gateway, one per IP version.
    pub fn gateway(mut self, gateway: IpAddr) -> Self {
        self.config.routes.push(Route::default_via(gateway));
        self
    }

    /// A route. The next hop is the address of a gateway, or a [`NextHop`].
    pub fn route(mut self, to: Cidr, hop: impl Into<NextHop>) -> Self {
        self.config.routes.push(route(to, hop.into()));
        self
    }

    /// The name of the stack in `fulmar stat`. Default: the program's name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Most bytes of memory for packets and socket buffers. Default 256 MiB, allocated as needed; at least
    /// [`MIN_BUDGET_BYTES`](crate::config::MIN_BUDGET_BYTES) for each shard.
    pub fn budget_bytes(mut self, bytes: usize) -> Self {
        self.config.pool = PoolConfig::with_budget(bytes);
        self
    }

    /// Tunables of TCP: buffer sizes, time-outs, options.
    pub fn tcp(mut self, tcp: TcpConfig) -> Self {
        self.config.tcp = tcp;
        self
    }

    /// Largest IP packet in bytes, at most the device's. Default: the device's.
    pub fn mtu(mut self, bytes: usize) -> Self {
        self.config.mtu = Some(bytes);
        self
    }

    /// How waiting threads wait for the device. Default: [`ModerationConfig::ADAPTIVE`], which
    /// busy-polls for up to 60 µs before it sleeps if frames have lately arrived within that time, and in a
    /// flood sleeps up to 64 µs to receive many frames per wake-up. [`ModerationConfig::LATENCY`] busy-polls
    /// longer and never delays, [`ModerationConfig::THROUGHPUT`] hardly busy-polls and delays longer,
    /// [`ModerationConfig::NONE`] sleeps immediately and wakes for every frame, [`ModerationConfig::POLLING`]
    /// never sleeps.
    pub fn moderation(mut self, config: ModerationConfig) -> Self {
        self.config.moderation = config;
        self
    }

    /// How long dropping the stack, or the end of the process, waits for accepted bytes to be acknowledged.
    /// Default 5 s.
    pub fn exit_drain(mut self, limit: Duration) -> Self {
        self.config.exit_drain = limit;
        self
    }

    /// Accepts packets to every unicast address, answers ARP and neighbour solicitations for each, and lets
    /// sockets bind to, send from and connect from each, as a gateway does for its guests (Linux: AnyIP and
    /// IP_TRANSPARENT). Default off. On a device without a link layer ([`Medium::Ip`](crate::device::Medium)) the stack
    /// then needs no address of its own: everything is routed to the device.
    pub fn any_ip(mut self, on: bool) -> Self {
        self.config.any_ip = on;
        self
    }

    /// The queues of an interface, for a stack of one shard for each: see [`Stack::shards`] and
    /// [`devices::tap_queues`](crate::devices::tap_queues), [`devices::packet_queues`](crate::devices::packet_queues). Memory and tables are divided
    /// among the shards.
    pub fn devices(mut self, queues: Vec<Box<dyn Device>>) -> Self {
        self.devices = queues;
        self
    }

    /// GRO in software: coalesces the TCP segments of one burst before TCP input, for a device without receive
    /// offload. Default on.
    pub fn gro(mut self, on: bool) -> Self {
        self.config.gro = on;
        self
    }

    /// Does not open the control socket that `fulmar stat` connects to.
    pub fn unlisted(mut self) -> Self {
        self.is_unlisted = true;
        self
    }

    /// Measures the CPU time of each stage, in one entry of a thread out of `every`; see [`Stack::account`] and
    /// `fulmar-lab path --live`. By default the account is off (unless the environment says `FULMAR_LEDGER`, see
    /// [`ledger`](crate::stat::ledger)).
    pub fn account(mut self, every: u32) -> Self {
        self.every = Some(every);
        self
    }

    /// Derives all keys from `seed` instead of 256 bits of the operating system's, so that a simulation
    /// or a test runs the same way twice. **Not for a stack on a network:** an attacker who knows the seed
    /// can predict every sequence number and port, and spoof connections.
    pub fn deterministic_for_simulation(mut self, seed: u64) -> Self {
        self.secrets = Some(Secrets::for_simulation(seed));
        self
    }

    /// Starts the stack.
    ///
    /// # Errors
    /// [`SetupError`], a sentence: what failed and what to do.
    pub fn build(self) -> Result<Stack, SetupError> {
        let Builder { devices, name, addresses, secrets, is_unlisted, every, mut config } = self;
        check_devices(&devices)?;
        config.addresses.extend(addresses.into_iter().map(IfAddr::from));
        if config.addresses.is_empty() {
            let is_alone = devices.iter().all(|d| d.caps().medium == Medium::Ip);
            if !config.any_ip || !is_alone {
                return Err(SetupError::NoAddress);
            }
            config.routes.extend(EVERYTHING.map(|all| Route::on_link(all.into())));
        }
        config.secrets = secrets.or(config.secrets);
        let exit_drain = config.exit_drain;
        let name = name.unwrap_or_else(program_name);
        let ledger = every.map_or_else(ledger::of_new_stack, Ledger::new);
        let hosts = crate::runtime::start_hosts(&config, devices, &name, &ledger)?;
        let (control, reader) = (std::sync::Mutex::new(None), Arc::default());
        let network_namespace = std::fs::metadata("/proc/thread-self/ns/net").ok().map(|m| m.ino());
        let is_closed = AtomicBool::new(false);
        let inner = Arc::new(Inner {
            hosts,
            name,
            exit_drain,
            is_closed,
            network_namespace,
            control,
            reader,
        });
        exit::register(&inner);
        if !is_unlisted {
            open_control(&inner);
        }
        Ok(Stack { inner, home: None })
    }
}

/// A builder with this configuration. Its methods add to the addresses and routes, and replace the other settings.
impl From<StackConfig> for Builder {
    fn from(config: StackConfig) -> Builder {
        Builder { config, ..Builder::default() }
    }
}

/// A route as the stack has it.
fn route(to: Cidr, hop: NextHop) -> Route {
    Route { dst: to.into(), via: hop.via, src: hop.src, mtu: hop.mtu }
}

/// The prefixes of everything.
const EVERYTHING: [Cidr; 2] = [
    Cidr { address: IpAddr::V4(Ipv4Addr::UNSPECIFIED), prefix_len: 0 },
    Cidr { address: IpAddr::V6(Ipv6Addr::UNSPECIFIED), prefix_len: 0 },
];

/// Boxes a device, unless it is a box already: a box in a box is one more dynamic call per burst.
fn boxed<D: Device + 'static>(device: D) -> Box<dyn Device> {
    let mut device = Some(device);
    let any: &mut dyn Any = &mut device;
    if let Some(boxed) = any.downcast_mut::<Option<Box<dyn Device>>>().and_then(Option::take) {
        return boxed;
    }
    Box::new(device.expect("invariant: only a box was taken, and that is returned"))
}

fn check_devices(devices: &[Box<dyn Device>]) -> Result<(), SetupError> {
    let mut caps = devices.iter().map(|d| d.caps());
    let first = caps.next().ok_or(SetupError::NoDevice)?;
    if devices.len() > fulmar_stack::shard::MAX_SHARDS {
        return Err(SetupError::TooManyDevices(devices.len()));
    }
    let is_mixed =
        caps.any(|c| (c.medium, c.ether, c.mtu) != (first.medium, first.ether, first.mtu));
    if is_mixed { Err(SetupError::MixedDevices) } else { Ok(()) }
}

/// That the device of a shard is gone, and how.
fn device_failure(host: &crate::runtime::Host) -> Option<String> {
    let lost = |shard: &mut WatchedShard, _| {
        let down = shard.down();
        Ok(down.map(|e| (e, shard.device().stats().name.clone())))
    };
    let (error, name) = host.call(lost).ok()??;
    Some(match error {
        SocketError::Protocol => {
            format!(
                "the process at the other end of device {name} violated the protocol of the link"
            )
        }
        _ => format!("device {name} is gone"),
    })
}

/// A failure is not an error: the stack works without a control socket.
#[cfg(feature = "stat")]
fn open_control(inner: &Arc<Inner>) {
    let observer = Observer::of(inner);
    let control = Control::open(move || serde_json::to_string(&observer.stat()?.document()).ok());
    if let Ok(control) = control {
        *inner.control.lock().unwrap_or_else(PoisonError::into_inner) = Some(control);
    }
}

/// Without the document there is nothing to ask for.
#[cfg(not(feature = "stat"))]
fn open_control(_: &Arc<Inner>) {}

fn program_name() -> String {
    let exe = std::env::current_exe().ok();
    let stem = exe.as_ref().and_then(|p| p.file_stem()).map(|s| s.to_string_lossy().into_owned());
    stem.unwrap_or_else(|| "stack".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_builder_from_a_configuration_adds_to_its_routes() {
        let routes = vec![Route::default_via("10.0.0.1".parse().unwrap())];
        let config = StackConfig { routes, max_sockets: 7, ..StackConfig::default() };
        let gateway: IpAddr = "10.0.0.9".parse().unwrap();
        let builder = Builder::from(config).route("192.168.0.0/16".parse().unwrap(), gateway);
        assert_eq!(builder.config.max_sockets, 7);
        let via: Vec<_> = builder.config.routes.iter().filter_map(|route| route.via).collect();
        assert_eq!(via, ["10.0.0.1".parse().unwrap(), gateway]);
    }

    #[test]
    fn a_boxed_device_is_not_boxed_again() {
        let (device, _peer) = crate::api::devices::link_pair().unwrap();
        let address = |d: &dyn Device| std::ptr::from_ref(d).cast::<u8>();
        let before = address(&*device);
        assert_eq!(address(&*boxed(device)), before);
    }
}
