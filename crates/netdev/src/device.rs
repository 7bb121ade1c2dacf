//! The device contract: what a stack asks of whatever carries its frames.
//!
//! [`Device`] is the whole of it. A device of one's own implements four methods ([`Device::caps`],
//! [`Device::tx_burst`], [`Device::rx_burst`], [`Device::wake_fd`]) and takes the defaults of the others until it
//! needs them. What is fixed for the life of a device is a fact in [`Caps`], not a method. A device that can
//! write payload straight into a reader's buffers implements [`DirectPlacement`] as well. A wrapper (capture,
//! faults, counting) implements the methods that it changes and forwards all others with
//! [`forward_device!`](crate::forward_device). `crates/fulmar/examples/own_device.rs` is a complete device.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;

use fulmar_base::{Counters, EtherAddr, FlowKey, Instant, OwnerKey, SeqNum};
use fulmar_mbuf::{Backing, BufId, Pool, WritableRange};

use crate::moderation::Profile;
use crate::{Burst, Rooms};

/// A descriptor of the operating system, as `std` has it. For threads that sleep until a device is ready.
pub type RawFd = core::ffi::c_int;

/// Who reads the memory of sent frames. It decides which memory may be sent by reference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TxReader {
    /// The device itself, in this process, before it gives the frame back.
    Process,
    /// Other code in user space: another process or another stack. It may read late, so pages of a file that
    /// may shrink are not sent to it by reference.
    UserSpace,
    /// The kernel alone, in the system call that [`Device::tx_burst`] makes. Pages of a file may be sent from
    /// where they are; the device tells the pool of bytes that the kernel did not find
    /// ([`Pool::note_fault`]).
    Kernel,
}

/// What the `now` of [`Device::tx_burst`] and [`Device::tx_reap`] is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TxTime {
    /// The device times frames by it: it is exact.
    Exact,
    /// The device sends at once, or reads a clock of its own: `now` may be some milliseconds old, which saves
    /// the stack a reading of the clock per datagram.
    Coarse,
}

/// When [`Device::wake_fd`] becomes readable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wake {
    /// When something arrives after [`Device::arm`].
    Armed,
    /// As long as frames are waiting, armed or not (level-triggered, as a socket is). A stack that sleeps on
    /// the descriptor needs no last poll before it.
    Level,
}

/// What a device can do. Fixed for the life of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Caps {
    /// Largest IP packet on the wire, in bytes (super-frames apart).
    pub mtu: usize,
    /// The station address that the stack uses on it.
    pub ether: EtherAddr,
    /// It completes transport checksums of sent frames.
    pub tx_csum: bool,
    /// It cuts TCP super-frames of either IP version; the largest IP packet it takes, in bytes.
    pub tso: Option<usize>,
    /// It cuts UDP super-frames, up to the same size.
    pub udp_gso: bool,
    /// Super-frames may arrive.
    pub rx_gro: bool,
    /// Most mbufs of one sent frame; longer chains are copied together by [`crate::offload::fit`].
    pub max_segs: usize,
    /// Queue pairs.
    pub queues: u16,
    /// Who reads the memory of sent frames.
    pub tx_reader: TxReader,
    /// How exact the time of sending has to be.
    pub tx_time: TxTime,
    /// When its descriptor is readable.
    pub wake: Wake,
    /// It has coalescing registers ([`Device::coalesce`]).
    pub coalescing: bool,
    /// Payload is placed ([`DirectPlacement`]) by the copy that receiving a frame makes anyway: a placed frame
    /// is handed up at once, memory needs no preparation, and after [`DirectPlacement::unplace`] only mbufs
    /// that were handed up refer to the rooms. Then even the buffer of a single read is worth placing.
    pub places_on_receive: bool,
}

impl Caps {
    /// A device with one queue and no offload at all.
    pub fn plain(mtu: usize, ether: EtherAddr) -> Caps {
        Caps {
            mtu,
            ether,
            tx_csum: false,
            tso: None,
            udp_gso: false,
            rx_gro: false,
            max_segs: 64,
            queues: 1,
            tx_reader: TxReader::Process,
            tx_time: TxTime::Exact,
            wake: Wake::Armed,
            coalescing: false,
            places_on_receive: false,
        }
    }

    /// The same for a wrapper that reads the frames that pass, or times them: their bytes are there to be
    /// read, and the time is exact.
    #[must_use]
    pub fn inspected(self) -> Caps {
        let tx_reader = match self.tx_reader {
            TxReader::Kernel => TxReader::Process,
            reader => reader,
        };
        Caps { tx_reader, tx_time: TxTime::Exact, ..self }
    }
}

/// Whether frames can pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LinkState {
    /// They can.
    #[default]
    Up,
    /// They cannot now; they may again.
    Down,
}

/// The device cannot do this.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unsupported;

impl core::fmt::Display for Unsupported {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("the device does not support this")
    }
}

impl core::error::Error for Unsupported {}

/// What a device counts for a person to read. Counts start at 0 with the device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceStats {
    /// The name of the device, with its wrappers.
    pub name: String,
    /// How frames cross, in a sentence for a person; empty where there is only one way.
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
    /// Frames that were lost before the device could hand them over, for want of room below it.
    pub rx_missed: u64,
    /// Times the device took less than it was given.
    pub tx_refusals: u64,
    /// Crossings to send: system calls, doorbells or lock acquisitions.
    pub tx_crossings: u64,
    /// Crossings to receive, empty ones included.
    pub rx_crossings: u64,
    /// Wake-ups written to a peer.
    pub wakes: u64,
    /// Frames whose payload went straight into a posted buffer.
    pub place_hits: u64,
    /// Frames that came while the next one of a flow was expected, and did not fit.
    pub place_misses: u64,
    /// Bytes of payload that went straight into posted buffers.
    pub placed_bytes: u64,
    /// Bytes copied because they had landed where they did not belong.
    pub place_miss_bytes: u64,
    /// Times a flow with posted buffers was given a queue of its own.
    pub flows_steered: u64,
}

impl DeviceStats {
    /// Adds what another queue of the same device has counted; name and path stay.
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
        self.flows_steered += other.flows_steered;
    }
}

/// A look at a device from outside of its stack's lock, for a thread that spins.
pub trait Peek: Send + Sync {
    /// Whether frames may have arrived, or space may have become free, since the device was polled last.
    /// A few nanoseconds; wrong answers cost a poll, or the rest of a short spin.
    fn is_pending(&self) -> bool;
}

/// What a stack gets from a device when it is built on it.
#[derive(Default)]
pub struct Attachment {
    /// Memory from which the stack's pool takes its slabs, so that the device (or the process behind it) reads
    /// sent bytes where they are. `None`: any memory does.
    pub region: Option<Backing>,
    /// How to look for work without a system call and without the stack's lock. A device that has this is
    /// worth spinning on for a short while before a sleep. `None`: it is not.
    pub peek: Option<Arc<dyn Peek>>,
}

/// What a thread that sleeps on a device gives to `poll(2)`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WakeFd {
    /// The descriptor. The number stays the same for the life of the device, what it stands for need not: give
    /// the number to `poll` at every sleep, and keep it in no epoll set.
    pub fd: RawFd,
    /// What to wait for.
    pub interest: Interest,
}

/// The events of a [`WakeFd`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interest {
    /// `POLLIN`: something arrived, or there is room again after a refusal.
    Readable,
    /// `POLLIN | POLLOUT`: frames were refused, and the descriptor is writable when there is room again.
    ReadableOrWritable,
}

impl WakeFd {
    /// A descriptor that is readable when something arrived, or when there is room again after a refusal.
    pub const fn readable(fd: RawFd) -> WakeFd {
        WakeFd { fd, interest: Interest::Readable }
    }
}

/// Something that carries Ethernet frames.
///
/// **Frames.** A [`Packet`](crate::Packet) is a whole Ethernet frame without check sequence, in one or more
/// mbufs, and what is still to be done to it (a checksum to complete, segmentation). The stack sends only what
/// [`Caps`] allow: a device that is [`Caps::plain`] gets complete frames of at most `mtu` + 14 bytes.
///
/// **Ownership.** The caller owns a frame until [`Device::tx_burst`] takes it from the front of the burst; then
/// the device does. A synchronous device frees the chain before it returns; one that completes later keeps it
/// until [`Device::tx_reap`]. Frames that stay in the burst were not touched. Frames that [`Device::rx_burst`]
/// appends belong to the caller, storage included; a device never writes to them again. Mbufs may belong to
/// another pool than the caller's (device `link`): `Pool::free` sends them home.
///
/// **Counting.** The innermost device counts `Tx`/`Rx` `Frames`, `Packets` and `Bytes` ([`crate::Tally`]), and
/// every drop is counted once, by the code that decides it. The caller counts bursts, polls and sleeps.
///
/// **Sleeping.** `arm`; if it answers true, poll once more with `rx_burst` (and `tx_burst` if frames are
/// waiting; with [`Wake::Level`] and no such frame this poll is left out); if nothing came, sleep until
/// `wake_fd` is ready or `next_deadline` passes; then `disarm`.
///
/// **Threads.** All calls come from under the stack's lock, from any thread. None may wait.
pub trait Device: Send {
    /// What the device can do.
    fn caps(&self) -> &Caps;

    /// A stack is built on the device; called once, before any frame passes. `owner` is the key by which the
    /// stack spreads flows over its shards, for the queues of a device that can send each received frame to
    /// the shard that owns its flow.
    fn attach(&mut self, owner: &OwnerKey) -> Attachment {
        let _ = owner;
        Attachment::default()
    }

    /// Sends frames from the front of `burst`, in order; returns how many it took. The rest stay: the device
    /// is full. A frame that can never be sent is taken, freed and counted as a drop. One crossing per burst
    /// where the device can.
    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize;

    /// Frees the frames that the device has finished with; returns how many.
    fn tx_reap(&mut self, now: Instant, pool: &mut Pool) -> usize {
        let _ = (now, pool);
        0
    }

    /// Appends up to `budget` received frames to `out` (never more than it has room for); returns how many.
    /// Frames that the device holds back are handed over here when they are due.
    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize;

    /// Asks to be woken through [`Device::wake_fd`]. True: nothing is pending, so the caller may sleep after
    /// one more poll.
    fn arm(&mut self) -> bool {
        true
    }

    /// Wake-ups are no longer wanted; swallows one that came.
    fn disarm(&mut self) {}

    /// What to sleep on; asked at every sleep. `None`: poll by [`Device::next_deadline`] only, as on a virtual
    /// clock.
    fn wake_fd(&self) -> Option<WakeFd>;

    /// When frames that the device holds back are due, or refused ones are to be offered again. The caller
    /// polls then.
    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    /// The errno with which the device was lost for ever, if it was. Asked at every step, so it must be cheap:
    /// no system call. An interface that is only down is not lost ([`DeviceStats::link`]).
    fn lost(&self) -> Option<i32> {
        None
    }

    /// Sets the coalescing registers: when the armed device wakes, and when it takes back sent frames. `None`:
    /// as it was set up. Only for a device that has them ([`Caps::coalescing`]); in front of others the
    /// waiting threads hold by themselves.
    fn coalesce(&mut self, to: Option<Profile>) {
        let _ = to;
    }

    /// The receive side that puts payload straight into posted buffers, if it has one. `None`: received frames
    /// land wherever they do.
    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        None
    }

    /// What the device has counted. May make a system call.
    fn stats(&self) -> DeviceStats {
        DeviceStats::default()
    }
}

/// A device that writes the payload of a flow into the rooms of buffers that were posted for it.
///
/// The device checks by itself that a frame is of the flow, is the next in order, has the header that it
/// predicted and no flag but ACK and PSH, before it splits a room. What it hands up is an ordinary chain: the
/// headers, the placed bytes (an mbuf per room), and, if the frame was longer than the rooms, the rest. Every
/// other frame is delivered as usual, from the pool; what of it landed in a room is copied out and the room
/// scrubbed ([`WritableRange::scrub`]) before it can be seen. A room that is full is dropped at once, so that
/// its owner gets the buffer back; the next one takes its place.
pub trait DirectPlacement {
    /// Sets what the device expects next of a flow (seen from this stack), in place of whatever it expected
    /// before: the byte with sequence number `next_seq` goes to the front of `rooms`. Rooms of an earlier call
    /// are dropped.
    ///
    /// # Errors
    /// [`Unsupported`]: not for this flow, or not for so many flows; the rooms were dropped.
    fn place(&mut self, flow: FlowKey, next_seq: SeqNum, rooms: Rooms) -> Result<(), Unsupported>;

    /// Adds a room behind the last one that the device has of the flow.
    ///
    /// # Errors
    /// [`Unsupported`]: the device has no range of the flow left, or has two already, or does not know the flow's next
    /// sequence number. The range was dropped, and nothing has changed.
    fn place_behind(&mut self, flow: &FlowKey, room: WritableRange) -> Result<(), Unsupported> {
        let _ = flow;
        drop(room);
        Err(Unsupported)
    }

    /// Forgets what was expected of a flow and gives its rooms back. From now on the device writes to none of
    /// them; frames that it has placed and not handed up yet are still to come.
    fn unplace(&mut self, flow: &FlowKey) -> Rooms;

    /// A buffer that is not known yet is about to be placed. For a device that has to prepare memory before it
    /// writes there; each buffer is registered once until it is released.
    fn register(&mut self, buffer: BufId) {
        let _ = buffer;
    }

    /// A buffer is forgotten; none of its rooms is with the device any more.
    fn release(&mut self, buffer: BufId) {
        let _ = buffer;
    }
}

#[deny(clippy::missing_trait_methods)]
impl<D: Device + ?Sized> Device for Box<D> {
    crate::forward_device!(self => **self);
}
