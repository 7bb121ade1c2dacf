//! Neighbour resolution and its failure, common to ARP and neighbour discovery.

use core::net::IpAddr;

use crate::base::{DropReason, Duration, EtherAddr, FlowKey, Instant, IpVersion, Medium};
use crate::route::{Resolution, Traffic};
use crate::wire::eth;

use crate::ip::destination::{Delivery, Key, Path};
use crate::ip::engine::Ip;
use crate::ip::frame::{Context, first};
use crate::ip::output::Refused;
use crate::ip::quote::Quoted;
use crate::ip::routing::flow_hash_of_ports;
use crate::ip::{ErrorKind, FrameSink, OutputError};

/// Minimum interval between defences of an address (RFC 5227 section 1.1: DEFEND_INTERVAL).
const DEFEND_INTERVAL: Duration = Duration::from_secs(10);

impl Ip {
    /// Resolves a neighbour. Resolution for replies only is rate-limited. Without a link layer every
    /// neighbour is the peer, and none has an entry.
    pub(crate) fn resolve(
        &mut self,
        next_hop: IpAddr,
        traffic: Traffic,
        now: Instant,
    ) -> Result<Resolution, Refused> {
        if self.config.medium == Medium::Ip {
            let (fresh_until, awaits_confirmation) = (Instant::FAR_FUTURE, false);
            return Ok(Resolution::Known { ether: Medium::PEER, fresh_until, awaits_confirmation });
        }
        if traffic == Traffic::Reply
            && self.neighbours.is_unknown(next_hop, now)
            && !self.reply_resolutions.take(now, &mut self.limit_jitter)
        {
            let reason = DropReason::RateLimited;
            return Err(Refused { error: OutputError::HostUnreachable, reason });
        }
        Ok(self.neighbours.resolve(next_hop, traffic, now))
    }

    /// Whether a neighbour awaits [`Ip::confirm`].
    #[inline]
    pub fn awaits_confirmation(&self) -> bool {
        self.neighbours.awaits_confirmation()
    }

    /// Reachability confirmation from TCP: the peer of `flow` acknowledged new data, so the next
    /// hop forwards packets (RFC 4861 section 7.3.1). Call it while [`Ip::awaits_confirmation`].
    pub fn confirm(&mut self, now: Instant, flow: &FlowKey) {
        let (src, dst) = (flow.local_ip(), flow.remote_ip());
        let table = self.tables.table_for(Some(src));
        let hash = if self.tables.is_multipath() { self.flow_hash_of_key(flow) } else { 0 };
        let keys = [0, hash].map(|flow| Key { dst, table, flow });
        let generation = self.generation();
        let known =
            keys.iter().find_map(|k| self.destinations.find(*k, Traffic::Reply, generation, now));
        if known.is_some_and(|d| !d.awaits_confirmation) {
            return;
        }
        if let Some(Path { delivery: Delivery::Neighbour(hop), .. }) =
            self.path_to(Some(src), dst, flow.zone, hash, now)
            && self.neighbours.confirm(hop, now)
        {
            keys.into_iter().for_each(|k| self.destinations.forget(k));
        }
    }

    fn flow_hash_of_key(&self, flow: &FlowKey) -> u64 {
        let ports = u32::from(flow.local_port) << 16 | u32::from(flow.remote_port);
        flow_hash_of_ports(&self.next_hop_key, flow.local_ip(), flow.remote_ip(), ports)
    }

    /// Sends an ARP request or neighbour solicitation for `ip`: to `unicast`, or by broadcast or to
    /// the solicited-node group.
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

    /// Resolution of `next_hop` failed: drops the packets queued for it and reports them to their
    /// flows (RFC 4861 section 7.2.2, RFC 1122 section 2.4).
    pub(crate) fn fail_resolution<S: FrameSink>(
        &mut self,
        cx: &mut Context<'_, S>,
        next_hop: IpAddr,
    ) {
        while let Some(queued) = self.waiting.pop(next_hop) {
            let packet = first(&queued.chain).get(eth::HEADER_BYTES..).unwrap_or(&[]);
            if let Some(quoted) = Quoted::parse(packet, IpVersion::of(&next_hop)) {
                self.report_resolution_failure(
                    quoted.error(ErrorKind::ResolutionFailed, self.config.zone),
                );
            }
            cx.discard(queued.chain, DropReason::NeighbourUnreachable);
        }
    }

    /// Defends `own` against an address conflict: announces it at most once per [`DEFEND_INTERVAL`]
    /// (RFC 5227 section 2.4(c)), so that two defending hosts do not flood the link. The address is
    /// kept, because it was configured.
    pub(crate) fn defend<S: FrameSink>(&mut self, cx: &mut Context<'_, S>, own: IpAddr) {
        if self.defended.get(&own).is_some_and(|at| cx.now < *at + DEFEND_INTERVAL) {
            return;
        }
        // One entry for each address at most.
        self.defended.retain(|_, at| cx.now < *at + DEFEND_INTERVAL);
        self.defended.insert(own, cx.now);
        self.announce_address(cx, own);
    }

    fn announce_address<S: FrameSink>(&mut self, cx: &mut Context<'_, S>, own: IpAddr) {
        let sent = match own {
            IpAddr::V4(own) => self.arp_announce(cx, own),
            IpAddr::V6(own) => self.unsolicited_advertisement(cx, own),
        };
        if let Err(reason) = sent {
            cx.counters.drop_packet(reason);
        }
    }

    /// Announces all addresses, so that neighbours update an outdated Ethernet address (RFC 5227
    /// section 2.3, RFC 4861 section 7.2.6). Optional, for use after a start. Nothing is sent without a link
    /// layer.
    pub fn announce<S: FrameSink>(&mut self, cx: &mut Context<'_, S>) {
        if self.config.medium == Medium::Ip {
            return;
        }
        for i in 0..self.addresses.iter().count() {
            let own = self.addresses.iter().nth(i).map(|a| a.addr);
            if let Some(own) = own {
                self.announce_address(cx, own);
            }
        }
    }
}
