//! The TAP device: frames to and from the kernel's own stack, super-frames included. Also all of the TUN device
//! (`tun.rs`) but its configuration.
//!
//! Enters and leaves: frames with a virtio-net header in front, so that 64 KiB super-frames without
//! checksums pass both ways. A sent chain is gathered by one `writev` and freed (`send.rs`). A received frame is read
//! into a buffer pair (`buffer_pair.rs`) or into posted buffers (`placing.rs`; `receive.rs`). Bursts of 3 to 64 small
//! frames are sent with one call of io_uring (`vector.rs` has the figures). Without io_uring, or where the
//! interface could accept a burst in part, each frame has a call of its own; `DeviceStats::path` reports
//! which of the two and why.
//!
//! On a TUN what crosses the descriptor is the IP packet after its link header ([`fulmar_stack::device::plain_ip`]),
//! without io_uring, joined datagrams and placement.
//!
//! Cost: 0.5 to 1.2 µs for a single small frame, depending on the machine, three quarters of that in a
//! burst of 64; 3.8 µs for 64 KiB; and the kernel's copy. Source: linux/if_tun.h,
//! Documentation/networking/tuntap.rst, io_uring(7).

pub(in crate::drivers) mod attach;
mod health;
mod netlink;
mod queues;
mod receive;
mod send;
mod vector;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use fulmar_stack::base::{Counters, EtherAddr, FlowKey, Instant, Medium, OwnerKey, SeqNum};
use fulmar_stack::device::{
    Attachment, Burst, Caps, Device, DeviceStats, DirectPlacement, Interest, LinkState, Tally,
    TxTime, Unsupported, Wake, WakeFd, WritableRanges, plain_ip,
};
use fulmar_stack::mbuf::{Pool, WritableRange};

use crate::drivers::batch::Completing;
use crate::drivers::buffer_pair::{BufferPair, Scratch};
use crate::drivers::placing::Placer;
use crate::drivers::udp_gso::UdpGso;
use crate::drivers::{OpenError, sys, vnet};
use attach::Attached;
use health::Health;
use vector::Vector;

const TSO: u32 = libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
const USO: u32 = libc::TUN_F_USO4 | libc::TUN_F_USO6;
/// Receive offloads, best first; older kernels refuse unknown flags (EINVAL).
const OFFLOADS: [u32; 4] = [
    libc::TUN_F_CSUM | TSO | libc::TUN_F_TSO_ECN | USO,
    libc::TUN_F_CSUM | TSO | libc::TUN_F_TSO_ECN,
    libc::TUN_F_CSUM,
    0,
];
/// Largest IP packet of a super-frame in bytes.
pub(super) const MAX_IP_BYTES: usize = 65_535;
pub(super) const MAX_SEGS: usize = 64;

/// The TAP interface, and the stack's address and MTU on it.
///
/// ```no_run
/// use fulmar::device::EtherAddr;
/// use fulmar::devices::{Tap, TapConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = TapConfig {
///     name: "tap0".to_owned(),
///     ether: Some(EtherAddr([2, 0, 0, 0, 0, 7])),
///     ..TapConfig::default()
/// };
/// let device = Tap::open(&config)?;
/// # drop(device);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TapConfig {
    /// Interface name; the interface is created if it does not exist. Empty or `tap%d`: the kernel chooses
    /// the name.
    pub name: String,
    /// Ethernet address of the stack; `None`: derived from the interface's, but different.
    pub ether: Option<EtherAddr>,
    /// Largest IP packet in bytes; `None`: the interface's MTU.
    pub mtu: Option<usize>,
    /// Predict the flow of the next frame, and read it into that flow's posted buffer. A misplaced frame
    /// is copied out and wiped before the buffer's owner can read it, unless the buffer is in memory that
    /// another process maps. Set this to false where the owners of posted buffers do not trust each other;
    /// then each byte is copied once.
    pub predict: bool,
    /// One system call per frame, never io_uring: for comparison.
    pub one_by_one: bool,
    /// With several queues: steer each packet to the queue of its owner (needs CAP_BPF).
    pub steer: bool,
}

impl Default for TapConfig {
    /// A new interface; the kernel chooses name and MTU. `predict` and `steer` are true.
    fn default() -> TapConfig {
        TapConfig {
            name: String::new(),
            ether: None,
            mtu: None,
            predict: true,
            one_by_one: false,
            steer: true,
        }
    }
}

/// One queue of a TAP interface: [`tap`](crate::devices::tap) with its options.
///
/// ```no_run
/// use fulmar::devices::{Tap, TapConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Tap::open(&TapConfig { name: "tap%d".to_owned(), ..TapConfig::default() })?;
/// println!("the kernel has named it {}", device.name());
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub struct Tap {
    pub(super) file: File,
    name: String,
    /// See [`Attached::control`].
    control: Option<OwnedFd>,
    caps: Caps,
    pair: BufferPair,
    scratch: Scratch,
    health: Health,
    /// The last read found the queue empty.
    is_drained: bool,
    /// The last write found the queue full.
    is_blocked: bool,
    pub(super) stats: DeviceStats,
    /// io_uring, if it is available.
    vector: Option<Vector>,
    /// Whether datagrams of one flow are sent as one super-datagram.
    joins: UdpGso,
    /// Frames of the last poll that received any; 0 if one of them was long.
    last_run: usize,
    placer: Placer,
    /// How packets are steered, for [`DeviceStats::path`].
    queues_path: String,
    /// The number of queues that packets are steered to; set in the first queue, which attaches the
    /// program.
    steered: Option<u16>,
}

impl std::fmt::Debug for Tap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tap").field("name", &self.name).finish_non_exhaustive()
    }
}

/// [`DeviceStats::path`] without io_uring.
const ALONE: &str = "one writev or readv per frame";

/// Opens io_uring. Returns also the description for [`DeviceStats::path`].
fn open_vector(file: &File, config: &TapConfig) -> (Option<Vector>, String) {
    if config.one_by_one {
        return (None, format!("{ALONE}, as configured"));
    }
    match Vector::open(file.as_fd()) {
        Ok(vector) => (Some(vector), Vector::describe()),
        Err(why) => (None, format!("{ALONE} ({why})")),
    }
}

/// An Ethernet address different from the kernel's on the interface, and constant for the interface:
/// locally administered, not a group (IEEE 802 section 8.2).
pub(crate) fn derive_ether(kernel: [u8; 6]) -> EtherAddr {
    let [a, b, c, d, e, f] = kernel;
    EtherAddr([(a | 0x02) & 0xfe, b ^ 0xf0, c, d, e, f ^ 0x5a])
}

impl Tap {
    /// Opens the interface, and creates it if it does not exist. It must be set up and get its addresses on
    /// the kernel's side (`ip link set NAME up`).
    ///
    /// # Errors
    /// A sentence: what failed, the system's error, and what to do.
    pub fn open(config: &TapConfig) -> Result<Tap, OpenError> {
        Tap::of_frames(Attached::alone(&config.name, Medium::Ethernet)?, config, 1)
    }

    /// Uses a descriptor that another process has opened and attached. `config.name` is ignored.
    ///
    /// # Errors
    /// The descriptor is not a TAP with IFF_VNET_HDR and IFF_NO_PI.
    pub fn from_fd(fd: OwnedFd, config: &TapConfig) -> Result<Tap, OpenError> {
        Tap::of_frames(Attached::by_another(fd, Medium::Ethernet)?, config, 1)
    }

    /// A TAP.
    fn of_frames(attached: Attached, config: &TapConfig, queues: u16) -> Result<Tap, OpenError> {
        let kernel_ether =
            sys::interface_ether(attached.file.as_fd(), &attached.name).map_err(|e| {
                let what = format!("cannot read the hardware address of {}", attached.name);
                OpenError::new(what, e, "Linux 4.0 or newer is required")
            })?;
        let ether = config.ether.unwrap_or_else(|| derive_ether(kernel_ether));
        let mut tap = Tap::set_up(attached, queues, config.mtu, |mtu| Caps::plain(mtu, ether))?;
        // The kernel writes to posted ranges during `readv` only.
        tap.caps.places_on_receive = true;
        (tap.vector, tap.stats.path) = open_vector(&tap.file, config);
        if tap.caps.udp_gso && !config.one_by_one {
            tap.joins = UdpGso::On;
        }
        tap.placer = Placer::new(config.predict);
        Ok(tap)
    }

    /// Sets the virtio-net header and the offloads. `plain`: the device without offloads, for an MTU. `mtu`:
    /// `None` is the interface's.
    pub(super) fn set_up(
        attached: Attached,
        queues: u16,
        mtu: Option<usize>,
        plain: impl FnOnce(usize) -> Caps,
    ) -> Result<Tap, OpenError> {
        let Attached { file, name, control } = &attached;
        sys::tun_set_header(file.as_fd(), vnet::HEADER_BYTES as _).map_err(|e| {
            let what = format!("cannot set the virtio-net header of {name}");
            OpenError::new(what, e, "Linux 4.0 or newer is required")
        })?;
        let accepted =
            OFFLOADS.into_iter().find(|o| sys::tun_set_offload(file.as_fd(), *o).is_ok());
        let offload = accepted.unwrap_or(0);
        let kernel_mtu = control.as_ref().and_then(|c| sys::interface_mtu(c.as_fd(), name).ok());
        let caps = Caps {
            tx_csum: true,
            tso: Some(MAX_IP_BYTES),
            udp_gso: offload & USO == USO,
            rx_gro: offload & TSO != 0,
            max_segs: MAX_SEGS,
            queues,
            wake: Wake::Level,
            // A packet is sent when it is written.
            tx_time: TxTime::Coarse,
            ..plain(mtu.or(kernel_mtu).unwrap_or(1500))
        };
        Ok(Tap::over(attached, caps))
    }

    /// A queue over a descriptor that keeps the bounds of packets; one call per packet.
    pub(super) fn over(Attached { file, name, control }: Attached, caps: Caps) -> Tap {
        Tap {
            stats: DeviceStats { name: name.clone(), ..DeviceStats::default() },
            file,
            name,
            control,
            caps,
            pair: BufferPair::default(),
            scratch: Scratch::new(),
            health: Health::default(),
            is_drained: false,
            is_blocked: false,
            vector: None,
            joins: UdpGso::Off,
            last_run: 0,
            placer: Placer::new(false),
            queues_path: String::new(),
            steered: None,
        }
    }

    /// The attached descriptor, for another process ([`Tap::from_fd`]).
    pub fn into_fd(self) -> OwnedFd {
        self.file.into()
    }

    /// The name of the interface when it was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes at the front of a frame that do not cross the descriptor.
    fn link_bytes(&self) -> usize {
        match self.caps.medium {
            Medium::Ethernet => 0,
            Medium::Ip => plain_ip::HEADER_BYTES,
        }
    }

    /// The counts of a burst: bytes that crossed the descriptor.
    fn tally(&self, frames: Tally) -> Tally {
        match self.caps.medium {
            Medium::Ethernet => frames,
            Medium::Ip => frames.of_plain_ip(),
        }
    }

    fn link(&self) -> LinkState {
        let asked = self.control.as_ref().map(|c| sys::interface_is_running(c.as_fd(), &self.name));
        match asked {
            Some(Ok(true)) => LinkState::Up,
            Some(Ok(false)) => LinkState::Down,
            _ if self.health.is_down || self.health.lost.is_some() => LinkState::Down,
            _ => LinkState::Up,
        }
    }
}

impl Device for Tap {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    /// If the kernel refuses the steering program, packets arrive on any queue, and shards hand them over.
    fn attach(&mut self, owner: &OwnerKey) -> Attachment {
        if let Some(queues) = self.steered {
            let _ = self.steer(queues, owner);
        }
        Attachment::default()
    }

    fn tx_burst(
        &mut self,
        _now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        let before = burst.len();
        self.send_burst(burst, Completing::new(pool, counters));
        before - burst.len()
    }

    fn rx_burst(
        &mut self,
        _now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        self.take_burst(pool, out, budget, counters)
    }

    /// The descriptor is level-triggered: readable while a frame is queued.
    fn arm(&mut self) -> bool {
        self.is_drained
    }

    fn lost(&self) -> Option<i32> {
        self.health.lost
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        let interest = match self.is_blocked {
            true => Interest::ReadableOrWritable,
            false => Interest::Readable,
        };
        Some(WakeFd { fd: self.file.as_raw_fd(), interest })
    }

    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        Some(self)
    }

    fn stats(&self) -> DeviceStats {
        let mut stats = DeviceStats { link: self.link(), ..self.stats.clone() };
        stats.path.push_str(self.joins.describe());
        stats.path.push_str(&self.queues_path);
        stats
    }
}

impl DirectPlacement for Tap {
    fn place(
        &mut self,
        flow: FlowKey,
        next_seq: SeqNum,
        ranges: WritableRanges,
    ) -> Result<(), Unsupported> {
        self.placer.place(flow, next_seq, ranges)
    }

    fn place_next(&mut self, flow: &FlowKey, range: WritableRange) -> Result<(), Unsupported> {
        self.placer.place_next(flow, range)
    }

    fn revoke(&mut self, flow: &FlowKey) -> WritableRanges {
        self.placer.revoke(flow)
    }
}
