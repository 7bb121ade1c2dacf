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

use std::io::{self, IoSliceMut, Read};
use std::os::fd::{AsFd, OwnedFd};

use fulmar_base::{Counters, DropReason, Instant};
use fulmar_mbuf::Pool;
use fulmar_netdev::plain_ip::{self, HEADER_BYTES};
use fulmar_netdev::{Burst, Caps, Device, DeviceStats, Packet, Tally, WakeFd, offload};

use crate::buffer_pair::{BufferPair, Scratch};
use crate::tap::attach::{attach, open_clone_device};
use crate::tap::drop_frame;
use crate::tun_queue::{Attached, MAX_SEGS, Queue};
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
    queue: Queue,
    pair: BufferPair,
    scratch: Scratch,
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
        Tun::set_up(Attached::here(file, name), config, 1)
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
            let mut tun = Tun::set_up(Attached::here(file, name.clone()), config, queues)?;
            tun.queue.stats.path.push_str("; steered by the queue that sent last");
            tuns.push(tun);
        }
        Ok(tuns)
    }

    /// Uses a descriptor that another process has opened and attached. `config.name` is ignored.
    ///
    /// # Errors
    /// The descriptor is not a TUN with IFF_VNET_HDR and IFF_NO_PI.
    pub fn from_fd(fd: OwnedFd, config: &TunConfig) -> Result<Tun, OpenError> {
        Tun::set_up(Attached::by_another(fd, FLAGS, "TUN")?, config, 1)
    }

    fn set_up(attached: Attached, config: &TunConfig, queues: u16) -> Result<Tun, OpenError> {
        Ok(Tun::over(Queue::set_up(attached, queues, config.mtu, Caps::plain_ip)?))
    }

    fn over(mut queue: Queue) -> Tun {
        queue.stats.path = "one writev or readv per packet".to_owned();
        Tun { queue, pair: BufferPair::default(), scratch: Scratch::new() }
    }

    /// The attached descriptor, for another process ([`Tun::from_fd`]).
    pub fn into_fd(self) -> OwnedFd {
        self.queue.file.into()
    }

    /// The name of the interface when it was opened.
    pub fn name(&self) -> &str {
        &self.queue.name
    }

    /// Reads one packet. `None`: the queue is empty, or the interface is gone.
    fn read(&mut self, pool: &mut Pool) -> Option<Result<Packet, DropReason>> {
        self.pair.prepare(pool);
        let mut header = [0; vnet::HEADER_BYTES];
        let [small, large] = self.pair.parts(&mut self.scratch);
        let (_, first) = small.split_at_mut_checked(HEADER_BYTES)?;
        let mut parts =
            [IoSliceMut::new(&mut header), IoSliceMut::new(first), IoSliceMut::new(large)];
        match (&self.queue.file).read_vectored(&mut parts) {
            Ok(bytes) => {
                self.queue.health.is_down = false;
                Some(self.received(&header, bytes.checked_sub(vnet::HEADER_BYTES), pool))
            }
            Err(e) => {
                self.queue.health.on_read_error(e.raw_os_error().unwrap_or(0));
                self.queue.is_drained = true;
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
        let mut parts = [sys::Part::EMPTY; MAX_SEGS + 1];
        let mut mbufs = p.chain.iter().filter(|m| !m.is_empty());
        let first = mbufs.next().and_then(|m| m.as_slice().get(HEADER_BYTES..)).unwrap_or(&[]);
        let header = vnet::request_before(&p.offload.unshift(HEADER_BYTES as u16), first);
        (parts[0], parts[1]) = (sys::Part::bytes(&header), sys::Part::bytes(first));
        let mut used = 2;
        for (part, m) in parts[2..].iter_mut().zip(mbufs) {
            *part = sys::Part::mbuf(m);
            used += 1;
        }
        sys::write_parts(self.queue.file.as_fd(), &parts[..used])
    }

    /// Sends or drops the first frame of the burst, or leaves it there: the queue is full then.
    fn send_one(
        &mut self,
        pool: &mut Pool,
        burst: &mut Burst,
        tally: &mut Tally,
        counters: &mut Counters,
    ) {
        let Some(p) = burst.pop_front() else { return };
        let checked = match self.queue.health.lost {
            Some(_) => Err(DropReason::DeviceGone),
            None => offload::check(&p, &self.queue.caps).and_then(|()| plain_ip::check_sent(&p)),
        };
        if let Err(reason) = checked {
            return drop_frame(p, reason, pool, counters);
        }
        self.queue.stats.tx_crossings += 1;
        let Err(e) = self.write(&p) else {
            tally.add_plain_ip(&p);
            return pool.free(p.chain);
        };
        match self.queue.health.on_write_error(e.raw_os_error().unwrap_or(0)) {
            Some(reason) => drop_frame(p, reason, pool, counters),
            None => {
                self.queue.note_refusal();
                // Never full: the frame was just taken from it.
                let _ = burst.push_front(p);
            }
        }
    }
}

impl Device for Tun {
    fn caps(&self) -> &Caps {
        &self.queue.caps
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
        self.queue.is_blocked = false;
        while !burst.is_empty() && !self.queue.is_blocked {
            self.send_one(pool, burst, &mut tally, counters);
        }
        // An accepted packet shows that the interface is up again.
        self.queue.health.is_down &= tally.frames == 0;
        tally.sent(counters, &mut self.queue.stats);
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
        self.queue.is_drained = false;
        for _ in 0..budget.min(out.space()) {
            if self.queue.health.lost.is_some() {
                break;
            }
            self.queue.stats.rx_crossings += 1;
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
        tally.received(counters, &mut self.queue.stats);
        tally.frames as usize
    }

    /// The descriptor is level-triggered: readable while a packet is queued.
    fn arm(&mut self) -> bool {
        self.queue.is_drained
    }

    fn lost(&self) -> Option<i32> {
        self.queue.health.lost
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        Some(self.queue.wake_fd())
    }

    fn stats(&self) -> DeviceStats {
        self.queue.stats()
    }
}

#[cfg(test)]
mod tests;
