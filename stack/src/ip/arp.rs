//! ARP (RFC 826, RFC 1122 section 2.3.2, RFC 5227 section 2.4).

use core::net::{IpAddr, Ipv4Addr};

use crate::base::{DropReason, EtherAddr, Offload};
use crate::mbuf::{Chain, NoBuffer, Pool, Purpose};
use crate::route::{Advertisement, Learned};
use crate::wire::arp::{self, Operation, Packet};
use crate::wire::eth;

use crate::ip::engine::Ip;
use crate::ip::frame::{Context, Frame, HEADROOM_BYTES, pull};
use crate::ip::{Egress, FrameSink, Verdict};

impl Ip {
    /// Processes an ARP packet: updates the neighbour table and answers requests for own addresses.
    ///
    /// Only a request for an own address creates a neighbour entry, because its sender is about to
    /// send to this host. Any other packet only updates an existing entry, so that gratuitous ARP
    /// cannot fill the table.
    pub(crate) fn arp_input<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        frame: &mut Frame,
    ) -> Result<Verdict, DropReason> {
        let bytes = pull(&mut frame.chain, arp::BYTES, cx.pool)?;
        let packet = Packet::parse(bytes).map_err(|_| DropReason::ArpInvalid)?;
        if !packet.sender_ether.is_unicast() {
            return Err(DropReason::ArpInvalid);
        }
        let (sender, target) = (IpAddr::V4(packet.sender_ip), IpAddr::V4(packet.target_ip));
        if packet.sender_ether == self.config.ether {
            return Ok(Verdict::Consumed);
        }
        if self.is_local(sender) {
            self.defend(cx, sender);
            return Err(DropReason::DuplicateAddress);
        }
        // A probe or announcement of another host (RFC 5227 section 1.1) is not answered.
        let is_question = !sender.is_unspecified() && sender != target;
        let is_for_us = self.is_local(target) || (is_question && self.answers_for(target));
        let learned = self.learn_from_arp(cx, &packet, is_for_us, frame.is_group);
        match packet.operation {
            Operation::Request if is_for_us => self.arp_reply(cx, &packet)?,
            Operation::Request | Operation::Reply => {}
        }
        match learned {
            Learned::Usable | Learned::Nothing => Ok(Verdict::Consumed),
            Learned::Claim => Err(DropReason::NeighbourClaim),
        }
    }

    fn learn_from_arp<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        packet: &Packet,
        is_for_us: bool,
        is_group: bool,
    ) -> Learned {
        let sender = IpAddr::V4(packet.sender_ip);
        if !self.is_on_link(sender) || self.is_broadcast(sender) {
            return Learned::Nothing;
        }
        let is_request = packet.operation == Operation::Request;
        let learned = if is_request && is_for_us {
            self.neighbours.on_solicit(sender, packet.sender_ether, cx.now)
        } else {
            // A unicast reply counts as solicited; ARP has no other sign of it.
            let solicited = !is_request && is_for_us && !is_group;
            let ether = Some(packet.sender_ether);
            let advert = Advertisement { ether, solicited, replaces: true, is_router: false };
            self.neighbours.on_advertisement(sender, advert, cx.now)
        };
        if learned == Learned::Usable {
            self.send_waiting(cx, sender);
        }
        learned
    }

    fn arp_reply<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        request: &Packet,
    ) -> Result<(), DropReason> {
        let reply = Packet {
            operation: Operation::Reply,
            sender_ether: self.config.ether,
            sender_ip: request.target_ip,
            target_ether: request.sender_ether,
            target_ip: request.sender_ip,
        };
        self.arp_output(cx, &reply, request.sender_ether)
    }

    /// Sends an ARP request for `target_ip`: by broadcast, or to `unicast` (RFC 1122 section
    /// 2.3.2.1).
    pub(crate) fn arp_request<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        target_ip: Ipv4Addr,
        unicast: Option<EtherAddr>,
    ) -> Result<(), DropReason> {
        let target = IpAddr::V4(target_ip);
        let Some(IpAddr::V4(sender_ip)) = self.addresses.source_for(target, target) else {
            return Err(DropReason::NoRoute);
        };
        let request = self.request_for(sender_ip, target_ip);
        self.arp_output(cx, &request, unicast.unwrap_or(EtherAddr::BROADCAST))
    }

    /// Sends an ARP announcement for `own` (RFC 5227 section 2.3).
    pub(crate) fn arp_announce<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        own: Ipv4Addr,
    ) -> Result<(), DropReason> {
        let announcement = self.request_for(own, own);
        self.arp_output(cx, &announcement, EtherAddr::BROADCAST)
    }

    fn request_for(&self, sender_ip: Ipv4Addr, target_ip: Ipv4Addr) -> Packet {
        Packet {
            operation: Operation::Request,
            sender_ether: self.config.ether,
            sender_ip,
            target_ether: EtherAddr::default(),
            target_ip,
        }
    }

    fn arp_output<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        packet: &Packet,
        dst: EtherAddr,
    ) -> Result<(), DropReason> {
        let header = eth::Header { dst, src: self.config.ether, ethertype: eth::ARP };
        let frame = build(&header, packet, cx.pool).map_err(|NoBuffer| DropReason::NoBuffer)?;
        let sent = cx.send(frame, Offload::default(), Egress::Device);
        sent.map_err(|_| DropReason::TxQueueFull)
    }
}

fn build(header: &eth::Header, packet: &Packet, pool: &mut Pool) -> Result<Chain, NoBuffer> {
    const BYTES: usize = eth::HEADER_BYTES + arp::BYTES;
    let mut m = pool.alloc(BYTES, HEADROOM_BYTES, Purpose::Control)?;
    let written = m.append(BYTES).and_then(|bytes| {
        let (link, body) = bytes.split_at_mut_checked(eth::HEADER_BYTES)?;
        header.emit(link).ok()?;
        packet.emit(body).ok()
    });
    match written {
        Some(()) => Ok(Chain::from(m)),
        None => {
            pool.free_mbuf(m);
            Err(NoBuffer)
        }
    }
}
