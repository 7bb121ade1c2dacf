//! A TAP of several queues, and which of them the kernel sends a packet to.

use std::io;
use std::os::fd::AsFd;

use fulmar_base::OwnerKey;

use super::attach::{attach, open_clone_device};
use super::{FLAGS, Tap, TapConfig, a_socket};
use crate::{OpenError, steering, sys};

impl Tap {
    /// Opens so many queues of one interface, each a device for a shard of its own.
    ///
    /// Where this process may load a program for the kernel (CAP_BPF), the kernel sends each packet to the
    /// queue of the shard that owns its flow. Elsewhere, or with [`TapConfig::steer`] off, it sends it to
    /// the queue that has last sent one of its flow, so that answers come back to the asking shard, and to a
    /// queue of its choice if none has within three seconds; shards hand over what they get of others.
    /// [`fulmar_netdev::DeviceStats::path`] says which it is.
    ///
    /// # Errors
    /// As [`Tap::open`], and for an interface that was made for one queue.
    pub fn open_queues(config: &TapConfig, queues: u16) -> Result<Vec<Tap>, OpenError> {
        if queues < 2 {
            return Ok(vec![Tap::open(config)?]);
        }
        let mut name = config.name.clone();
        let mut taps = Vec::with_capacity(usize::from(queues));
        for _ in 0..queues {
            let file = open_clone_device()?;
            name = attach(&file, &name, FLAGS | libc::IFF_MULTI_QUEUE)?;
            taps.push(Tap::set_up(file, name.clone(), a_socket(), config, queues)?);
        }
        if let Some(tap) = taps.first() {
            // A former owner of the interface may have left a program there.
            let _ = sys::tun_set_steering(tap.file.as_fd(), None);
        }
        let steered = match (config.steer, taps.first_mut()) {
            (true, Some(tap)) => tap.try_to_steer(queues),
            _ => "by the queue that sent last, as asked for".to_owned(),
        };
        for tap in &mut taps {
            tap.queues_say = format!("; steered {steered}");
        }
        Ok(taps)
    }

    /// Has the kernel send each packet to the queue of its owner, if it lets us; says how packets are
    /// steered. The key comes with the stack; until then all packets go to the first queue.
    fn try_to_steer(&mut self, queues: u16) -> String {
        match self.steer(queues, &OwnerKey::new([0; OwnerKey::WORDS])) {
            Ok(()) => {
                self.steered = Some(queues);
                "to the owner of each flow".to_owned()
            }
            Err(e) => format!(
                "by the queue that sent last, since the kernel refuses a program ({e}): to steer by owner \
                 run as root, or with CAP_BPF and CAP_NET_ADMIN"
            ),
        }
    }

    /// Gives the kernel the program with a key, in place of the one that it has.
    pub(super) fn steer(&self, queues: u16, key: &OwnerKey) -> io::Result<()> {
        let program = sys::load_socket_program(&steering::program(queues, key))?;
        sys::tun_set_steering(self.file.as_fd(), Some(program.as_fd()))
    }
}
