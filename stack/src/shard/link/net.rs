//! Output below the transports: the IP layer turns segments and datagrams into frames, and the link collects them in a
//! burst for the device.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use core::net::IpAddr;

use crate::base::{Counter, Counters, DropReason, FlowKey, Instant, Offload, Stage, Stages};
use crate::device::offload::{self, Refusal};
use crate::device::{Burst, Caps, Device, Packet, Peek, WakeFd};
use crate::ip::{Context, Egress, FrameSink, Ip, Outgoing, OutputError, Template, Traffic};
use crate::mbuf::{Chain, Mbuf, Pool, Purpose};
use crate::socket::SocketError;
use crate::tcp::{Emit, EmitError, Env, PathInfo, SegmentOut, WindowBudget, control_segment};
use crate::wire::tcp;

use crate::shard::config::StackConfig;
use crate::shard::conn::socket_options::HeaderOptions;

/// Everything below the sockets of one shard.
pub(crate) struct Net {
    /// The buffers.
    pub pool: Pool,
    /// The counters.
    pub counters: Counters,
    /// The receive windows granted.
    pub window: WindowBudget,
    /// The IP layer.
    pub ip: Ip,
    /// The device and the frames that wait for it.
    pub link: Link,
    /// The stages that paths pass.
    pub stages: Stages,
}

impl Net {
    /// Makes a call of the IP layer at `now`, whose frames go to the link.
    #[inline(always)]
    pub(crate) fn with_ip<R>(
        &mut self,
        now: Instant,
        call: impl FnOnce(&mut Ip, &mut Context<'_, Sink<'_>>) -> R,
    ) -> R {
        let Net { pool, counters, ip, link, stages, .. } = self;
        link.set_now(now);
        call(ip, &mut Context { now, pool, counters, out: &mut Sink { link, stages } })
    }

    /// The environment of an engine call.
    #[inline(always)]
    pub(crate) fn env(&mut self, now: Instant) -> Env<'_> {
        Env { now, pool: &mut self.pool, counters: &mut self.counters, window: &mut self.window }
    }

    /// The path has reached `stage`.
    #[inline(always)]
    pub(crate) fn pass(&self, stage: Stage) {
        self.stages.pass(stage);
    }

    /// Hands the transmit burst to the device.
    pub(crate) fn flush(&mut self) {
        let Net { pool, counters, link, stages, .. } = self;
        link.flush(pool, counters, stages);
    }

    /// Drops a packet for a reason.
    pub(crate) fn drop_chain(&mut self, chain: Chain, reason: DropReason) {
        self.counters.drop_packet(reason);
        self.pool.free(chain);
    }

    /// Moves a packet of the loopback queue out of the send share, before it is received: a reader may leave it unread
    /// for good, and then it would count against all writers.
    ///
    /// | send share | receive share | the packet |
    /// |---|---|---|
    /// | less than half in use | | stays |
    /// | half in use | has space | is copied |
    /// | more is free than the minima of connections | is full | stays |
    /// | only the minima of connections are free | is full | is dropped, and TCP retransmits it |
    ///
    /// A packet larger than half of the receive share stays: no retransmission of it could be copied either.
    pub(crate) fn release_send_share(&mut self, p: Packet) -> Option<Packet> {
        let is_sent = |m: &Mbuf| m.purpose() == Purpose::Send;
        if !self.pool.is_contended(Purpose::Send)
            || !p.chain.iter().any(is_sent)
            || p.chain.is_volatile()
        {
            return Some(p);
        }
        if let Ok(mut copy) = self.pool.alloc_chain(p.chain.len(), 0, Purpose::Receive) {
            copy.fill(p.chain.slices());
            self.pool.free(p.chain);
            return Some(Packet { chain: copy, ..p });
        }
        let has_space = self.pool.share_of(Purpose::Send).common() > 0;
        let is_too_large = p.chain.len() > self.pool.share_of(Purpose::Receive).limit / 2;
        if has_space || is_too_large {
            return Some(p);
        }
        self.drop_chain(p.chain, DropReason::NoBuffer);
        None
    }

    /// The route to a peer, as the transport needs it; `src` if the source address is chosen already.
    pub(crate) fn path_to(
        &mut self,
        src: Option<IpAddr>,
        dst: IpAddr,
        zone: u32,
    ) -> Result<(IpAddr, FlowPath), SocketError> {
        let choice = self.ip.route_from(src, dst, zone);
        let choice = choice.map_err(|_| SocketError::NetworkUnreachable)?;
        let tso = if choice.is_local { Some(65_535) } else { self.link.caps().tso };
        let info = PathInfo {
            mtu: choice.mtu,
            route_mtu: choice.route_mtu,
            ip_header_bytes: if dst.is_ipv4() { 20 } else { 40 },
            tso_bytes: tso,
        };
        Ok((choice.src, FlowPath { info, generation: choice.generation }))
    }

    /// Counts a write of `bytes` in `mbufs` newly allocated.
    pub(crate) fn count_write(&mut self, bytes: usize, mbufs: usize) {
        let counters = &mut self.counters;
        counters.count(Counter::Sends);
        counters.add(Counter::SendBytes, bytes as u64);
        counters.add(Counter::SendMbufs, mbufs as u64);
    }

    /// Counts bytes copied between the application and the pool.
    pub(crate) fn count_copied(&mut self, bytes: usize) {
        self.counters.add(Counter::CopiedBytes, bytes as u64);
    }

    /// Counts bytes lent to the application.
    pub(crate) fn count_loan(&mut self, bytes: usize) {
        if bytes > 0 {
            self.counters.count(Counter::Receives);
            self.counters.add(Counter::ReceiveBytes, bytes as u64);
            self.counters.add(Counter::LoanedBytes, bytes as u64);
        }
    }

    /// Sends a segment without payload that belongs to no connection.
    pub(crate) fn send_control(
        &mut self,
        now: Instant,
        key: &FlowKey,
        options: HeaderOptions,
        header: &tcp::Header,
    ) {
        let Net { pool, counters, ip, link, stages, .. } = self;
        let Ok(seg) = control_segment(pool, key, header) else {
            return counters.drop_packet(DropReason::NoBuffer);
        };
        let (key, traffic, template, quota) = (*key, Traffic::Reply, None, usize::MAX);
        let mut out = TcpEmit { now, ip, link, stages, key, options, traffic, template, quota };
        let _ = crate::tcp::Emit::emit(&mut out, pool, counters, seg);
    }
}

/// The device of a stack that has failed.
struct Gone(Caps);

impl Device for Gone {
    fn caps(&self) -> &Caps {
        &self.0
    }

    fn tx_burst(&mut self, _: Instant, _: &mut Pool, _: &mut Burst, _: &mut Counters) -> usize {
        0
    }

    fn rx_burst(
        &mut self,
        _: Instant,
        _: &mut Pool,
        _: &mut Burst,
        _: usize,
        _: &mut Counters,
    ) -> usize {
        0
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        None
    }

    fn lost(&self) -> Option<i32> {
        Some(SocketError::NetworkDown.errno())
    }
}

/// The Ethernet header, which the MTU leaves out.
const ETHER_BYTES: usize = crate::wire::eth::HEADER_BYTES;

/// Frames sent between two calls of `tx_reap`: most devices have nothing to complete right after a burst, and
/// this many buffers stay in a cache. Receive polls reap as well, and so does a device that is full.
const REAP_FRAMES: usize = 16;

/// The device, the burst that waits for it, and the packets from the stack to itself.
pub(crate) struct Link {
    device: Box<dyn Device>,
    /// Checks for frames without the lock, if the device supports that.
    peek: Option<Arc<dyn Peek>>,
    caps: Caps,
    tx: Burst,
    /// Packets to own addresses; they are input again by the next poll.
    pub loopback: VecDeque<Packet>,
    loopback_limit: usize,
    /// Frames that the device has taken so far.
    sent_frames: u64,
    /// Frames sent since the last `tx_reap`.
    unreaped: usize,
    now: Instant,
}

impl Link {
    /// A link over a device.
    pub(crate) fn new(
        device: Box<dyn Device>,
        peek: Option<Arc<dyn Peek>>,
        config: &StackConfig,
    ) -> Link {
        let caps = *device.caps();
        Link {
            caps,
            device,
            peek,
            tx: Burst::with_capacity(config.burst_frames),
            loopback: VecDeque::with_capacity(config.loopback_packets),
            loopback_limit: config.loopback_packets,
            sent_frames: 0,
            unreaped: 0,
            now: Instant::ZERO,
        }
    }

    /// Frames that the device has taken so far.
    pub(crate) fn sent_frames(&self) -> u64 {
        self.sent_frames
    }

    /// Capabilities of the device.
    pub(crate) fn caps(&self) -> &Caps {
        &self.caps
    }

    /// The device.
    pub(crate) fn device(&mut self) -> &mut dyn Device {
        &mut *self.device
    }

    /// Takes the device and the frames that wait out of a link that is never used again.
    pub(crate) fn abandon(&mut self) -> (Box<dyn Device>, Burst, VecDeque<Packet>) {
        let gone = Box::new(Gone(self.caps));
        self.peek = None;
        let tx = core::mem::replace(&mut self.tx, Burst::with_capacity(0));
        (core::mem::replace(&mut self.device, gone), tx, core::mem::take(&mut self.loopback))
    }

    /// Checks for frames without the lock, if the device supports that.
    pub(crate) fn peek(&self) -> Option<Arc<dyn Peek>> {
        self.peek.clone()
    }

    /// The device, read-only.
    pub(crate) fn device_ref(&self) -> &dyn Device {
        &*self.device
    }

    /// Whether frames are queued for the device: of this turn, or refused by a device that is full.
    #[inline]
    pub(crate) fn has_unsent_frames(&self) -> bool {
        !self.tx.is_empty()
    }

    /// Frames that the burst still takes before the next `tx_burst`.
    pub(crate) fn space(&self) -> usize {
        self.tx.capacity() - self.tx.len()
    }

    /// Sets the clock of the link, once per poll or call. It never goes back: a call that sends a
    /// datagram may know only the time of the kernel's last tick.
    #[inline]
    pub(crate) fn set_now(&mut self, now: Instant) {
        self.now = self.now.max(now);
    }

    /// The coarse clock of the link.
    #[inline]
    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    /// Hands the burst to the device: one crossing. True if nothing is left.
    #[inline(always)]
    pub(crate) fn flush(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        stages: &Stages,
    ) -> bool {
        if self.tx.is_empty() {
            return true;
        }
        counters.count(Counter::TxBursts);
        let taken = self.device.tx_burst(self.now, pool, &mut self.tx, counters);
        self.sent_frames += taken as u64;
        stages.pass(Stage::DeviceTaken);
        self.unreaped += taken;
        if self.unreaped >= REAP_FRAMES || !self.tx.is_empty() {
            self.reap(pool, counters);
        }
        stages.pass(Stage::Completed);
        self.tx.is_empty()
    }

    /// Takes completed frames back from the device, and drops the frames that wait for a device that is gone.
    #[inline(never)]
    fn reap(&mut self, pool: &mut Pool, counters: &mut Counters) {
        self.unreaped = 0;
        self.device.tx_reap(self.now, pool);
        if !self.tx.is_empty() && self.device.lost().is_some() {
            self.tx.discard(DropReason::DeviceGone, pool, counters);
        }
    }

    /// Whether the burst has space for a linear frame of this length that the device can send without software offload.
    #[inline(always)]
    pub(crate) fn fits_linear(&self, bytes: usize) -> bool {
        self.caps.tx_csum && !self.tx.is_full() && bytes <= self.caps.mtu + ETHER_BYTES
    }

    /// Puts a frame into the burst of which [`Link::fits_linear`] is true.
    #[inline(always)]
    pub(crate) fn push_linear(&mut self, packet: Packet) {
        // There is space, as was checked; without the check the frame is lost.
        let _ = self.tx.push(packet);
    }

    /// Puts a frame into the burst in a form that the device can send, crossing when it is full.
    fn put(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        mut packet: Packet,
        stages: &Stages,
    ) -> Result<(), Chain> {
        loop {
            let unfit = match offload::fit(packet, &self.caps, pool, &mut self.tx, counters) {
                Ok(()) => return Ok(()),
                Err(unfit) => unfit,
            };
            match unfit.why {
                Refusal::NoSpace => {
                    self.flush(pool, counters, stages);
                    if self.tx.is_full() {
                        return Err(unfit.packet.chain);
                    }
                    packet = unfit.packet;
                }
                Refusal::NoBuffer => {
                    counters.drop_packet(DropReason::NoBuffer);
                    pool.free(unfit.packet.chain);
                    return Ok(());
                }
                Refusal::Drop(reason) => {
                    counters.drop_packet(reason);
                    pool.free(unfit.packet.chain);
                    return Ok(());
                }
            }
        }
    }
}

/// The link as ip sees it.
pub(crate) struct Sink<'a> {
    pub link: &'a mut Link,
    pub stages: &'a Stages,
}

impl FrameSink for Sink<'_> {
    fn frame(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        chain: Chain,
        offload: Offload,
    ) -> Result<(), Chain> {
        self.link.put(pool, counters, Packet { chain, offload }, self.stages)?;
        self.stages.pass(Stage::BurstQueued);
        Ok(())
    }

    #[inline(always)]
    fn pass(&self, stage: Stage) {
        self.stages.pass(stage);
    }

    fn has_space(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        frames: usize,
        egress: Egress,
    ) -> bool {
        let link = &mut *self.link;
        if egress == Egress::Loopback {
            let space = link.loopback_limit.saturating_sub(link.loopback.len());
            return space >= frames.min(link.loopback_limit);
        }
        let frames = frames.min(link.tx.capacity());
        if link.space() < frames {
            link.flush(pool, counters, self.stages);
        }
        link.space() >= frames
    }

    fn loopback(
        &mut self,
        counters: &mut Counters,
        chain: Chain,
        offload: Offload,
    ) -> Result<(), Chain> {
        let link = &mut *self.link;
        if link.loopback.len() >= link.loopback_limit {
            return Err(chain);
        }
        counters.count(Counter::Loopback);
        link.loopback.push_back(Packet { chain, offload });
        Ok(())
    }
}

/// Where a flow's packets go, as far as the transport needs to know; valid while the IP layer's
/// generation stays the same.
#[derive(Clone, Copy, Debug)]
pub struct FlowPath {
    /// Path properties that the engine needs.
    pub info: PathInfo,
    /// Generation of routes, neighbours and addresses that it was derived from.
    pub generation: u64,
}

/// ECT(0) (RFC 3168 section 5).
const ECT0: u8 = 2;

/// The glue between a TCP connection's output and IP.
pub(in crate::shard) struct TcpEmit<'a> {
    pub now: Instant,
    pub ip: &'a mut Ip,
    pub link: &'a mut Link,
    pub stages: &'a Stages,
    pub key: FlowKey,
    /// TTL and TOS; the ECN field of the TOS is 0.
    pub options: HeaderOptions,
    /// Whether a segment may start neighbour resolution as own traffic or as a reply.
    pub traffic: Traffic,
    /// The lower headers of its segments, if they are known.
    pub template: Option<&'a Template>,
    /// Bytes that the connection may still send in this turn; a small segment counts as [`LEAST_CHARGE`].
    pub quota: usize,
}

/// Bytes that a segment counts for at least.
const LEAST_CHARGE: usize = 4096;

impl TcpEmit<'_> {
    /// Sends a segment by ready-made headers.
    fn emit_by(
        &mut self,
        template: &Template,
        pool: &mut Pool,
        counters: &mut Counters,
        seg: SegmentOut,
    ) -> Result<(), EmitError> {
        let SegmentOut { mut chain, offload, ecn_capable } = seg;
        let (bytes, payload_bytes) = (template.header_bytes(), chain.len() as u16);
        let mut is_written = false;
        if let Ok(headers) = chain.prepend(bytes, pool, Purpose::Control) {
            let ident = self.ip.draw_ident_for(template);
            is_written = template.emit(payload_bytes, ident, headers).is_some();
            if ecn_capable {
                template.set_ect(headers);
            }
        }
        if !is_written {
            counters.drop_packet(DropReason::NoBuffer);
            pool.free(chain);
            return Err(EmitError::Lost);
        }
        self.stages.pass_all([Stage::RouteFound, Stage::IpOutput, Stage::EtherOutput]);
        let sink = &mut Sink { link: self.link, stages: self.stages };
        sink.frame(pool, counters, chain, offload.shift(bytes as u16)).map_err(|chain| {
            pool.free(chain);
            EmitError::Full
        })
    }

    /// Sends a segment by ready-made headers where they fit, else through IP.
    #[inline]
    fn emit_segment(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        seg: SegmentOut,
    ) -> Result<(), EmitError> {
        self.stages.pass(Stage::TransportOutput);
        if let Some(template) = self.template
            && template.fits(seg.chain.len(), &seg.offload)
        {
            return self.emit_by(template, pool, counters, seg);
        }
        // As on Linux: a connection whose local address was removed waits until the address comes back.
        if !self.ip.accepts(self.key.local_ip()) {
            counters.drop_packet(DropReason::NoRoute);
            pool.free(seg.chain);
            return Err(EmitError::NoRoute);
        }
        let packet = Outgoing {
            src: self.key.local_ip(),
            dst: self.key.remote_ip(),
            zone: self.key.zone,
            protocol: crate::wire::protocol::TCP,
            ttl: self.options.ttl,
            dscp_ecn: self.options.dscp_ecn | if seg.ecn_capable { ECT0 } else { 0 },
            chain: seg.chain,
            offload: seg.offload,
            traffic: self.traffic,
            mtu_discovery: self.options.mtu_discovery,
        };
        let out = &mut Sink { link: self.link, stages: self.stages };
        match self.ip.output(&mut Context { now: self.now, pool, counters, out }, packet) {
            Ok(()) => Ok(()),
            Err(OutputError::Full) => Err(EmitError::Full),
            Err(OutputError::NoRoute) => Err(EmitError::NoRoute),
            Err(_) => Err(EmitError::Lost),
        }
    }
}

impl Emit for TcpEmit<'_> {
    fn emit(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        seg: SegmentOut,
    ) -> Result<(), EmitError> {
        let charge = seg.chain.len().max(LEAST_CHARGE);
        let sent = self.emit_segment(pool, counters, seg);
        if sent != Err(EmitError::Full) {
            self.quota = self.quota.saturating_sub(charge);
        }
        sent
    }

    fn space(&self) -> usize {
        // The link flushes when its burst is full, so there is space as long as the
        // device keeps taking.
        if self.quota == 0 { 0 } else { self.link.space().max(1) }
    }
}
