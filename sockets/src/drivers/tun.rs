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

use fulmar_stack::base::Medium;
use fulmar_stack::device::{Caps, Device, forward_device};

use crate::drivers::OpenError;
use crate::drivers::tap::Tap;
use crate::drivers::tap::attach::Attached;

/// The TUN interface, and the stack's MTU on it.
///
/// ```no_run
/// use fulmar::devices::{Tun, TunConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = TunConfig { name: "tun0".to_owned(), mtu: Some(1400) };
/// let device = Tun::open(&config)?;
/// # drop(device);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct TunConfig {
    /// Interface name; the interface is created if it does not exist. Empty or `tun%d`: the kernel chooses
    /// the name.
    pub name: String,
    /// Largest IP packet in bytes; `None`: the interface's MTU.
    pub mtu: Option<usize>,
}

/// One queue of a TUN interface: [`tun`](crate::devices::tun) with its options.
///
/// ```no_run
/// use fulmar::devices::{Tun, TunConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Tun::open(&TunConfig { name: "tun%d".to_owned(), ..TunConfig::default() })?;
/// println!("the kernel has named it {}", device.name());
/// let stack = fulmar::Stack::builder().device(device).address("10.0.0.2/24".parse()?).build()?;
/// # drop(stack);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Tun(Tap);

impl Tun {
    /// Opens the interface, and creates it if it does not exist. It must be set up and get its addresses on
    /// the kernel's side (`ip link set NAME up`).
    ///
    /// # Errors
    /// A sentence: what failed, the system's error, and what to do.
    pub fn open(config: &TunConfig) -> Result<Tun, OpenError> {
        Tun::set_up(Attached::alone(&config.name, Medium::Ip)?, config, 1)
    }

    /// Opens `queues` queues of one interface, each the device of one shard. The kernel sends a packet to the
    /// queue that last sent a packet of its flow, or to a queue of its choice if no queue has for three
    /// seconds. Shards hand over misdirected packets.
    ///
    /// # Errors
    /// As [`Tun::open`]; also if the interface was created without IFF_MULTI_QUEUE.
    pub fn open_queues(config: &TunConfig, queues: u16) -> Result<Vec<Tun>, OpenError> {
        let attached = Attached::to_queues(&config.name, queues, Medium::Ip)?;
        attached.into_iter().map(|a| Tun::set_up(a, config, queues.max(1))).collect()
    }

    /// Uses a descriptor that another process has opened and attached. `config.name` is ignored.
    ///
    /// # Errors
    /// The descriptor is not a TUN with IFF_VNET_HDR and IFF_NO_PI.
    pub fn from_fd(fd: OwnedFd, config: &TunConfig) -> Result<Tun, OpenError> {
        Tun::set_up(Attached::by_another(fd, Medium::Ip)?, config, 1)
    }

    fn set_up(attached: Attached, config: &TunConfig, queues: u16) -> Result<Tun, OpenError> {
        let mut tap = Tap::set_up(attached, queues, config.mtu, Caps::plain_ip)?;
        tap.stats.path = "one writev or readv per packet".to_owned();
        if queues > 1 {
            tap.stats.path.push_str("; steered by the queue that sent last");
        }
        Ok(Tun(tap))
    }

    /// The attached descriptor, for another process ([`Tun::from_fd`]).
    pub fn into_fd(self) -> OwnedFd {
        self.0.into_fd()
    }

    /// The name of the interface when it was opened.
    pub fn name(&self) -> &str {
        self.0.name()
    }
}

impl Device for Tun {
    forward_device!(self => self.0, except placement);
}

#[cfg(test)]
mod tests;
