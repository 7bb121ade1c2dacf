//! Asking neighbours, and giving up on them: what ARP and neighbour discovery share.

use core::net::IpAddr;

use fulmar_base::{Counters, DropReason, Duration, EtherAddr, FlowKey, Instant};
use fulmar_mbuf::Pool;
use fulmar_route::{Resolution, Traffic};
use fulmar_wire::eth;

use crate::destination::{Path, Way};
use crate::engine::Ip;
use crate::frame::{Context, first};
use crate::quote::Quoted;
use crate::routing::hash_of_flow;
use crate::{ErrorKind, FrameSink, OutputError};

/// Time between two defences of an address (RFC 5227 section 1.1: DEFEND_INTERVAL).
const DEFEND_INTERVAL: Duration = Duration::from_secs(10);

impl Ip {
    /// Where packets to a neighbour go. Questions that only replies wait for are limited in rate.
    pub(crate) fn resolve(
        &mut self,
        next_hop: IpAddr,
        traffic: Traffic,
        now: Instant,
    ) -> Result<Resolution, (OutputError, DropReason)> {
        if traffic == Traffic::Reply
            && self.neighbours.is_unknown(next_hop, now)
            && !self.questions.take(now, &mut self.limits)
        {
            return Err((OutputError::HostUnreachable, DropReason::RateLimited));
        }
        Ok(self.neighbours.resolve(next_hop, traffic, now))
    }

    /// Whether a neighbour waits for [`Ip::confirm`].
    #[inline]
    pub fn awaits_confirmation(&self) -> bool {
        self.neighbours.has_doubts()
    }

    /// The peer of a flow of TCP acknowledged new data: the neighbour on the way forwards what is sent to
    /// it (RFC 4861 section 7.3.1). To be called while [`Ip::awaits_confirmation`].
    pub fn confirm(&mut self, now: Instant, flow: &FlowKey) {
        let (src, dst) = (flow.local_ip(), flow.remote_ip());
        let table = self.tables.table_for(Some(src));
        let hash = if self.tables.is_spread() { self.hash_of(flow) } else { 0 };
        let keys = [(dst, table, 0), (dst, table, hash)];
        let generation = self.generation();
        let known = keys.iter().find_map(|k| self.destinations.find(*k, generation, now));
        if known.is_some_and(|d| !d.in_doubt) {
            return;
        }
        if let Some(Path { way: Way::Neighbour(hop), .. }) =
            self.path_to(dst, flow.zone, (Some(src), hash), now)
            && self.neighbours.confirm(hop, now)
        {
            keys.into_iter().for_each(|k| self.destinations.forget(k));
        }
    }

    fn hash_of(&self, flow: &FlowKey) -> u64 {
        let ports = u32::from(flow.local_port) << 16 | u32::from(flow.remote_port);
        hash_of_flow(&self.next_hop_key, flow.local_ip(), flow.remote_ip(), ports)
    }

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
