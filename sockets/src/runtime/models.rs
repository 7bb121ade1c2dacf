//! How threads run a shard together, in every order of their steps (`make loom`): the host as it is, over a device of a
//! few frames and a kernel in which no time passes ([`fulmar_stack::models`]). Each model says which faults, put in by hand,
//! it was seen to find.

mod completion;
mod handoff;
mod inbox;
mod leader;

mod wire;

use std::sync::Arc;

use fulmar_stack::base::SlotId;
use fulmar_stack::models::Model;
use fulmar_stack::socket::{Ready, SocketError};

use crate::runtime::account::Ledger;
use crate::runtime::host::Host;
use crate::runtime::limit::Limit;
use crate::runtime::watched::WatchedShard;
use wire::{PORTS, Wire};

/// The models of this room.
pub const MODELS: &[&[Model]] =
    &[leader::MODELS, handoff::MODELS, inbox::MODELS, completion::MODELS];

/// A stack over a wire, with a datagram socket at each port.
#[derive(Clone)]
struct World {
    host: Arc<Host>,
    wire: Arc<Wire>,
    sockets: [SlotId; PORTS.len()],
}

impl World {
    fn new(is_level_triggered: bool) -> World {
        let wire = Wire::new(is_level_triggered);
        let host = Arc::new(
            Host::new(WatchedShard::new(wire::shard(&wire, 0, 1)), Ledger::off())
                .expect("descriptors"),
        );
        let sockets = PORTS.map(|port| bind(&host, port));
        World { host, wire, sockets }
    }
}

fn bind(host: &Host, port: u16) -> SlotId {
    let to = (wire::OWN, port).into();
    host.call(|shard, _| shard.udp().bind(to, Default::default())).expect("a socket")
}

/// The steps of a program's thread that reads from a socket.
fn read(host: &Host, socket: SlotId) -> Result<(), SocketError> {
    let receive = |shard: &mut WatchedShard, _| shard.udp().receive(socket);
    let d = host.wait(socket, Ready::READABLE, Limit::Forever, receive)?;
    host.call(|shard, _| Ok(shard.free(d.payload)))
}
