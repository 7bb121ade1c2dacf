//! The contract between a stack and whatever carries its frames.

use std::os::fd::RawFd;
use std::sync::Arc;

use fulmar_base::{Counters, EtherAddr, FlowKey, Instant, Offload, OwnerKey};
use fulmar_mbuf::{Backing, BufId, Mbuf, Pool};

use crate::moderation::Profile;
use crate::{Burst, PlacementHint, Rooms};

/// Whether a device separates headers from payload on receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scatter {
    /// A frame lands as it comes.
    None,
    /// Headers and payload can land in memory of their own.
    HeaderPayload,
}

/// From where a device can send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gather {
    /// Any memory of the process.
    AnyMemory,
    /// Only a region of its own: frames are copied into it.
    OwnRegion,
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
    /// How received frames land.
    pub scatter: Scatter,
    /// From where it sends.
    pub gather: Gather,
    /// Other code in user space reads the memory of sent frames (so pages of a file that may
    /// shrink must not be sent by reference).
    pub shared_with_user_space: bool,
    /// Queue pairs.
    pub queues: u16,
    /// Most mbufs of one sent frame; longer chains are copied together by [`crate::offload::fit`].
    pub max_segs: usize,
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
            scatter: Scatter::None,
            gather: Gather::AnyMemory,
            shared_with_user_space: false,
            queues: 1,
            max_segs: 64,
        }
    }
}

/// Whether frames can pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkState {
    /// They can.
    Up,
    /// They cannot now; they may again.
    Down,
    /// They never will again; the errno with which the device was lost.
    Gone(i32),
}

/// The device cannot do this.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unsupported;

impl std::fmt::Display for Unsupported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the device does not support this")
    }
}

impl std::error::Error for Unsupported {}

/// What a device counts for a person to read. Counts start at 0 with the device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceStats {
    /// The name of the device, with its wrappers.
    pub name: String,
    /// How frames cross, in a sentence for a person; empty where there is only one way.
    pub path: String,
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
    /// Whether frames may have come, or room may have become free, since the device was polled last.
    /// A few nanoseconds; wrong answers cost a poll, or the rest of a short spin.
    fn is_pending(&self) -> bool;
}

/// Something that carries Ethernet frames.
///
/// **Who owns a frame when.** The caller owns a frame until [`Device::tx_burst`] takes it from the
/// front of the burst; then the device does. A synchronous device frees the chain before it returns;
/// one that completes later keeps it until [`Device::tx_reap`]. Frames that stay in the burst were
/// not touched. Frames that [`Device::rx_burst`] appends belong to the caller, storage included; a
/// device never writes to them again. Mbufs may belong to another pool than the caller's (device
/// `link`): `Pool::free` sends them home.
///
/// **Who counts what.** The innermost device counts `Tx`/`Rx` `Frames`, `Packets` and `Bytes`, and
/// every drop is counted by whoever decides it. The caller counts bursts, polls and sleeps.
///
/// **Order of sleeping.** `arm`; if it answers true, poll once more with `rx_burst` (and `tx_burst`
/// if frames wait); if nothing came, sleep until `wake_fd` is readable or `next_deadline` passes;
/// then `disarm`. `rx_burst` also advances whatever the device holds back (delayed frames).
pub trait Device: Send {
    /// What the device can do.
    fn caps(&self) -> &Caps;

    /// Sends frames from the front of `burst`, in order; returns how many it took. The rest stay.
    /// A frame that can never be sent is taken, freed and counted as a drop. Frames fit the device:
    /// see [`crate::offload::fit`]. One crossing per burst where the device can.
    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize;

    /// Whether [`Device::tx_frame`] is a way to send. Asked once.
    fn takes_single_frames(&self) -> bool {
        false
    }

    /// Sends one frame by itself, for devices where the burst around it would cost more than it saves:
    /// the frame goes from its sender to the ring without a place in between. It is one that
    /// [`crate::offload::fit`] would leave as it is, in one piece and no super-frame.
    ///
    /// # Errors
    /// The frame, untouched: there is no room at this moment. [`Device::tx_burst`] says what then.
    fn tx_frame(
        &mut self,
        now: Instant,
        frame: Mbuf,
        offload: &Offload,
        counters: &mut Counters,
    ) -> Result<(), Mbuf> {
        let _ = (now, offload, counters);
        Err(frame)
    }

    /// Frees the frames that the device has finished with; returns how many.
    fn tx_reap(&mut self, now: Instant, pool: &mut Pool) -> usize {
        let _ = (now, pool);
        0
    }

    /// Appends up to `budget` received frames to `out` (never more than it has room for); returns
    /// how many.
    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize;

    /// Asks to be woken through [`Device::wake_fd`]. True: nothing is pending, so the caller may
    /// sleep after one more poll.
    fn arm(&mut self) -> bool;

    /// Whether `wake_fd` is readable whenever frames wait, armed or not. Then nothing can come between
    /// the last poll and the sleep unseen, and there is no need for one more poll.
    fn shows_what_waits(&self) -> bool {
        false
    }

    /// No longer wants to be woken; swallows a wake-up that came.
    fn disarm(&mut self) {}

    /// The descriptor that becomes readable when the device is armed and something came, or when
    /// there is room again after a refusal. The number stays the same for the life of the device, what it
    /// stands for need not: give the number to `poll` at every sleep, and keep it in no epoll set.
    /// `None`: poll by time only (a simulated device).
    fn wake_fd(&self) -> Option<RawFd>;

    /// When frames that the device holds back are due. The caller polls then.
    fn next_deadline(&self) -> Option<Instant>;

    /// Whether frames can pass.
    fn link_state(&self) -> LinkState;

    /// The errno with which the device was lost for ever, if it was. Asked at every step, so it
    /// must be cheap: no system call.
    fn lost(&self) -> Option<i32> {
        match self.link_state() {
            LinkState::Gone(errno) => Some(errno),
            LinkState::Up | LinkState::Down => None,
        }
    }

    /// After `tx_burst` left frames: sleep for writability of `wake_fd` too. False: `wake_fd`
    /// becomes readable when there is room again.
    fn wants_tx_wake(&self) -> bool {
        false
    }

    /// Memory from which the stack's pool takes its slabs, so that the device (or who is behind it)
    /// reads sent bytes where they are. Asked once, when the stack is built. `None`: any memory does.
    fn region(&mut self) -> Option<Backing> {
        None
    }

    /// Whether the kernel alone reads the bytes of sent frames, from wherever they lie, and none of
    /// them before `tx_burst` hands them to a system call; and whether the device tells the pool of
    /// bytes that it did not find ([`Pool::note_vanished`]). Then pages of files may be sent from
    /// where they are. A wrapper, which may read frames, says no by saying nothing.
    fn gathers_in_kernel(&self) -> bool {
        false
    }

    /// How to look for work without a system call and without the stack's lock. A device that has
    /// this is worth spinning on for a short while before a sleep. `None`: it is not.
    fn peek(&self) -> Option<Arc<dyn Peek>> {
        None
    }

    /// Sets the coalescing registers: when the armed device wakes, and when it takes back sent frames.
    /// `None`: as it was set up.
    ///
    /// # Errors
    /// [`Unsupported`]: it has none, and wakes for every frame. Whoever waits holds by itself.
    fn coalesce(&mut self, to: Option<Profile>) -> Result<(), Unsupported> {
        let _ = to;
        Err(Unsupported)
    }

    /// Sets what the device expects next of a flow, in place of whatever it expected before. Rooms of
    /// an earlier hint are dropped.
    ///
    /// The device sees by itself that a frame is of the flow, is the next in order, has the header
    /// that it predicted and no flag but ACK and PSH, before it splits a room. What it hands up is an
    /// ordinary chain: the headers, the placed bytes (an mbuf per room), and, if the frame was longer
    /// than the rooms, the rest. Every other frame is delivered as usual, from the pool; what of it
    /// landed in a room is copied out and the room scrubbed ([`fulmar_mbuf::Room::scrub`]) before
    /// anybody else can see it. A room that is full is dropped at once, so that its owner gets the buffer
    /// back; the next one takes its place.
    ///
    /// # Errors
    /// [`Unsupported`]: received frames land wherever they do; the rooms were dropped. For
    /// [`crate::Placement::Then`]: nothing has changed.
    fn place(&mut self, hint: PlacementHint) -> Result<(), Unsupported> {
        drop(hint);
        Err(Unsupported)
    }

    /// Forgets what was expected of a flow and gives its rooms back. From now on the device writes to
    /// none of them; frames that it has placed and not handed up yet are still to come.
    fn unplace(&mut self, flow: &FlowKey) -> Rooms {
        let _ = flow;
        Rooms::default()
    }

    /// Whether it pays to have the memory of a single read in hints ([`Device::place`]), which is taken back
    /// when the read ends: the device brings payload there with a copy that it makes anyway, that of its call for
    /// the frame, it hands up at once what it has placed, and needs no memory made known. After [`Device::unplace`] only mbufs that were
    /// handed up refer to the rooms. Asked once.
    ///
    /// A device that keeps what it has placed for a while may not say yes: readers would wait for it.
    fn places_lent(&self) -> bool {
        false
    }

    /// A buffer that is not known yet is about to come in hints. For a device that has to prepare memory
    /// before it writes there; each buffer is made known once until it is released.
    fn register(&mut self, buffer: BufId) {
        let _ = buffer;
    }

    /// A buffer is forgotten; it is in no hint any more.
    fn release(&mut self, buffer: BufId) {
        let _ = buffer;
    }

    /// Offers a clock that runs with the `now` of the calls. True: the device reads it where it has to know
    /// when a frame was sent, or need not know; then the `now` of `tx_burst` and `tx_reap` may be a few
    /// milliseconds old. False, and not asked again: it is exact. A stack on a virtual clock offers none.
    fn keep_time(&mut self, clock: fn() -> Instant) -> bool {
        let _ = clock;
        false
    }

    /// Tells the key by which the stack spreads flows over its shards, before frames pass: for the queues
    /// of a device that can send each received frame to the shard that owns its flow.
    fn steer_by(&mut self, key: &OwnerKey) {
        let _ = key;
    }

    /// What the device has counted.
    fn stats(&self) -> DeviceStats {
        DeviceStats::default()
    }
}

impl<D: Device + ?Sized> Device for Box<D> {
    fn caps(&self) -> &Caps {
        (**self).caps()
    }
    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        (**self).tx_burst(now, pool, burst, counters)
    }
    fn takes_single_frames(&self) -> bool {
        (**self).takes_single_frames()
    }
    fn tx_frame(
        &mut self,
        now: Instant,
        frame: Mbuf,
        offload: &Offload,
        counters: &mut Counters,
    ) -> Result<(), Mbuf> {
        (**self).tx_frame(now, frame, offload, counters)
    }
    fn tx_reap(&mut self, now: Instant, pool: &mut Pool) -> usize {
        (**self).tx_reap(now, pool)
    }
    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        (**self).rx_burst(now, pool, out, budget, counters)
    }
    fn arm(&mut self) -> bool {
        (**self).arm()
    }
    fn shows_what_waits(&self) -> bool {
        (**self).shows_what_waits()
    }
    fn disarm(&mut self) {
        (**self).disarm();
    }
    fn wake_fd(&self) -> Option<RawFd> {
        (**self).wake_fd()
    }
    fn next_deadline(&self) -> Option<Instant> {
        (**self).next_deadline()
    }
    fn link_state(&self) -> LinkState {
        (**self).link_state()
    }
    fn lost(&self) -> Option<i32> {
        (**self).lost()
    }
    fn wants_tx_wake(&self) -> bool {
        (**self).wants_tx_wake()
    }
    fn region(&mut self) -> Option<Backing> {
        (**self).region()
    }
    fn gathers_in_kernel(&self) -> bool {
        (**self).gathers_in_kernel()
    }
    fn peek(&self) -> Option<Arc<dyn Peek>> {
        (**self).peek()
    }
    fn coalesce(&mut self, to: Option<Profile>) -> Result<(), Unsupported> {
        (**self).coalesce(to)
    }
    fn place(&mut self, hint: PlacementHint) -> Result<(), Unsupported> {
        (**self).place(hint)
    }
    fn unplace(&mut self, flow: &FlowKey) -> Rooms {
        (**self).unplace(flow)
    }
    fn places_lent(&self) -> bool {
        (**self).places_lent()
    }
    fn register(&mut self, buffer: BufId) {
        (**self).register(buffer);
    }
    fn release(&mut self, buffer: BufId) {
        (**self).release(buffer);
    }
    fn keep_time(&mut self, clock: fn() -> Instant) -> bool {
        (**self).keep_time(clock)
    }
    fn steer_by(&mut self, key: &OwnerKey) {
        (**self).steer_by(key);
    }
    fn stats(&self) -> DeviceStats {
        (**self).stats()
    }
}
