//! One core's whole world: device queue, buffers, flows, timers. It advances only when it is
//! called, with the time as an argument, and makes no call of the operating system besides those of
//! its device; so the simulation drives it exactly as the host does.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::IpAddr;

use fulmar_base::{
    Counter, Counters, DropReason, Duration, Instant, NoProbe, Probe, Secrets, SlotId, Stage,
};
use fulmar_ip::{Delivered, Ip, Verdict};
use fulmar_mbuf::Pool;
use fulmar_netdev::{Attachment, Device, Packet, Peek};
use fulmar_socket::{Ready, SocketError};
use fulmar_tcp::{PathInfo, WindowBudget};
use fulmar_wire::protocol;

use crate::config::StackConfig;
use crate::demux::{Tables, ports_of};
use crate::error::SetupError;
use crate::events::Events;
use crate::layers::Core;
use crate::memory::Memory;
use crate::net::{FlowPath, Link, Net, Sink};
use crate::ping::Ping;
use crate::returns::Returns;
use crate::rx::{RX_BATCH, Rx};
use crate::secret::Secret;
use crate::siblings::{Handed, Siblings};
use crate::slab::Slab;
use crate::sockets::Socket;
use crate::stock::Stocks;
use crate::tcp::Tcp;
use crate::udp::Udp;
use crate::wheel::{TimerKey, Wheel};

/// Frames that one step for a reader takes at most.
const POLL_FRAMES: usize = 128;

/// Frames that a reader's first step after a hold takes at most: the first of them has waited for all of
/// the hold, and is not to wait for the taking of all that has gathered as well.
pub(crate) const FRAMES_AFTER_HOLD: usize = 8;

/// Frames that a call drains at most after it has sent.
const QUICK_DRAIN: usize = 64;

/// What a reader copies while it is still warm in the second-level cache, beside its own buffer.
const HOT_BYTES: usize = 128 << 10;

/// The same of bytes that the device puts where the reader wants them: nobody copies these, and frames
/// that come together share what the code of a step costs in the first-level cache.
const PLACED_BYTES: usize = 512 << 10;

/// Frames after which connections are heard although more frames wait: half the default window in
/// super-frames, so that the other half keeps the peer busy meanwhile. Fewer ACKs cost less.
const ANSWER_FRAMES: usize = 8;

/// How long an answer, or the tail of a write, may wait for the caller's next call before somebody
/// else sends it.
pub(crate) const CALLER_IS_BACK: Duration = Duration::from_millis(2);

/// A shard: see the module's header.
pub struct Shard<P: Probe = NoProbe> {
    pub(crate) core: Core<P>,
    pub(crate) tcp: Tcp,
    pub(crate) udp: Udp,
    pub(crate) ping: Ping,
    pub(crate) rx: Rx,
}

/// The sooner one of those that there are.
#[inline]
fn sooner(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Storage for incomplete datagrams: a sixteenth of the receive share, but room for a few datagrams of
/// 64 KiB and no more than 4 MiB, Linux's bound; of a small pool at most a quarter.
fn reassembly_bytes(receive_share_bytes: usize) -> usize {
    (receive_share_bytes / 16).clamp(512 << 10, 4 << 20).min(receive_share_bytes / 4)
}

/// Bytes that wait for the addresses of neighbours: room for a few datagrams of 64 KiB, up to 1 MiB.
fn neighbour_queue_bytes(receive_share_bytes: usize) -> usize {
    (receive_share_bytes / 32).clamp(128 << 10, 1 << 20)
}

/// What the layers share, over a device.
fn net_over<P: Probe>(
    mut device: Box<dyn Device>,
    config: &StackConfig,
    secrets: &Secrets,
    probe: P,
) -> Result<Net<P>, SetupError> {
    let caps = *device.caps();
    let Attachment { region, peek } = device.attach(&secrets.owner());
    let receive_share_bytes = config.pool.receive_share_bytes;
    let ip_config = fulmar_ip::Config {
        addresses: config.addresses.clone(),
        routes: config.routes.clone(),
        any_ip: config.any_ip,
        ether: caps.ether,
        mtu: config.mtu.unwrap_or(caps.mtu).min(caps.mtu),
        reassembly_bytes: reassembly_bytes(receive_share_bytes),
        neighbour_queue_bytes: neighbour_queue_bytes(receive_share_bytes),
        table_memory: config.table_memory,
        ..fulmar_ip::Config::default()
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
        stocks: Stocks::default(),
        probe,
    })
}

impl Shard<NoProbe> {
    /// A stack of one shard, with the released path.
    ///
    /// # Errors
    /// [`SetupError`]: an address or route that makes no sense, or no memory.
    pub fn new(
        config: StackConfig,
        device: Box<dyn Device>,
        now: Instant,
    ) -> Result<Self, SetupError> {
        Shard::with_probe(config, device, now, NoProbe, 0, 1)
    }
}

impl<P: Probe> Shard<P> {
    /// Shard `id` of `shards`, with a probe. The shards of one stack are given the same secrets, or they
    /// would not agree on who owns a flow.
    ///
    /// # Errors
    /// As [`Shard::new`].
    pub fn with_probe(
        config: StackConfig,
        device: Box<dyn Device>,
        now: Instant,
        probe: P,
        id: u16,
        shards: u16,
    ) -> Result<Self, SetupError> {
        let mut config = config;
        let secrets = config.secrets.take().ok_or(SetupError::NoSecrets)?.for_shard(id);
        let secret = Secret::new(&secrets);
        let net = net_over(device, &config, &secrets, probe)?;
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
                returns: Returns::default(),
                siblings,
            },
        })
    }

    /// Does everything that can be done at `now`: takes at most `budget` frames from the device,
    /// runs the timers, sends what may be sent. Returns how many frames came.
    pub fn step(&mut self, now: Instant, budget: usize) -> usize {
        self.advance(now, budget, usize::MAX)
    }

    /// As [`Shard::step`], for a reader who is about to copy: stops taking frames once they hold
    /// about as many bytes as stay in a cache. What the frames ask for in return (ACKs) may then
    /// wait for the next step, a moment away, so that several bursts share one answer.
    pub fn step_for_reader(&mut self, now: Instant) -> usize {
        let has_held = self.rx.moderation.is_holding() && !self.core.net.link.caps().coalescing;
        let budget = if has_held { FRAMES_AFTER_HOLD } else { POLL_FRAMES };
        self.advance(now, budget, HOT_BYTES)
    }

    /// As [`Shard::step_for_reader`], for one who waits for buffers that the device fills.
    pub(crate) fn step_for_placed(&mut self, now: Instant) -> usize {
        self.advance(now, POLL_FRAMES, PLACED_BYTES)
    }

    fn advance(&mut self, now: Instant, budget: usize, enough_bytes: usize) -> usize {
        self.core.net.link.set_now(now);
        // What came home from another thread or stack is warm: it is the next to be used.
        self.core.net.pool.drain_remote();
        self.core.returns.plan(now, self.core.net.pool.shared_parts());
        let (mut taken, mut bytes, mut is_dry) = (0, 0, true);
        if self.tcp.unanswered >= ANSWER_FRAMES {
            // The reader has read since: one ACK says both.
            self.answer(now);
        }
        // What others hand over is news to who waits here, as frames are.
        let handed = if self.core.siblings.is_alone() { 0 } else { self.take_handed(now) };
        self.tcp.unanswered += handed;
        self.tcp.posted.notify_device(now, &mut self.core);
        while taken < budget && bytes < enough_bytes.saturating_sub(self.rx.frame_bytes / 2) {
            let room = self.burst_size(enough_bytes).min(budget - taken);
            let ask = self.frames_to_ask(room);
            let (n, burst_bytes) = self.receive(now, ask);
            taken += n;
            bytes += burst_bytes;
            self.tcp.unanswered += n;
            let looped = self.take_loopback(now);
            is_dry = n < room;
            self.rx.is_dry = is_dry;
            self.tcp.posted.take_in_all(now, &mut self.core);
            // A device stops where a buffer is full: whether it is dry its reader will see, who is back
            // at once. So the answer waits as it does for a reader who copies.
            let is_awaited = self.tcp.posted.take_filled() && enough_bytes != usize::MAX;
            if is_dry && !is_awaited || looped > 0 || self.tcp.unanswered >= 2 * ANSWER_FRAMES {
                self.answer(now);
            }
            if is_dry && looped == 0 {
                break;
            }
        }
        self.run_timers(now);
        if !self.tcp.posted.may_rest(now) {
            self.tcp.posted.end_bursts(now, is_dry, &mut self.core);
        }
        self.relieve(now);
        self.pass(Stage::TimersRun);
        let is_late = self.tcp.held_since.is_some_and(|since| now >= since + CALLER_IS_BACK);
        if self.tcp.unanswered == 0 || is_late {
            self.answer(now);
        } else {
            self.tcp.held_since.get_or_insert(now);
        }
        self.flush();
        if self.core.net.pool.has_fault() {
            self.fail_vanished(now);
        }
        self.check_link();
        taken + handed
    }

    /// Hands what waits to the device.
    pub(crate) fn flush(&mut self) {
        let Net { pool, counters, link, probe, .. } = &mut self.core.net;
        link.flush(pool, counters, probe);
    }

    /// The end of a call that may have sent something: one crossing, then a quick drain of receive,
    /// since the answer of a peer on this machine is there already.
    pub(crate) fn finish_call(&mut self, now: Instant) {
        let Net { link, pool, .. } = &self.core.net;
        if link.has_backlog() || !link.loopback.is_empty() || pool.has_fault() {
            self.advance(now, QUICK_DRAIN, HOT_BYTES);
        }
    }

    /// Whether the device may hold more frames, so that answers wait for them.
    pub(crate) fn expects_frames(&self) -> bool {
        self.tcp.unanswered > 0
    }

    /// Lets every connection that has something to say say it.
    fn answer(&mut self, now: Instant) {
        self.tcp.unanswered = 0;
        self.tcp.held_since = None;
        self.run_output(now);
    }

    /// Frames per burst: many small ones, or as many large ones as are wanted.
    fn burst_size(&self, enough_bytes: usize) -> usize {
        (enough_bytes / self.rx.frame_bytes.max(1)).clamp(1, RX_BATCH)
    }

    /// Shows the probe a stage behind which there is nothing left to leave out.
    #[inline(always)]
    pub fn pass(&mut self, stage: Stage) {
        let _ = self.core.net.probe.stage(stage);
    }

    /// Shows the probe a stage; whether the path ends there.
    #[inline(always)]
    pub(crate) fn ends_at(&mut self, stage: Stage) -> bool {
        self.core.net.probe.stage(stage).is_break()
    }

    /// Whether the path ends at a stage that lies behind it.
    #[inline(always)]
    pub fn stops_at(&self, stage: Stage) -> bool {
        self.core.net.probe.stops_at(stage)
    }

    /// One burst of the device: frames and bytes.
    fn receive(&mut self, now: Instant, room: usize) -> (usize, usize) {
        let Net { pool, counters, link, .. } = &mut self.core.net;
        counters.count(Counter::RxPolls);
        link.device().rx_burst(now, pool, &mut self.rx.burst, room, counters);
        let n = self.rx.burst.len();
        let sent = self.core.net.link.sent_frames();
        if n == 0 {
            self.core.net.counters.count(Counter::RxEmptyPolls);
            self.rx.moderation.polled(now, 0, 0, sent);
            self.pass(Stage::PolledEmpty);
            return (0, 0);
        }
        let is_end = self.ends_at(Stage::DeviceReceived);
        if n > 1
            && !is_end
            && let Some(gro) = &mut self.rx.gro
        {
            let Net { pool, counters, .. } = &mut self.core.net;
            gro.join(&mut self.rx.burst, pool, counters);
        }
        let mut bytes = 0;
        let tables =
            Tables { flows: &self.tcp.flows, udp: &self.udp.table, sockets: &self.core.sockets };
        self.rx.foresight.look_up(&self.rx.burst, &tables);
        while let Some(p) = self.rx.burst.pop_front() {
            bytes += p.chain.len();
            self.rx.foresight.advance();
            if is_end {
                self.core.net.pool.free(p.chain);
            } else {
                self.input(now, p);
            }
        }
        self.rx.foresight.clear();
        self.rx.frame_bytes = if n > 1 { bytes / n } else { bytes };
        self.rx.moderation.polled(now, n, bytes, sent);
        self.count_look();
        (n, bytes)
    }

    /// Packets from the stack to itself; those that they cause wait for the next round.
    #[inline]
    fn take_loopback(&mut self, now: Instant) -> usize {
        match self.core.net.link.loopback.is_empty() {
            true => 0,
            false => self.take_looped(now),
        }
    }

    #[inline(never)]
    fn take_looped(&mut self, now: Instant) -> usize {
        let n = self.core.net.link.loopback.len();
        for _ in 0..n {
            if let Some(p) = self.core.net.link.loopback.pop_front()
                && let Some(p) = self.take_familiar(now, p)
            {
                self.input_by_layers(now, p, true);
                self.tcp.last_stream.forget_front();
            }
        }
        n
    }

    fn input(&mut self, now: Instant, p: Packet) {
        if !self.core.siblings.is_alone() {
            let lost = self.core.siblings.share_answer(&p);
            (0..lost).for_each(|_| self.core.net.counters.drop_packet(DropReason::HandOffFull));
        }
        self.input_here(now, p);
    }

    /// A frame that no other shard needs to hear of.
    pub(crate) fn input_here(&mut self, now: Instant, p: Packet) {
        if let Some(p) = self.take_familiar(now, p) {
            self.input_by_layers(now, p, false);
            self.tcp.last_stream.forget_front();
        }
    }

    #[inline(never)]
    fn input_by_layers(&mut self, now: Instant, p: Packet, is_looped: bool) {
        let Net { pool, counters, ip, link, probe, .. } = &mut self.core.net;
        let sink = &mut Sink { link, probe };
        let Packet { chain, offload, .. } = p;
        let verdict = match is_looped {
            false => ip.input(now, pool, counters, chain, offload, sink),
            true => ip.input_loopback(now, pool, counters, chain, offload, sink),
        };
        match verdict {
            Verdict::Deliver(d) => {
                if self.ends_at(Stage::IpInput) {
                    return self.core.net.pool.free(d.chain);
                }
                self.demultiplex(now, d);
            }
            Verdict::IcmpError(e) => self.icmp_error(now, e),
            Verdict::EchoReply(r) => self.steer_echo(r),
            Verdict::EchoRequest(r) => self.steer_echo_request(r),
            Verdict::Consumed => {}
        }
    }

    /// To the transport, or over to the shard that owns the flow.
    fn demultiplex(&mut self, now: Instant, d: Delivered) {
        match d.protocol {
            protocol::TCP => self.tcp_input(now, d),
            _ => match ports_of(&d).and_then(|key| self.core.siblings.port_elsewhere(&key)) {
                Some(owner) => self.hand(owner, Handed::Packet(d)),
                None => self.udp_input(now, d),
            },
        }
    }

    /// Runs whatever is due.
    fn run_timers(&mut self, now: Instant) {
        while let Some(key) = self.core.wheel.expire(now) {
            self.fire(now, key);
        }
        self.run_ip_timer(now);
    }

    #[inline(never)]
    fn fire(&mut self, now: Instant, key: TimerKey) {
        self.core.net.counters.count(Counter::TimersFired);
        match key {
            TimerKey::Tcp(id) => self.tcp_timer(now, id),
            TimerKey::Posted(id) => {
                self.tcp.posted.timer_fired(id, &mut self.core);
            }
            TimerKey::Pending(listener) => self.expire_pending(now, listener),
            TimerKey::TimeWait => {
                self.tcp.time_wait_timer = None;
                self.tcp.time_wait.expire(now);
                self.arm_time_wait();
            }
        }
    }

    fn run_ip_timer(&mut self, now: Instant) {
        if self.core.net.ip.next_deadline().is_some_and(|d| d <= now) {
            let Net { pool, counters, ip, link, probe, .. } = &mut self.core.net;
            ip.on_timer(now, pool, counters, &mut Sink { link, probe });
        }
        if self.core.net.ip.has_failed() {
            self.tell_failed(now);
        }
    }

    /// Packets were lost because a neighbour did not answer.
    #[cold]
    fn tell_failed(&mut self, now: Instant) {
        let failed: Vec<_> = self.core.net.ip.drain_resolution_failures().collect();
        for e in failed {
            self.icmp_error(now, e);
        }
    }

    pub(crate) fn arm_time_wait(&mut self) {
        if let Some(at) = self.tcp.time_wait.next_deadline() {
            let held = self.tcp.time_wait_timer;
            self.tcp.time_wait_timer = Some(self.core.wheel.schedule(held, TimerKey::TimeWait, at));
        }
    }

    /// When [`Shard::step`] must be called at the latest, frames apart. A call may find nothing.
    pub fn next_deadline(&self) -> Option<Instant> {
        let mut next = self.core.wheel.next_deadline();
        let device = self.core.net.link.device_ref().next_deadline();
        let (shortage, returns) =
            (self.core.memory.shortage.next_deadline(), self.core.returns.next_deadline());
        let posted = self.tcp.posted.next_deadline();
        let ip = self.core.net.ip.next_deadline();
        let waiters = self.core.memory.send_waiters.next_deadline(&self.core.net.pool);
        let reclaim = self.core.memory.reclaim.next_deadline();
        for other in [ip, device, shortage, returns, posted, waiters, reclaim] {
            next = sooner(next, other);
        }
        // What waits because the device is full goes on when the device says that it has room.
        if !self.core.net.link.loopback.is_empty() {
            return Some(Instant::ZERO);
        }
        if self.core.siblings.has_incoming() {
            return Some(Instant::ZERO);
        }
        if self.core.output_queue.is_empty() || self.core.net.link.has_backlog() {
            return next;
        }
        let by = self.tcp.held_since.map_or(Instant::ZERO, |since| since + CALLER_IS_BACK);
        Some(next.map_or(by, |n| n.min(by)))
    }

    /// Tells every socket once that the device is gone.
    #[inline]
    pub(crate) fn check_link(&mut self) {
        if self.core.events.down.is_none() && self.core.net.link.device_ref().lost().is_some() {
            self.link_is_lost();
        }
    }

    #[cold]
    fn link_is_lost(&mut self) {
        let error = match self.core.net.link.device_ref().lost() {
            Some(errno) if errno == SocketError::Protocol.errno() => SocketError::Protocol,
            _ => SocketError::NetworkDown,
        };
        self.core.events.down = Some(error);
        for id in self.core.sockets.ids() {
            let Some(s) = self.core.sockets.get_mut(id) else { continue };
            if let Socket::Tcp(s) = s {
                s.error = Some(error);
                self.tcp.posted.list(id, &mut s.posted);
            }
            self.notify(id);
        }
        let now = self.core.net.link.now();
        self.tcp.posted.take_in_all(now, &mut self.core);
        self.tcp.posted.end_bursts(now, true, &mut self.core);
    }

    /// What time it was at the last step or call that knew it.
    #[inline]
    pub fn now(&self) -> Instant {
        self.core.net.link.now()
    }

    /// Whether the device is gone.
    pub fn is_down(&self) -> bool {
        self.core.events.down.is_some()
    }

    /// The error of every call once the device is gone: [`SocketError::Protocol`] if the process behind it
    /// broke the protocol of the link, else [`SocketError::NetworkDown`].
    #[inline]
    pub fn down(&self) -> Option<SocketError> {
        self.core.events.down
    }

    /// What a socket is ready for, if it exists. When the device is gone every call fails at once.
    pub(crate) fn ready_of(&self, id: SlotId) -> Option<Ready> {
        self.core.sockets.get(id).map(|s| self.core.events.ready(s))
    }

    /// The way to a peer, as the transport needs it; `src` if the address is chosen already.
    pub(crate) fn path_to(
        &mut self,
        src: Option<IpAddr>,
        dst: IpAddr,
        zone: u32,
    ) -> Result<(IpAddr, FlowPath), SocketError> {
        let choice = self.core.net.ip.route_from(src, dst, zone);
        let choice = choice.map_err(|_| SocketError::NetworkUnreachable)?;
        let tso = if choice.is_local { Some(65_535) } else { self.core.net.link.caps().tso };
        let info = PathInfo {
            mtu: choice.mtu,
            route_mtu: choice.route_mtu,
            ip_header_bytes: if dst.is_ipv4() { 20 } else { 40 },
            tso_bytes: tso,
        };
        Ok((choice.src, FlowPath { info, generation: choice.generation }))
    }

    /// The probe.
    pub fn probe(&self) -> &P {
        &self.core.net.probe
    }

    /// What of the receive share is granted to connections and to those who hold loans.
    pub fn window_budget(&self) -> &WindowBudget {
        &self.core.net.window
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

    /// How to look for frames without the lock, if the device can be looked at.
    pub fn peek(&self) -> Option<Arc<dyn Peek>> {
        self.core.net.link.peek()
    }

    /// The device.
    pub fn device(&mut self) -> &mut dyn Device {
        self.core.net.link.device()
    }

    /// Whether frames wait for a device that refused them.
    pub fn has_backlog(&self) -> bool {
        self.core.net.link.has_backlog()
    }
}
