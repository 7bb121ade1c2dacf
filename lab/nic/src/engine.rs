//! Who runs the hardware: the host's own thread, within its calls, or a thread that does nothing
//! else.

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use fulmar_stack::base::Instant;

use super::SimConfig;
use super::hardware::{Hardware, Rings};
use super::meter::{Board, SLACK_NS, SMALL_SLACK_NS, Sampler, bump};
use super::worker::Worker;

/// The largest small frame. The time of small frames is sampled.
const SMALL_BYTES: u64 = 256;

/// See the module's header.
pub enum Engine {
    Inline(Box<Inline>),
    Thread(Thread),
}

/// The hardware and its rings, run by the thread that owns them.
pub struct Inline {
    rings: Rings,
    board: Arc<Board>,
    hardware: Hardware,
    /// The host wants an interrupt, or wanted one since the hardware ran last.
    is_armed: bool,
    /// The host sleeps, or is about to.
    is_asleep: bool,
    last_now: Instant,
    /// The hardware's own clock, if it has one; else it uses the host's time.
    clock: Option<fn() -> Instant>,
    sampler: Sampler,
    /// Frames that it fetches at once.
    fetch_frames: usize,
}

/// The hardware runs elsewhere.
pub struct Thread {
    shared: Arc<Shared>,
    handle: Option<JoinHandle<()>>,
}

/// The state that a host and the thread of its hardware share.
pub struct Shared {
    rings: Mutex<Rings>,
    pub board: Arc<Board>,
    /// Grows whenever the host has posted something.
    posted: AtomicU64,
    /// The host waits for space in the transmit ring.
    pub is_host_blocked: AtomicBool,
    pub has_carrier: AtomicBool,
    is_stopping: AtomicBool,
}

impl Shared {
    pub fn rings(&self) -> MutexGuard<'_, Rings> {
        // A panic elsewhere cannot leave a ring half changed.
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn posted(&self) -> u64 {
        self.posted.load(SeqCst)
    }

    pub fn is_stopping(&self) -> bool {
        self.is_stopping.load(SeqCst)
    }
}

/// The rings, for the host to work on.
pub enum RingsMut<'a> {
    Own(&'a mut Rings),
    Locked(MutexGuard<'a, Rings>),
}

impl Deref for RingsMut<'_> {
    type Target = Rings;
    fn deref(&self) -> &Rings {
        match self {
            RingsMut::Own(r) => r,
            RingsMut::Locked(r) => r,
        }
    }
}

impl DerefMut for RingsMut<'_> {
    fn deref_mut(&mut self) -> &mut Rings {
        match self {
            RingsMut::Own(r) => r,
            RingsMut::Locked(r) => r,
        }
    }
}

impl Engine {
    pub fn inline(config: &SimConfig, hardware: Hardware) -> Engine {
        Engine::Inline(Box::new(Inline {
            rings: Rings::new(config),
            board: Arc::clone(&hardware.board),
            hardware,
            is_armed: false,
            is_asleep: false,
            last_now: Instant::ZERO,
            clock: config.clock,
            sampler: Sampler::default(),
            fetch_frames: config.tx_fetch_frames,
        }))
    }

    /// Starts a thread for the hardware, bound to a CPU if one is given.
    pub fn thread(
        config: &SimConfig,
        hardware: Hardware,
        cpu: Option<usize>,
    ) -> io::Result<Engine> {
        let shared = Arc::new(Shared {
            rings: Mutex::new(Rings::new(config)),
            board: Arc::clone(&hardware.board),
            posted: AtomicU64::new(0),
            is_host_blocked: AtomicBool::new(false),
            has_carrier: AtomicBool::new(true),
            is_stopping: AtomicBool::new(false),
        });
        let worker = Worker::new(Arc::clone(&shared), hardware, Rings::new(config));
        let (tell, told) = mpsc::channel();
        let run = move || {
            let pinned = cpu.map_or(Ok(()), pin_thread);
            let is_fine = pinned.is_ok();
            // The opener waits for it.
            let _ = tell.send(pinned);
            if is_fine {
                worker.run();
            }
        };
        let handle = std::thread::Builder::new().name("sim-nic".into()).spawn(run)?;
        told.recv().unwrap_or_else(|_| Err(io::Error::other("the thread ended at once")))?;
        Ok(Engine::Thread(Thread { shared, handle: Some(handle) }))
    }

    pub fn rings(&mut self) -> RingsMut<'_> {
        match self {
            Engine::Inline(i) => RingsMut::Own(&mut i.rings),
            Engine::Thread(t) => RingsMut::Locked(t.shared.rings()),
        }
    }

    /// The same where no other thread works on them.
    #[inline]
    pub fn own_rings(&mut self) -> Option<&mut Rings> {
        match self {
            Engine::Inline(i) => Some(&mut i.rings),
            Engine::Thread(_) => None,
        }
    }

    /// The host has posted `frames` frames with `bytes` bytes.
    #[inline]
    pub fn doorbell(&mut self, now: Instant, frames: u64, bytes: u64) {
        match self {
            Engine::Inline(i) => i.ring(now, frames == 1 && bytes <= SMALL_BYTES),
            Engine::Thread(t) => t.kick(),
        }
    }

    /// The time of the hardware's last run; the host may know only an earlier time.
    pub fn latest(&self, now: Instant) -> Instant {
        match self {
            Engine::Inline(i) => now.max(i.last_now),
            Engine::Thread(_) => now,
        }
    }

    /// The host has posted receive buffers and is about to look for frames.
    pub fn poll(&mut self, now: Instant, has_posted: bool) {
        match self {
            Engine::Inline(i) => i.run(now),
            Engine::Thread(t) if has_posted => t.kick(),
            Engine::Thread(_) => {}
        }
    }

    /// The host waits for space in the transmit ring, or no longer does.
    pub fn set_blocked(&mut self, is_blocked: bool) {
        if let Engine::Thread(t) = self {
            t.shared.is_host_blocked.store(is_blocked, SeqCst);
        }
    }

    /// Asks for interrupts; true if nothing is there now.
    pub fn arm(&mut self) -> bool {
        match self {
            Engine::Inline(i) => {
                i.is_armed = true;
                i.is_asleep = true;
                i.hardware.board.bell.arm();
                i.rings.rx.done() == 0 && !i.hardware.is_due(i.last_now, &i.rings)
            }
            Engine::Thread(t) => {
                t.shared.board.bell.arm();
                let rings = t.shared.rings();
                let has_space = t.shared.is_host_blocked.load(SeqCst) && rings.tx.done() > 0;
                rings.rx.done() == 0 && !has_space
            }
        }
    }

    /// The host is awake.
    pub fn disarm(&mut self) {
        // Whether an interrupt came is found out when the hardware runs next.
        if let Engine::Inline(i) = self {
            i.is_asleep = false;
        }
    }

    /// When the host must run the hardware, or be asked for attention, where no thread does it.
    pub fn next_event(&self) -> Option<Instant> {
        let Engine::Inline(i) = self else { return None };
        let left = (i.fetch_frames > 1 && i.rings.tx.waiting() > 0).then_some(i.last_now);
        let events = [left, i.hardware.interrupt_at(&i.rings.rx), i.hardware.next_event()];
        events.into_iter().flatten().min()
    }

    /// The oldest frame that the hardware has finished with: when it did.
    pub fn oldest_done(&self) -> Option<Instant> {
        match self {
            Engine::Inline(i) => i.rings.tx.oldest_done().map(|s| s.done_at),
            Engine::Thread(t) => t.shared.rings().tx.oldest_done().map(|s| s.done_at),
        }
    }

    pub fn has_carrier(&self) -> bool {
        match self {
            Engine::Inline(i) => i.hardware.has_carrier(),
            Engine::Thread(t) => t.shared.has_carrier.load(SeqCst),
        }
    }
}

impl Inline {
    /// The host has posted frames: when they go the hardware sees by its own clock, if it has one, in its
    /// own account.
    #[inline]
    fn ring(&mut self, now: Instant, is_small: bool) {
        if self.rings.tx.waiting() < self.fetch_frames && !self.is_asleep {
            return;
        }
        // Readings around several frames cost little compared with the frames.
        let is_small = is_small && self.fetch_frames == 1;
        let Inline { rings, board, hardware, is_armed, last_now, clock, sampler, .. } = self;
        let mut run = || {
            *last_now = clock.map_or(now, |clock| clock());
            let is_due = *is_armed || hardware.is_due(*last_now, rings);
            if is_due { work(*last_now, rings, hardware, is_armed) } else { 0 }
        };
        match is_small {
            true if sampler.skips() => {
                run();
            }
            true => board.section(sampler.stands_for(), SMALL_SLACK_NS, run),
            false => board.section(1, SLACK_NS, run),
        }
    }

    /// Lets the hardware work, on this thread and in its own account.
    fn run(&mut self, now: Instant) {
        self.last_now = now;
        let Inline { rings, board, hardware, is_armed, .. } = self;
        if !*is_armed && !hardware.is_due(now, rings) {
            return;
        }
        board.section(1, SLACK_NS, || work(now, rings, hardware, is_armed));
    }
}

/// Everything that the hardware does at a time; returns the bytes that it moved.
fn work(now: Instant, rings: &mut Rings, hardware: &mut Hardware, is_armed: &mut bool) -> u64 {
    let bytes = hardware.run(now, rings);
    if *is_armed && hardware.interrupt_at(&rings.rx).is_some_and(|at| at <= now) {
        *is_armed = false;
        bump(&hardware.board.counts.interrupts, 1);
    }
    bytes
}

impl Thread {
    fn kick(&self) {
        self.shared.posted.fetch_add(1, SeqCst);
        self.shared.board.kick();
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.shared.is_stopping.store(true, SeqCst);
        self.kick();
        if let Some(h) = self.handle.take() {
            // If it panicked, the panic has been printed already.
            let _ = h.join();
        }
    }
}

/// Binds the calling thread to one CPU.
fn pin_thread(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}
