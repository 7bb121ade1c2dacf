//! The TUN device: IP packets to and from the kernel's own stack, without a link layer.
//!
//! Enters and leaves: packets with a virtio-net header in front, so that 64 KiB super-packets without checksums
//! pass both ways. The constant Ethernet header of [`fulmar_stack::device::plain_ip`] is in memory only: a received packet
//! is read behind space for it, a sent one is gathered from the byte after it. The medium is point-to-point
//! ([`Medium::Ip`](fulmar_stack::device::Medium)): no ARP, no neighbour discovery.
//!
//! A packet that is neither IPv4 nor IPv6, or is shorter than its fixed header, is dropped here; the stack checks
//! all other fields.
//!
//! Cost: one `writev` or `readv` per packet or super-packet, and the kernel's copy. Datagrams of one flow are
//! joined by the stack's calls for bursts only ([`Caps::udp_gso`]). Source: linux/if_tun.h,
//! Documentation/networking/tuntap.rst.

use std::os::fd::OwnedFd;

use fulmar_stack::base::{Counters, Instant};
use fulmar_stack::device::{Burst, Caps, Device, DeviceStats, WakeFd};
use fulmar_stack::mbuf::Pool;

use crate::drivers::OpenError;
use crate::drivers::batch::{Completing, Receiving};
use crate::drivers::tap::attach::{attach, open_clone_device};
use crate::drivers::tun_queue::{Attached, Queue};

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
        Tun { queue }
    }

    /// The attached descriptor, for another process ([`Tun::from_fd`]).
    pub fn into_fd(self) -> OwnedFd {
        self.queue.file.into()
    }

    /// The name of the interface when it was opened.
    pub fn name(&self) -> &str {
        &self.queue.name
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
        let mut done = Completing::new(pool, counters);
        self.queue.is_blocked = false;
        while !burst.is_empty() && !self.queue.is_blocked {
            self.queue.send_one(burst, &mut done);
        }
        done.tally = done.tally.of_plain_ip();
        self.queue.count_sent(done);
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
        let queue = &mut self.queue;
        let mut left = budget.min(out.space());
        let mut taking = Receiving::new(out, counters);
        queue.is_drained = false;
        while left > 0 && !queue.is_drained && queue.health.lost.is_none() {
            left -= 1;
            queue.stats.rx_crossings += 1;
            queue.pair.prepare(pool);
            match queue.read(pool) {
                Some(frame) => taking.deliver(frame),
                None => queue.is_drained = true,
            }
        }
        let tally = taking.tally.of_plain_ip();
        tally.received(taking.counters, &mut queue.stats);
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
