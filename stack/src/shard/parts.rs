//! The parts of a shard in which a thread panicked.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::IntoIter;
use core::any::Any;

use crate::base::SlotId;
use crate::device::gro::Gro;
use crate::device::{Burst, Device, Packet};
use crate::socket::SocketError;

use crate::shard::conn::posted::PostedTable;
use crate::shard::link::siblings::Siblings;
use crate::shard::slab::Slab;
use crate::shard::sockets::Socket;
use crate::shard::world::Shard;

/// Everything that holds a descriptor, or memory that is not the shard's own.
///
/// Yields its parts one by one, each to be dropped by itself: a drop that panics keeps none of the others.
pub struct ShardParts {
    device: Option<Box<dyn Device>>,
    sockets: Slab<Socket>,
    /// Sockets not yielded yet.
    ids: IntoIter<SlotId>,
    posted: Option<PostedTable>,
    packets: Option<Packets>,
    siblings: Option<Siblings>,
}

/// Packets in the queues.
struct Packets {
    _bursts: [Burst; 2],
    _loopback: VecDeque<Packet>,
    _gro: Option<Gro>,
}

impl Iterator for ShardParts {
    type Item = Box<dyn Any>;

    fn next(&mut self) -> Option<Box<dyn Any>> {
        // First, so that the device writes no more to memory that the sockets free.
        if let Some(device) = self.device.take() {
            return Some(Box::new(device));
        }
        if let Some(id) = self.ids.next() {
            return Some(Box::new(self.sockets.remove(id)));
        }
        if let Some(posted) = self.posted.take() {
            return Some(Box::new(posted));
        }
        if let Some(packets) = self.packets.take() {
            return Some(Box::new(packets));
        }
        Some(Box::new(self.siblings.take()?))
    }
}

impl Shard {
    /// Takes the parts out of a shard whose state is unknown and which is stepped no more.
    pub fn abandon(&mut self) -> ShardParts {
        self.core.events.down = Some(SocketError::NetworkDown);
        let (device, tx, loopback) = self.core.net.link.abandon();
        let rx = core::mem::replace(&mut self.rx.burst, Burst::with_capacity(0));
        ShardParts {
            device: Some(device),
            ids: self.core.sockets.ids().into_iter(),
            sockets: core::mem::take(&mut self.core.sockets),
            posted: Some(core::mem::take(&mut self.tcp.posted)),
            packets: Some(Packets {
                _bursts: [tx, rx],
                _loopback: loopback,
                _gro: self.rx.gro.take(),
            }),
            siblings: Some(self.core.siblings.take_all()),
        }
    }
}
