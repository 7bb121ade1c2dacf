//! The parts of a device of your own.
//!
//! [`Device`] documents the requirements of a stack and the ownership of frames. Start with [`Caps::plain`] and the
//! four methods that have no default: `caps`, `tx_burst`, `rx_burst` and `wake_fd`. The example `own_device` is such a
//! device. Frames of any pool may be handed over as they are; they return to their pool when they are freed. Frames are
//! Ethernet's unless [`Caps::medium`] says otherwise: a device that is fed IP packets is [`Caps::plain_ip`] and
//! converts them with [`plain_ip`]. A wrapper around another device forwards unchanged methods with
//! [`forward_device!`]. A device counts with [`Counter`](crate::stat::Counter) and
//! [`DropReason`](crate::stat::DropReason).
//!
//! Few devices need more: [`placement`] is for those that write received payload directly into the buffers of a reader,
//! [`OwnerKey`] for those that steer packets to queues, [`Attachment`] for those in memory of another process.

pub mod placement;

/// The counters of a shard, to which a device adds.
///
/// ```
/// use fulmar::device::Counters;
/// use fulmar::stat::{Counter, DropReason};
///
/// let mut counters = Counters::default();
/// counters.add(Counter::RxFrames, 3);
/// counters.drop_packet(DropReason::Truncated);
/// assert_eq!(counters.value(Counter::RxFrames), 3);
/// assert_eq!(counters.drops(DropReason::Truncated), 1);
/// ```
pub use fulmar_stack::base::Counters;
/// The address of a station.
///
/// ```
/// use fulmar::device::EtherAddr;
///
/// let own = EtherAddr([0x02, 0, 0, 0, 0, 0x17]);
/// assert!(own.is_unicast() && EtherAddr::BROADCAST.is_multicast());
/// assert_eq!(own.to_string(), "02:00:00:00:00:17");
/// ```
pub use fulmar_stack::base::EtherAddr;
/// The two ends of a flow, as a device that steers or places packets finds them in the headers.
///
/// ```
/// # use std::net::SocketAddr;
/// use fulmar::device::FlowKey;
///
/// let local: SocketAddr = "10.0.0.2:80".parse()?;
/// let flow = FlowKey::new(local, "10.0.0.1:40000".parse()?);
/// assert_eq!((flow.local(), flow.remote_port), (local, 40_000));
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
pub use fulmar_stack::base::FlowKey;
/// The segmentation of a super-frame: a part of [`Offload`].
///
/// ```
/// use fulmar::config::PoolConfig;
/// use fulmar::device::{Gso, GsoKind, Packet, Pool, Purpose};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let mut pool = Pool::new(PoolConfig::with_budget(4 << 20))?;
/// // Ethernet, IPv4 and TCP with timestamps; three segments.
/// let mut frame = Packet::new(pool.alloc_chain(66 + 3 * 1448, 0, Purpose::Receive)?);
/// let gso = Gso { kind: GsoKind::TcpV4, segment_bytes: 1448, header_bytes: 66, ecn: false };
/// frame.offload.gso = Some(gso);
/// assert_eq!(frame.wire_packets(), 3);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::base::Gso;
/// The kind of a super-frame, which a driver translates for its hardware.
///
/// ```
/// use fulmar::device::GsoKind;
///
/// /// The `gso_type` of a virtio-net header.
/// fn gso_type(kind: GsoKind) -> u8 {
///     match kind {
///         GsoKind::TcpV4 => 1,
///         GsoKind::TcpV6 => 4,
///         GsoKind::Udp => 5,
///     }
/// }
/// # assert_eq!(gso_type(GsoKind::Udp), 5);
/// ```
pub use fulmar_stack::base::GsoKind;
/// The time as the calls of a device get it: nanoseconds of the monotonic clock.
///
/// ```
/// use std::time::Duration;
/// use fulmar::device::Instant;
///
/// let now = Instant::from_millis(5);
/// // A frame that is held back for 20 ms: the deadline of the device.
/// let due = now + Duration::from_millis(20);
/// assert_eq!(due.since(now), Duration::from_millis(20));
/// ```
pub use fulmar_stack::base::Instant;
/// Checksums and segmentation of a frame.
///
/// ```
/// use fulmar::config::PoolConfig;
/// use fulmar::device::{Offload, Packet, Pool, Purpose};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let mut pool = Pool::new(PoolConfig::with_budget(4 << 20))?;
/// // A received frame whose checksum the hardware has verified.
/// let mut frame = Packet::new(pool.alloc_chain(1514, 0, Purpose::Receive)?);
/// frame.offload = Offload { csum_valid: true, ..Offload::default() };
/// assert!(frame.is_checksum_trusted());
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::base::Offload;
/// The hash by which a device of several queues steers packets: [`Device::attach`] gets its key.
///
/// ```
/// use fulmar::device::{FlowKey, OwnerKey};
///
/// # fn main() -> Result<(), std::net::AddrParseError> {
/// let key = OwnerKey::new([1, 2, 3, 4, 5, 6]);
/// let flow = FlowKey::new("10.0.0.2:80".parse()?, "10.0.0.1:40000".parse()?);
/// let queue = key.owner(&flow, 4);
/// assert!(queue < 4);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::base::OwnerKey;
/// The facilities that a device gives to its stack: [`Device::attach`].
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicBool, Ordering};
/// use fulmar::device::{Attachment, Peek};
///
/// /// Whether the other side has written frames.
/// struct Arrivals(AtomicBool);
///
/// impl Peek for Arrivals {
///     fn is_pending(&self) -> bool {
///         self.0.load(Ordering::Relaxed)
///     }
/// }
///
/// let arrivals = Arc::new(Arrivals(AtomicBool::new(false)));
/// let attachment = Attachment { peek: Some(arrivals), ..Attachment::default() };
/// # assert!(!attachment.peek.unwrap().is_pending());
/// ```
pub use fulmar_stack::device::Attachment;
/// The frames of one call of a device.
///
/// ```
/// use fulmar::config::PoolConfig;
/// use fulmar::device::{Burst, Packet, Pool, Purpose};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let mut pool = Pool::new(PoolConfig::with_budget(4 << 20))?;
/// let mut burst = Burst::with_capacity(64);
/// let frame = Packet::new(pool.alloc_chain(60, 0, Purpose::Receive)?);
/// burst.push(frame).expect("it has space for 64");
/// while let Some(frame) = burst.pop_front() {
///     pool.free(frame.chain);
/// }
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::device::Burst;
/// The capabilities of a device: [`Device::caps`].
///
/// ```
/// use fulmar::device::{Caps, EtherAddr, Wake};
///
/// // No offloads, and a descriptor that is readable while frames are queued.
/// let caps = Caps { wake: Wake::Level, ..Caps::plain(1500, EtherAddr([2, 0, 0, 0, 0, 1])) };
/// assert_eq!((caps.mtu, caps.tso), (1500, None));
/// ```
pub use fulmar_stack::device::Caps;
/// A device: give it to [`Builder::device`](crate::Builder::device).
///
/// ```
/// use fulmar::Stack;
/// use fulmar::device::{Burst, Caps, Counters, Device, EtherAddr, Instant, Pool, WakeFd};
///
/// /// Drops every frame that it gets, and receives none.
/// struct Hole(Caps);
///
/// impl Device for Hole {
///     fn caps(&self) -> &Caps {
///         &self.0
///     }
///     fn tx_burst(&mut self, _: Instant, pool: &mut Pool, frames: &mut Burst, _: &mut Counters) -> usize {
///         let taken = frames.len();
///         frames.clear(pool);
///         taken
///     }
///     fn rx_burst(&mut self, _: Instant, _: &mut Pool, _: &mut Burst, _: usize, _: &mut Counters) -> usize {
///         0
///     }
///     fn wake_fd(&self) -> Option<WakeFd> {
///         None
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Hole(Caps::plain(1500, EtherAddr([2, 0, 0, 0, 0, 1])));
/// let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::device::Device;
/// The counters of a device: [`Device::stats`] makes them, and [`Stat::device`](crate::stat::Stat::device) shows them.
///
/// ```
/// use fulmar::device::DeviceStats;
///
/// let mut stats = DeviceStats { name: "wire1".to_owned(), ..DeviceStats::default() };
/// stats.tx_crossings += 1; // a system call
/// # assert_eq!(stats.tx_frames, 0);
/// ```
pub use fulmar_stack::device::DeviceStats;
/// The events that a thread waits for.
///
/// ```
/// use std::os::fd::AsRawFd;
/// use std::os::unix::net::UnixDatagram;
/// use fulmar::device::{Interest, WakeFd};
///
/// /// The answer of `Device::wake_fd`.
/// fn wake_fd(socket: &UnixDatagram, is_full: bool) -> WakeFd {
///     let interest = if is_full { Interest::ReadableOrWritable } else { Interest::Readable };
///     WakeFd { fd: socket.as_raw_fd(), interest }
/// }
/// # let (socket, _peer) = UnixDatagram::pair()?;
/// # assert_eq!(wake_fd(&socket, true).interest, Interest::ReadableOrWritable);
/// # Ok::<(), std::io::Error>(())
/// ```
pub use fulmar_stack::device::Interest;
/// The state of the link: a part of [`DeviceStats`].
///
/// ```
/// # use fulmar::{Stack, devices};
/// use fulmar::device::LinkState;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (device, _peer) = devices::link_pair()?;
/// # let stack = Stack::builder().device(device).address("10.0.0.1/24".parse()?).unlisted().build()?;
/// match stack.stat()?.device().link {
///     LinkState::Up => println!("frames pass"),
///     LinkState::Down => println!("the link is down"),
/// }
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::device::LinkState;
/// The kind of frames of a device: [`Caps::medium`].
///
/// ```
/// use fulmar::device::{Caps, EtherAddr, Medium};
///
/// assert_eq!(Caps::plain(1500, EtherAddr([2, 0, 0, 0, 0, 1])).medium, Medium::Ethernet);
/// assert_eq!(Caps::plain_ip(1420).medium, Medium::Ip);
/// ```
pub use fulmar_stack::device::Medium;
/// A frame.
///
/// ```
/// use fulmar::config::PoolConfig;
/// use fulmar::device::{Counters, Packet, Pool, Purpose};
/// use fulmar::stat::DropReason;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (mut pool, mut counters) = (Pool::new(PoolConfig::with_budget(4 << 20))?, Counters::default());
/// # let bytes = [0; 9];
/// let mut chain = pool.alloc_chain(bytes.len(), 0, Purpose::Receive)?;
/// chain.copy_from(0, &bytes);
/// let frame = Packet::new(chain);
/// if frame.chain.len() < 14 {
///     frame.discard(DropReason::Truncated, &mut pool, &mut counters);
/// }
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::device::Packet;
/// Looks for frames without the lock of the stack: a part of [`Attachment`].
///
/// ```
/// use std::sync::atomic::{AtomicU32, Ordering};
/// use fulmar::device::Peek;
///
/// /// The positions of a ring in shared memory.
/// struct Ring {
///     written: AtomicU32,
///     read: AtomicU32,
/// }
///
/// impl Peek for Ring {
///     fn is_pending(&self) -> bool {
///         self.written.load(Ordering::Relaxed) != self.read.load(Ordering::Relaxed)
///     }
/// }
/// # let ring = Ring { written: AtomicU32::new(1), read: AtomicU32::new(0) };
/// # assert!(ring.is_pending());
/// ```
pub use fulmar_stack::device::Peek;
/// Counts the frames of a call: add each frame, then the sum.
///
/// ```
/// use fulmar::config::PoolConfig;
/// use fulmar::device::{Counters, DeviceStats, Packet, Pool, Purpose, Tally};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let mut pool = Pool::new(PoolConfig::with_budget(4 << 20))?;
/// # let (mut counters, mut stats) = (Counters::default(), DeviceStats::default());
/// # let frames = [Packet::new(pool.alloc_chain(60, 0, Purpose::Send)?)];
/// let mut tally = Tally::default();
/// for frame in &frames {
///     tally.add(frame);
/// }
/// tally.sent(&mut counters, &mut stats);
/// assert_eq!((stats.tx_frames, stats.tx_bytes), (1, 60));
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::device::Tally;
/// Whether a device needs the exact time: [`Caps::tx_time`].
///
/// ```
/// use fulmar::device::{Caps, TxTime};
///
/// // Each frame is written to a descriptor at once.
/// let caps = Caps { tx_time: TxTime::Coarse, ..Caps::plain_ip(1420) };
/// # assert_eq!(caps.tx_time, TxTime::Coarse);
/// ```
pub use fulmar_stack::device::TxTime;
/// The kind of wake-ups of a device: [`Caps::wake`].
///
/// ```
/// use fulmar::device::{Caps, Wake};
///
/// // A socket, which is readable while packets are queued.
/// let caps = Caps { wake: Wake::Level, ..Caps::plain_ip(1420) };
/// # assert_eq!(caps.wake, Wake::Level);
/// ```
pub use fulmar_stack::device::Wake;
/// The descriptor of a device: [`Device::wake_fd`].
///
/// ```
/// use std::os::fd::AsRawFd;
/// use std::os::unix::net::UnixDatagram;
/// use fulmar::device::{Interest, WakeFd};
///
/// let (socket, _peer) = UnixDatagram::pair()?;
/// let wake = WakeFd::readable(socket.as_raw_fd());
/// assert_eq!(wake.interest, Interest::Readable);
/// # Ok::<(), std::io::Error>(())
/// ```
pub use fulmar_stack::device::WakeFd;
/// One pair of coalescing registers: a part of [`Profile`].
///
/// ```
/// use std::time::Duration;
/// use fulmar::device::Coalesce;
///
/// // An interrupt after 32 frames, or 50 us after the first one.
/// let coalesce = Coalesce { packets: 32, delay: Duration::from_micros(50) };
/// # assert_eq!(coalesce.packets, 32);
/// ```
pub use fulmar_stack::device::moderation::Coalesce;
/// The coalescing registers of a device: [`Device::coalesce`].
///
/// ```
/// use fulmar::device::Profile;
///
/// /// The registers for received frames: frames, and microseconds.
/// fn registers(to: Option<Profile>) -> (usize, u128) {
///     to.map_or((1, 0), |profile| (profile.receive.packets, profile.receive.delay.as_micros()))
/// }
/// # assert_eq!(registers(None), (1, 0));
/// ```
pub use fulmar_stack::device::moderation::Profile;
pub use fulmar_stack::device::{forward_device, plain_ip};
/// Memory for the buffers of a stack: a part of [`Attachment`].
///
/// ```
/// use fulmar::config::PoolConfig;
/// use fulmar::device::{Device, OwnerKey, Pool};
/// use fulmar::devices::{Shm, ShmConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (mut device, _other) = Shm::pair(&ShmConfig::default())?;
/// // As a stack does when it is built.
/// let attachment = device.attach(&OwnerKey::new([1; OwnerKey::WORDS]));
/// let pool = Pool::with_backing(PoolConfig::with_budget(16 << 20), attachment.region)?;
/// # drop(pool);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::mbuf::Backing;
/// The bytes of a frame.
///
/// ```
/// use fulmar::config::PoolConfig;
/// use fulmar::device::{Pool, Purpose};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let mut pool = Pool::new(PoolConfig::with_budget(4 << 20))?;
/// let mut chain = pool.alloc_chain(5, 0, Purpose::Receive)?;
/// chain.copy_from(0, b"hello");
/// let mut frame = [0; 1514];
/// let bytes = chain.copy_to(0, &mut frame);
/// assert_eq!(&frame[..bytes], b"hello");
/// pool.free(chain);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::mbuf::Chain;
/// A buffer of a [`Pool`].
///
/// ```
/// use fulmar::config::PoolConfig;
/// use fulmar::device::{Chain, Pool, Purpose};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let mut pool = Pool::new(PoolConfig::with_budget(4 << 20))?;
/// let mut buffer = pool.alloc(1514, 0, Purpose::Receive)?;
/// if let Some(space) = buffer.append(5) {
///     space.copy_from_slice(b"hello");
/// }
/// assert_eq!(buffer.as_slice(), b"hello");
/// pool.free(Chain::from(buffer));
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::mbuf::Mbuf;
/// There is no memory for a frame: a device drops it, and counts that.
///
/// ```
/// use fulmar::config::PoolConfig;
/// use fulmar::device::{Counters, NoBuffer, Packet, Pool, Purpose};
/// use fulmar::stat::DropReason;
///
/// fn received(bytes: &[u8], pool: &mut Pool, counters: &mut Counters) -> Option<Packet> {
///     match pool.alloc_chain(bytes.len(), 0, Purpose::Receive) {
///         Ok(mut chain) => {
///             chain.copy_from(0, bytes);
///             Some(Packet::new(chain))
///         }
///         Err(NoBuffer) => {
///             counters.drop_packet(DropReason::NoBuffer);
///             None
///         }
///     }
/// }
/// # let mut pool = Pool::new(PoolConfig::with_budget(4 << 20)).unwrap();
/// # assert!(received(&vec![0; 8 << 20], &mut pool, &mut Counters::default()).is_none());
/// ```
pub use fulmar_stack::mbuf::NoBuffer;
/// The buffers of a stack, which lends them to the calls of its device.
///
/// ```
/// use fulmar::config::PoolConfig;
/// use fulmar::device::{Pool, Purpose};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // A test of a device has a pool of its own.
/// let mut pool = Pool::new(PoolConfig::with_budget(4 << 20))?;
/// let frame = pool.alloc_chain(1514, 0, Purpose::Receive)?;
/// pool.free(frame);
/// assert_eq!(pool.outstanding(), 0);
/// # Ok(())
/// # }
/// ```
pub use fulmar_stack::mbuf::Pool;
/// The use of a buffer, which decides the share of the memory that it is charged to.
///
/// ```
/// use fulmar::device::Purpose;
///
/// /// A short frame is most likely an ACK, which frees memory: it may use the reserve.
/// fn purpose(bytes: usize) -> Purpose {
///     if bytes <= 256 { Purpose::Control } else { Purpose::Receive }
/// }
/// # assert_eq!(purpose(60), Purpose::Control);
/// ```
pub use fulmar_stack::mbuf::Purpose;
