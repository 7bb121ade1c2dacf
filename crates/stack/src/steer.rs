//! Which shard of a stack a packet is for, and how it gets there.
//!
//! A TCP flow belongs to the shard that the hash of its two ends names ([`fulmar_base::OwnerKey`]), whatever
//! queue its packets come on; flows never move. A datagram belongs to a shard that has a socket on its
//! port; if several have one, the hash decides again, so that one peer always meets the same socket.
//! Ping sockets live on the first shard. What a neighbour answers is heard by all.

use std::sync::Arc;

use fulmar_base::{Counter, DropReason, FlowKey, Instant, Probe};
use fulmar_ip::{Delivered, EchoReply, QuotedError};
use fulmar_mbuf::Purpose;
use fulmar_netdev::{Packet, Peek};
use fulmar_wire::{eth, protocol};

use crate::handoff::{Handed, Handoff, OVERHEARD_BYTES, Overheard};
use crate::shard::Shard;
use crate::udp_calls::ports_of;

/// What one step takes from the ring at most; more waits for the next.
const TAKE: usize = 256;

/// The shard where ping sockets live.
const PING_SHARD: u16 = 0;

impl<P: Probe> Shard<P> {
    /// Gives the shard its way to the others. Once, before it is used.
    pub fn join(&mut self, handoff: Handoff) {
        debug_assert_eq!(handoff.shards(), self.shards);
        self.handoff = Some(Box::new(handoff));
    }

    /// The shard that owns a flow.
    pub(crate) fn owner_of(&self, key: &FlowKey) -> u16 {
        self.secret.owner().owner(key, self.shards)
    }

    /// Whether another shard owns the flow, and which.
    #[inline]
    pub(crate) fn is_stray(&self, key: &FlowKey) -> Option<u16> {
        if self.shards == 1 {
            return None;
        }
        Some(self.owner_of(key)).filter(|owner| *owner != self.id)
    }

    /// Hands a packet that came on the wrong queue to its owner.
    pub(crate) fn put_aside(&mut self, owner: u16, packet: Delivered) {
        self.hand(owner, Handed::Packet(packet));
    }

    fn hand(&mut self, to: u16, what: Handed) {
        let refused = match &mut self.handoff {
            Some(handoff) => handoff.hand(to, what).err(),
            None => Some(what),
        };
        let Some(what) = refused else {
            return self.net.counters.count(Counter::WrongQueue);
        };
        self.net.counters.drop_packet(DropReason::WrongQueueFull);
        match what {
            Handed::Packet(d) => self.net.pool.free(d.chain),
            Handed::Echo(e) => self.net.pool.free(e.payload),
            Handed::Error(_) | Handed::Overheard(_) => {}
        }
    }

    /// Takes what other shards have received for this one.
    #[inline(never)]
    pub(crate) fn take_handed(&mut self, now: Instant) -> usize {
        let mut taken = 0;
        while taken < TAKE
            && let Some(what) = self.handoff.as_mut().and_then(|h| h.take())
        {
            taken += 1;
            match what {
                Handed::Packet(d) if d.protocol == protocol::TCP => self.tcp_input(now, d),
                Handed::Packet(d) => self.udp_input(now, d),
                Handed::Error(e) => self.icmp_error_here(now, e),
                Handed::Echo(r) => self.echo_reply(r),
                Handed::Overheard(o) => self.listen_to(now, &o),
            }
        }
        taken
    }

    /// Whether another shard has handed something over.
    pub(crate) fn has_handed(&self) -> bool {
        self.handoff.as_ref().is_some_and(|h| !h.is_empty())
    }

    /// How to look for work from outside of the lock: at the device, and at what others hand over.
    pub(crate) fn peek(&mut self) -> Option<Arc<dyn Peek>> {
        let device = self.device().peek()?;
        Some(match &self.handoff {
            Some(handoff) => handoff.peek_beside(device),
            None => device,
        })
    }

    /// The shards that were handed something since the last call, a bit each.
    pub(crate) fn take_told(&mut self) -> u32 {
        self.handoff.as_mut().map_or(0, |h| h.take_told())
    }

    /// The shard that has the socket for a datagram, if it is another.
    pub(crate) fn owner_of_datagram(&self, d: &Delivered) -> Option<u16> {
        self.port_elsewhere(&ports_of(d)?)
    }

    fn port_elsewhere(&self, key: &FlowKey) -> Option<u16> {
        let owners = self.handoff.as_ref()?.ports.owners(key.local_port);
        let own = 1 << self.id;
        if owners & !own == 0 {
            return None;
        }
        let by_hash = self.owner_of(key);
        if owners >> by_hash & 1 == 1 {
            return Some(by_hash).filter(|owner| *owner != self.id);
        }
        (owners & own == 0).then(|| owners.trailing_zeros() as u16)
    }

    /// Whether another shard of the stack has a datagram socket on a port.
    pub fn has_port_elsewhere(&self, port: u16) -> bool {
        let own = 1u32 << self.id;
        self.handoff.as_ref().is_some_and(|h| h.ports.owners(port) & !own != 0)
    }

    /// An ICMP error, for whoever owns what it quotes.
    pub(crate) fn icmp_error(&mut self, now: Instant, e: QuotedError) {
        let elsewhere = match e.protocol {
            _ if self.shards == 1 => None,
            protocol::TCP => self.is_stray(&e.flow()),
            protocol::UDP => self.port_elsewhere(&e.flow()),
            _ => Some(PING_SHARD).filter(|s| *s != self.id),
        };
        match elsewhere {
            Some(owner) => self.hand(owner, Handed::Error(e)),
            None => self.icmp_error_here(now, e),
        }
    }

    /// An answer to an echo request, for the shard of the ping sockets.
    pub(crate) fn steer_echo(&mut self, r: EchoReply) {
        match self.id {
            PING_SHARD => self.echo_reply(r),
            _ => self.hand(PING_SHARD, Handed::Echo(r)),
        }
    }

    /// Lets the other shards hear what a neighbour answers: whoever asked may be any of them.
    pub(crate) fn share_answer(&mut self, p: &Packet) {
        let Some(front) = p.chain.front().map(|m| m.as_slice()) else { return };
        if p.chain.len() > OVERHEARD_BYTES || front.len() < p.chain.len() || !is_answer(front) {
            return;
        }
        for shard in (0..self.shards).filter(|s| *s != self.id) {
            let Some(copy) = Overheard::of(front) else { return };
            let is_lost = match &mut self.handoff {
                Some(handoff) => handoff.hand(shard, Handed::Overheard(copy)).is_err(),
                None => true,
            };
            if is_lost {
                // It will ask again.
                self.net.counters.drop_packet(DropReason::WrongQueueFull);
            }
        }
    }

    fn listen_to(&mut self, now: Instant, heard: &Overheard) {
        let bytes = heard.as_slice();
        let Ok(mut chain) = self.net.pool.alloc_chain(bytes.len(), 0, Purpose::Control) else {
            return self.net.counters.drop_packet(DropReason::NoBuffer);
        };
        chain.fill([bytes]);
        self.input_here(now, Packet::new(chain));
    }
}

/// An ARP reply, a neighbour advertisement or a router advertisement (RFC 826, RFC 4861). Requests are
/// answered by the shard that they came to.
fn is_answer(frame: &[u8]) -> bool {
    const ARP_REPLY: u8 = 2;
    const ROUTER: u8 = 134;
    const NEIGHBOUR: u8 = 136;
    const OPERATION: usize = eth::HEADER_BYTES + 6;
    const NEXT_HEADER: usize = eth::HEADER_BYTES + 6;
    const ICMP_TYPE: usize = eth::HEADER_BYTES + 40;
    let at = |i: usize| frame.get(i).copied();
    match (at(12), at(13)) {
        (Some(0x08), Some(0x06)) => {
            (at(OPERATION), at(OPERATION + 1)) == (Some(0), Some(ARP_REPLY))
        }
        (Some(0x86), Some(0xdd)) => {
            at(NEXT_HEADER) == Some(protocol::ICMPV6)
                && matches!(at(ICMP_TYPE), Some(ROUTER | NEIGHBOUR))
        }
        _ => false,
    }
}
