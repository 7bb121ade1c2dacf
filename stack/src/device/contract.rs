//! The device contract: what a stack requires of a device.
//!
//! [`Device`] is the whole of it. A new device implements four methods ([`Device::caps`],
//! [`Device::tx_burst`], [`Device::rx_burst`], [`Device::wake_fd`]) and keeps the defaults of the others
//! until it needs them. Properties that are fixed for the life of a device are in [`Caps`]. A device that can
//! write payload straight into a reader's buffers implements [`DirectPlacement`] as well. A wrapper (capture,
//! faults, counting) implements the methods that it changes and forwards all others with
//! [`forward_device!`](crate::device::forward_device). `sockets/examples/own_device.rs` is a complete device.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;

use crate::base::{Counters, EtherAddr, FlowKey, Instant, Medium, OwnerKey, SeqNum};
use crate::mbuf::{Backing, BufId, Pool, WritableRange};

use crate::device::moderation::Profile;
use crate::device::{Burst, WritableRanges};

/// A descriptor of the operating system, as `std` has it. For threads that sleep until a device is ready.
pub type RawFd = core::ffi::c_int;

/// The use of the `now` of [`Device::tx_burst`] and [`Device::tx_reap`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TxTime {
    /// The device schedules frames by it: it must be exact.
    Exact,
    /// The device sends immediately, or reads its own clock: `now` may be some milliseconds old, so the stack
    /// reads no clock per datagram.
    Coarse,
}

/// When [`Device::wake_fd`] becomes readable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wake {
    /// When a frame arrives after [`Device::arm`] (edge-triggered).
    Armed,
    /// While frames are queued, armed or not (level-triggered, as a socket). No poll is needed between `arm`
    /// and the sleep.
    Level,
}

/// The capabilities of a device. Fixed for the life of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Caps {
    /// Largest IP packet in bytes, super-frames excepted.
    pub mtu: usize,
    /// Whether the wire carries Ethernet frames, or IP packets alone ([`plain_ip`](crate::device::plain_ip)).
    pub medium: Medium,
    /// The stack's Ethernet address on the device; [`Medium::OWN`] on [`Medium::Ip`].
    pub ether: EtherAddr,
    /// The device completes transport checksums of sent frames.
    pub tx_csum: bool,
    /// The device segments TCP super-frames (TSO), IPv4 and IPv6, up to this IP packet in bytes.
    pub tso: Option<usize>,
    /// The device segments UDP super-frames (USO), up to the same size.
    pub udp_gso: bool,
    /// Super-frames may be received.
    pub rx_gro: bool,
    /// Most mbufs of one sent frame; longer chains are linearized by [`fit`](crate::device::offload::fit).
    pub max_segs: usize,
    /// Queue pairs.
    pub queues: u16,
    /// Whether the `now` of sending must be exact.
    pub tx_time: TxTime,
    /// When [`Device::wake_fd`] is readable.
    pub wake: Wake,
    /// The device has coalescing registers ([`Device::coalesce`]).
    pub coalescing: bool,
    /// Payload is placed ([`DirectPlacement`]) by the copy of the receive call itself, one call per placed frame.
    /// Then frames that are short on average are better copied.
    pub places_on_receive: bool,
}

impl Caps {
    /// As [`Caps::plain`], for a device that carries IP packets without a link layer.
    pub fn plain_ip(mtu: usize) -> Caps {
        Caps { medium: Medium::Ip, ..Caps::plain(mtu, Medium::OWN) }
    }

    /// One queue, no offload, Ethernet.
    pub fn plain(mtu: usize, ether: EtherAddr) -> Caps {
        Caps {
            mtu,
            medium: Medium::Ethernet,
            ether,
            tx_csum: false,
            tso: None,
            udp_gso: false,
            rx_gro: false,
            max_segs: 64,
            queues: 1,
            tx_time: TxTime::Exact,
            wake: Wake::Armed,
            coalescing: false,
            places_on_receive: false,
        }
    }

    /// The capabilities of a wrapper that schedules frames: the time is exact.
    #[must_use]
    pub fn exact_time(self) -> Caps {
        Caps { tx_time: TxTime::Exact, ..self }
    }
}

/// Whether frames can pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LinkState {
    /// The link is up.
    #[default]
    Up,
    /// The link is down, and may come up again.
    Down,
}

/// The device does not support the operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unsupported;

impl core::fmt::Display for Unsupported {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("the device does not support this")
    }
}

impl core::error::Error for Unsupported {}

/// The counters of a device, for `fulmar stat`. They start at 0 when the device is opened.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceStats {
    /// The name of the device, with its wrappers.
    pub name: String,
    /// How frames cross to the other side, a sentence; empty if there is only one way.
    pub path: String,
    /// Whether frames can pass.
    pub link: LinkState,
    /// Frames sent.
    pub tx_frames: u64,
    /// Bytes of frames sent.
    pub tx_bytes: u64,
    /// Frames received.
    pub rx_frames: u64,
    /// Bytes of frames received.
    pub rx_bytes: u64,
    /// Frames that were lost before the device could hand them over, because a queue below it was full.
    pub rx_missed: u64,
    /// Bursts that the device accepted only in part.
    pub tx_refusals: u64,
    /// Crossings to send: system calls, doorbells or lock acquisitions.
    pub tx_crossings: u64,
    /// Crossings to receive, empty ones included.
    pub rx_crossings: u64,
    /// Wake-ups written to a peer.
    pub wakes: u64,
    /// Frames whose payload was placed into a posted buffer.
    pub place_hits: u64,
    /// Frames of, or predicted to be of, a placed flow that had to be copied.
    pub place_misses: u64,
    /// Payload bytes placed into posted buffers.
    pub placed_bytes: u64,
    /// Bytes copied because of misses.
    pub place_miss_bytes: u64,
    /// Sent frames that the device holds back for now, as [`Impaired`](crate::device::impaired::Impaired) does for a delay. The end
    /// of a stack waits until there is none.
    pub tx_held: u64,
}

impl DeviceStats {
    /// Adds the counters of another queue of the same device; name and path are kept.
    pub fn add(&mut self, other: &DeviceStats) {
        self.tx_frames += other.tx_frames;
        self.tx_bytes += other.tx_bytes;
        self.rx_frames += other.rx_frames;
        self.rx_bytes += other.rx_bytes;
        self.rx_missed += other.rx_missed;
        self.tx_refusals += other.tx_refusals;
        self.tx_crossings += other.tx_crossings;
        self.rx_crossings += other.rx_crossings;
        self.wakes += other.wakes;
        self.place_hits += other.place_hits;
        self.place_misses += other.place_misses;
        self.placed_bytes += other.placed_bytes;
        self.place_miss_bytes += other.place_miss_bytes;
        self.tx_held += other.tx_held;
    }
}

/// Tells a busy-polling thread whether a device has work, without the shard lock.
pub trait Peek: Send + Sync {
    /// Whether frames may have arrived, or space may have become free, since the device was polled last.
    /// Takes a few nanoseconds. A wrong answer costs a poll, or the rest of a spin.
    fn is_pending(&self) -> bool;
}

/// The facilities that a device provides when a stack attaches to it.
#[derive(Default)]
pub struct Attachment {
    /// Memory from which the stack's pool takes its slabs, so that the device (or the process that implements it) reads
    /// sent bytes in place. `None`: the stack allocates the memory.
    pub region: Option<Backing>,
    /// Checks for work without a system call and without the shard lock. A waiting thread spins on it before
    /// it sleeps. `None`: it does not spin.
    pub peek: Option<Arc<dyn Peek>>,
}

impl core::fmt::Debug for Attachment {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let mut d = f.debug_struct("Attachment");
        d.field("region", &self.region).field("peek", &self.peek.is_some()).finish()
    }
}

/// The descriptor and events that a sleeping thread passes to `poll(2)`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WakeFd {
    /// The descriptor, constant for the life of the device.
    pub fd: RawFd,
    /// The events to wait for.
    pub interest: Interest,
}

/// The events of a [`WakeFd`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interest {
    /// `POLLIN`: a frame arrived, or there is space again after a refusal.
    Readable,
    /// `POLLIN | POLLOUT`: frames were refused, and the descriptor is writable when there is space again.
    ReadableOrWritable,
}

impl WakeFd {
    /// Waits for `POLLIN` on a descriptor: a frame arrived, or there is space again after a refusal.
    pub const fn readable(fd: RawFd) -> WakeFd {
        WakeFd { fd, interest: Interest::Readable }
    }
}

/// A network interface: it sends and receives frames.
///
/// **Frames.** A [`Packet`](crate::device::Packet) is an Ethernet frame without FCS, in one or more mbufs, with its
/// offload request (a checksum to complete, segmentation). The stack sends only what [`Caps`] allow: a device that is
/// [`Caps::plain`] gets complete frames of at most `mtu` + 14 bytes. A device of [`Medium::Ip`] removes the Ethernet
/// header from sent packets and puts one in front of received packets ([`plain_ip`](crate::device::plain_ip)).
///
/// **Ownership.** The caller owns a frame until [`Device::tx_burst`] takes it from the front of the burst; then
/// the device does. A synchronous device frees the chain before it returns; one that completes later keeps it
/// until [`Device::tx_reap`]. Frames that stay in the burst are unchanged. Frames that [`Device::rx_burst`]
/// appends belong to the caller, storage included; a device never writes to them again. Mbufs may belong to
/// another pool than the caller's (device `link`): `Pool::free` returns them to it.
///
/// **Counting.** The innermost device counts `Tx`/`Rx` `Frames`, `Packets` and `Bytes`
/// ([`Tally`](crate::device::Tally)), and every drop is counted once, by the code that decides it. The caller counts
/// bursts, polls and sleeps.
///
/// **Sleeping.** `arm`; if it returns true, poll once more with `rx_burst` (and `tx_burst` if frames are
/// queued; with [`Wake::Level`] and no such frame this poll is left out); if no frame was received, sleep
/// until `wake_fd` is ready or `next_deadline` passes; then `disarm`.
///
/// **Threads.** Every call is made under the shard lock, from any thread. No call may block.
pub trait Device: Send {
    /// The capabilities of the device.
    fn caps(&self) -> &Caps;

    /// Called once when a stack is built on the device, before the first frame. `owner` is the key of the hash
    /// that maps flows to shards: a multi-queue device steers each received frame by it, if it can.
    fn attach(&mut self, owner: &OwnerKey) -> Attachment {
        let _ = owner;
        Attachment::default()
    }

    /// Sends frames from the front of `burst`, in order. Returns how many it accepted; the others stay in the
    /// burst: the device is full. A frame that can never be sent is accepted, freed and counted as a drop. At
    /// best one system call per burst.
    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize;

    /// Frees the frames whose transmission is complete. Returns how many.
    fn tx_reap(&mut self, now: Instant, pool: &mut Pool) -> usize {
        let _ = (now, pool);
        0
    }

    /// Appends up to `budget` received frames to `out` (never more than it has space for). Returns how many.
    /// Frames that the device delays are received here when they are due.
    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize;

    /// Enables wake-ups through [`Device::wake_fd`]. True: no frame is pending, so the caller may sleep after
    /// one more poll.
    fn arm(&mut self) -> bool {
        true
    }

    /// Disables wake-ups, and consumes a pending one.
    fn disarm(&mut self) {}

    /// The descriptor to sleep on; called at every sleep. `None`: poll by [`Device::next_deadline`] only, as on a virtual
    /// clock.
    fn wake_fd(&self) -> Option<WakeFd>;

    /// When delayed frames are due, or refused frames are to be offered again. The caller
    /// polls then.
    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    /// The errno with which the device was permanently lost. Called at every step, so it must make no system
    /// call. An interface that is only down is not lost ([`DeviceStats::link`]).
    fn lost(&self) -> Option<i32> {
        None
    }

    /// Sets the coalescing registers: when the armed device wakes, and when it completes sent frames. `None`:
    /// the initial setting. Only for a device that has them ([`Caps::coalescing`]); for other devices the
    /// waiting threads delay their wake-ups.
    fn coalesce(&mut self, to: Option<Profile>) {
        let _ = to;
    }

    /// Direct data placement, if the device supports it.
    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        None
    }

    /// The counters. May make a system call.
    fn stats(&self) -> DeviceStats {
        DeviceStats::default()
    }
}

/// Direct data placement: the device writes the payload of a flow into posted buffers.
///
/// The device verifies that a frame belongs to the flow, is its next segment, has the predicted headers and no
/// flag but ACK and PSH, before it takes bytes of a range as received. It hands up an ordinary chain: headers,
/// placed bytes (an mbuf per range), and the bytes that did not fit. Every other frame is handed up in buffers
/// of the pool; bytes of it in a range are copied out and the range is scrubbed ([`WritableRange::scrub`])
/// before its owner can read it. The device drops a full range immediately, so that its owner gets the buffer
/// back, and goes on with the next range.
pub trait DirectPlacement {
    /// Posts the ranges of a flow (from this stack's point of view): the byte with sequence number `next_seq`
    /// is written to the front of `ranges`. Ranges of an earlier call
    /// are dropped.
    ///
    /// # Errors
    /// [`Unsupported`]: the flow cannot be placed, or too many flows are. The ranges were dropped.
    fn place(
        &mut self,
        flow: FlowKey,
        next_seq: SeqNum,
        ranges: WritableRanges,
    ) -> Result<(), Unsupported>;

    /// Posts one more range, after the flow's existing ranges.
    ///
    /// # Errors
    /// [`Unsupported`]: the device has no range of the flow left, or has two already, or does not know the flow's next
    /// sequence number. The range was dropped, and nothing has changed.
    fn place_next(&mut self, flow: &FlowKey, range: WritableRange) -> Result<(), Unsupported> {
        let _ = flow;
        drop(range);
        Err(Unsupported)
    }

    /// Revokes and returns the ranges of a flow. The device no longer writes to them; frames that it has placed
    /// already are still handed up.
    fn revoke(&mut self, flow: &FlowKey) -> WritableRanges;

    /// Called before a buffer is posted for the first time, for a device that must prepare memory (an IOMMU).
    /// Each buffer is registered once until it is released.
    fn register(&mut self, buffer: BufId) {
        let _ = buffer;
    }

    /// Called when a registered buffer is dropped; the device has none of its ranges.
    fn release(&mut self, buffer: BufId) {
        let _ = buffer;
    }
}

#[deny(clippy::missing_trait_methods)]
impl<D: Device + ?Sized> Device for Box<D> {
    crate::device::forward_device!(self => **self);
}
