//! The TAP device: frames to and from the kernel's own stack, super-frames included.
//!
//! Enters and leaves: frames with a virtio-net header in front, so that 64 KiB super-frames without
//! checksums pass both ways. Sent chains are gathered from wherever they lie (`writev`, one system
//! call each) and freed at once; received frames land as `landing.rs` says, or in posted buffers, as
//! `placing.rs` says, by queues of their flows' own where that helps (`flow_queues.rs`). Bursts of small
//! frames cross together, by io_uring, where that is cheaper: from the third on, up to 64 of up to a
//! packet each (`vector.rs` has the figures). Without io_uring, or where the interface could take a burst
//! in part, every frame has a call of its own; `DeviceStats::path` says which it is and why.
//!
//! Cost: 0.5 to 1.2 µs for a small frame by itself, as the machine is, three quarters of that in a burst
//! of 64; 3.8 µs for 64 KiB; and the kernel's copy. Source: linux/if_tun.h,
//! Documentation/networking/tuntap.rst, io_uring(7).

mod attach;
mod flow_queues;
mod netlink;
mod queues;
mod receive;
mod vector;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use fulmar_base::{Counter, Counters, DropReason, EtherAddr, FlowKey, Instant, OwnerKey, SeqNum};
use fulmar_mbuf::{Pool, WritableRange};
use fulmar_netdev::{
    Attachment, Burst, Caps, Device, DeviceStats, DirectPlacement, Interest, LinkState, Packet,
    Rooms, Tally, TxReader, TxTime, Unsupported, Wake, WakeFd, offload, uso,
};

use crate::joined::Joining;
use crate::landing::{Landing, Scratch};
use crate::placing::Placer;
use crate::{OpenError, joined, sys, vnet};
use attach::{attach_alone, open_clone_device};
use flow_queues::FlowQueues;
use vector::{Fate, Vector};

const FLAGS: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
const TSO: u32 = libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
const USO: u32 = libc::TUN_F_USO4 | libc::TUN_F_USO6;
/// What we can receive, best first; older kernels refuse the flags that they do not know.
const OFFLOADS: [u32; 4] = [
    libc::TUN_F_CSUM | TSO | libc::TUN_F_TSO_ECN | USO,
    libc::TUN_F_CSUM | TSO | libc::TUN_F_TSO_ECN,
    libc::TUN_F_CSUM,
    0,
];
/// Largest IP packet; the kernel takes super-frames up to this.
const MAX_IP_BYTES: usize = 65_535;
const ETHER_BYTES: usize = 14;
const MAX_SEGS: usize = 64;

/// Which TAP, and how this stack appears on it.
#[derive(Clone, Debug)]
pub struct TapConfig {
    /// Interface name; created if there is none. Empty or `tap%d`: the kernel chooses.
    pub name: String,
    /// Station address of this stack; by default derived from the interface's own, but different.
    pub ether: Option<EtherAddr>,
    /// Largest IP packet in bytes; by default the interface's.
    pub mtu: Option<usize>,
    /// Frames may land in posted buffers before it is known that they belong to the flow whose buffer
    /// it is. What does not belong there is taken away before the owner can look, unless the buffer
    /// lies in memory that another process maps: set this to false where the owners of posted buffers
    /// do not trust each other. Then each byte is copied once.
    pub predict: bool,
    /// One system call per frame, whatever is cheaper: to compare with.
    pub one_by_one: bool,
    /// Several queues: ask the kernel to send each packet to the queue of its owner.
    pub steer: bool,
    /// Queues at the most that flows with posted buffers get of their own, where one queue cannot tell whose frame comes
    /// next ([`TapConfig::predict`]). Needs an interface made with IFF_MULTI_QUEUE, as a new one is, and CAP_BPF.
    /// 0: none.
    pub flow_queues: usize,
}

impl Default for TapConfig {
    /// A new interface with a name, an address and an MTU of the kernel's choice; predictive.
    fn default() -> TapConfig {
        TapConfig {
            name: String::new(),
            ether: None,
            mtu: None,
            predict: true,
            one_by_one: false,
            steer: true,
            flow_queues: 4,
        }
    }
}

/// One queue of a TAP interface.
pub struct Tap {
    file: File,
    name: String,
    /// A socket of the interface's network namespace, to ask about it.
    control: Option<OwnedFd>,
    caps: Caps,
    landing: Landing,
    scratch: Scratch,
    /// Crosses with many frames at once, where that can be done.
    vector: Option<Vector>,
    /// Datagrams of one flow cross as one.
    joins: Joining,
    /// Short frames that came without a gap when the device was polled last with success; 0 if a long
    /// one was among them.
    last_run: usize,
    placer: Placer,
    /// What there is to say of its queues from the start, for a person.
    queues_say: String,
    /// The number of queues that the kernel steers to by owner: the first of them has the program.
    steered: Option<u16>,
    /// Queues for single flows, if the interface can have them.
    flow_queues: Option<Box<FlowQueues>>,
    /// The last read found nothing.
    is_drained: bool,
    lost: Option<i32>,
    is_down: bool,
    is_blocked: bool,
    stats: DeviceStats,
}

/// A socket of this thread's network namespace, to ask about an interface.
fn a_socket() -> Option<OwnedFd> {
    sys::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).ok()
}

/// How frames cross without a ring, for a person.
const ALONE: &str = "one writev or readv per frame";

/// The way of crossing with many frames, and which way frames cross, in words.
fn open_vector(file: &File, one_by_one: bool) -> (Option<Vector>, String) {
    if one_by_one {
        return (None, format!("{ALONE}, as asked for"));
    }
    match Vector::open(file.as_fd()) {
        Ok(vector) => (Some(vector), Vector::sentence()),
        Err(why) => (None, format!("{ALONE} ({why})")),
    }
}

/// Another station address than the kernel's own on the same interface, always the same for the
/// same interface: locally administered, not a group (IEEE 802 section 8.2).
pub(crate) fn derive_ether(kernel: [u8; 6]) -> EtherAddr {
    let [a, b, c, d, e, f] = kernel;
    EtherAddr([(a | 0x02) & 0xfe, b ^ 0xf0, c, d, e, f ^ 0x5a])
}

impl Tap {
    /// Opens the interface, creating it if there is none. Setting it up and giving it addresses is
    /// left to the administrator of the kernel's side (`ip link set NAME up`).
    ///
    /// # Errors
    /// What failed, why, and what to do next.
    pub fn open(config: &TapConfig) -> Result<Tap, OpenError> {
        let file = open_clone_device()?;
        let count = if config.predict { config.flow_queues } else { 0 };
        let (name, has_space) = attach_alone(&file, &config.name, count > 0)?;
        let mut tap = Tap::set_up(file, name, a_socket(), config, 1)?;
        if has_space {
            tap.flow_queues = Some(Box::new(FlowQueues::new(&tap.file, count)?));
        } else if count > 0 {
            tap.queues_say
                .push_str("; posted flows share one queue (the interface was made for one)");
        }
        Ok(tap)
    }

    /// Takes a descriptor that another process has opened and attached. `config.name` is not used.
    ///
    /// # Errors
    /// It is no TAP with a virtio-net header and without packet information.
    pub fn from_fd(fd: OwnedFd, config: &TapConfig) -> Result<Tap, OpenError> {
        let advice = "attach it with IFF_TAP | IFF_NO_PI | IFF_VNET_HDR before handing it over";
        let wrong = |e| OpenError::new("cannot use the descriptor as a TAP", e, advice);
        let (name, flags) = sys::tun_interface(fd.as_fd()).map_err(wrong)?;
        if flags & FLAGS != FLAGS {
            return Err(wrong(std::io::Error::from_raw_os_error(libc::EINVAL)));
        }
        sys::set_nonblocking(fd.as_fd()).map_err(wrong)?;
        // The interface may live in another network namespace than ours, where it cannot be queried.
        Tap::set_up(File::from(fd), name, None, config, 1)
    }

    fn set_up(
        file: File,
        name: String,
        control: Option<OwnedFd>,
        config: &TapConfig,
        queues: u16,
    ) -> Result<Tap, OpenError> {
        let failed = |what: &str, e| {
            OpenError::new(format!("{what} of {name}"), e, "Linux 4.0 or newer is needed")
        };
        sys::tun_set_header(file.as_fd(), vnet::HEADER_BYTES as _)
            .map_err(|e| failed("cannot set the virtio-net header", e))?;
        let offload = OFFLOADS
            .into_iter()
            .find(|o| sys::tun_set_offload(file.as_fd(), *o).is_ok())
            .unwrap_or(0);
        let kernel_ether = sys::interface_ether(file.as_fd(), &name)
            .map_err(|e| failed("cannot read the hardware address", e))?;
        let kernel_mtu = control.as_ref().and_then(|c| sys::interface_mtu(c.as_fd(), &name).ok());
        let caps = Caps {
            tx_csum: true,
            tso: Some(MAX_IP_BYTES),
            udp_gso: offload & USO == USO,
            rx_gro: offload & TSO != 0,
            max_segs: MAX_SEGS,
            queues,
            tx_reader: TxReader::Kernel,
            wake: Wake::Level,
            // What it sends goes at once.
            tx_time: TxTime::Coarse,
            // The kernel writes to rooms while it is asked for a frame, and never else.
            places_on_receive: true,
            ..Caps::plain(
                config.mtu.or(kernel_mtu).unwrap_or(1500),
                config.ether.unwrap_or_else(|| derive_ether(kernel_ether)),
            )
        };
        let (vector, path) = open_vector(&file, config.one_by_one);
        Ok(Tap {
            stats: DeviceStats { name: name.clone(), path, ..DeviceStats::default() },
            file,
            name,
            control,
            caps,
            landing: Landing::default(),
            scratch: Scratch::new(),
            joins: Joining::new(caps.udp_gso && !config.one_by_one),
            vector,
            last_run: 0,
            placer: Placer::new(config.predict),
            queues_say: String::new(),
            steered: None,
            flow_queues: None,
            is_drained: false,
            lost: None,
            is_down: false,
            is_blocked: false,
        })
    }

    /// The descriptor, attached, to be handed to another process ([`Tap::from_fd`]).
    pub fn into_fd(self) -> OwnedFd {
        self.file.into()
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Writes one frame: header and mbufs gathered by the kernel.
    fn write(&self, p: &Packet) -> std::io::Result<usize> {
        let header = vnet::request(&p.offload);
        let mut parts = [sys::Part::EMPTY; MAX_SEGS + 1];
        let mut used = 1;
        parts[0] = sys::Part::bytes(&header);
        for (part, m) in parts[1..].iter_mut().zip(p.chain.iter().filter(|m| !m.is_empty())) {
            *part = sys::Part::mbuf(m);
            used += 1;
        }
        sys::write_parts(self.file.as_fd(), &parts[..used])
    }

    /// Sends the first frame by itself, or drops it.
    fn send_one(
        &mut self,
        pool: &mut Pool,
        burst: &mut Burst,
        tally: &mut Tally,
        counters: &mut Counters,
    ) {
        let Some(p) = burst.pop_front() else { return };
        let fate = match (self.lost, offload::check(&p, &self.caps)) {
            (Some(_), _) => Err(DropReason::DeviceGone),
            (None, Err(reason)) => Err(reason),
            (None, Ok(())) => {
                self.stats.tx_crossings += 1;
                Ok(match self.write(&p) {
                    Ok(_) => Fate::Sent,
                    Err(e) => Fate::Failed(e.raw_os_error().unwrap_or(0)),
                })
            }
        };
        let kept = match fate {
            Ok(fate) => self.settle(p, fate, pool, tally, counters),
            Err(reason) => {
                drop_frame(p, reason, pool, counters);
                None
            }
        };
        if let Some(p) = kept {
            self.note_refusal();
            // It came from there.
            let _ = burst.push_front(p);
        }
    }

    /// Sends the first `run` frames in one crossing, as far as the interface takes them.
    fn send_run(
        &mut self,
        run: usize,
        pool: &mut Pool,
        burst: &mut Burst,
        tally: &mut Tally,
        counters: &mut Counters,
    ) {
        let Some(mut vector) = self.vector.take() else { return };
        self.stats.tx_crossings += 1;
        let kept = vector.send(run, burst, |p, fate| self.settle(p, fate, pool, tally, counters));
        if !vector.sends() {
            self.stats.path = format!("{ALONE} (the interface took a burst in part)");
        }
        self.vector = Some(vector);
        if kept > 0 {
            self.note_refusal();
        }
    }

    /// Sends datagrams of one flow at the front as one frame, if they can be. False: nothing happened.
    fn send_joined(
        &mut self,
        pool: &mut Pool,
        burst: &mut Burst,
        tally: &mut Tally,
        counters: &mut Counters,
    ) -> bool {
        if !self.joins.is_on() || burst.len() < uso::LEAST || self.lost.is_some() {
            return false;
        }
        let Some(joined) = uso::join(&*burst, &self.caps, joined::MOST_SEGS) else { return false };
        self.stats.tx_crossings += 1;
        let written = joined::write(self.file.as_fd(), &joined, burst, vnet::HEADER_BYTES);
        match written.map_err(|e| e.raw_os_error().unwrap_or(0)) {
            Ok(_) => {
                counters.add(Counter::UsoJoined, joined.count as u64 - 1);
                for p in (0..joined.count).map_while(|_| burst.pop_front()) {
                    tally.add(&p);
                    pool.free(p.chain);
                }
            }
            Err(libc::EAGAIN | libc::EINTR) => self.note_refusal(),
            Err(libc::EINVAL) => {
                self.joins = Joining::Refused;
                return false;
            }
            Err(errno) => {
                for p in (0..joined.count).map_while(|_| burst.pop_front()) {
                    // Nothing to keep for later: those errors are above.
                    let _ = self.settle(p, Fate::Failed(errno), pool, tally, counters);
                }
            }
        }
        true
    }

    fn note_refusal(&mut self) {
        self.is_blocked = true;
        self.stats.tx_refusals += 1;
    }

    /// Frees a frame that was sent or can never be; gives back one to be offered again.
    fn settle(
        &mut self,
        p: Packet,
        fate: Fate,
        pool: &mut Pool,
        tally: &mut Tally,
        counters: &mut Counters,
    ) -> Option<Packet> {
        match fate {
            Fate::Sent => {
                tally.add(&p);
                pool.free(p.chain);
            }
            Fate::Failed(errno) => match self.after_write_error(errno) {
                Some(reason) => drop_frame(p, reason, pool, counters),
                None => return Some(p),
            },
        }
        None
    }

    /// What a failed write means for the frame: `None` to keep it for later, else why it is dropped.
    fn after_write_error(&mut self, errno: i32) -> Option<DropReason> {
        match errno {
            libc::EAGAIN | libc::EINTR => return None,
            // The interface is down, not gone: the kernel refuses frames until it is up.
            libc::EIO => self.is_down = true,
            libc::EFAULT => return Some(DropReason::PageVanished),
            libc::EBADFD | libc::EBADF | libc::ENODEV | libc::ENXIO => {
                self.lost = Some(errno);
                return Some(DropReason::DeviceGone);
            }
            _ => {}
        }
        Some(DropReason::DeviceRefused)
    }
}

impl Tap {
    fn link(&self) -> LinkState {
        let asked = self.control.as_ref().map(|c| sys::interface_is_running(c.as_fd(), &self.name));
        match asked {
            Some(Ok(true)) => LinkState::Up,
            Some(Ok(false)) => LinkState::Down,
            _ if self.is_down || self.lost.is_some() => LinkState::Down,
            _ => LinkState::Up,
        }
    }
}

fn drop_frame(p: Packet, reason: DropReason, pool: &mut Pool, counters: &mut Counters) {
    if reason == DropReason::PageVanished {
        pool.note_fault(&p.chain);
    }
    counters.drop_packet(reason);
    pool.free(p.chain);
}

impl Device for Tap {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    /// Where the kernel refuses the program that steers, a flow arrives on any queue, and shards hand its packets over:
    /// slower, and as correct.
    fn attach(&mut self, owner: &OwnerKey) -> Attachment {
        if let Some(queues) = self.steered {
            let _ = self.steer(queues, owner);
        }
        Attachment::default()
    }

    fn tx_burst(
        &mut self,
        _now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        let before = burst.len();
        let mut tally = Tally::default();
        self.is_blocked = false;
        while !burst.is_empty() && !self.is_blocked {
            if self.send_joined(pool, burst, &mut tally, counters) {
                continue;
            }
            let run = match (&self.vector, self.lost) {
                (Some(vector), None) => vector.run(burst, &self.caps, self.joins.is_on()),
                _ => 0,
            };
            if run > 0 {
                self.send_run(run, pool, burst, &mut tally, counters);
            } else {
                self.send_one(pool, burst, &mut tally, counters);
            }
        }
        // The interface is up again if it has taken a frame.
        self.is_down &= tally.frames == 0;
        if let Some(queues) = &mut self.flow_queues {
            queues.want_room(self.file.as_fd(), self.is_blocked);
        }
        tally.sent(counters, &mut self.stats);
        before - burst.len()
    }

    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        self.take_burst(now, pool, out, budget, counters)
    }

    /// The descriptor is readable by itself whenever a frame waits.
    fn arm(&mut self) -> bool {
        if let Some(queues) = &mut self.flow_queues {
            queues.armed();
        }
        self.is_drained
    }

    fn next_deadline(&self) -> Option<Instant> {
        // What is held is of no use where nothing is read any more.
        self.flow_queues.as_ref().filter(|_| self.lost.is_none())?.table.next_deadline()
    }

    fn lost(&self) -> Option<i32> {
        self.lost
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        let queues = self.flow_queues.as_ref();
        let fd = queues.map_or(self.file.as_raw_fd(), |q| q.wake_fd());
        // Beside other queues the main one is watched for room already.
        let is_watched = queues.is_some_and(|q| q.wakes_for_room());
        let interest = match self.is_blocked && !is_watched {
            true => Interest::ReadableOrWritable,
            false => Interest::Readable,
        };
        Some(WakeFd { fd, interest })
    }

    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        Some(self)
    }

    fn stats(&self) -> DeviceStats {
        let mut stats = DeviceStats { link: self.link(), ..self.stats.clone() };
        stats.path.push_str(self.joins.sentence());
        stats.path.push_str(&self.queues_say);
        if let Some(queues) = &self.flow_queues {
            stats.path.push_str(&queues.sentence());
        }
        stats
    }
}

impl DirectPlacement for Tap {
    fn place(&mut self, flow: FlowKey, next_seq: SeqNum, rooms: Rooms) -> Result<(), Unsupported> {
        let placed = self.placer.place(flow, next_seq, rooms);
        if let Some(queues) = &mut self.flow_queues {
            queues.placed(&flow);
        }
        placed
    }

    fn place_behind(&mut self, flow: &FlowKey, room: WritableRange) -> Result<(), Unsupported> {
        let placed = self.placer.place_behind(flow, room);
        if let Some(queues) = &mut self.flow_queues {
            queues.placed(flow);
        }
        placed
    }

    fn unplace(&mut self, flow: &FlowKey) -> Rooms {
        self.placer.unplace(flow)
    }
}
