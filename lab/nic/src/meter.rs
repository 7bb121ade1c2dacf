//! The cost of the hardware, and its counters.
//!
//! The hardware of an inline NIC runs on the host's own thread, inside `tx_burst` and `rx_burst`. Its
//! time is measured around each such section with the cycle counter, once per burst, and kept apart,
//! so that a bench can take it off the thread's CPU time. What the measuring itself costs outside
//! the two readings is calibrated once and counted as the hardware's as well.
//!
//! Of the sections that put one small frame on the wire only some are measured ([`Sampler`]).
//!
//! A section that a preemption falls into would look long although its thread used no CPU: a section
//! is charged at most [`SLACK_NS`] ([`SMALL_SLACK_NS`]) and a nanosecond per byte that it moved (the
//! slowest copy from memory takes a tenth of that); [`SimCounts::cut_sections`] says how often that
//! struck.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::Duration;

use super::Coalesce;
use super::far_end::Command;
use super::registers::Register;
use fulmar::internals::drivers::wake::Bell;
use fulmar::internals::runtime::{now, ticks};

/// Longest honest section that moves no bytes.
pub const SLACK_NS: u64 = 50_000;
/// The same of one that puts a small frame on the wire, which takes a few hundred nanoseconds: it stands
/// for others, so that an interrupt in it would count many times.
pub const SMALL_SLACK_NS: u64 = 1_000;
/// Time over which the cycle counter is compared with the clock: errors of 50 ns at both ends are
/// 20 parts in a million.
const CALIBRATION: Duration = Duration::from_millis(5);
/// Empty sections that are timed to find the cost of timing.
const EMPTY_SECTIONS: u64 = 2000;

thread_local! {
    static THREAD_NS: Cell<u64> = const { Cell::new(0) };
}

/// Nanoseconds that the hardware of inline NICs has taken on the calling thread so far, of all
/// simulated NICs together. Take the difference of two readings off the thread's CPU time.
pub fn thread_hardware_ns() -> u64 {
    THREAD_NS.with(Cell::get)
}

/// How ticks become nanoseconds.
#[derive(Clone, Copy)]
struct Rate {
    /// Nanoseconds per tick, in units of 2^-32.
    ns_per_tick: u64,
    /// The measured ticks of an empty section: one reading.
    empty_ticks: u64,
    /// What a section costs beside what it measures, in ticks.
    overhead_ticks: u64,
}

impl Rate {
    fn get() -> Rate {
        static RATE: OnceLock<Rate> = OnceLock::new();
        *RATE.get_or_init(Rate::calibrate)
    }

    fn calibrate() -> Rate {
        let (start, from) = (now().as_nanos(), ticks());
        let (mut end, mut to) = (start, from);
        while end - start < CALIBRATION.as_nanos() as u64 {
            (end, to) = (now().as_nanos(), ticks());
        }
        let elapsed = to.wrapping_sub(from).max(1);
        let ns_per_tick = ((u128::from(end - start) << 32) / u128::from(elapsed)) as u64;
        let (empty_ticks, overhead_ticks) = Rate::empty_section();
        Rate { ns_per_tick, empty_ticks, overhead_ticks }
    }

    /// The time that an undisturbed section without work measures, and its further cost: the least of a few rounds.
    fn empty_section() -> (u64, u64) {
        let round = || {
            let (mut inside, from) = (0, ticks());
            for _ in 0..EMPTY_SECTIONS {
                let start = ticks();
                inside += ticks().wrapping_sub(start);
            }
            let outside = ticks().wrapping_sub(from).saturating_sub(inside);
            (inside / EMPTY_SECTIONS, outside / EMPTY_SECTIONS)
        };
        (0..5).map(|_| round()).min_by_key(|(i, o)| i + o).unwrap_or((0, 0))
    }

    fn ns(self, ticks: u64) -> u64 {
        ((u128::from(ticks) * u128::from(self.ns_per_tick)) >> 32) as u64
    }
}

macro_rules! counts {
    ($($(#[doc = $doc:literal])* $name:ident;)*) => {
        /// The counts of a simulated NIC and of its modelled peer since they were made.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct SimCounts {
            $($(#[doc = $doc])* pub $name: u64,)*
        }

        /// The same, shared. Each is written by one thread at a time.
        #[derive(Default)]
        pub struct Shared {
            $(pub $name: AtomicU64,)*
        }

        impl Shared {
            pub fn snapshot(&self) -> SimCounts {
                SimCounts { $($name: self.$name.load(Relaxed),)* }
            }
        }
    };
}

counts! {
    /// Times the host told the hardware that it had posted frames: once per burst.
    doorbells;
    /// Transmit descriptors that the host wrote, one per piece of a frame.
    descriptors;
    /// Frames that the host posted; a super-frame counts once.
    tx_frames;
    /// Packets that went onto the wire.
    tx_packets;
    /// Bytes of the frames that the host posted.
    tx_bytes;
    /// Frames that the hardware could not cut as the host asked, and dropped.
    tx_malformed;
    /// Frames that the hardware has finished with and the host has taken back.
    completions;
    /// Times the host took completions back.
    reaps;
    /// Frames that the hardware put into posted buffers; an aggregated frame counts once.
    rx_frames;
    /// Packets that they came in as.
    rx_packets;
    /// Bytes of the frames put into posted buffers.
    rx_bytes;
    /// Packets that came when no buffer was posted.
    rx_missed;
    /// Times the host told the hardware that a reader's buffer is to be filled, and from where on.
    posted_tags;
    /// Buffers of readers whose pages the host has told the hardware.
    registrations;
    /// Records of four pages that the host has written for that.
    pods;
    /// Times the hardware asked for the host's attention.
    interrupts;
    /// Nanoseconds that the hardware took on the host's threads.
    inline_ns;
    /// Nanoseconds that the hardware worked on a thread of its own.
    own_thread_ns;
    /// Nanoseconds that the thread of the hardware looked for work in vain.
    idle_spin_ns;
    /// Sections of inline hardware.
    sections;
    /// Sections that were interrupted, and charged only a plausible time.
    cut_sections;
    /// Connections that the modelled peer has accepted or opened.
    peer_connections;
    /// Bytes that connections have delivered to the peer in order.
    peer_bytes_in;
    /// Bytes of streams that the peer has sent, without repetitions.
    peer_bytes_out;
    /// TCP packets that the peer has taken.
    peer_segments_in;
    /// Acknowledgements without data that the peer has sent.
    peer_acks_out;
    /// Acknowledgements among them that told of a gap or a repetition.
    peer_duplicate_acks_out;
    /// Stream bytes that came to the peer a second time.
    peer_repeated_bytes_in;
    /// Stream bytes that the peer has sent again.
    peer_resent_bytes;
    /// Resets that the peer has sent.
    peer_resets_out;
    /// Datagrams that the peer has taken.
    peer_datagrams_in;
    /// Bytes of payload in them.
    peer_datagram_bytes_in;
    /// Datagrams that the peer has sent.
    peer_datagrams_out;
    /// Bytes of payload that are not what the pattern says, where the peer looks at them.
    peer_wrong_bytes;
    /// Frames that the peer does not understand.
    peer_odd_frames;
}

/// Adds where only one thread at a time writes: cheaper than an atomic addition.
#[inline]
pub fn bump(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(by), Relaxed);
}

/// The state that a NIC, its hardware and its handle share.
pub struct Board {
    pub counts: Shared,
    /// The requests of a handle to the modelled peer.
    commands: Mutex<VecDeque<Command>>,
    has_commands: AtomicBool,
    /// Wakes the host.
    pub bell: Bell,
    /// When it does after frames were received.
    pub rx_coalesce: Register,
    /// The thread that the hardware runs on, if it has one of its own.
    thread: OnceLock<Thread>,
    /// That thread sleeps, or is about to.
    is_asleep: AtomicBool,
    rate: Rate,
}

/// Commands that may wait.
const COMMANDS: usize = 1024;

impl Board {
    pub fn new(bell: Bell, rx_coalesce: Coalesce) -> Board {
        Board {
            counts: Shared::default(),
            commands: Mutex::default(),
            has_commands: AtomicBool::new(false),
            bell,
            rx_coalesce: Register::new(rx_coalesce),
            thread: OnceLock::new(),
            is_asleep: AtomicBool::new(false),
            rate: Rate::get(),
        }
    }

    /// Something came for the hardware from outside: runs its thread, or has the host run it.
    pub fn attend(&self) {
        if self.thread.get().is_some() {
            self.kick();
        } else {
            self.bell.ring();
        }
    }

    /// The hardware has a thread of its own from now on, the calling one.
    pub fn set_thread(&self) {
        let _ = self.thread.set(std::thread::current());
    }

    /// Wakes the hardware's thread if it sleeps.
    #[inline]
    pub fn kick(&self) {
        if self.is_asleep.load(SeqCst)
            && self.is_asleep.swap(false, SeqCst)
            && let Some(t) = self.thread.get()
        {
            t.unpark();
        }
    }

    /// The hardware's thread is about to sleep: a producer of work wakes it from now on.
    pub fn fall_asleep(&self) {
        self.is_asleep.store(true, SeqCst);
    }

    pub fn wake_up(&self) {
        self.is_asleep.store(false, SeqCst);
    }

    /// Nanoseconds from one reading of [`ticks`] to another.
    pub fn ns_between(&self, from: u64, to: u64) -> u64 {
        self.rate.ns(to.wrapping_sub(from))
    }

    /// Runs the hardware on the host's thread, with its time measured. `run` answers how many bytes
    /// it moved. It stands for `count` sections, of which the others are not measured: what measuring costs
    /// is charged once.
    #[inline]
    pub fn section(&self, count: u64, slack_ns: u64, run: impl FnOnce() -> u64) {
        let start = ticks();
        let bytes = run();
        let plausible = slack_ns + bytes;
        let spent = ticks().wrapping_sub(start).saturating_sub(self.rate.empty_ticks);
        let mut ns = self.rate.ns(spent);
        if ns > plausible {
            ns = plausible;
            bump(&self.counts.cut_sections, 1);
        }
        let measuring = self.rate.empty_ticks + self.rate.overhead_ticks;
        let ns = ns * count + self.rate.ns(measuring);
        bump(&self.counts.sections, count);
        bump(&self.counts.inline_ns, ns);
        THREAD_NS.with(|t| t.set(t.get().wrapping_add(ns)));
    }

    /// Whether a handle asks for something.
    #[inline]
    pub fn has_commands(&self) -> bool {
        self.has_commands.load(SeqCst)
    }

    pub fn take_commands(&self) -> VecDeque<Command> {
        let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_commands.store(false, SeqCst);
        std::mem::take(&mut commands)
    }

    fn command(&self, c: Command) -> Result<(), Busy> {
        let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        if commands.len() >= COMMANDS {
            return Err(Busy);
        }
        commands.push_back(c);
        self.has_commands.store(true, SeqCst);
        drop(commands);
        self.attend();
        Ok(())
    }
}

/// Too many requests wait for the modelled peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Busy;

impl std::fmt::Display for Busy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("too many requests are queued for the modelled peer; let the stack run")
    }
}

impl std::error::Error for Busy {}

/// Draws which of many short sections are measured: two readings of the cycle counter cost as much as the
/// host's own part of a small frame, and hold up what the processor does around them. Each measured one
/// stands for those that were left out before it; which ones is drawn, so that no rhythm of the traffic
/// hides in it.
pub struct Sampler {
    /// Sections to be left out before the next one is measured.
    left: u32,
    /// Those left out since the last one.
    skipped: u64,
    random: u32,
}

impl Default for Sampler {
    fn default() -> Sampler {
        Sampler { left: 0, skipped: 0, random: 0x9e37_79b9 }
    }
}

/// About two of this number of short sections are measured.
const SAMPLED: u32 = 16;

impl Sampler {
    /// Whether the next section goes unmeasured.
    #[inline]
    pub fn skips(&mut self) -> bool {
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        self.skipped += 1;
        true
    }

    /// For how many the next section stands, itself included.
    pub fn stands_for(&mut self) -> u64 {
        // Xorshift, full period (Marsaglia 2003).
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.left = self.random % SAMPLED;
        std::mem::take(&mut self.skipped) + 1
    }
}

/// Looks at a simulated NIC from outside, and tells the modelled peer what to do. Clones share.
#[derive(Clone)]
pub struct SimHandle {
    board: Arc<Board>,
}

impl SimHandle {
    pub(super) fn new(board: Arc<Board>) -> SimHandle {
        SimHandle { board }
    }

    /// Nanoseconds that the hardware of this NIC has taken so far, on the threads of its host
    /// (inline) or on its own. Only what ran inline is part of the host's CPU time: see
    /// [`SimCounts::inline_ns`], and [`thread_hardware_ns`] for one thread's share.
    pub fn hardware_ns(&self) -> u64 {
        let c = &self.board.counts;
        c.inline_ns.load(Relaxed) + c.own_thread_ns.load(Relaxed)
    }

    /// The counts so far.
    pub fn counts(&self) -> SimCounts {
        self.board.counts.snapshot()
    }

    /// Asks the modelled peer for something; it begins when the hardware runs next.
    ///
    /// # Errors
    /// [`Busy`]: the host has not run for so long that requests pile up.
    pub fn ask(&self, what: Command) -> Result<(), Busy> {
        self.board.command(what)
    }
}

impl std::fmt::Debug for SimHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("SimHandle").field(&self.counts()).finish()
    }
}
