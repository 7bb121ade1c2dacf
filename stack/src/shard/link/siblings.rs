//! Hand-offs between the shards of a stack: packets that were received on another shard's queue, and neighbour
//! updates for all. They leave and come as data; the runtime carries them.
//!
//! [`Ports`] says which shards have a datagram socket on a port, since datagram sockets belong to no flow.
//! It is read and written without a lock.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use core::net::SocketAddr;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::base::{FlowKey, OwnerKey};
use crate::device::Packet;
use crate::ip::{Delivered, EchoReply, EchoRequest, QuotedError};
use crate::wire::{eth, protocol};

/// Most shards of one stack: one for each bit of a word.
pub const MAX_SHARDS: usize = 32;

/// Hand-offs received in one step at most; more wait for the next.
pub(in crate::shard) const MAX_INCOMING: usize = 256;

/// Hand-offs sent by one call or step at most; more are dropped.
const MAX_OUTGOING: usize = 512;

/// Longest frame of a neighbour update.
pub(in crate::shard) const NEIGHBOUR_UPDATE_BYTES: usize = 128;

/// A neighbour update (ARP reply or neighbour advertisement) received by another shard.
pub struct NeighbourUpdate {
    bytes: [u8; NEIGHBOUR_UPDATE_BYTES],
    len: usize,
}

impl NeighbourUpdate {
    /// A copy of a short frame.
    pub fn of(frame: &[u8]) -> Option<NeighbourUpdate> {
        let mut bytes = [0; NEIGHBOUR_UPDATE_BYTES];
        bytes.get_mut(..frame.len())?.copy_from_slice(frame);
        Some(NeighbourUpdate { bytes, len: frame.len() })
    }

    /// The frame.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

/// A hand-off.
#[allow(clippy::large_enum_variant, reason = "stored in the slots of the ring: no heap per packet")]
pub enum HandOff {
    /// A packet of a flow that the receiver owns, as ip delivered it.
    Packet(Delivered),
    /// An error about such a flow.
    Error(QuotedError),
    /// An answer for a ping socket.
    Echo(EchoReply),
    /// An echo request to an address of another host.
    EchoRequest(EchoRequest),
    /// A neighbour update.
    NeighbourUpdate(NeighbourUpdate),
}

/// A hand-off for another shard.
pub struct Outgoing {
    /// The shard.
    pub to: u16,
    /// The hand-off.
    pub what: HandOff,
}

/// Which shards have a datagram socket on which port.
pub struct Ports(Box<[AtomicU32]>);

impl Default for Ports {
    fn default() -> Self {
        Ports((0..=u16::MAX).map(|_| AtomicU32::new(0)).collect())
    }
}

impl Ports {
    fn word(&self, port: u16) -> &AtomicU32 {
        &self.0[usize::from(port)]
    }

    /// A bit for each shard that has the port.
    #[inline]
    pub fn owners(&self, port: u16) -> u32 {
        self.word(port).load(Ordering::Relaxed)
    }

    /// The shard has a socket on the port.
    pub fn add(&self, port: u16, shard: u16) {
        self.word(port).fetch_or(1 << shard, Ordering::Relaxed);
    }

    /// The shard has none any more.
    pub fn remove(&self, port: u16, shard: u16) {
        self.word(port).fetch_and(!(1 << shard), Ordering::Relaxed);
    }

    /// Takes a port that no other shard has.
    pub fn claim(&self, port: u16, shard: u16) -> bool {
        let own = 1 << shard;
        let taken = self.word(port).compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed);
        taken.is_ok() || taken == Err(own)
    }
}

/// The shard where ping sockets live.
pub(in crate::shard) const PING_SHARD: u16 = 0;

/// Which flows a shard owns.
#[derive(Clone, Copy)]
pub(crate) struct FlowOwnership {
    id: u16,
    shards: u16,
    owner: OwnerKey,
}

impl FlowOwnership {
    pub(crate) fn owns(&self, key: &FlowKey) -> bool {
        self.owner_of(key) == self.id
    }

    fn owner_of(&self, key: &FlowKey) -> u16 {
        self.owner.owner(key, self.shards)
    }
}

/// A shard's place in its stack: ownership of flows and ports, and hand-offs to and from other shards.
pub struct Siblings {
    ownership: FlowOwnership,
    /// Set once the shard has joined others.
    ports: Option<Arc<Ports>>,
    /// Hand-offs from other shards, for the next step.
    incoming: VecDeque<HandOff>,
    /// Hand-offs to other shards, in order.
    outgoing: VecDeque<Outgoing>,
    /// Entries of `outgoing` that are not packets.
    unasked: usize,
}

impl Siblings {
    pub(crate) fn new(id: u16, shards: u16, owner: OwnerKey) -> Siblings {
        let (incoming, outgoing) = (VecDeque::new(), VecDeque::new());
        let ownership = FlowOwnership { id, shards, owner };
        Siblings { ownership, ports: None, incoming, outgoing, unasked: 0 }
    }

    /// Makes the shard one of several, which share a table of ports. Once, before it is used.
    pub fn join(&mut self, ports: Arc<Ports>) {
        self.ports = Some(ports);
    }

    /// The shard's number in its stack.
    pub fn id(&self) -> u16 {
        self.ownership.id
    }

    #[inline]
    pub(crate) fn is_alone(&self) -> bool {
        self.ownership.shards == 1
    }

    /// The shard that owns a flow.
    pub(crate) fn owner_of(&self, key: &FlowKey) -> u16 {
        self.ownership.owner_of(key)
    }

    /// The shard that receives a sender's datagrams to sockets that are bound to every port, whichever of them it
    /// writes to.
    pub fn owner_of_sender(&self, sender: SocketAddr) -> u16 {
        self.owner_of(&FlowKey::new(sender, sender))
    }

    /// Which flows the shard owns.
    pub(crate) fn ownership(&self) -> FlowOwnership {
        self.ownership
    }

    /// Whether another shard owns the flow, and which.
    #[inline]
    pub(crate) fn owner_elsewhere(&self, key: &FlowKey) -> Option<u16> {
        if self.is_alone() {
            return None;
        }
        Some(self.owner_of(key)).filter(|owner| *owner != self.ownership.id)
    }

    /// The shard that has the socket for a datagram of a flow, if it is another.
    pub(crate) fn bound_elsewhere(&self, key: &FlowKey) -> Option<u16> {
        let ports = self.ports.as_ref()?;
        let (owners, by_hash) = match ports.owners(key.local_port) {
            // Sockets that are bound to every port.
            0 => (ports.owners(0), self.owner_of_sender(key.remote())),
            owners => (owners, self.owner_of(key)),
        };
        let own = 1 << self.ownership.id;
        if owners & !own == 0 {
            return None;
        }
        if owners >> by_hash & 1 == 1 {
            return Some(by_hash).filter(|owner| *owner != self.ownership.id);
        }
        (owners & own == 0).then(|| owners.trailing_zeros() as u16)
    }

    /// Whether another shard of the stack has a datagram socket on a port.
    pub fn has_port_elsewhere(&self, port: u16) -> bool {
        let own = 1u32 << self.ownership.id;
        self.ports.as_ref().is_some_and(|ports| ports.owners(port) & !own != 0)
    }

    /// Takes a port that no other shard has.
    pub(crate) fn claims_port(&self, port: u16) -> bool {
        self.ports.as_ref().is_none_or(|ports| ports.claim(port, self.ownership.id))
    }

    /// The shard has a datagram socket on a port.
    pub(crate) fn add_port(&self, port: u16) {
        if let Some(ports) = &self.ports {
            ports.add(port, self.ownership.id);
        }
    }

    /// The shard has none any more.
    pub(crate) fn remove_port(&self, port: u16) {
        if let Some(ports) = &self.ports {
            ports.remove(port, self.ownership.id);
        }
    }

    /// Queues a hand-off for another shard.
    #[allow(clippy::result_large_err, reason = "returned by value: no heap per packet")]
    pub(crate) fn hand_over(&mut self, to: u16, what: HandOff) -> Result<(), HandOff> {
        // Bounds hand-offs that any host can cause, such as echo replies and neighbour updates: a flood leaves space
        // for packets.
        let is_unasked = !matches!(what, HandOff::Packet(_));
        let is_full =
            self.outgoing.len() >= MAX_OUTGOING || is_unasked && self.unasked >= MAX_OUTGOING / 4;
        if self.ports.is_none() || is_full {
            return Err(what);
        }
        self.unasked += usize::from(is_unasked);
        self.outgoing.push_back(Outgoing { to, what });
        Ok(())
    }

    /// Copies the answer of a neighbour to the other shards, any of which may have asked. Returns how many had no
    /// space: they will ask again.
    pub(crate) fn share_answer(&mut self, p: &Packet) -> usize {
        let Some(front) = p.chain.front().map(|m| m.as_slice()) else { return 0 };
        if p.chain.len() > NEIGHBOUR_UPDATE_BYTES
            || front.len() < p.chain.len()
            || !is_answer(front)
        {
            return 0;
        }
        let own = self.ownership.id;
        let others = (0..self.ownership.shards).filter(|shard| *shard != own);
        let copies = others.filter_map(|shard| Some((shard, NeighbourUpdate::of(front)?)));
        let refused =
            |(shard, copy)| self.hand_over(shard, HandOff::NeighbourUpdate(copy)).is_err();
        copies.map(refused).filter(|is_lost| *is_lost).count()
    }

    /// The next hand-off for another shard. To be taken after each step and call.
    pub fn pop_outgoing(&mut self) -> Option<Outgoing> {
        let out = self.outgoing.pop_front()?;
        self.unasked -= usize::from(!matches!(out.what, HandOff::Packet(_)));
        Some(out)
    }

    #[inline]
    pub(crate) fn has_outgoing(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Queues a hand-off of another shard for the next step. Refused if a step's worth waits, or if the shard
    /// has not joined others.
    ///
    /// # Errors
    /// The hand-off.
    #[allow(clippy::result_large_err, reason = "as above")]
    pub fn receive_hand_off(&mut self, what: HandOff) -> Result<(), HandOff> {
        if !self.has_hand_off_space() {
            return Err(what);
        }
        self.incoming.push_back(what);
        Ok(())
    }

    /// Whether [`Siblings::receive_hand_off`] takes something.
    pub fn has_hand_off_space(&self) -> bool {
        self.ports.is_some() && self.incoming.len() < MAX_INCOMING
    }

    /// Takes everything that holds packets.
    pub(crate) fn take_all(&mut self) -> Siblings {
        core::mem::replace(
            self,
            Siblings::new(self.ownership.id, self.ownership.shards, self.ownership.owner),
        )
    }

    /// The oldest hand-off of other shards.
    pub(crate) fn take(&mut self) -> Option<HandOff> {
        self.incoming.pop_front()
    }

    pub(crate) fn has_incoming(&self) -> bool {
        !self.incoming.is_empty()
    }
}

/// An ARP reply, or a neighbour advertisement that was sent on the link: its hop limit is 255 (RFC 826, RFC 4861
/// section 7.1.2). Requests are answered by the shard that they came to. A router's advertisements change nothing.
fn is_answer(frame: &[u8]) -> bool {
    const ARP_REPLY: u8 = 2;
    const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
    const NEVER_FORWARDED: u8 = 255;
    const OPERATION: usize = eth::HEADER_BYTES + 6;
    const NEXT_HEADER: usize = eth::HEADER_BYTES + 6;
    const HOP_LIMIT: usize = eth::HEADER_BYTES + 7;
    const ICMP_TYPE: usize = eth::HEADER_BYTES + 40;
    let at = |i: usize| frame.get(i).copied();
    match (at(12), at(13)) {
        (Some(0x08), Some(0x06)) => {
            (at(OPERATION), at(OPERATION + 1)) == (Some(0), Some(ARP_REPLY))
        }
        (Some(0x86), Some(0xdd)) => {
            at(NEXT_HEADER) == Some(protocol::ICMPV6)
                && at(HOP_LIMIT) == Some(NEVER_FORWARDED)
                && at(ICMP_TYPE) == Some(NEIGHBOUR_ADVERTISEMENT)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update() -> HandOff {
        HandOff::NeighbourUpdate(NeighbourUpdate::of(&[1; 60]).unwrap())
    }

    fn packet() -> HandOff {
        HandOff::Packet(Delivered {
            src: core::net::Ipv4Addr::LOCALHOST.into(),
            dst: core::net::Ipv4Addr::LOCALHOST.into(),
            zone: 0,
            protocol: protocol::UDP,
            chain: crate::mbuf::Chain::new(),
            offload: Default::default(),
            ip_header: crate::ip::SavedHeader::EMPTY,
            is_group: false,
            dscp_ecn: 0,
            hop_limit: 64,
        })
    }

    fn echo() -> HandOff {
        HandOff::Echo(EchoReply {
            ident: 1,
            seq: 1,
            hop_limit: 64,
            from: core::net::Ipv4Addr::LOCALHOST.into(),
            payload: crate::mbuf::Chain::new(),
        })
    }

    #[test]
    fn neither_direction_grows_without_bound_and_answers_leave_room_for_packets() {
        let owner = crate::base::Secrets::for_simulation(1).owner();
        let mut siblings = Siblings::new(0, 2, owner);
        assert!(
            siblings.hand_over(1, update()).is_err()
                && siblings.receive_hand_off(update()).is_err()
        );
        siblings.join(Arc::default());
        let answers =
            (0..2 * MAX_OUTGOING).filter(|_| siblings.hand_over(1, update()).is_ok()).count();
        // Hand-offs other than packets get a quarter of the space.
        assert!(siblings.hand_over(1, echo()).is_err());
        let packets =
            (0..2 * MAX_OUTGOING).filter(|_| siblings.hand_over(1, packet()).is_ok()).count();
        assert_eq!((answers, answers + packets), (MAX_OUTGOING / 4, MAX_OUTGOING));
        let taken =
            (0..2 * MAX_INCOMING).filter(|_| siblings.receive_hand_off(update()).is_ok()).count();
        assert_eq!(taken, MAX_INCOMING);
        while siblings.pop_outgoing().is_some() {}
        // Packets leave space for the others, too.
        (0..MAX_OUTGOING / 2).for_each(|_| assert!(siblings.hand_over(1, packet()).is_ok()));
        assert!(siblings.hand_over(1, echo()).is_ok());
        while siblings.pop_outgoing().is_some() {}
        while siblings.take().is_some() {}
        assert!(
            siblings.hand_over(1, update()).is_ok() && siblings.receive_hand_off(update()).is_ok()
        );
    }

    #[test]
    fn only_answers_of_neighbours_are_copied() {
        let frame = |changes: &[(usize, u8)]| {
            let mut frame = [0; 78];
            for (at, byte) in [(12, 0x86), (13, 0xdd), (20, protocol::ICMPV6), (21, 255), (54, 136)]
                .iter()
                .chain(changes)
            {
                frame[*at] = *byte;
            }
            frame
        };
        assert!(is_answer(&frame(&[])));
        // From another network, of a router, a solicitation, UDP.
        for change in [(21, 254), (54, 134), (54, 135), (20, protocol::UDP)] {
            assert!(!is_answer(&frame(&[change])), "{change:?}");
        }
        let arp = |operation| frame(&[(12, 0x08), (13, 0x06), (20, 0), (21, operation)]);
        assert!(is_answer(&arp(2)) && !is_answer(&arp(1)));
        assert!(!is_answer(&[]));
    }

    #[test]
    fn a_frame_too_long_for_a_neighbour_update_is_not_copied() {
        assert!(NeighbourUpdate::of(&[0; NEIGHBOUR_UPDATE_BYTES + 1]).is_none());
    }

    #[test]
    fn a_port_that_a_shard_has_is_claimed_by_no_other() {
        let ports = Ports::default();
        assert!(ports.claim(53, 1));
        assert!(ports.claim(53, 1));
        assert!(!ports.claim(53, 0));
        ports.add(53, 0);
        assert_eq!(ports.owners(53), 0b11);
        ports.remove(53, 1);
        ports.remove(53, 0);
        assert!(ports.claim(53, 0));
    }
}
