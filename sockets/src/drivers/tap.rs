//! The TAP device: frames to and from the kernel's own stack, super-frames included.
//!
//! Enters and leaves: frames with a virtio-net header in front, so that 64 KiB super-frames without
//! checksums pass both ways. A sent chain is gathered by one `writev` and freed. A received frame is read
//! into a buffer pair (`buffer_pair.rs`) or into posted buffers (`placing.rs`). Bursts of 3 to 64 small
//! frames are sent with one call of io_uring (`vector.rs` has the figures). Without io_uring, or where the
//! interface could accept a burst in part, each frame has a call of its own; `DeviceStats::path` reports
//! which of the two and why.
//!
//! Cost: 0.5 to 1.2 µs for a single small frame, depending on the machine, three quarters of that in a
//! burst of 64; 3.8 µs for 64 KiB; and the kernel's copy. Source: linux/if_tun.h,
//! Documentation/networking/tuntap.rst, io_uring(7).

pub(crate) mod attach;
mod netlink;
mod queues;
mod receive;
mod vector;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use fulmar_stack::base::{Counter, Counters, EtherAddr, FlowKey, Instant, OwnerKey, SeqNum};
use fulmar_stack::device::{
    Attachment, Burst, Caps, Device, DeviceStats, DirectPlacement, Unsupported, WakeFd,
    WritableRanges, uso,
};
use fulmar_stack::mbuf::{Pool, WritableRange};

use crate::drivers::batch::Completing;
use crate::drivers::placing::Placer;
use crate::drivers::tun_queue::{Attached, Queue};
use crate::drivers::udp_gso::UdpGso;
use crate::drivers::{OpenError, sys, udp_gso, vnet};
use attach::{attach_alone, open_clone_device};
use vector::Vector;

const FLAGS: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

/// The TAP interface, and the stack's address and MTU on it.
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

/// One queue of a TAP interface.
pub struct Tap {
    queue: Queue,
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
        let file = open_clone_device()?;
        let name = attach_alone(&file, &config.name)?;
        Tap::set_up(Attached::here(file, name), config, 1)
    }

    /// Uses a descriptor that another process has opened and attached. `config.name` is ignored.
    ///
    /// # Errors
    /// The descriptor is not a TAP with IFF_VNET_HDR and IFF_NO_PI.
    pub fn from_fd(fd: OwnedFd, config: &TapConfig) -> Result<Tap, OpenError> {
        Tap::set_up(Attached::by_another(fd, FLAGS, "TAP")?, config, 1)
    }

    fn set_up(attached: Attached, config: &TapConfig, queues: u16) -> Result<Tap, OpenError> {
        let kernel_ether =
            sys::interface_ether(attached.file.as_fd(), &attached.name).map_err(|e| {
                let what = format!("cannot read the hardware address of {}", attached.name);
                OpenError::new(what, e, "Linux 4.0 or newer is required")
            })?;
        let ether = config.ether.unwrap_or_else(|| derive_ether(kernel_ether));
        let mut queue = Queue::set_up(attached, queues, config.mtu, |mtu| Caps::plain(mtu, ether))?;
        // The kernel writes to posted ranges during `readv` only.
        queue.caps.places_on_receive = true;
        let (vector, path) = open_vector(&queue.file, config);
        queue.stats.path = path;
        let joins = queue.caps.udp_gso && !config.one_by_one;
        Ok(Tap {
            queue,
            joins: if joins { UdpGso::On } else { UdpGso::Off },
            vector,
            last_run: 0,
            placer: Placer::new(config.predict),
            queues_path: String::new(),
            steered: None,
        })
    }

    /// The attached descriptor, for another process ([`Tap::from_fd`]).
    pub fn into_fd(self) -> OwnedFd {
        self.queue.file.into()
    }

    /// The name of the interface when it was opened.
    pub fn name(&self) -> &str {
        &self.queue.name
    }

    /// Sends the first `run` frames with one call of io_uring.
    fn send_run(&mut self, run: usize, burst: &mut Burst, done: &mut Completing<'_>) {
        let Tap { queue, vector: Some(vector), .. } = self else { return };
        queue.stats.tx_crossings += 1;
        let kept = vector.send(run, burst, |p, written| queue.complete(p, written, done));
        if !vector.sends() {
            queue.stats.path = format!("{ALONE} (the interface accepted a burst in part)");
        }
        if kept > 0 {
            queue.note_refusal();
        }
    }

    /// Sends datagrams of one flow at the front as one super-datagram. False: not possible; no effect.
    fn send_joined(&mut self, burst: &mut Burst, done: &mut Completing<'_>) -> bool {
        let queue = &mut self.queue;
        if !self.joins.is_on() || burst.len() < uso::LEAST || queue.health.lost.is_some() {
            return false;
        }
        let Some(joined) = uso::join(&*burst, &queue.caps, udp_gso::MOST_SEGS) else {
            return false;
        };
        queue.stats.tx_crossings += 1;
        let written = udp_gso::write(queue.file.as_fd(), &joined, burst, vnet::HEADER_BYTES);
        match written.map_err(|e| e.raw_os_error().unwrap_or(0)) {
            Ok(_) => {
                done.counters.add(Counter::UsoJoined, joined.count as u64 - 1);
                done.sent_front(joined.count, burst);
            }
            Err(libc::EAGAIN | libc::EINTR) => queue.note_refusal(),
            Err(libc::EINVAL) => {
                self.joins = UdpGso::Refused;
                return false;
            }
            Err(errno) => {
                for p in (0..joined.count).map_while(|_| burst.pop_front()) {
                    // Never kept: EAGAIN and EINTR were handled above.
                    let _ = queue.complete(p, Err(errno), done);
                }
            }
        }
        true
    }
}

impl Device for Tap {
    fn caps(&self) -> &Caps {
        &self.queue.caps
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
        let mut done = Completing::new(pool, counters);
        self.queue.is_blocked = false;
        while !burst.is_empty() && !self.queue.is_blocked {
            if self.send_joined(burst, &mut done) {
                continue;
            }
            let run = match (&self.vector, self.queue.health.lost) {
                (Some(vector), None) => vector.run(burst, &self.queue.caps, self.joins),
                _ => 0,
            };
            match run {
                0 => self.queue.send_one(burst, &mut done),
                _ => self.send_run(run, burst, &mut done),
            }
        }
        self.queue.count_sent(done);
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
        self.queue.is_drained
    }

    fn lost(&self) -> Option<i32> {
        self.queue.health.lost
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        Some(self.queue.wake_fd())
    }

    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        Some(self)
    }

    fn stats(&self) -> DeviceStats {
        let mut stats = self.queue.stats();
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
