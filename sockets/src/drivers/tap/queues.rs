//! A multi-queue TAP: opening its queues, and how the kernel distributes packets over them.

use std::io;
use std::os::fd::AsFd;

use fulmar_stack::base::{Medium, OwnerKey};

use super::attach::Attached;
use super::{Tap, TapConfig};
use crate::drivers::{OpenError, steering, sys};

impl Tap {
    /// Opens `queues` queues of one interface, each the device of one shard.
    ///
    /// Where this process may load a program for the kernel (CAP_BPF), the kernel sends each packet to the
    /// queue of the shard that owns its flow. Without it, or with [`TapConfig::steer`] off, the kernel sends
    /// a packet to the queue that last sent a packet of its flow, or to a queue of its choice if no queue
    /// has for three seconds. Shards hand over misdirected packets.
    /// [`DeviceStats::path`](fulmar_stack::device::DeviceStats::path) reports which of the two is in use.
    ///
    /// # Errors
    /// As [`Tap::open`]; also if the interface was created without IFF_MULTI_QUEUE.
    pub fn open_queues(config: &TapConfig, queues: u16) -> Result<Vec<Tap>, OpenError> {
        if queues < 2 {
            return Ok(vec![Tap::open(config)?]);
        }
        let attached = Attached::to_queues(&config.name, queues, Medium::Ethernet)?;
        let taps = attached.into_iter().map(|a| Tap::of_frames(a, config, queues));
        let mut taps = taps.collect::<Result<Vec<Tap>, _>>()?;
        if let Some(tap) = taps.first() {
            // The program of an earlier owner may still be attached.
            let _ = sys::tun_set_steering(tap.file.as_fd(), None);
        }
        let steered = match (config.steer, taps.first_mut()) {
            (true, Some(tap)) => tap.try_to_steer(queues),
            _ => "by the queue that sent last, as configured".to_owned(),
        };
        for tap in &mut taps {
            tap.queues_path = format!("; steered {steered}");
        }
        Ok(taps)
    }

    /// Attaches the steering program, if the kernel allows it. Returns how packets are steered, for
    /// `DeviceStats::path`. Until [`Device::attach`] sets the key, all packets go to the first queue.
    fn try_to_steer(&mut self, queues: u16) -> String {
        match self.steer(queues, &OwnerKey::new([0; OwnerKey::WORDS])) {
            Ok(()) => {
                self.steered = Some(queues);
                "to the owner of each flow".to_owned()
            }
            Err(e) => format!(
                "by the queue that sent last, because the kernel rejects the BPF program ({e}): to steer to owners, \
                 run as root or with CAP_BPF and CAP_NET_ADMIN"
            ),
        }
    }

    /// Replaces the steering program by one with this key.
    pub(super) fn steer(&self, queues: u16, key: &OwnerKey) -> io::Result<()> {
        let program = sys::load_socket_program(&steering::program(queues, key))?;
        sys::tun_set_steering(self.file.as_fd(), Some(program.as_fd()))
    }
}
