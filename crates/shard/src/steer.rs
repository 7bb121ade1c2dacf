//! Which shard of a stack a packet is for.
//!
//! A TCP flow belongs to the shard that the hash of its two ends names ([`fulmar_base::OwnerKey`]), whatever
//! queue its packets come on; flows never move. A datagram belongs to a shard that has a socket on its
//! port; if several have one, the hash decides again, so that one peer always meets the same socket.
//! Ping sockets live on the first shard. What a neighbour answers is heard by all.

use fulmar_base::{DropReason, Instant, Probe};
use fulmar_ip::{EchoReply, EchoRequest, QuotedError};
use fulmar_mbuf::Purpose;
use fulmar_netdev::Packet;
use fulmar_wire::protocol;

use crate::shard::Shard;
use crate::siblings::{Handed, Overheard, PING_SHARD, Siblings};

impl<P: Probe> Shard<P> {
    /// The other shards of the stack: what is for them, and what they have for this one.
    pub fn siblings(&mut self) -> &mut Siblings {
        &mut self.core.siblings
    }

    /// Another shard has no room for what was for it: it is dropped.
    pub fn refuse_handed(&mut self, what: Handed) {
        self.core.net.counters.drop_packet(DropReason::HandOffFull);
        match what {
            Handed::Packet(d) => self.core.net.pool.free(d.chain),
            Handed::Echo(e) => self.core.net.pool.free(e.payload),
            Handed::EchoRequest(e) => self.core.net.pool.free(e.payload),
            // A neighbour that is asked again answers again.
            Handed::Error(_) | Handed::Overheard(_) => {}
        }
    }

    /// Hands to its owner what came on the wrong queue.
    pub(crate) fn hand(&mut self, to: u16, what: Handed) {
        if let Err(what) = self.core.siblings.hand(to, what) {
            self.refuse_handed(what);
        }
    }

    /// Takes what other shards have received for this one.
    #[inline(never)]
    pub(crate) fn take_handed(&mut self, now: Instant) -> usize {
        let mut taken = 0;
        while let Some(what) = self.core.siblings.take() {
            taken += 1;
            match what {
                Handed::Packet(d) if d.protocol == protocol::TCP => self.tcp_input(now, d),
                Handed::Packet(d) => self.udp_input(now, d),
                Handed::Error(e) => self.icmp_error_here(now, e),
                Handed::Echo(r) => self.echo_reply(r),
                Handed::EchoRequest(r) => self.echo_request(r),
                Handed::Overheard(o) => self.listen_to(now, &o),
            }
        }
        taken
    }

    /// An ICMP error, for whoever owns what it quotes.
    pub(crate) fn icmp_error(&mut self, now: Instant, e: QuotedError) {
        let elsewhere = match e.protocol {
            _ if self.core.siblings.is_alone() => None,
            protocol::TCP => self.core.siblings.owner_elsewhere(&e.flow()),
            protocol::UDP => self.core.siblings.port_elsewhere(&e.flow()),
            _ => Some(PING_SHARD).filter(|s| *s != self.core.siblings.id()),
        };
        match elsewhere {
            Some(owner) => self.hand(owner, Handed::Error(e)),
            None => self.icmp_error_here(now, e),
        }
    }

    /// An answer to an echo request, for the shard of the ping sockets.
    pub(crate) fn steer_echo(&mut self, r: EchoReply) {
        match self.core.siblings.id() {
            PING_SHARD => self.echo_reply(r),
            _ => self.hand(PING_SHARD, Handed::Echo(r)),
        }
    }

    /// An echo request to an address of another host, for the shard of the ping sockets.
    pub(crate) fn steer_echo_request(&mut self, r: EchoRequest) {
        match self.core.siblings.id() {
            PING_SHARD => self.echo_request(r),
            _ => self.hand(PING_SHARD, Handed::EchoRequest(r)),
        }
    }

    fn listen_to(&mut self, now: Instant, heard: &Overheard) {
        let bytes = heard.as_slice();
        let Ok(mut chain) = self.core.net.pool.alloc_chain(bytes.len(), 0, Purpose::Control) else {
            return self.core.net.counters.drop_packet(DropReason::NoBuffer);
        };
        chain.fill([bytes]);
        self.input_here(now, Packet::new(chain));
    }
}
