//! Asking neighbours, and giving up on them: what ARP and neighbour discovery share.

use core::net::IpAddr;

use fulmar_base::{Counters, DropReason, Duration, EtherAddr, Instant};
use fulmar_mbuf::Pool;
use fulmar_wire::eth;

use crate::engine::Ip;
use crate::frame::{Context, first};
use crate::quote::Quoted;
use crate::{ErrorKind, FrameSink};

/// Time between two defences of an address (RFC 5227 section 1.1: DEFEND_INTERVAL).
const DEFEND_INTERVAL: Duration = Duration::from_secs(10);

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

    /// Another station claims `own`, an address of ours: every station is told where it is, once per
    /// [`DEFEND_INTERVAL`] (RFC 5227 section 2.4(c)), so that two that both defend do not flood the
    /// link. The address is kept: it was configured.
    pub(crate) fn defend<S: FrameSink>(&mut self, cx: &mut Context<'_, S>, own: IpAddr) {
        if self.defended_at.is_some_and(|at| cx.now < at + DEFEND_INTERVAL) {
            return;
        }
        self.defended_at = Some(cx.now);
        self.announce_one(cx, own);
    }

    fn announce_one<S: FrameSink>(&mut self, cx: &mut Context<'_, S>, own: IpAddr) {
        let sent = match own {
            IpAddr::V4(own) => self.arp_announce(cx, own),
            IpAddr::V6(own) => self.neighbour_announcement(cx, own),
        };
        if let Err(reason) = sent {
            cx.counters.drop_packet(reason);
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
            if let Some(own) = own {
                self.announce_one(cx, own);
            }
        }
    }
}
