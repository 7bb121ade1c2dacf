//! The interface: its tables, and the doors to them.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv6Addr};

use fulmar_base::{
    Counters, Duration, EtherAddr, Instant, Key, KeyUse, Random, Secrets, TokenBucket, Zone,
};
use fulmar_mbuf::Pool;
use fulmar_route::{Action, Neighbour, Neighbours, Route};

use crate::address::{self, Addresses, LINK_LOCAL, Scope};
use crate::destination::{DestinationCache, Path, Way};
use crate::frame::Context;
use crate::pmtu::{Evidence, Limits, PathMtus, least_mtu};
use crate::reassembly::Reassembly;
use crate::routing::{Found, Tables};
use crate::waiting::Waiting;
use crate::{AddressUse, Config, ConfigError, FrameSink, IfAddr, NoRoute, PathChoice, QuotedError};

/// Reports of failed neighbours kept until somebody asks; more are lost, and their flows learn by
/// their own time-outs.
const MAX_FAILED: usize = 64;
/// Neighbours per second that are asked for because of replies alone: packets with forged sources turn
/// into broadcasts.
const QUESTIONS_PER_S: u32 = 1000;
/// The same in one burst: more new neighbours than that at once have to try again.
const QUESTION_BURST: u32 = 500;
/// Largest packet to ourselves: what a length field can say.
const OWN_MTU: usize = 65_535;

/// IPv4 and IPv6 on one Ethernet interface.
pub struct Ip {
    pub(crate) config: Config,
    pub(crate) addresses: Addresses,
    pub(crate) tables: Tables,
    pub(crate) neighbours: Neighbours,
    pub(crate) waiting: Waiting,
    pub(crate) path_mtus: PathMtus,
    pub(crate) destinations: DestinationCache,
    pub(crate) errors: TokenBucket,
    pub(crate) echoes: TokenBucket,
    /// Questions for neighbours that only replies wait for.
    pub(crate) questions: TokenBucket,
    /// How far these limits vary.
    pub(crate) limits: Random,
    pub(crate) failed: VecDeque<QuotedError>,
    /// Draws the identifications of what may be fragmented: see [`Ip::draw_ident`].
    pub(crate) idents: Random,
    /// Chooses among next hops.
    pub(crate) next_hop_key: Key,
    /// Datagrams that arrive in fragments.
    pub(crate) reassembly: Reassembly,
    /// When an address of ours was last defended against another station.
    pub(crate) defended_at: Option<Instant>,
    /// Changes of addresses and of the MTU.
    changes: u64,
    /// Scratch of the neighbour timer, empty between calls.
    actions: Vec<Action>,
}

impl Ip {
    /// An interface with the addresses and routes of `config`, each address with a route to its
    /// own link.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn new(config: Config, secrets: &Secrets) -> Result<Ip, ConfigError> {
        if !config.ether.is_unicast() {
            return Err(ConfigError::EtherAddr);
        }
        let mut config = config;
        let (given, routes) =
            (core::mem::take(&mut config.addresses), core::mem::take(&mut config.routes));
        config.neighbours.reachable =
            jittered(config.neighbours.reachable, secrets.random(KeyUse::ReachableTime).number());
        let mut ip = Ip {
            addresses: Addresses::default(),
            tables: Tables::new(config.table_memory),
            neighbours: Neighbours::new(config.neighbours),
            waiting: Waiting::new(config.neighbour_queue_bytes),
            path_mtus: PathMtus::default(),
            destinations: DestinationCache::new(),
            errors: TokenBucket::new(config.icmp_errors_per_s, config.icmp_error_burst),
            echoes: TokenBucket::new(config.echo_replies_per_s, config.echo_reply_burst),
            questions: TokenBucket::new(QUESTIONS_PER_S, QUESTION_BURST),
            failed: VecDeque::new(),
            limits: secrets.random(KeyUse::IcmpLimit),
            idents: secrets.random(KeyUse::Identification),
            next_hop_key: secrets.key(KeyUse::NextHop),
            reassembly: Reassembly::new(config.reassembly_bytes, secrets),
            defended_at: None,
            changes: 0,
            actions: Vec::new(),
            config,
        };
        ip.check_mtu(true)?;
        given.into_iter().try_for_each(|a| ip.add_address(a))?;
        routes.into_iter().try_for_each(|r| ip.add_route(r))?;
        Ok(ip)
    }

    /// Adds an address, with a route to its link. The first IPv6 address brings the link-local one
    /// that comes from the Ethernet address.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn add_address(&mut self, address: IfAddr) -> Result<(), ConfigError> {
        self.check_mtu(address.addr.is_ipv4())?;
        self.addresses.insert(address)?;
        if address.addr.is_ipv6() && !self.addresses.iter().any(|a| is_link_local(a.addr)) {
            let own = address::link_local(self.config.ether);
            self.addresses.insert(IfAddr { addr: IpAddr::V6(own), prefix_len: 64 })?;
        }
        self.changes = self.changes.wrapping_add(1);
        let links = [address.prefix(), address.addr.is_ipv6().then_some(LINK_LOCAL)];
        links.into_iter().flatten().try_for_each(|p| self.add_route(Route::on_link(p)))
    }

    /// Removes an address, and the route to its link if no other address is on it. Returns whether
    /// it was there.
    pub fn remove_address(&mut self, addr: IpAddr) -> bool {
        let Some(old) = self.addresses.remove(addr) else { return false };
        self.changes = self.changes.wrapping_add(1);
        let link = old.prefix();
        if let Some(link) = link
            && !self.addresses.iter().any(|a| a.prefix() == Some(link))
            && self.routes().any(|r| r == Route::on_link(link))
        {
            self.remove_route(link);
        }
        true
    }

    /// Says that an address should be used less or more than the others (RFC 6724 section 5, rules 3
    /// and 7). Returns whether it is one of ours.
    pub fn set_address_use(&mut self, addr: IpAddr, use_: AddressUse) -> bool {
        self.changes = self.changes.wrapping_add(1);
        self.addresses.set_use(addr, use_)
    }

    /// Which source address, neighbour and MTU packets to `dst` use. `zone` names the interface of
    /// a link-local address; 0 is the only one.
    ///
    /// # Errors
    /// [`NoRoute`]: no route, another zone, or no source address of this IP version.
    pub fn route(&self, dst: IpAddr, zone: Zone) -> Result<PathChoice, NoRoute> {
        self.route_from(None, dst, zone)
    }

    /// As [`Ip::route`], for packets whose source address is known, which may have routes of its own
    /// ([`Ip::set_source_policy`]). Where flows are spread over several next hops, it is that of one of
    /// them.
    ///
    /// # Errors
    /// As [`Ip::route`].
    pub fn route_from(
        &self,
        src: Option<IpAddr>,
        dst: IpAddr,
        zone: Zone,
    ) -> Result<PathChoice, NoRoute> {
        let path = self.path_to(dst, zone, (src, 0), Instant::ZERO).ok_or(NoRoute)?;
        let next_hop = match path.way {
            Way::Neighbour(hop) => hop,
            Way::Own | Way::Group(_) => dst,
        };
        let src = path.src.or_else(|| self.addresses.source_for(dst, next_hop)).ok_or(NoRoute)?;
        Ok(PathChoice {
            src,
            next_hop,
            mtu: path.limits.tcp.mtu,
            datagram_mtu: path.limits.datagrams.mtu,
            route_mtu: path.route_mtu,
            generation: self.generation(),
            is_local: path.way == Way::Own,
            is_broadcast: path.is_broadcast,
        })
    }

    /// Counts changes of addresses, routes, neighbours and path MTUs: what was derived from them
    /// holds while this stays the same.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.changes
            .wrapping_add(self.tables.generation())
            .wrapping_add(self.neighbours.generation())
            .wrapping_add(self.path_mtus.generation())
    }

    /// Believes a report that packets to `dst` may have at most `mtu` bytes, for all traffic. To be
    /// called for [`crate::ErrorKind::TooBig`] once TCP has believed it (RFC 5927 section 7.2).
    /// Returns whether the path MTU is lower than before.
    pub fn lower_path_mtu(&mut self, now: Instant, dst: IpAddr, mtu: usize) -> bool {
        self.lower_path(now, dst, mtu, Evidence::Segment)
    }

    /// As [`Ip::lower_path_mtu`], for what is not TCP: a datagram that the report quotes is no proof
    /// that one was sent.
    pub fn lower_datagram_mtu(&mut self, now: Instant, dst: IpAddr, mtu: usize) -> bool {
        self.lower_path(now, dst, mtu, Evidence::Datagram)
    }

    fn lower_path(&mut self, now: Instant, dst: IpAddr, mtu: usize, evidence: Evidence) -> bool {
        let path = self.path_to(dst, 0, (None, 0), now);
        let Some(Path { way: Way::Neighbour(_), limits, .. }) = path else { return false };
        let expires = now + self.config.path_mtu_lifetime;
        self.path_mtus.lower(dst, mtu, (evidence, limits), expires)
    }

    /// Does what is due: asks neighbours again, gives up on those that do not answer and on datagrams
    /// of which fragments are missing, forgets old path MTUs.
    pub fn on_timer<S: FrameSink>(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        counters: &mut Counters,
        out: &mut S,
    ) {
        let cx = &mut Context { now, pool, counters, out };
        self.path_mtus.on_timer(now);
        self.expire_fragments(cx);
        let mut actions = core::mem::take(&mut self.actions);
        self.neighbours.on_timer(now, &mut actions);
        for action in actions.drain(..) {
            match action {
                Action::Solicit { ip, unicast } => self.solicit(cx, ip, unicast),
                Action::Failed { ip } => self.fail_waiting(cx, ip),
            }
        }
        self.actions = actions;
    }

    /// When [`Ip::on_timer`] has something to do.
    pub fn next_deadline(&self) -> Option<Instant> {
        let deadlines = [
            self.neighbours.next_deadline(),
            self.path_mtus.next_deadline(),
            self.reassembly.next_deadline(),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// Takes the reports about packets that were lost because a neighbour did not answer, oldest
    /// first. To be asked for after [`Ip::on_timer`].
    pub fn drain_failed(&mut self) -> impl Iterator<Item = QuotedError> + '_ {
        self.failed.drain(..)
    }

    /// Whether there are such reports.
    #[inline]
    pub fn has_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    pub(crate) fn report_failed(&mut self, error: QuotedError) {
        if self.failed.len() < MAX_FAILED {
            self.failed.push_back(error);
        }
    }

    /// Whether an address is one of ours.
    #[inline]
    pub fn is_local(&self, ip: IpAddr) -> bool {
        self.addresses.is_own(ip)
    }

    /// Whether an address is a broadcast address of ours.
    pub fn is_broadcast(&self, ip: IpAddr) -> bool {
        self.addresses.is_broadcast(ip)
    }

    /// Largest IP packet of the link, in bytes.
    pub fn mtu(&self) -> usize {
        self.config.mtu
    }

    /// The Ethernet address of the interface.
    pub fn ether(&self) -> EtherAddr {
        self.config.ether
    }

    /// Every neighbour, in the order of their addresses.
    pub fn neighbours(&self) -> impl Iterator<Item = &Neighbour> {
        self.neighbours.iter()
    }

    /// Every address, in the order in which they were given.
    pub fn addresses(&self) -> impl Iterator<Item = &IfAddr> {
        self.addresses.iter()
    }

    /// Packets that wait for a neighbour's address.
    pub fn waiting_pkts(&self) -> usize {
        self.waiting.len()
    }

    /// Datagrams of which fragments are still missing.
    pub fn incomplete_datagrams(&self) -> usize {
        self.reassembly.len()
    }

    /// Storage that they hold, in bytes.
    pub fn incomplete_bytes(&self) -> usize {
        self.reassembly.held_bytes()
    }

    /// Frees the packets that wait and the fragments. To be called before the interface is dropped.
    pub fn release(&mut self, pool: &mut Pool) {
        self.reassembly.release(pool);
        self.waiting.release(pool);
    }

    /// What the tables say about the way to `dst`, from a source address and with the hash of a flow.
    pub(crate) fn path_to(
        &self,
        dst: IpAddr,
        zone: Zone,
        (src, flow): (Option<IpAddr>, u64),
        now: Instant,
    ) -> Option<Path> {
        if address::is_link_scoped(dst) && zone != 0 && zone != self.config.zone {
            return None;
        }
        let path = |way, mtu| Path {
            way,
            src: None,
            limits: Limits::of(mtu),
            route_mtu: mtu,
            is_broadcast: false,
            is_spread: false,
        };
        let group = Way::Group(address::group_ether(dst));
        match self.addresses.classify(dst) {
            Scope::Own => return Some(Path { src: Some(dst), ..path(Way::Own, OWN_MTU) }),
            Scope::Broadcast => {
                return Some(Path { is_broadcast: true, ..path(group, self.config.mtu) });
            }
            Scope::Group => return Some(path(group, self.config.mtu)),
            Scope::Foreign if dst.is_multicast() => return Some(path(group, self.config.mtu)),
            Scope::Foreign => {}
        }
        let Found { hop, is_spread } = self.next_hop_to(dst, src, flow, now)?;
        let mtu = hop.mtu.map_or(self.config.mtu, |m| m.min(self.config.mtu));
        let mtu = mtu.max(least_mtu(dst.is_ipv4()));
        Some(Path {
            way: Way::Neighbour(hop.via.unwrap_or(dst)),
            src: hop.src,
            limits: self.path_mtus.limits(dst, mtu),
            route_mtu: mtu,
            is_broadcast: false,
            is_spread,
        })
    }

    fn check_mtu(&self, is_v4: bool) -> Result<(), ConfigError> {
        let least = least_mtu(is_v4);
        let fits = (least..=OWN_MTU).contains(&self.config.mtu);
        if fits { Ok(()) } else { Err(ConfigError::Mtu { least }) }
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(a) if Ipv6Addr::is_unicast_link_local(&a))
}

/// `base` times a random factor between 0.5 and 1.5 (RFC 4861 section 6.3.2).
fn jittered(base: Duration, random: u32) -> Duration {
    let ns = u64::try_from(base.as_nanos()).unwrap_or(u64::MAX);
    let jitter_ns = (ns >> 16).saturating_mul(u64::from(random >> 16));
    Duration::from_nanos((ns / 2).saturating_add(jitter_ns))
}
