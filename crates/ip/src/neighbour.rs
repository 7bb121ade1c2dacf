//! Asking neighbours, and giving up on them: what ARP and neighbour discovery share.

use core::net::IpAddr;

use fulmar_base::{Counters, DropReason, EtherAddr, Instant};
use fulmar_mbuf::Pool;
use fulmar_wire::eth;

use crate::engine::Ip;
use crate::frame::{Context, first};
use crate::quote::Quoted;
use crate::{ErrorKind, FrameSink};

impl Ip {
    /// Sends a question for `ip`: to `unicast`, else to everybody who might own it.
    pub(crate) fn solicit<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        ip: IpAddr,
        unicast: Option<EtherAddr>,
    ) {
        let sent = match ip {
            IpAddr::V4(target) => self.arp_request(cx, target, unicast),
            IpAddr::V6(target) => self.neighbour_solicitation(cx, target, unicast),
        };
        if let Err(reason) = sent {
            cx.counters.drop_packet(reason);
        }
    }

    /// Nobody answers for `next_hop`: what waited for it is lost, and its flows are told (RFC 4861
    /// section 7.2.2, RFC 1122 section 2.4).
    pub(crate) fn fail_waiting<S: FrameSink>(&mut self, cx: &mut Context<'_, S>, next_hop: IpAddr) {
        while let Some(held) = self.waiting.pop(next_hop) {
            let packet = first(&held.chain).get(eth::HEADER_BYTES..).unwrap_or(&[]);
            if let Some(quoted) = Quoted::parse(packet, next_hop.is_ipv4()) {
                self.report_failed(quoted.error(ErrorKind::NoNeighbour, self.config.zone));
            }
            cx.discard(held.chain, DropReason::NeighbourUnreachable);
        }
    }

    /// Tells the link our addresses, so that neighbours with an older Ethernet address for them
    /// change it (RFC 5227 section 2.3, RFC 4861 section 7.2.6). For use after a start; optional.
    pub fn announce<S: FrameSink>(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        counters: &mut Counters,
        out: &mut S,
    ) {
        let cx = &mut Context { now, pool, counters, out };
        for i in 0..self.addresses.iter().count() {
            let own = self.addresses.iter().nth(i).map(|a| a.addr);
            let sent = match own {
                Some(IpAddr::V4(own)) => self.arp_announce(cx, own),
                Some(IpAddr::V6(own)) => self.neighbour_announcement(cx, own),
                None => Ok(()),
            };
            if let Err(reason) = sent {
                cx.counters.drop_packet(reason);
            }
        }
    }
}
