//! The state that the layers of a shard share. Each layer owns its own fields and gets the rest as arguments:
//!
//! | layer | owns |
//! |---|---|
//! | [`Core`] | configuration, keys, sockets, timers, wake-ups, siblings |
//! | [`Net`] | buffers, counters, IP with its neighbours and routes, the device link |
//! | [`Memory`] | sockets that wait for send memory or for the device |
//! | [`Tcp`](crate::shard::conn::layer::Tcp) | connections by flow, listeners, TIME-WAIT, posted receive |
//! | [`Udp`](crate::shard::dgram::layer::Udp) | bindings and header templates of datagram sockets |
//! | [`Ping`](crate::shard::icmp::ping::Ping) | identifiers of echo requests |
//! | [`Rx`](crate::shard::link::rx::Rx) | the burst that was received, batched look-up, the wait for the device |

use alloc::collections::VecDeque;

use crate::base::{DropReason, Instant, SlotId};
use crate::socket::SocketError;

use crate::shard::config::StackConfig;
use crate::shard::events::Events;
use crate::shard::link::completion_polls::CompletionPolls;
use crate::shard::link::net::Net;
use crate::shard::link::siblings::{HandOff, Siblings};
use crate::shard::memory::Memory;
use crate::shard::secret::Secret;
use crate::shard::slab::Slab;
use crate::shard::sockets::Socket;
use crate::shard::wheel::{TimerKey, Wheel};

/// What every layer uses.
pub(crate) struct Core {
    pub config: StackConfig,
    pub net: Net,
    pub sockets: Slab<Socket>,
    pub wheel: Wheel<TimerKey>,
    pub secret: Secret,
    pub events: Events,
    /// Connections that have something to send, in order.
    pub output_queue: VecDeque<SlotId>,
    pub memory: Memory,
    /// When to look again for bytes sent without a copy that another thread frees.
    pub completion_polls: CompletionPolls,
    /// Until then calls defer their output to the next step.
    pub transmit_deferred_until: Option<Instant>,
    /// The other shards of the stack.
    pub siblings: Siblings,
}

impl Core {
    /// Reports the present readiness of a socket to its watcher.
    pub(crate) fn notify(&mut self, id: SlotId) {
        self.events.notify(&mut self.sockets, id);
    }

    /// Whether a call that sends at `now` leaves its frames for the next step.
    #[inline(always)]
    pub(crate) fn defers_transmit(&self, now: Instant) -> bool {
        self.transmit_deferred_until.is_some_and(|until| now < until)
    }

    /// Whether a new socket may be opened.
    pub(crate) fn check_usable(&self) -> Result<(), SocketError> {
        if let Some(e) = self.events.down {
            return Err(e);
        }
        if self.sockets.len() >= self.config.max_sockets {
            return Err(SocketError::NoBuffer);
        }
        Ok(())
    }

    /// Puts a connection into the output queue.
    pub(crate) fn queue_output(&mut self, id: SlotId) {
        if let Ok(mut conn) = self.conn(id) {
            conn.queue_output();
        }
    }

    /// A write found no memory ([`SocketError::NoBuffer`]), or no space in the device: the socket is not writable
    /// until either is there.
    pub(crate) fn wait_to_send(&mut self, now: Instant, id: SlotId, why: SocketError) {
        let Core { memory, sockets, net, .. } = self;
        match why {
            SocketError::NoBuffer => memory.wait(now, id, sockets, net),
            _ => {
                if let Some(blocked) = sockets.get_mut(id).and_then(Socket::blocked) {
                    memory.retry_later(now, id, blocked, net);
                }
            }
        }
    }

    /// Hands a packet, an error or an echo reply over to the shard that owns it.
    pub(crate) fn hand_over(&mut self, to: u16, what: HandOff) {
        if let Err(what) = self.siblings.hand_over(to, what) {
            self.drop_hand_off(what);
        }
    }

    /// Drops a hand-off for which the other shard has no space.
    pub(crate) fn drop_hand_off(&mut self, what: HandOff) {
        self.net.counters.drop_packet(DropReason::HandOffFull);
        match what {
            HandOff::Packet(d) => self.net.pool.free(d.chain),
            HandOff::Echo(e) => self.net.pool.free(e.payload),
            HandOff::EchoRequest(e) => self.net.pool.free(e.payload),
            // The next neighbour request is answered again.
            HandOff::Error(_) | HandOff::NeighbourUpdate(_) => {}
        }
    }
}
