//! One core's whole world: device queue, buffers, flows, timers. It advances only when it is called, with the time as
//! an argument, and makes no call of the operating system except through its device; so the simulation drives it
//! exactly as the host does.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::base::{Counter, Counters, Duration, Instant, Secrets, Stage, Stages};
use crate::device::{Attachment, Device, Peek};
use crate::ip::Ip;
use crate::mbuf::Pool;
use crate::shard::conn::posted::BurstEnd;
use crate::socket::SocketError;
use crate::tcp::WindowBudget;

use crate::shard::config::{MIN_BUDGET_BYTES, StackConfig};
use crate::shard::conn::layer::Tcp;
use crate::shard::dgram::layer::Udp;
use crate::shard::error::SetupError;
use crate::shard::events::Events;
use crate::shard::icmp::ping::Ping;
use crate::shard::layers::Core;
use crate::shard::link::completion_polls::CompletionPolls;
use crate::shard::link::net::{Link, Net};
use crate::shard::link::rx::Rx;
use crate::shard::link::siblings::Siblings;
use crate::shard::memory::Memory;
use crate::shard::secret::Secret;
use crate::shard::slab::Slab;
use crate::shard::wheel::{TimerKey, Wheel};

/// Most frames that one step for a reader takes.
pub(crate) const POLL_FRAMES: usize = 128;

/// Frames that a reader's first step after a coalescing delay takes at most: the first of them has waited for
/// all of the delay, and is not to wait for the others as well.
pub(crate) const FRAMES_AFTER_HOLD: usize = 8;

/// Frames that a call drains at most after it has sent.
const QUICK_DRAIN: usize = 64;

/// Bytes that a reader copies while they are in the second-level cache, beside its own buffer.
const CACHED_BYTES: usize = 128 << 10;

/// The same for bytes that the device places into the reader's buffer: these are not copied, and frames
/// handled together share the misses of the instruction cache.
pub(crate) const PLACED_BYTES: usize = 512 << 10;

/// Frames after which connections send ACKs although more frames wait: half the default window in
/// super-frames, so that the other half keeps the peer busy meanwhile. Fewer ACKs cost less.
const ACK_FRAMES: usize = 8;

/// How long an ACK, or the tail of a write, may wait for the next call of the application before the
/// service thread sends it.
pub(crate) const MAX_OUTPUT_DEFERRAL: Duration = Duration::from_millis(2);

/// A shard: see the module's header.
pub struct Shard {
    pub(crate) core: Core,
    pub(crate) tcp: Tcp,
    pub(crate) udp: Udp,
    pub(crate) ping: Ping,
    pub(crate) rx: Rx,
}

/// The frames and bytes that one step received.
struct Received {
    frames: usize,
    bytes: usize,
    /// The last burst left nothing in the device.
    is_drained: bool,
}

/// The earlier of two deadlines.
#[inline]
fn sooner(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Storage for incomplete datagrams: a sixteenth of the receive share, but at least a few datagrams of
/// 64 KiB and no more than 4 MiB, Linux's bound; of a small pool at most a quarter.
fn reassembly_bytes(receive_share_bytes: usize) -> usize {
    (receive_share_bytes / 16).clamp(512 << 10, 4 << 20).min(receive_share_bytes / 4)
}

/// Bytes that wait for the addresses of neighbours: a few datagrams of 64 KiB, up to 1 MiB.
fn neighbour_queue_bytes(receive_share_bytes: usize) -> usize {
    (receive_share_bytes / 32).clamp(128 << 10, 1 << 20)
}

/// Refuses a configuration that no layer would refuse, but with which the stack could not work.
fn check(config: &StackConfig, device_mtu: usize) -> Result<(), SetupError> {
    match (config.pool.budget_bytes, config.mtu) {
        (bytes, _) if bytes < MIN_BUDGET_BYTES => Err(SetupError::Budget { bytes }),
        (_, Some(asked)) if asked > device_mtu => {
            Err(SetupError::Mtu { asked, device: device_mtu })
        }
        _ => Ok(()),
    }
}

/// The layers below the transports, over a device.
fn net_over(
    mut device: Box<dyn Device>,
    config: &StackConfig,
    secrets: &Secrets,
) -> Result<Net, SetupError> {
    let caps = *device.caps();
    check(config, caps.mtu)?;
    let Attachment { region, peek } = device.attach(&secrets.owner());
    let receive_share_bytes = config.pool.receive_share_bytes;
    let ip_config = crate::ip::Config {
        addresses: config.addresses.clone(),
        routes: config.routes.clone(),
        any_ip: config.any_ip,
        medium: caps.medium,
        ether: caps.ether,
        mtu: config.mtu.unwrap_or(caps.mtu),
        reassembly_bytes: reassembly_bytes(receive_share_bytes),
        neighbour_queue_bytes: neighbour_queue_bytes(receive_share_bytes),
        ..crate::ip::Config::default()
    };
    let ip = Ip::new(ip_config, secrets).map_err(SetupError::Ip)?;
    let mut pool = Pool::with_backing(config.pool, region).map_err(SetupError::Pool)?;
    pool.keep_sums(!caps.tx_csum);
    Ok(Net {
        pool,
        counters: Counters::default(),
        // Storage of received bytes is up to twice the bytes; a quarter of the share stays for
        // frames that are just landing.
        window: WindowBudget::new(receive_share_bytes / 8 * 3),
        ip,
        link: Link::new(device, peek, config),
        stages: Stages::default(),
    })
}

impl Shard {
    /// A stack of one shard.
    ///
    /// # Errors
    /// [`SetupError`]: an address or route that makes no sense, or no memory.
    pub fn new(
        config: StackConfig,
        device: Box<dyn Device>,
        now: Instant,
    ) -> Result<Self, SetupError> {
        Shard::of_several(config, device, now, 0, 1)
    }

    /// Shard `id` of `shards`. The shards of one stack are given the same secrets, or they would not agree on the
    /// owner of a flow.
    ///
    /// # Errors
    /// As [`Shard::new`].
    pub fn of_several(
        config: StackConfig,
        device: Box<dyn Device>,
        now: Instant,
        id: u16,
        shards: u16,
    ) -> Result<Self, SetupError> {
        let mut config = config;
        let secrets = config.secrets.take().ok_or(SetupError::NoSecrets)?.for_shard(id);
        let secret = Secret::new(&secrets);
        let net = net_over(device, &config, &secrets)?;
        let siblings = Siblings::new(id, shards, secret.owner());
        Ok(Shard {
            tcp: Tcp::new(&config, &secret),
            udp: Udp::new(&secrets),
            ping: Ping::default(),
            rx: Rx::new(&config),
            core: Core {
                config,
                net,
                sockets: Slab::default(),
                wheel: Wheel::new(now),
                secret,
                events: Events::default(),
                output_queue: VecDeque::new(),
                memory: Memory::default(),
                completion_polls: CompletionPolls::default(),
                transmit_deferred_until: None,
                siblings,
            },
        })
    }

    /// Does everything that can be done at `now`: receives at most `budget` frames,
    /// runs the timers, sends what may be sent. Returns the number of frames received.
    pub fn step(&mut self, now: Instant, budget: usize) -> usize {
        self.advance(now, budget, usize::MAX)
    }

    /// As [`Shard::step`], for a reader who is about to copy: stops taking frames once they hold about the bytes that
    /// stay in a cache. The ACKs of these frames may then wait for the next step, which is near, so that several bursts
    /// share one answer.
    pub fn step_for_reader(&mut self, now: Instant) -> usize {
        let has_delayed = self.rx.moderation.is_holding() && !self.core.net.link.caps().coalescing;
        let budget = if has_delayed { FRAMES_AFTER_HOLD } else { POLL_FRAMES };
        self.advance(now, budget, CACHED_BYTES)
    }

    /// For an event loop that receives by a step, reads and writes, and ends its turn by `step(now, 0)`: calls before
    /// `until` leave what they send in the transmit burst, and received segments are acknowledged, at the end of the
    /// turn. So all of it leaves as one burst, and an ACK carries the window after the reads. A burst that is full
    /// leaves at once. Default `None`: each call sends, and a step acknowledges what it received.
    pub fn set_transmit_deferred(&mut self, until: Option<Instant>) {
        self.core.transmit_deferred_until = until;
    }

    /// Whether a call at `now` leaves its frames for the next step.
    pub fn is_transmit_deferred(&self, now: Instant) -> bool {
        self.core.defers_transmit(now)
    }

    /// Whether frames or ACKs wait for the next step.
    pub fn has_deferred(&self) -> bool {
        self.core.net.link.has_unsent_frames()
            || !self.core.output_queue.is_empty()
            || self.tcp.unacked_frames > 0
    }

    /// One step. `enough_bytes`: received bytes after which no further burst is taken.
    pub(crate) fn advance(&mut self, now: Instant, budget: usize, enough_bytes: usize) -> usize {
        self.core.net.link.set_now(now);
        // Buffers freed by another thread or stack are in the cache: they are the next to be used.
        self.core.net.pool.drain_remote();
        self.core.completion_polls.plan(now, self.core.net.pool.shared_storages());
        if self.tcp.unacked_frames >= ACK_FRAMES {
            // The reader has read meanwhile: one ACK carries both.
            self.tcp.acknowledge(now, &mut self.core);
        }
        let handed = if self.core.siblings.is_alone() { 0 } else { self.input_hand_offs(now) };
        self.tcp.posted.notify_device(now, &mut self.core);
        let received = self.receive_bursts(now, budget, enough_bytes);
        self.run_timers(now);
        if !self.tcp.posted.may_defer(now) {
            let end = BurstEnd { now, is_drained: received.is_drained };
            self.tcp.posted.end_bursts(end, &mut self.core);
        }
        self.tcp.reclaim_and_retry(now, &mut self.core);
        self.pass(Stage::TimersRun);
        self.acknowledge_unless_deferred(now, budget);
        self.core.net.flush();
        self.tcp.check_link(&mut self.core);
        received.frames + handed
    }

    /// Receives bursts until the device is drained or a bound is reached. The completions of a burst are delivered to
    /// posted buffers, and acknowledged where no reader is about to return.
    fn receive_bursts(&mut self, now: Instant, budget: usize, enough_bytes: usize) -> Received {
        let mut received = Received { frames: 0, bytes: 0, is_drained: true };
        // The budget and the bytes of a step bound the data that waits for its ACK.
        let is_deferred = self.core.defers_transmit(now);
        while received.frames < budget
            && received.bytes < enough_bytes.saturating_sub(self.rx.frame_bytes / 2)
        {
            let limit = self.rx.burst_size(enough_bytes).min(budget - received.frames);
            let (frames, bytes) = self.receive(now, limit);
            received.frames += frames;
            received.bytes += bytes;
            received.is_drained = frames < limit;
            self.rx.is_drained = received.is_drained;
            self.tcp.unacked_frames += frames;
            let is_looped = !self.core.net.link.loopback.is_empty();
            let looped = if is_looped { self.input_loopback(now) } else { 0 };
            self.tcp.posted.deliver_all(now, &mut self.core);
            // A device stops where a buffer is full: the reader returns at once and finds out whether it has
            // more. So the ACK waits as it does for a reader that copies.
            let is_awaited =
                self.tcp.posted.take_filled() && enough_bytes != usize::MAX || is_deferred;
            if received.is_drained && !is_awaited
                || looped > 0
                || self.tcp.unacked_frames >= 2 * ACK_FRAMES && !is_deferred
            {
                self.tcp.acknowledge(now, &mut self.core);
            }
            if received.is_drained && looped == 0 {
                break;
            }
        }
        received
    }

    /// Runs the output that received frames and deferred writes have queued, unless the next call of the
    /// application is awaited: then within [`MAX_OUTPUT_DEFERRAL`].
    fn acknowledge_unless_deferred(&mut self, now: Instant, budget: usize) {
        let deferred_since = self.tcp.output_deferred_since;
        let is_late = deferred_since.is_some_and(|since| now >= since + MAX_OUTPUT_DEFERRAL);
        let ends_turn = self.core.transmit_deferred_until.is_some() && budget == 0;
        if self.tcp.unacked_frames == 0 || is_late || ends_turn {
            self.tcp.acknowledge(now, &mut self.core);
        } else {
            self.tcp.output_deferred_since.get_or_insert(now);
        }
    }

    /// The end of a call that may have sent something: a short receive poll, which takes the ACKs of earlier
    /// calls, and one `tx_burst`.
    pub(crate) fn finish_call(&mut self, now: Instant) {
        if self.core.defers_transmit(now) {
            return;
        }
        let link = &self.core.net.link;
        if link.has_unsent_frames() || !link.loopback.is_empty() {
            self.advance(now, QUICK_DRAIN, CACHED_BYTES);
        }
    }

    /// The path has reached `stage`.
    #[inline(always)]
    pub fn pass(&self, stage: Stage) {
        self.core.net.pass(stage);
    }

    /// Runs the timers that are due.
    fn run_timers(&mut self, now: Instant) {
        while let Some(key) = self.core.wheel.expire(now) {
            self.fire(now, key);
        }
        if self.core.net.ip.next_deadline().is_some_and(|at| at <= now) {
            self.core.net.with_ip(now, |ip, cx| ip.on_timer(cx));
        }
        let ip = &mut self.core.net.ip;
        if ip.has_resolution_failures() {
            // Packets were lost because a neighbour did not answer.
            let failed: Vec<_> = ip.drain_resolution_failures().collect();
            failed.into_iter().for_each(|e| self.icmp_error(now, e));
        }
    }

    #[inline(never)]
    fn fire(&mut self, now: Instant, key: TimerKey) {
        self.core.net.counters.count(Counter::TimersFired);
        match key {
            TimerKey::Tcp(id) => self.tcp.timer_fired(now, id, &mut self.core),
            TimerKey::Posted(id) => self.tcp.posted.timer_fired(id, &mut self.core),
            TimerKey::Pending(listener) => self.tcp.expire_pending(now, listener, &mut self.core),
            TimerKey::TimeWait => {
                self.tcp.time_wait_timer = None;
                self.tcp.time_wait.expire(now);
                self.tcp.arm_time_wait(&mut self.core.wheel);
            }
        }
    }

    /// When [`Shard::step`] must be called at the latest, frames apart. A call may find nothing.
    pub fn next_deadline(&self) -> Option<Instant> {
        let mut next = self.core.wheel.next_deadline();
        let device = self.core.net.link.device_ref().next_deadline();
        let (retries, returns) =
            (self.core.memory.retries.next_deadline(), self.core.completion_polls.next_deadline());
        let posted = self.tcp.posted.next_deadline();
        let ip = self.core.net.ip.next_deadline();
        let waiters = self.core.memory.send_waiters.next_deadline(&self.core.net.pool);
        let reclaim = self.core.memory.reclaim.next_deadline();
        let unread = self.core.memory.receive_reclaim.next_deadline();
        for other in [ip, device, retries, returns, posted, waiters, reclaim, unread] {
            next = sooner(next, other);
        }
        if !self.core.net.link.loopback.is_empty() {
            return Some(Instant::ZERO);
        }
        if self.core.siblings.has_incoming() {
            return Some(Instant::ZERO);
        }
        // A full device wakes the shard when it has space; the output queue waits until then.
        if self.core.net.link.has_unsent_frames() {
            return sooner(next, self.core.transmit_deferred_until);
        }
        if self.core.output_queue.is_empty() {
            return next;
        }
        let by = self
            .tcp
            .output_deferred_since
            .map_or(Instant::ZERO, |since| since + MAX_OUTPUT_DEFERRAL);
        Some(next.map_or(by, |n| n.min(by)))
    }

    /// The time of the last step or call that was given it.
    #[inline]
    pub fn now(&self) -> Instant {
        self.core.net.link.now()
    }

    /// The error of every call once the device is gone: [`SocketError::Protocol`] if the process at its other end broke
    /// the protocol of the link, else [`SocketError::NetworkDown`].
    #[inline]
    pub fn down(&self) -> Option<SocketError> {
        self.core.events.down
    }

    /// The stages of its paths, for an observer.
    #[inline(always)]
    pub fn stages(&mut self) -> &mut Stages {
        &mut self.core.net.stages
    }

    /// The counters.
    pub fn counters(&self) -> &Counters {
        &self.core.net.counters
    }

    /// The buffers.
    pub fn pool(&mut self) -> &mut Pool {
        &mut self.core.net.pool
    }

    /// The IP layer: addresses, routes, neighbours.
    pub fn ip(&mut self) -> &mut Ip {
        &mut self.core.net.ip
    }

    /// Checks for frames without the lock, if the device supports that.
    pub fn peek(&self) -> Option<Arc<dyn Peek>> {
        self.core.net.link.peek()
    }

    /// The device.
    pub fn device(&mut self) -> &mut dyn Device {
        self.core.net.link.device()
    }

    /// Whether frames are queued for the device: of this turn, or refused by a device that is full.
    pub fn has_unsent_frames(&self) -> bool {
        self.core.net.link.has_unsent_frames()
    }
}
