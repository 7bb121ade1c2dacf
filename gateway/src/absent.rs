//! The device of a gateway whose guest has no interface: nothing comes from it, and what is sent there is discarded.
//!
//! The loop of such a gateway has only its handlers; ports between the loopback interfaces are the
//! [`splice`](crate::splice) threads'.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use fulmar_stack::base::{Counters, EtherAddr, Instant};
use fulmar_stack::device::{Burst, Caps, Device, DeviceStats, Wake, WakeFd};
use fulmar_stack::mbuf::Pool;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::guest::DEFAULT_MTU;

/// The device.
#[derive(Debug)]
pub struct Absent {
    caps: Caps,
    /// Never readable.
    wake: EventFd,
}

impl Absent {
    /// A device of one queue.
    ///
    /// # Errors
    /// No descriptor.
    pub fn new() -> io::Result<Absent> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let ether = EtherAddr([2, 0, 0, 0, 0, 1]);
        Ok(Absent {
            caps: Caps { wake: Wake::Level, ..Caps::plain(DEFAULT_MTU as usize, ether) },
            wake,
        })
    }
}

impl Device for Absent {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn tx_burst(&mut self, _: Instant, pool: &mut Pool, b: &mut Burst, _: &mut Counters) -> usize {
        let count = b.len();
        b.clear(pool);
        count
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

    fn stats(&self) -> DeviceStats {
        DeviceStats { name: "no interface".to_owned(), ..DeviceStats::default() }
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        Some(WakeFd::readable(self.wake.as_fd().as_raw_fd()))
    }
}
