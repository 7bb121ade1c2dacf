//! The TUN device: IP packets to and from the kernel's own stack, without a link layer.
//!
//! Enters and leaves: packets with a virtio-net header in front, so that 64 KiB super-packets without checksums
//! pass both ways. The constant Ethernet header of [`plain_ip`] is in memory only: a received packet is read
//! behind space for it, a sent one is gathered from the byte after it. The medium is point-to-point
//! ([`Medium::Ip`](fulmar_netdev::Medium)): no ARP, no neighbour discovery.
//!
//! A packet that is neither IPv4 nor IPv6, or is shorter than its fixed header, is dropped here; the stack checks
//! all other fields.
//!
//! Cost: one `writev` or `readv` per packet or super-packet, and the kernel's copy. Datagrams of one flow are
//! joined by the stack's calls for bursts only ([`Caps::udp_gso`]). Source: linux/if_tun.h,
//! Documentation/networking/tuntap.rst.

use std::fs::File;
use std::io::{self, IoSliceMut, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use fulmar_base::{Counters, DropReason, Instant};
use fulmar_mbuf::Pool;
use fulmar_netdev::plain_ip::{self, HEADER_BYTES};
use fulmar_netdev::{
    Burst, Caps, Device, DeviceStats, Interest, LinkState, Packet, Tally, TxReader, TxTime, Wake,
    WakeFd, offload,
};

use crate::buffer_pair::{BufferPair, Scratch};
use crate::health::Health;
use crate::tap::attach::{attach, open_clone_device};
use crate::tap::{MAX_IP_BYTES, MAX_SEGS, OFFLOADS, TSO, USO, control_socket, drop_frame};
use crate::{OpenError, sys, vnet};

const FLAGS: libc::c_int = libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

/// The TUN interface, and the stack's MTU on it.
#[derive(Clone, Debug, Default)]
pub struct TunConfig {
    /// Interface name; the interface is created if it does not exist. Empty or `tun%d`: the kernel chooses
    /// the name.
    pub name: String,
    /// Largest IP packet in bytes; `None`: the interface's MTU.
    pub mtu: Option<usize>,
}

/// One queue of a TUN interface.
pub struct Tun {
    file: File,
    name: String,
    /// A socket in the interface's network namespace, for ioctls.
    control: Option<OwnedFd>,
    caps: Caps,
    pair: BufferPair,
    scratch: Scratch,
    health: Health,
    /// The last read found the queue empty.
    is_drained: bool,
    is_blocked: bool,
    stats: DeviceStats,
}

impl Tun {
    /// Opens the interface, and creates it if it does not exist. It must be set up and get its addresses on
    /// the kernel's side (`ip link set NAME up`).
    ///
    /// # Errors
    /// A sentence: what failed, the system's error, and what to do.
    pub fn open(config: &TunConfig) -> Result<Tun, OpenError> {
        let file = open_clone_device()?;
        let name = attach(&file, &config.name, FLAGS)?;
        Tun::set_up(file, name, control_socket(), config, 1)
    }

    /// Opens `queues` queues of one interface, each the device of one shard. The kernel sends a packet to the
    /// queue that last sent a packet of its flow, or to a queue of its choice if no queue has for three
    /// seconds. Shards hand over misdirected packets.
    ///
    /// # Errors
    /// As [`Tun::open`]; also if the interface was created without IFF_MULTI_QUEUE.
    pub fn open_queues(config: &TunConfig, queues: u16) -> Result<Vec<Tun>, OpenError> {
        if queues < 2 {
            return Ok(vec![Tun::open(config)?]);
        }
        let mut name = config.name.clone();
        let mut tuns = Vec::with_capacity(usize::from(queues));
        for _ in 0..queues {
            let file = open_clone_device()?;
            name = attach(&file, &name, FLAGS | libc::IFF_MULTI_QUEUE)?;
            let mut tun = Tun::set_up(file, name.clone(), control_socket(), config, queues)?;
            tun.stats.path.push_str("; steered by the queue that sent last");
            tuns.push(tun);
        }
        Ok(tuns)
    }

    /// Uses a descriptor that another process has opened and attached. `config.name` is ignored.
    ///
    /// # Errors
    /// The descriptor is not a TUN with IFF_VNET_HDR and IFF_NO_PI.
    pub fn from_fd(fd: OwnedFd, config: &TunConfig) -> Result<Tun, OpenError> {
        let advice = "attach it with IFF_TUN | IFF_NO_PI | IFF_VNET_HDR before handing it over";
        let wrong = |e| OpenError::new("cannot use the descriptor as a TUN", e, advice);
        let (name, flags) = sys::tun_interface(fd.as_fd()).map_err(wrong)?;
        if flags & FLAGS != FLAGS {
            return Err(wrong(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        sys::set_nonblocking(fd.as_fd()).map_err(wrong)?;
        // The interface may be in another network namespace, where it cannot be queried from here.
        Tun::set_up(File::from(fd), name, None, config, 1)
    }

    fn set_up(
        file: File,
        name: String,
        control: Option<OwnedFd>,
        config: &TunConfig,
        queues: u16,
    ) -> Result<Tun, OpenError> {
        sys::tun_set_header(file.as_fd(), vnet::HEADER_BYTES as _).map_err(|e| {
            let what = format!("cannot set the virtio-net header of {name}");
            OpenError::new(what, e, "Linux 4.0 or newer is needed")
        })?;
        let accepted =
            OFFLOADS.into_iter().find(|o| sys::tun_set_offload(file.as_fd(), *o).is_ok());
        let offload = accepted.unwrap_or(0);
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
            // A packet is sent when it is written.
            tx_time: TxTime::Coarse,
            ..Caps::plain_ip(config.mtu.or(kernel_mtu).unwrap_or(1500))
        };
        Ok(Tun::over(file, name, control, caps))
    }

    /// A device over a descriptor that keeps the bounds of packets.
    fn over(file: File, name: String, control: Option<OwnedFd>, caps: Caps) -> Tun {
        let path = "one writev or readv per packet".to_owned();
        Tun {
            stats: DeviceStats { name: name.clone(), path, ..DeviceStats::default() },
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

    /// The attached descriptor, for another process ([`Tun::from_fd`]).
    pub fn into_fd(self) -> OwnedFd {
        self.file.into()
    }

    /// The name of the interface when it was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Reads one packet. `None`: the queue is empty, or the interface is gone.
    fn read(&mut self, pool: &mut Pool) -> Option<Result<Packet, DropReason>> {
        self.pair.prepare(pool);
        let mut header = [0; vnet::HEADER_BYTES];
        let [small, large] = self.pair.parts(&mut self.scratch);
        let (_, first) = small.split_at_mut_checked(HEADER_BYTES)?;
        let mut parts =
            [IoSliceMut::new(&mut header), IoSliceMut::new(first), IoSliceMut::new(large)];
        match (&self.file).read_vectored(&mut parts) {
            Ok(bytes) => {
                self.health.is_down = false;
                Some(self.received(&header, bytes.checked_sub(vnet::HEADER_BYTES), pool))
            }
            Err(e) => {
                self.health.on_read_error(e.raw_os_error().unwrap_or(0));
                self.is_drained = true;
                None
            }
        }
    }

    /// The frame of a packet of `bytes` bytes that was read into the buffer pair.
    fn received(
        &mut self,
        header: &[u8; vnet::HEADER_BYTES],
        bytes: Option<usize>,
        pool: &mut Pool,
    ) -> Result<Packet, DropReason> {
        let bytes = bytes.ok_or(DropReason::Truncated)?;
        let [small, _] = self.pair.parts(&mut self.scratch);
        let (link, first) =
            small.split_first_chunk_mut::<HEADER_BYTES>().ok_or(DropReason::NoBuffer)?;
        let first = first.get(..bytes).unwrap_or(first);
        *link = plain_ip::link_header(first, bytes)?;
        let offload = vnet::parse(header, bytes, first)?.shift(HEADER_BYTES as u16);
        let chain = self.pair.take(bytes + HEADER_BYTES, &mut self.scratch, pool)?;
        Ok(Packet { chain, offload })
    }

    /// Writes one packet with `writev`: virtio-net header, and the mbufs behind the Ethernet header.
    fn write(&self, p: &Packet) -> io::Result<usize> {
        let header = vnet::request(&p.offload.unshift(HEADER_BYTES as u16));
        let mut parts = [sys::Part::EMPTY; MAX_SEGS + 1];
        let mut mbufs = p.chain.iter().filter(|m| !m.is_empty());
        let first = mbufs.next().and_then(|m| m.as_slice().get(HEADER_BYTES..)).unwrap_or(&[]);
        (parts[0], parts[1]) = (sys::Part::bytes(&header), sys::Part::bytes(first));
        let mut used = 2;
        for (part, m) in parts[2..].iter_mut().zip(mbufs) {
            *part = sys::Part::mbuf(m);
            used += 1;
        }
        sys::write_parts(self.file.as_fd(), &parts[..used])
    }

    /// Sends or drops the first frame of the burst. False: it stays, and so do all others.
    fn send_one(
        &mut self,
        pool: &mut Pool,
        burst: &mut Burst,
        tally: &mut Tally,
        counters: &mut Counters,
    ) -> bool {
        let Some(p) = burst.pop_front() else { return false };
        let checked = match self.health.lost {
            Some(_) => Err(DropReason::DeviceGone),
            None => offload::check(&p, &self.caps).and_then(|()| plain_ip::check_sent(&p)),
        };
        if let Err(reason) = checked {
            drop_frame(p, reason, pool, counters);
            return true;
        }
        self.stats.tx_crossings += 1;
        let Err(e) = self.write(&p) else {
            tally.add_plain_ip(&p);
            pool.free(p.chain);
            return true;
        };
        match self.health.on_write_error(e.raw_os_error().unwrap_or(0)) {
            Some(reason) => {
                drop_frame(p, reason, pool, counters);
                true
            }
            None => {
                self.stats.tx_refusals += 1;
                // Never full: the frame was just taken from it.
                let _ = burst.push_front(p);
                false
            }
        }
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

impl Device for Tun {
    fn caps(&self) -> &Caps {
        &self.caps
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
            self.is_blocked = !self.send_one(pool, burst, &mut tally, counters);
        }
        // An accepted packet shows that the interface is up again.
        self.health.is_down &= tally.frames == 0;
        tally.sent(counters, &mut self.stats);
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
        let mut tally = Tally::default();
        self.is_drained = false;
        for _ in 0..budget.min(out.space()) {
            if self.health.lost.is_some() {
                break;
            }
            self.stats.rx_crossings += 1;
            match self.read(pool) {
                None => break,
                Some(Err(reason)) => counters.drop_packet(reason),
                Some(Ok(p)) => {
                    tally.add_plain_ip(&p);
                    // Never full: the number of rounds is bounded by its free space.
                    let _ = out.push(p);
                }
            }
        }
        tally.received(counters, &mut self.stats);
        tally.frames as usize
    }

    /// The descriptor is level-triggered: readable while a packet is queued.
    fn arm(&mut self) -> bool {
        self.is_drained
    }

    fn lost(&self) -> Option<i32> {
        self.health.lost
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        let interest = match self.is_blocked {
            true => Interest::ReadableOrWritable,
            false => Interest::Readable,
        };
        Some(WakeFd { fd: self.file.as_raw_fd(), interest })
    }

    fn stats(&self) -> DeviceStats {
        DeviceStats { link: self.link(), ..self.stats.clone() }
    }
}

#[cfg(test)]
mod tests;
