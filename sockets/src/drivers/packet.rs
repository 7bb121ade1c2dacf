//! The AF_PACKET device: frames to and from any Ethernet interface of the kernel.
//!
//! Enters and leaves: bursts of frames, many per system call, with a virtio-net header in front of
//! each, so that 64 KiB super-frames without checksums pass both ways where the interface supports them
//! (a veth does). Needs CAP_NET_RAW in the interface's network namespace and no device node, so
//! `unshare -Urn` is enough.
//!
//! The stack uses an Ethernet address of its own beside the kernel's. The interface is promiscuous, and a
//! socket filter passes only frames to this address and to groups: unicast frames to the kernel do not
//! reach the stack; broadcast and multicast frames reach both.
//!
//! Long frames of a flow with posted buffers are received one by one, each into its posted buffer
//! (`placing.rs`). Of several frames in one call only the first could be placed, since the position of the
//! second in the stream is known only after the first was received; so short frames are received into
//! buffer pairs and copied from there, once. (PACKET_MMAP would add one copy for every frame: the position
//! of a frame in the mapped ring cannot be chosen.)
//!
//! Frames of BIG TCP (`big_tcp.rs`) are taken whole and handed up in pieces of at most 64 KiB. Every receive has memory
//! for the longest frame, half a megabyte per frame of a batch; its pages are touched by such frames only.
//!
//! Cost: 1.2 µs per small frame in a burst, 4.1 µs for 64 KiB, and the kernel's copy. Source:
//! packet(7), linux/if_packet.h.

mod big;
mod config;
mod queues;

use std::fs::File;
use std::io::{ErrorKind, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_stack::base::{Counter, Counters, DropReason, Duration, EtherAddr, Instant, OwnerKey};
use fulmar_stack::device::{
    Attachment, Burst, Caps, Device, DeviceStats, DirectPlacement, Interest, LinkState, Packet,
    Wake, WakeFd, offload, uso,
};
use fulmar_stack::mbuf::Pool;

use crate::drivers::batch::{Completing, Receiving};
use crate::drivers::big_tcp::{self, BigTcp};
use crate::drivers::buffer_pair::{BufferPair, Scratch};
use crate::drivers::placing::scatter::Landed;
use crate::drivers::placing::{Placer, Prediction};
use crate::drivers::sys::{self, Instruction, MANY, Received};
use crate::drivers::tap::derive_ether;
use crate::drivers::udp_gso::UdpGso;
use crate::drivers::{OpenError, udp_gso, vnet};
pub use config::PacketConfig;

/// A packet socket with PACKET_QDISC_BYPASS refuses frames above 65,535 bytes.
const MAX_IP_BYTES: usize = 65_535 - ETHER_BYTES;
const ETHER_BYTES: usize = 14;
const MAX_SEGS: usize = 64;
/// A frame of more mbufs is sent with a call of its own.
const FEW_SEGS: usize = 8;
/// Buffer pairs, and so the most frames that one `recvmmsg` receives. Half a megabyte, which fits the second-level
/// cache.
const PAIRS: usize = 8;
/// A window of super-frames; the kernel's default of 208 KiB would drop some.
const RECEIVE_BUFFER_BYTES: libc::c_int = 4 << 20;
/// Interval of retries while the interface's queue is full (ENOBUFS).
const RETRY: Duration = Duration::from_micros(200);
/// Refusals in a row after which the frame is dropped.
const MAX_RETRIES: u32 = 50;

/// A packet socket bound to one interface: [`packet`](crate::devices::packet) with its options.
///
/// ```no_run
/// use fulmar::devices::{PacketConfig, PacketSocket};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = PacketConfig { interface: "eth0".to_owned(), mtu: Some(1400), ..PacketConfig::default() };
/// let device = PacketSocket::open(&config)?;
/// let stack = fulmar::Stack::builder().device(device).address("192.168.1.77/24".parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
pub struct PacketSocket {
    socket: File,
    interface: String,
    caps: Caps,
    /// 12, or 10 on kernels before 6.5.
    header_bytes: usize,
    pairs: [BufferPair; PAIRS],
    scratch: Scratch,
    big: BigTcp,
    placer: Placer,
    /// Whether datagrams of one flow are sent as one super-datagram.
    joins: UdpGso,
    /// The size of the fanout group; set in its first socket, which attaches the steering program.
    steered: Option<u16>,
    is_drained: bool,
    lost: Option<i32>,
    is_blocked: bool,
    /// ENOBUFS in a row, and the time of the next attempt.
    retries: u32,
    retry_at: Option<Instant>,
    /// Frames that the full socket buffer dropped. Summed here: the kernel resets its count when read.
    missed: AtomicU64,
    stats: DeviceStats,
    /// What marks the interface as this program's.
    claim: Option<UnixListener>,
}

impl std::fmt::Debug for PacketSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PacketSocket").field("interface", &self.interface).finish_non_exhaustive()
    }
}

/// Offsets at which a filter loads the VLAN tag of a frame, and whether it has one (SKF_AD_OFF + SKF_AD_VLAN_*).
const VLAN_TAG: u32 = 0xffff_f02c;
const VLAN_TAG_PRESENT: u32 = 0xffff_f030;

/// A classic BPF program that accepts frames to `ether` and to groups, without a VLAN tag or with one that only has a
/// priority (linux/filter.h). The kernel takes the tag out of the frame.
fn filter(ether: EtherAddr) -> [Instruction; 12] {
    const LOAD_BYTE: u16 = 0x30;
    const LOAD_HALF: u16 = 0x28;
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_SET: u16 = 0x45;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const WHOLE_FRAME: u32 = u32::MAX;
    const VLAN_ID: u32 = 0xfff;
    let op = |code, k, jump_true, jump_false| Instruction { code, jump_true, jump_false, k };
    let [a, b, c, d, e, f] = ether.0;
    [
        op(LOAD_WORD, VLAN_TAG_PRESENT, 0, 0),
        op(JUMP_IF_EQUAL, 0, 2, 0), // untagged: to the address
        op(LOAD_WORD, VLAN_TAG, 0, 0),
        op(JUMP_IF_SET, VLAN_ID, 7, 0), // to the last return
        op(LOAD_BYTE, 0, 0, 0),
        op(JUMP_IF_SET, 1, 4, 0), // group bit: to the first return
        op(LOAD_WORD, 0, 0, 0),
        op(JUMP_IF_EQUAL, u32::from_be_bytes([a, b, c, d]), 0, 3), // else: to the last return
        op(LOAD_HALF, 4, 0, 0),
        op(JUMP_IF_EQUAL, u32::from_be_bytes([0, 0, e, f]), 0, 1),
        op(RETURN, WHOLE_FRAME, 0, 0),
        op(RETURN, 0, 0, 0),
    ]
}

fn open_socket() -> Result<OwnedFd, OpenError> {
    // Protocol 0: nothing is received before the filter is attached and the socket is bound.
    sys::socket(libc::AF_PACKET, libc::SOCK_RAW, 0).map_err(|e| {
        let advice = "grant the program CAP_NET_RAW, or run it as root or in a network namespace of your own \
            (`unshare -Urn`)";
        OpenError::new("cannot open a packet socket", e, advice)
    })
}

/// Enables virtio-net headers. Returns their length in bytes.
fn use_vnet_headers(socket: &OwnedFd) -> std::io::Result<usize> {
    let set = |name, value| sys::set_int(socket.as_fd(), libc::SOL_PACKET, name, value);
    if set(sys::PACKET_VNET_HDR_SZ, vnet::HEADER_BYTES as _).is_ok() {
        return Ok(vnet::HEADER_BYTES);
    }
    set(sys::PACKET_VNET_HDR, 1).map(|()| vnet::HEADER_BYTES - 2)
}

/// Optional settings: buffer size and queueing discipline.
fn tune(socket: &OwnedFd) {
    let fd = socket.as_fd();
    let forced = sys::set_int(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES);
    if forced.is_err() {
        let _ = sys::set_int(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, RECEIVE_BUFFER_BYTES);
    }
    let _ = sys::set_int(fd, libc::SOL_PACKET, sys::PACKET_QDISC_BYPASS, 1);
}

impl PacketSocket {
    /// Opens a socket on an interface. Frames pass while the interface is up.
    ///
    /// # Errors
    /// What failed, why, and what to do next.
    pub fn open(config: &PacketConfig) -> Result<PacketSocket, OpenError> {
        Ok(PacketSocket { claim: config.claim()?, ..PacketSocket::open_shared(config)? })
    }

    fn open_shared(config: &PacketConfig) -> Result<PacketSocket, OpenError> {
        let name = &config.interface;
        let socket = open_socket()?;
        let index = sys::interface_index(socket.as_fd(), name).map_err(|e| {
            let advice = "list the interfaces of this network namespace with `ip -o link`";
            OpenError::new(format!("cannot find interface {name:?}"), e, advice)
        })?;
        let kernel_ether = sys::interface_ether(socket.as_fd(), name).map_err(|e| {
            OpenError::new(format!("cannot use {name}"), e, "choose an Ethernet interface")
        })?;
        let ether = config.ether.unwrap_or_else(|| derive_ether(kernel_ether));
        let mtu = sys::interface_mtu(socket.as_fd(), name).unwrap_or(1500);
        let header_bytes = PacketSocket::set_up(&socket, index, ether).map_err(|e| {
            let advice = "Linux 4.20 or newer is required";
            OpenError::new(format!("cannot set up a packet socket on {name}"), e, advice)
        })?;
        let caps = Caps {
            tx_csum: true,
            tso: Some(MAX_IP_BYTES),
            udp_gso: header_bytes == vnet::HEADER_BYTES,
            rx_gro: true,
            max_segs: MAX_SEGS,
            wake: Wake::Level,
            // The kernel writes to posted ranges during `recvmsg` only.
            places_on_receive: true,
            ..Caps::plain(config.mtu.unwrap_or(mtu), ether)
        };
        Ok(PacketSocket {
            socket: File::from(socket),
            interface: name.clone(),
            caps,
            header_bytes,
            pairs: Default::default(),
            scratch: Scratch::new(),
            big: BigTcp::new(PAIRS),
            placer: Placer::new(config.predict),
            joins: if caps.udp_gso { UdpGso::On } else { UdpGso::Off },
            steered: None,
            claim: None,
            is_drained: false,
            lost: None,
            is_blocked: false,
            retries: 0,
            retry_at: None,
            missed: AtomicU64::new(0),
            stats: DeviceStats {
                name: format!("packet:{name}"),
                path: format!("sendmmsg of up to {MANY} frames, recvmmsg of up to {PAIRS}"),
                ..DeviceStats::default()
            },
        })
    }

    fn set_up(socket: &OwnedFd, index: i32, ether: EtherAddr) -> std::io::Result<usize> {
        let fd = socket.as_fd();
        sys::attach_filter(fd, &filter(ether))?;
        let header_bytes = use_vnet_headers(socket)?;
        tune(socket);
        // Without it every frame that the kernel sends on the interface would be received here.
        sys::set_int(fd, libc::SOL_PACKET, sys::PACKET_IGNORE_OUTGOING, 1)?;
        sys::set_promiscuous(fd, index)?;
        sys::bind_packet(fd, index)?;
        Ok(header_bytes)
    }

    /// Drops frames at the front that the device cannot send.
    fn drop_unfit(&self, burst: &mut Burst, done: &mut Completing<'_>) {
        while let Some(p) = burst.front() {
            let verdict = match self.lost {
                Some(_) => Err(DropReason::DeviceGone),
                None => offload::check(p, &self.caps),
            };
            let Err(reason) = verdict else { return };
            discard_front(reason, burst, done);
        }
    }

    /// Sends frames from the front with one `sendmmsg`. Returns how many.
    fn send_some(&mut self, burst: &Burst, counters: &mut Counters) -> std::io::Result<usize> {
        if let Some(sent) = self.send_joined(burst, counters) {
            return sent;
        }
        let is_small =
            |p: &&Packet| p.chain.segs() <= FEW_SEGS && offload::check(p, &self.caps).is_ok();
        let mut count = burst.iter().take(MANY).take_while(is_small).count();
        if self.joins.is_on() {
            count = uso::before_join(burst.iter().take(count), &self.caps);
        }
        if count > 1 {
            return self.send_group(burst, count);
        }
        let Some(p) = burst.front() else { return Ok(0) };
        let header = vnet::request_for(p);
        let mut parts = [sys::Part::EMPTY; MAX_SEGS + 1];
        let used = gather(&mut parts, &header[..self.header_bytes], p);
        sys::write_parts(self.socket.as_fd(), &parts[..used]).map(|_| 1)
    }

    /// Sends datagrams of one flow at the front as one super-datagram. `None`: not possible; no effect.
    fn send_joined(
        &mut self,
        burst: &Burst,
        counters: &mut Counters,
    ) -> Option<std::io::Result<usize>> {
        if !self.joins.is_on() || burst.len() < uso::LEAST {
            return None;
        }
        let joined = uso::join(burst, &self.caps, udp_gso::MOST_SEGS)?;
        let sent = udp_gso::write(self.socket.as_fd(), &joined, burst, self.header_bytes);
        if sent.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EINVAL)) {
            self.joins = UdpGso::Refused;
            return None;
        }
        Some(sent.map(|_| {
            counters.add(Counter::UsoJoined, joined.count as u64 - 1);
            joined.count
        }))
    }

    fn send_group(&self, burst: &Burst, count: usize) -> std::io::Result<usize> {
        let mut headers = [[0; vnet::HEADER_BYTES]; MANY];
        for (h, p) in headers.iter_mut().zip(burst) {
            *h = vnet::request_for(p);
        }
        let mut parts = [[sys::Part::EMPTY; FEW_SEGS + 1]; MANY];
        let mut messages: [&[sys::Part<'_>]; MANY] = [&[]; MANY];
        let frames = headers.iter().zip(burst).take(count);
        for ((message, part), (h, p)) in messages.iter_mut().zip(&mut parts).zip(frames) {
            let used = gather(part, &h[..self.header_bytes], p);
            *message = &part[..used];
        }
        sys::send_many(self.socket.as_fd(), &messages[..count])
    }

    /// Handles a failed send. `None`: the frame stays queued; otherwise it is to be dropped.
    fn after_send_error(&mut self, errno: i32, now: Instant) -> Option<DropReason> {
        match errno {
            libc::EAGAIN | libc::EINTR => {
                self.is_blocked = true;
                None
            }
            // The interface's queue is full. The socket stays writable, so a timer retries.
            libc::ENOBUFS if self.retries < MAX_RETRIES => {
                self.retries += 1;
                self.retry_at = Some(now + RETRY);
                None
            }
            libc::ENOBUFS => {
                self.retries = 0;
                Some(DropReason::TxQueueFull)
            }
            libc::ENXIO | libc::ENODEV | libc::EBADF => {
                self.lost = Some(errno);
                Some(DropReason::DeviceGone)
            }
            _ => Some(DropReason::DeviceRefused),
        }
    }

    /// Receives up to `limit` frames into the buffer pairs with one `recvmmsg`.
    fn receive_some(
        &mut self,
        limit: usize,
        pool: &mut Pool,
    ) -> std::io::Result<(usize, [Received; MANY], Headers)> {
        let limit = limit.min(PAIRS);
        let whole =
            self.pairs.iter_mut().take(limit).map(|p| p.prepare(pool)).take_while(|w| *w).count();
        let mut headers: Headers = [[0; vnet::HEADER_BYTES]; PAIRS];
        let n = self.header_bytes;
        let (count, received) = if whole == 0 {
            let [small, large] = self.pairs[0].parts(&mut self.scratch);
            let mut one =
                [[&mut headers[0][..n], small, large, self.big.overflow(0)].map(IoSliceMut::new)];
            sys::receive_many(self.socket.as_fd(), &mut one)?
        } else {
            let pairs = self.pairs.iter_mut().zip(self.big.overflows());
            let mut parts = headers.iter_mut().zip(pairs).map(|(h, (pair, overflow))| {
                let [small, large] = pair.own_parts().unwrap_or_default();
                [&mut h[..n], small, large, overflow].map(IoSliceMut::new)
            });
            let mut many: [_; PAIRS] =
                std::array::from_fn(|_| parts.next().unwrap_or_else(no_parts));
            drop(parts);
            sys::receive_many(self.socket.as_fd(), &mut many[..whole])?
        };
        Ok((count, received, headers))
    }

    /// Receives one frame into the posted ranges of the predicted flow. `Ok(None)`: the pool is empty.
    fn receive_placed(
        &mut self,
        aimed: Prediction,
        pool: &mut Pool,
    ) -> std::io::Result<Option<Result<Packet, DropReason>>> {
        let prediction = Some(aimed);
        let pair = &mut self.pairs[0];
        pair.prepare(pool);
        let mut header = [0; vnet::HEADER_BYTES];
        let Some([head, a, b, rest]) = self.placer.parts(prediction, pair) else { return Ok(None) };
        let overflow = self.big.overflow(0);
        let mut one =
            [[&mut header[..self.header_bytes], head, a, b, rest, overflow].map(IoSliceMut::new)];
        let received = sys::receive_many(self.socket.as_fd(), &mut one);
        let (_, [received, ..]) = received.inspect_err(|e| {
            if e.kind() != ErrorKind::WouldBlock {
                self.placer.discard(prediction);
            }
        })?;
        if received.is_cut {
            self.placer.discard(prediction);
            return Ok(Some(Err(DropReason::FrameTooBig)));
        }
        let bytes = received.bytes.saturating_sub(self.header_bytes);
        if big_tcp::is_big(bytes) {
            let overflow = self.big.overflow(0);
            let frame = self.placer.big_packet(aimed, (&header, bytes), pair, overflow, pool);
            return Ok(Some(self.big.learned(frame)));
        }
        Ok(Some(self.placer.packet(prediction, &header, bytes, pair, pool)))
    }

    /// The frame received into pair `at`.
    fn take(
        &mut self,
        at: usize,
        header: &[u8; vnet::HEADER_BYTES],
        received: Received,
        pool: &mut Pool,
    ) -> Result<Packet, DropReason> {
        let frame_bytes = received.bytes.saturating_sub(self.header_bytes);
        if received.is_cut {
            return Err(DropReason::FrameTooBig);
        }
        if frame_bytes < ETHER_BYTES {
            return Err(DropReason::Truncated);
        }
        let pair = &mut self.pairs[at];
        if big_tcp::is_big(frame_bytes) {
            let [small, large] = pair.own_parts().ok_or(DropReason::NoBuffer)?;
            let landed = Landed::new([small, large, self.big.overflow(at)], frame_bytes);
            let frame = big_tcp::copied(landed, header, frame_bytes, pool);
            return self.big.learned(frame);
        }
        if !self.placer.is_idle() && pair.own_parts().is_some() {
            return self.placer.packet(None, header, frame_bytes, pair, pool);
        }
        let [front, _] = pair.parts(&mut self.scratch);
        let front = front.get(..frame_bytes).unwrap_or(front);
        let offload = vnet::parse(header, frame_bytes, front)?;
        let chain = pair.take(frame_bytes, &mut self.scratch, pool)?;
        Ok(Packet { chain, offload })
    }

    /// Hands up a batch, or queues it: the order of the frames is kept.
    fn hand_up(
        &mut self,
        batch: &[Received],
        headers: &Headers,
        pool: &mut Pool,
        taking: &mut Receiving<'_>,
    ) {
        let frame_bytes = |r: &Received| r.bytes.saturating_sub(self.header_bytes);
        let has_big = batch.iter().any(|r| big_tcp::is_big(frame_bytes(r)));
        for (at, (received, header)) in batch.iter().zip(headers).enumerate() {
            let frame = self.take(at, header, *received, pool);
            match has_big {
                true => self.big.queue(frame, pool, taking.counters),
                false => taking.deliver(frame),
            }
        }
    }

    fn after_receive_error(&mut self, errno: i32) {
        match errno {
            libc::EAGAIN | libc::EINTR => {}
            // Reported once when the interface goes down (it may come up again) and once when it is
            // removed.
            libc::ENETDOWN => {
                let asked = sys::interface_is_running(self.socket.as_fd(), &self.interface);
                self.lost = asked.err().map(|e| e.raw_os_error().unwrap_or(libc::ENODEV));
            }
            _ => self.lost = Some(errno),
        }
    }
}

type Headers = [[u8; vnet::HEADER_BYTES]; PAIRS];

fn no_parts<'a>() -> [IoSliceMut<'a>; 4] {
    [(); 4].map(|()| IoSliceMut::new(&mut []))
}

/// Fills `parts` with the header and the mbufs of a frame. Returns the number of parts.
fn gather<'a>(parts: &mut [sys::Part<'a>], header: &'a [u8], p: &'a Packet) -> usize {
    let mbufs = p.chain.iter().filter(|m| !m.is_empty()).map(sys::Part::mbuf);
    sys::gather(parts, std::iter::once(sys::Part::bytes(header)).chain(mbufs))
}

fn discard_front(reason: DropReason, burst: &mut Burst, done: &mut Completing<'_>) {
    if let Some(p) = burst.pop_front() {
        done.discard(p, reason);
    }
}

impl Device for PacketSocket {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    /// If the kernel refuses the steering program, packets arrive on any queue, and shards hand them over.
    fn attach(&mut self, owner: &OwnerKey) -> Attachment {
        if let Some(sockets) = self.steered {
            let _ = self.steer(sockets, owner);
        }
        Attachment::default()
    }

    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        let before = burst.len();
        let mut done = Completing::new(pool, counters);
        self.is_blocked = false;
        self.retry_at = None;
        loop {
            self.drop_unfit(burst, &mut done);
            if burst.is_empty() {
                break;
            }
            self.stats.tx_crossings += 1;
            let error = match self.send_some(burst, done.counters) {
                Ok(count) => {
                    self.retries = 0;
                    done.sent_front(count, burst);
                    continue;
                }
                Err(e) => e.raw_os_error().unwrap_or(0),
            };
            match self.after_send_error(error, now) {
                Some(reason) => discard_front(reason, burst, &mut done),
                None => {
                    self.stats.tx_refusals += 1;
                    break;
                }
            }
        }
        done.tally.sent(done.counters, &mut self.stats);
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
        let mut left = budget.min(out.space());
        let mut taking = Receiving::new(out, counters);
        self.is_drained = false;
        // The flag may be left from an earlier call.
        self.placer.take_full();
        while left > 0 && self.lost.is_none() && !self.placer.take_full() {
            if !self.big.is_empty() {
                left -= self.big.deliver(left, &mut taking);
                continue;
            }
            self.stats.rx_crossings += 1;
            if let Some(received) = self.receive_expected(left, pool, &mut taking) {
                left = left.saturating_sub(received);
                continue;
            }
            let one =
                self.placer.predict_long().map(|prediction| self.receive_placed(prediction, pool));
            let batch = match one {
                Some(Ok(Some(frame))) => {
                    left -= 1;
                    match frame {
                        Ok(p) if big_tcp::is_big(p.chain.len()) => {
                            self.big.queue(Ok(p), pool, taking.counters);
                        }
                        frame => taking.deliver(frame),
                    }
                    continue;
                }
                Some(Err(e)) => Err(e),
                Some(Ok(None)) | None => self.receive_some(left, pool),
            };
            let (count, received, headers) = match batch {
                Ok(batch) => batch,
                // A frame that the kernel cannot describe, and has dropped: a super-frame of SCTP, and of UDP before
                // Linux 6.2 (packet_recvmsg).
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                    left -= 1;
                    taking.deliver(Err(DropReason::BadOffload));
                    continue;
                }
                Err(e) => {
                    self.is_drained = true;
                    self.after_receive_error(e.raw_os_error().unwrap_or(0));
                    break;
                }
            };
            left = left.saturating_sub(count);
            self.hand_up(&received[..count], &headers, pool, &mut taking);
        }
        self.placer.take_outcome().count(taking.counters, &mut self.stats);
        taking.tally.received(taking.counters, &mut self.stats);
        taking.tally.frames as usize
    }

    /// The descriptor is level-triggered: readable while a frame is queued.
    fn arm(&mut self) -> bool {
        self.is_drained && self.big.is_empty()
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        let interest =
            if self.is_blocked { Interest::ReadableOrWritable } else { Interest::Readable };
        Some(WakeFd { fd: self.socket.as_raw_fd(), interest })
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.retry_at
    }

    fn lost(&self) -> Option<i32> {
        self.lost
    }

    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        Some(&mut self.placer)
    }

    fn stats(&self) -> DeviceStats {
        let fresh = u64::from(sys::take_missed(self.socket.as_fd()).unwrap_or(0));
        let before = self.missed.fetch_add(fresh, Ordering::Relaxed);
        let path = format!("{}{}", self.stats.path, self.joins.describe());
        let link = match sys::interface_is_running(self.socket.as_fd(), &self.interface) {
            Ok(true) => LinkState::Up,
            // A contained process may not ask the kernel; the link keeps its last state until the interface is removed.
            Err(e) if e.raw_os_error() == Some(libc::EPERM) && self.lost.is_none() => LinkState::Up,
            _ => LinkState::Down,
        };
        DeviceStats { rx_missed: before + fresh, path, link, ..self.stats.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the filter as the kernel does.
    fn accepts(program: &[Instruction], frame: &[u8], tag: Option<u16>) -> bool {
        let (mut at, mut a) = (0, 0u32);
        loop {
            let i = program[at];
            at += 1;
            let k = i.k as usize;
            let jump = |taken: bool| usize::from(if taken { i.jump_true } else { i.jump_false });
            match i.code {
                0x30 => a = u32::from(frame[k]),
                0x28 => a = u32::from(u16::from_be_bytes([frame[k], frame[k + 1]])),
                0x20 if i.k == VLAN_TAG_PRESENT => a = tag.is_some().into(),
                0x20 if i.k == VLAN_TAG => a = tag.unwrap_or(0).into(),
                0x20 => a = u32::from_be_bytes(frame[k..k + 4].try_into().unwrap()),
                0x45 => at += jump(a & i.k != 0),
                0x15 => at += jump(a == i.k),
                0x06 => return i.k > 0,
                other => panic!("{other:#x}"),
            }
        }
    }

    #[test]
    fn the_filter_accepts_our_station_and_groups_only() {
        let ours = [0x02, 0xf1, 0x33, 0x44, 0x55, 0x66];
        let program = filter(EtherAddr(ours));
        assert!(accepts(&program, &ours, None));
        assert!(accepts(&program, &[0xff; 6], None));
        assert!(accepts(&program, &[0x33, 0x33, 0, 0, 0, 1], None));
        for at in 0..6 {
            let mut other = ours;
            other[at] ^= 0x10;
            assert!(!accepts(&program, &other, None), "{other:x?}");
        }
    }

    #[test]
    fn the_filter_accepts_no_frame_of_a_vlan() {
        let ours = [0x02, 0xf1, 0x33, 0x44, 0x55, 0x66];
        let program = filter(EtherAddr(ours));
        for to in [ours, [0xff; 6]] {
            // 802.1Q: priority 7, drop eligible, VLAN 0.
            assert!(accepts(&program, &to, Some(0xf000)));
            for vlan in [1, 7, 0x800, 0xfff] {
                assert!(!accepts(&program, &to, Some(0xe000 | vlan)), "{vlan}");
            }
        }
    }

    #[test]
    fn the_derived_station_differs_from_the_kernels_and_is_local() {
        for kernel in [[0; 6], [0x02, 0, 0, 0, 0, 1], [0xfe; 6], [0x52, 0x54, 0, 1, 2, 3]] {
            let ours = derive_ether(kernel);
            assert!(ours.is_unicast() && ours.0[0] & 2 != 0 && ours.0 != kernel);
            assert_eq!(ours, derive_ether(kernel));
        }
    }
}
