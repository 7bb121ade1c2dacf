//! What is left of a shard in which a thread panicked.

use std::collections::VecDeque;

use fulmar_base::Probe;
use fulmar_netdev::gro::Gro;
use fulmar_netdev::{Burst, Device, Packet};
use fulmar_socket::SocketError;

use crate::handoff::Handoff;
use crate::host::contain;
use crate::recv_calls::PostedTable;
use crate::shard::Shard;
use crate::slab::Slab;
use crate::sockets::Socket;

/// Everything that holds a descriptor, or memory that is not the shard's own.
pub(crate) struct Remains {
    device: Box<dyn Device>,
    sockets: Slab<Socket>,
    posted: PostedTable,
    bursts: [Burst; 2],
    loopback: VecDeque<Packet>,
    gro: Option<Gro>,
    handoff: Option<Box<Handoff>>,
}

impl Remains {
    /// Drops the parts one by one: a drop that panics keeps none of the others. Not to be called under the
    /// shard's lock, since it tells those who wait for tickets.
    pub fn drop_each(self) {
        let Remains { device, mut sockets, posted, bursts, loopback, gro, handoff } = self;
        // First, so that nothing is written any more to memory that the sockets give back.
        contain(|| drop(device));
        for id in sockets.ids() {
            let socket = sockets.remove(id);
            contain(|| drop(socket));
        }
        contain(|| drop(posted));
        contain(|| drop((bursts, loopback, gro)));
        contain(|| drop(handoff));
    }
}

impl<P: Probe> Shard<P> {
    /// Takes them out of a shard whose state is unknown, and which nobody steps any more.
    pub(crate) fn abandon(&mut self) -> Remains {
        self.down = Some(SocketError::NetworkDown);
        let (device, tx, loopback) = self.net.link.abandon();
        let rx = std::mem::replace(&mut self.rx, Burst::with_capacity(0));
        Remains {
            device,
            sockets: std::mem::take(&mut self.sockets),
            posted: std::mem::take(&mut self.posted),
            bursts: [tx, rx],
            loopback,
            gro: self.gro.take(),
            handoff: self.handoff.take(),
        }
    }
}
