//! One queue of a TUN or TAP interface: the descriptor, its offloads, its state, and a frame by one call.
//!
//! What crosses the descriptor is the frame (TAP), or the IP packet behind its link header (TUN,
//! [`fulmar_stack::device::plain_ip`]), with a virtio-net header in front. Runs of frames, datagrams joined and direct
//! placement are `tap.rs`. Source: linux/if_tun.h, Documentation/networking/tuntap.rst.

use std::fs::File;
use std::io::{self, IoSliceMut, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use fulmar_stack::base::{DropReason, Medium};
use fulmar_stack::device::{
    Burst, Caps, DeviceStats, Interest, LinkState, Packet, TxTime, Wake, WakeFd, offload, plain_ip,
};
use fulmar_stack::mbuf::Pool;
use fulmar_stack::wire::eth;

use crate::drivers::batch::Completing;
use crate::drivers::buffer_pair::{BufferPair, Scratch};
use crate::drivers::health::Health;
use crate::drivers::{OpenError, sys, vnet};

const TSO: u32 = libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
const USO: u32 = libc::TUN_F_USO4 | libc::TUN_F_USO6;
/// Receive offloads, best first; older kernels refuse unknown flags (EINVAL).
const OFFLOADS: [u32; 4] = [
    libc::TUN_F_CSUM | TSO | libc::TUN_F_TSO_ECN | USO,
    libc::TUN_F_CSUM | TSO | libc::TUN_F_TSO_ECN,
    libc::TUN_F_CSUM,
    0,
];
/// Largest IP packet of a super-frame in bytes.
pub(super) const MAX_IP_BYTES: usize = 65_535;
pub(super) const MAX_SEGS: usize = 64;

/// A descriptor that is attached to an interface.
pub(super) struct Attached {
    pub file: File,
    /// The interface.
    pub name: String,
    /// A socket in the interface's network namespace, for ioctls; `None`: the interface may be in another one
    /// than this thread.
    pub control: Option<OwnedFd>,
}

impl Attached {
    /// In this thread's network namespace.
    pub(super) fn here(file: File, name: String) -> Attached {
        Attached { file, name, control: sys::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).ok() }
    }

    /// A descriptor that another process has opened and attached with `flags`; `kind` is TUN or TAP.
    pub(super) fn by_another(
        fd: OwnedFd,
        flags: libc::c_int,
        kind: &str,
    ) -> Result<Attached, OpenError> {
        let advice =
            format!("attach it with IFF_{kind} | IFF_NO_PI | IFF_VNET_HDR before passing it");
        let wrong =
            |e| OpenError::new(format!("cannot use the descriptor as a {kind}"), e, advice.clone());
        let (name, has) = sys::tun_interface(fd.as_fd()).map_err(wrong)?;
        if has & flags != flags {
            return Err(wrong(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        sys::set_nonblocking(fd.as_fd()).map_err(wrong)?;
        Ok(Attached { file: File::from(fd), name, control: None })
    }
}

/// See the module's header.
pub(super) struct Queue {
    pub file: File,
    pub name: String,
    control: Option<OwnedFd>,
    pub caps: Caps,
    pub pair: BufferPair,
    pub scratch: Scratch,
    pub health: Health,
    /// The last read found the queue empty.
    pub is_drained: bool,
    /// The last write found the queue full.
    pub is_blocked: bool,
    pub stats: DeviceStats,
}

impl Queue {
    /// Sets the virtio-net header and the offloads. `plain`: the device without offloads, for an MTU. `mtu`:
    /// `None` is the interface's.
    pub(super) fn set_up(
        attached: Attached,
        queues: u16,
        mtu: Option<usize>,
        plain: impl FnOnce(usize) -> Caps,
    ) -> Result<Queue, OpenError> {
        let Attached { file, name, control } = &attached;
        sys::tun_set_header(file.as_fd(), vnet::HEADER_BYTES as _).map_err(|e| {
            let what = format!("cannot set the virtio-net header of {name}");
            OpenError::new(what, e, "Linux 4.0 or newer is required")
        })?;
        let accepted =
            OFFLOADS.into_iter().find(|o| sys::tun_set_offload(file.as_fd(), *o).is_ok());
        let offload = accepted.unwrap_or(0);
        let kernel_mtu = control.as_ref().and_then(|c| sys::interface_mtu(c.as_fd(), name).ok());
        let caps = Caps {
            tx_csum: true,
            tso: Some(MAX_IP_BYTES),
            udp_gso: offload & USO == USO,
            rx_gro: offload & TSO != 0,
            max_segs: MAX_SEGS,
            queues,
            wake: Wake::Level,
            // A packet is sent when it is written.
            tx_time: TxTime::Coarse,
            ..plain(mtu.or(kernel_mtu).unwrap_or(1500))
        };
        Ok(Queue::over(attached, caps))
    }

    /// A queue over a descriptor that keeps the bounds of packets.
    pub(super) fn over(Attached { file, name, control }: Attached, caps: Caps) -> Queue {
        Queue {
            stats: DeviceStats { name: name.clone(), ..DeviceStats::default() },
            file,
            name,
            control,
            caps,
            pair: BufferPair::default(),
            scratch: Scratch::new(),
            health: Health::default(),
            is_drained: false,
            is_blocked: false,
        }
    }

    /// Bytes at the front of a frame that do not cross the descriptor.
    fn link_bytes(&self) -> usize {
        match self.caps.medium {
            Medium::Ethernet => 0,
            Medium::Ip => plain_ip::HEADER_BYTES,
        }
    }

    /// Reads one frame into the buffer pair, which was prepared. `None`: the queue is empty, or the interface is gone.
    pub(super) fn read(&mut self, pool: &mut Pool) -> Option<Result<Packet, DropReason>> {
        let mut header = [0; vnet::HEADER_BYTES];
        let link_bytes = self.link_bytes();
        let [small, large] = self.pair.parts(&mut self.scratch);
        let (_, first) = small.split_at_mut_checked(link_bytes)?;
        let mut parts =
            [IoSliceMut::new(&mut header), IoSliceMut::new(first), IoSliceMut::new(large)];
        match self.file.read_vectored(&mut parts) {
            Ok(bytes) => {
                self.health.is_down = false;
                Some(self.received(&header, bytes.checked_sub(vnet::HEADER_BYTES), pool))
            }
            Err(e) => {
                self.health.on_read_error(e.raw_os_error().unwrap_or(0));
                None
            }
        }
    }

    /// The frame of `bytes` bytes that crossed into the buffer pair. `None`: not even a virtio-net header did.
    fn received(
        &mut self,
        header: &[u8; vnet::HEADER_BYTES],
        bytes: Option<usize>,
        pool: &mut Pool,
    ) -> Result<Packet, DropReason> {
        let bytes = bytes.ok_or(DropReason::Truncated)?;
        let link_bytes = self.link_bytes();
        let [small, _] = self.pair.parts(&mut self.scratch);
        let (link, first) = small.split_at_mut_checked(link_bytes).ok_or(DropReason::NoBuffer)?;
        let first = first.get(..bytes).unwrap_or(first);
        match self.caps.medium {
            Medium::Ethernet if bytes < eth::HEADER_BYTES => return Err(DropReason::Truncated),
            Medium::Ethernet => {}
            Medium::Ip => link.copy_from_slice(&plain_ip::link_header(first, bytes)?),
        }
        let offload = vnet::parse(header, bytes, first)?.shift(link_bytes as u16);
        let chain = self.pair.take(bytes + link_bytes, &mut self.scratch, pool)?;
        Ok(Packet { chain, offload })
    }

    /// Sends the first frame of the burst with one call, drops it, or leaves it there: the queue is full then.
    pub(super) fn send_one(&mut self, burst: &mut Burst, done: &mut Completing<'_>) {
        let Some(p) = burst.pop_front() else { return };
        if let Err(reason) = self.check(&p) {
            return done.discard(p, reason);
        }
        self.stats.tx_crossings += 1;
        let written = self.write(&p).map(drop).map_err(|e| e.raw_os_error().unwrap_or(0));
        if let Some(p) = self.complete(p, written, done) {
            self.note_refusal();
            // Never full: the frame was just taken from it.
            let _ = burst.push_front(p);
        }
    }

    fn check(&self, p: &Packet) -> Result<(), DropReason> {
        if self.health.lost.is_some() {
            return Err(DropReason::DeviceGone);
        }
        offload::check(p, &self.caps)?;
        match self.caps.medium {
            Medium::Ethernet => Ok(()),
            Medium::Ip => plain_ip::check_sent(p),
        }
    }

    /// Writes one frame with `writev`: virtio-net header and mbufs.
    fn write(&self, p: &Packet) -> io::Result<usize> {
        let link_bytes = self.link_bytes();
        let front = p.chain.front().and_then(|m| m.as_slice().get(link_bytes..)).unwrap_or(&[]);
        let header = vnet::request_before(&p.offload.unshift(link_bytes as u16), front);
        let mut mbufs = p.chain.iter().filter(|m| !m.is_empty()).map(sys::Part::mbuf);
        let first = mbufs.next().map_or(sys::Part::EMPTY, |part| part.behind(link_bytes));
        let mut parts = [sys::Part::EMPTY; MAX_SEGS + 1];
        (parts[0], parts[1]) = (sys::Part::bytes(&header), first);
        let used = sys::gather(&mut parts[2..], mbufs);
        sys::write_parts(self.file.as_fd(), &parts[..2 + used])
    }

    /// Completes a frame: frees it if it was sent or dropped, returns it if it is to be sent again.
    pub(super) fn complete(
        &mut self,
        p: Packet,
        written: Result<(), i32>,
        done: &mut Completing<'_>,
    ) -> Option<Packet> {
        let Err(errno) = written else {
            done.sent(p);
            return None;
        };
        match self.health.on_write_error(errno) {
            Some(reason) => done.discard(p, reason),
            None => return Some(p),
        }
        None
    }

    /// The end of a transmit burst.
    pub(super) fn count_sent(&mut self, done: Completing<'_>) {
        // An accepted frame shows that the interface is up again.
        self.health.is_down &= done.tally.frames == 0;
        done.tally.sent(done.counters, &mut self.stats);
    }

    /// The device refused a frame, which stays queued.
    pub(super) fn note_refusal(&mut self) {
        self.is_blocked = true;
        self.stats.tx_refusals += 1;
    }

    /// The descriptor is level-triggered: readable while a packet is queued.
    pub(super) fn wake_fd(&self) -> WakeFd {
        let interest = match self.is_blocked {
            true => Interest::ReadableOrWritable,
            false => Interest::Readable,
        };
        WakeFd { fd: self.file.as_raw_fd(), interest }
    }

    pub(super) fn stats(&self) -> DeviceStats {
        DeviceStats { link: self.link(), ..self.stats.clone() }
    }

    fn link(&self) -> LinkState {
        let asked = self.control.as_ref().map(|c| sys::interface_is_running(c.as_fd(), &self.name));
        match asked {
            Some(Ok(true)) => LinkState::Up,
            Some(Ok(false)) => LinkState::Down,
            _ if self.health.is_down || self.health.lost.is_some() => LinkState::Down,
            _ => LinkState::Up,
        }
    }
}
