//! A modelled NIC: it measures the host's cost of a network card without hardware.
//!
//! ```text
//!   host (the stack's thread, what is measured)  │  hardware (its time is shown apart)
//!                                                │
//!   tx_burst ─► descriptors ─► ring ── doorbell ─┼─► read by reference, cut, line rate ─► wire
//!   tx_reap  ◄─ ring ◄─ completions ─────────────┼──
//!   rx_burst ◄─ ring ◄───────────────────────────┼─◄ posted buffers written, aggregated ◄─ wire
//!            ─► posted buffers ─► ring ──────────┼─►
//! ```
//!
//! [`with_peer`] puts a modelled station at the far end ([`FarEnd`]), which acknowledges or generates as fast as line
//! and window allow, so that only one host's cost is measured. [`pair`] joins two NICs.
//!
//! **Who owns what.** The hardware owns frames and buffers that are posted to a ring until it completes them. It reads
//! sent frames in place, and they return to their pool when the host reaps them; received frames are in buffers that
//! the host posted from its own pool, or, where a reader has posted memory, there ([`SimConfig::placement`]).
//!
//! **Hardware's time.** Inline, the hardware runs within the calls of the host and is timed there
//! ([`SimHandle::hardware_ns`], [`thread_hardware_ns`]); or it has a thread of its own
//! ([`HardwareThread`]).
//!
//! **Time** is the caller's, so all of it works on a virtual clock. What the hardware does between
//! two calls it does at the second one, with the times at which it would have happened.
//!
//! **Bounds.** Rings and lanes have fixed sizes. Without a posted buffer the wire pauses, or frames
//! are lost and counted.
//!
//! Every figure obtained with it is a *simulated device's*. A NIC of several queues is several of these
//! ([`queues`]). Not here: VLANs, virtual functions.

mod cut;
mod engine;
mod far_end;
mod frame;
mod hardware;
mod line;
mod meter;
mod nic;
pub mod pattern;
mod peer;
mod registers;
mod ring;
mod rx;
mod table;
mod wire;
mod worker;

use std::sync::Arc;

use fulmar_stack::base::{Duration, EtherAddr, Instant};
use fulmar_stack::device::{Caps, Device, TxTime};
use fulmar_stack::mbuf::MAX_MBUF_BYTES;

use engine::Engine;
pub use far_end::{AckRule, Command, FarEnd, Service};
use fulmar::internals::drivers::OpenError;
use fulmar::internals::drivers::wake::Bell;
pub use fulmar_stack::device::moderation::Coalesce;
pub use meter::{Busy, SimCounts, SimHandle, thread_hardware_ns};
pub use nic::SimNic;

const ETHER_BYTES: usize = 14;

/// What the pool has blocks for: a buffer of another length would take the next of these.
const BUFFER_BYTES: [usize; 4] = [2 << 10, 4 << 10, 16 << 10, 64 << 10];

/// The thread that runs the hardware of a NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HardwareThread {
    /// The host's threads, within their calls; the time is measured and shown apart.
    Inline,
    /// A thread of its own, on real time: callers must pass times of the monotonic clock, as a live stack does.
    Own {
        /// The CPU that it is bound to.
        cpu: Option<usize>,
    },
}

/// The features of the NIC, and its configuration.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Largest IP packet that is not a super-frame, in bytes.
    pub mtu: usize,
    /// Station address of the NIC.
    pub ether: EtherAddr,
    /// It completes and verifies transport checksums. Without it there are no super-frames.
    pub csum: bool,
    /// Segments super-frames of up to this number of bytes of IP packet. `None`: the stack segments.
    pub tso: Option<usize>,
    /// Aggregates received segments in order, up to this number of bytes of IP packet. `None`: no aggregation.
    pub lro: Option<usize>,
    /// It puts the payload of flows whose readers have posted memory there; needs `csum`.
    pub placement: bool,
    /// Bits per second each way, 0 for no limit.
    pub line_rate_bps: u64,
    /// Time from the last bit sent to the last bit received.
    pub delay: Duration,
    /// Transmit descriptors; each piece of a frame takes one. Rounded up to a power of two.
    pub tx_descriptors: usize,
    /// Frames that inline hardware fetches at once: it begins when this number is posted, or when the host polls the
    /// device. A value above one delays single frames. It keeps the hardware's work apart from the host's, which the
    /// hardware's work would slow down, and separates the two with fewer readings of a clock.
    pub tx_fetch_frames: usize,
    /// Receive buffers posted. Rounded up to a power of two.
    pub rx_buffers: usize,
    /// Space of a receive buffer: 2, 4, 16 or 64 KiB, rounded up, and at least a frame of the MTU.
    pub rx_buffer_bytes: usize,
    /// If that is more than 4 KiB, this number of buffers of 2 KiB is posted in addition, for frames that fit these.
    /// Rounded up to a power of two.
    pub rx_small_buffers: usize,
    /// When the hardware asks for attention after it has received.
    pub rx_coalesce: Coalesce,
    /// When the driver takes completions back: after `packets` frames, or after `delay` at the latest.
    pub tx_coalesce: Coalesce,
    /// Also after this number of bytes, so that memory is used again while it is in the cache.
    pub tx_reap_bytes: usize,
    /// Without a posted buffer the wire pauses; otherwise frames are lost then.
    pub flow_control: bool,
    /// The thread that runs the hardware.
    pub hardware: HardwareThread,
    /// A clock that runs with the `now` of the calls, for inline hardware: frames leave by it, and the host
    /// need not read one for each. `None`, as on a virtual clock: the time is what the calls say.
    pub clock: Option<fn() -> Instant>,
    /// The peer at the other end, for [`with_peer`].
    pub far_end: FarEnd,
}

impl Default for SimConfig {
    /// MTU 1500, all offloads with super-frames of 64 KiB, no rate limit, 1024 transmit descriptors,
    /// 64 receive buffers of 64 KiB and 128 of 2 KiB, an interrupt per frame received, completions taken back after
    /// 32 frames, 128 KiB or a millisecond.
    fn default() -> SimConfig {
        SimConfig {
            mtu: 1500,
            ether: EtherAddr([2, 0, 0, 0, 0, 0x51]),
            csum: true,
            tso: Some(65_535),
            lro: Some(MAX_MBUF_BYTES - ETHER_BYTES),
            placement: true,
            line_rate_bps: 0,
            delay: Duration::ZERO,
            tx_descriptors: 1024,
            tx_fetch_frames: 1,
            rx_buffers: 64,
            rx_buffer_bytes: MAX_MBUF_BYTES,
            rx_small_buffers: 128,
            rx_coalesce: Coalesce { packets: 1, delay: Duration::ZERO },
            tx_coalesce: Coalesce { packets: 32, delay: Duration::from_millis(1) },
            tx_reap_bytes: 128 << 10,
            flow_control: true,
            hardware: HardwareThread::Inline,
            clock: None,
            far_end: FarEnd::default(),
        }
    }
}

impl SimConfig {
    /// The same NIC without any offload: the stack cuts and sums, every packet arrives by itself in
    /// a buffer of 2 KiB.
    #[must_use]
    pub fn without_offloads(self) -> SimConfig {
        SimConfig {
            csum: false,
            tso: None,
            lro: None,
            placement: false,
            rx_buffers: 512,
            rx_buffer_bytes: 2048,
            ..self
        }
    }

    /// The same with everything inside its bounds.
    fn bounded(mut self) -> SimConfig {
        self.mtu = self.mtu.clamp(68, MAX_MBUF_BYTES - ETHER_BYTES);
        let least = self.mtu + ETHER_BYTES;
        let wanted = self.rx_buffer_bytes.max(least);
        let fits = BUFFER_BYTES.into_iter().find(|b| *b >= wanted);
        self.rx_buffer_bytes = fits.unwrap_or(MAX_MBUF_BYTES);
        self.tx_descriptors = self.tx_descriptors.clamp(2 * MAX_SEGS, 1 << 16);
        self.tx_fetch_frames = self.tx_fetch_frames.clamp(1, MAX_SEGS);
        self.rx_buffers = self.rx_buffers.clamp(4, 1 << 16);
        self.rx_small_buffers = self.rx_small_buffers.clamp(1, 1 << 16);
        // A whole aggregate fits into half of what is posted.
        let space = self.rx_buffers / 2 * self.rx_buffer_bytes - ETHER_BYTES;
        self.lro = self.lro.map(|l| l.clamp(self.mtu, 65_535).min(space));
        self.tso = self.tso.map(|t| t.clamp(self.mtu, 65_535));
        self
    }

    fn caps(&self) -> Caps {
        let tso = self.tso.filter(|_| self.csum);
        let has_clock = self.clock.is_some() && self.hardware == HardwareThread::Inline;
        let tx_time = if has_clock { TxTime::Coarse } else { TxTime::Exact };
        Caps {
            tx_csum: self.csum,
            tso,
            rx_gro: self.lro.is_some() && self.csum,
            max_segs: MAX_SEGS,
            tx_time,
            coalescing: true,
            ..Caps::plain(self.mtu, self.ether)
        }
    }
}

/// Pieces of one frame that the hardware gathers at most.
const MAX_SEGS: usize = 64;

fn board(config: &SimConfig) -> Result<Arc<meter::Board>, OpenError> {
    let bell = Bell::new().map_err(|e| {
        OpenError::new("cannot create an eventfd", e, "raise the limit on open files (ulimit -n)")
    })?;
    Ok(Arc::new(meter::Board::new(bell, config.rx_coalesce)))
}

fn nic(config: &SimConfig, hardware: hardware::Hardware) -> Result<(SimNic, SimHandle), OpenError> {
    let (board, table) = (Arc::clone(&hardware.board), Arc::clone(&hardware.table));
    let engine = match config.hardware {
        HardwareThread::Inline => Engine::inline(config, hardware),
        HardwareThread::Own { cpu } => Engine::thread(config, hardware, cpu).map_err(|e| {
            let on = cpu.map_or(String::new(), |n| format!(" on CPU {n}"));
            let what = format!("cannot start the thread of the simulated hardware{on}");
            OpenError::new(what, e, "choose a CPU that this process is allowed to use, or none")
        })?,
    };
    let handle = SimHandle::new(Arc::clone(&board));
    Ok((SimNic::new(config, engine, board, table), handle))
}

/// A NIC with the modelled peer of `config.far_end` at the other end of its wire.
///
/// # Errors
/// No descriptor left for the wake-ups, or no thread for the hardware.
pub fn with_peer(config: SimConfig) -> Result<(SimNic, SimHandle), OpenError> {
    let config = config.bounded();
    nic(&config, hardware::Hardware::with_peer(&config, board(&config)?))
}

/// The queues of a NIC, each with hardware, wire and a modelled peer of its own, so that threads which use different
/// queues share nothing. The peers of all queues use the addresses of one station, which answers on the queue of the
/// request.
///
/// # Errors
/// As [`with_peer`].
pub fn queues(config: &SimConfig, count: u16) -> Result<Vec<(SimNic, SimHandle)>, OpenError> {
    (0..count.max(1)).map(|_| with_peer(config.clone())).collect()
}

/// As [`with_peer`], by the clock of the stacks of this process ([`SimConfig::clock`]).
///
/// # Errors
/// As [`with_peer`].
pub fn open(config: SimConfig) -> Result<(Box<dyn Device>, SimHandle), OpenError> {
    let (nic, handle) = with_peer(on_stack_time(config))?;
    Ok((Box::new(nic), handle))
}

/// The queues of a NIC, each for a shard of its own.
pub type Queues = Vec<Box<dyn Device>>;

/// As [`queues`], by the clock of the stacks of this process.
///
/// # Errors
/// As [`with_peer`].
pub fn open_queues(config: &SimConfig, count: u16) -> Result<(Queues, Vec<SimHandle>), OpenError> {
    let queues = queues(&on_stack_time(config.clone()), count)?.into_iter();
    Ok(queues.map(|(nic, handle)| (Box::new(nic) as Box<dyn Device>, handle)).unzip())
}

fn on_stack_time(config: SimConfig) -> SimConfig {
    SimConfig { clock: config.clock.or(Some(fulmar::internals::runtime::now)), ..config }
}

/// Two NICs at the ends of one wire, each for a stack of its own. Each sends at its own line rate.
///
/// # Errors
/// As [`with_peer`].
pub fn pair(a: SimConfig, b: SimConfig) -> Result<[(SimNic, SimHandle); 2], OpenError> {
    let (a, b) = (a.bounded(), b.bounded());
    let boards = [board(&a)?, board(&b)?];
    let [here, there] = boards.clone();
    let (p, q) = wire::wire(boards);
    Ok([
        nic(&a, hardware::Hardware::on_wire(&a, here, p))?,
        nic(&b, hardware::Hardware::on_wire(&b, there, q))?,
    ])
}

#[cfg(test)]
mod tests;
