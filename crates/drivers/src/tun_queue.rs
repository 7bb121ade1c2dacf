//! One queue of a TUN or TAP interface: the descriptor, its offloads, and its state.
//!
//! What a packet looks like in front of the descriptor (`tun.rs`: IP, `tap.rs`: Ethernet), and by which calls it
//! crosses, is the device's own. Source: linux/if_tun.h, Documentation/networking/tuntap.rst.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use fulmar_netdev::{Caps, DeviceStats, Interest, LinkState, TxReader, TxTime, Wake, WakeFd};

use crate::health::Health;
use crate::{OpenError, sys, vnet};

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
pub const MAX_IP_BYTES: usize = 65_535;
pub const MAX_SEGS: usize = 64;

/// A descriptor that is attached to an interface.
pub struct Attached {
    pub file: File,
    /// The interface.
    pub name: String,
    /// A socket in the interface's network namespace, for ioctls; `None`: the interface may be in another one
    /// than this thread.
    pub control: Option<OwnedFd>,
}

impl Attached {
    /// In this thread's network namespace.
    pub fn here(file: File, name: String) -> Attached {
        Attached { file, name, control: sys::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).ok() }
    }

    /// A descriptor that another process has opened and attached with `flags`; `kind` is TUN or TAP.
    pub fn by_another(fd: OwnedFd, flags: libc::c_int, kind: &str) -> Result<Attached, OpenError> {
        let advice =
            format!("attach it with IFF_{kind} | IFF_NO_PI | IFF_VNET_HDR before handing it over");
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
pub struct Queue {
    pub file: File,
    pub name: String,
    control: Option<OwnedFd>,
    pub caps: Caps,
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
    pub fn set_up(
        attached: Attached,
        queues: u16,
        mtu: Option<usize>,
        plain: impl FnOnce(usize) -> Caps,
    ) -> Result<Queue, OpenError> {
        let Attached { file, name, control } = &attached;
        sys::tun_set_header(file.as_fd(), vnet::HEADER_BYTES as _).map_err(|e| {
            let what = format!("cannot set the virtio-net header of {name}");
            OpenError::new(what, e, "Linux 4.0 or newer is needed")
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
            tx_reader: TxReader::Kernel,
            wake: Wake::Level,
            // A packet is sent when it is written.
            tx_time: TxTime::Coarse,
            ..plain(mtu.or(kernel_mtu).unwrap_or(1500))
        };
        Ok(Queue::over(attached, caps))
    }

    /// A queue over a descriptor that keeps the bounds of packets.
    pub fn over(Attached { file, name, control }: Attached, caps: Caps) -> Queue {
        Queue {
            stats: DeviceStats { name: name.clone(), ..DeviceStats::default() },
            file,
            name,
            control,
            caps,
            health: Health::default(),
            is_drained: false,
            is_blocked: false,
        }
    }

    /// The device refused a frame, which stays queued.
    pub fn note_refusal(&mut self) {
        self.is_blocked = true;
        self.stats.tx_refusals += 1;
    }

    /// The descriptor is level-triggered: readable while a packet is queued.
    pub fn wake_fd(&self) -> WakeFd {
        let interest = match self.is_blocked {
            true => Interest::ReadableOrWritable,
            false => Interest::Readable,
        };
        WakeFd { fd: self.file.as_raw_fd(), interest }
    }

    pub fn stats(&self) -> DeviceStats {
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
