//! The interface: its tables, configuration and timers.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv6Addr};

use crate::base::{
    Duration, EtherAddr, Instant, IpVersion, Key, KeyUse, Random, Secrets, TokenBucket, Zone,
};
use crate::mbuf::Pool;
use crate::route::{Action, Neighbour, NeighbourState, Neighbours, Route};

use crate::ip::address::{self, Addresses, DstClass, LINK_LOCAL, is_possible_source};
use crate::ip::destination::{Delivery, DestinationCache, Path};
use crate::ip::frame::Context;
use crate::ip::pmtu::{Evidence, Limits, PathMtus, smallest_mtu};
use crate::ip::reassembly::Reassembly;
use crate::ip::routing::{Found, Tables};
use crate::ip::waiting::ResolutionQueue;
use crate::ip::{Config, ConfigError, FrameSink, IfAddr, NoRoute, PathChoice, QuotedError};

/// Maximum number of queued reports of failed neighbours. Further ones are lost, and their flows
/// time out.
const MAX_FAILED: usize = 64;
/// Rate limit of neighbour resolution caused by replies only, per second. Without it, packets with
/// spoofed sources turn into broadcasts.
const REPLY_RESOLUTIONS_PER_S: u32 = 1000;
/// Burst size of that limit. Replies to further new neighbours are dropped.
const REPLY_RESOLUTION_BURST: u32 = 500;
/// MTU of loopback: the maximum of a length field.
const LOOPBACK_MTU: usize = 65_535;

/// IPv4 and IPv6 on one interface.
pub struct Ip {
    pub(crate) config: Config,
    pub(crate) addresses: Addresses,
    pub(crate) tables: Tables,
    pub(crate) neighbours: Neighbours,
    pub(crate) waiting: ResolutionQueue,
    path_mtus: PathMtus,
    pub(crate) destinations: DestinationCache,
    pub(crate) error_limit: TokenBucket,
    pub(crate) echo_limit: TokenBucket,
    /// Rate limit of neighbour resolution caused by replies only.
    pub(crate) reply_resolutions: TokenBucket,
    /// Randomizes the rate limits.
    pub(crate) limit_jitter: Random,
    resolution_failures: VecDeque<QuotedError>,
    /// Draws identifications of packets that may be fragmented: see [`Ip::draw_ident`].
    pub(crate) idents: Random,
    /// Keys the flow hash that selects among next hops.
    pub(crate) next_hop_key: Key,
    /// The reassembly table.
    pub(crate) reassembly: Reassembly,
    /// When an own address was last defended (RFC 5227).
    pub(crate) defended: BTreeMap<IpAddr, Instant>,
    /// Generation of addresses and their uses.
    address_generation: u64,
    /// Scratch for the neighbour timer, empty between calls.
    actions: Vec<Action>,
}

impl Ip {
    /// An interface with the addresses and routes of `config`, and a connected route per address.
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
            tables: Tables::default(),
            neighbours: Neighbours::new(config.neighbours),
            waiting: ResolutionQueue::new(config.neighbour_queue_bytes),
            path_mtus: PathMtus::default(),
            destinations: DestinationCache::new(),
            error_limit: TokenBucket::new(config.icmp_errors_per_s, config.icmp_error_burst),
            echo_limit: TokenBucket::new(config.echo_replies_per_s, config.echo_reply_burst),
            reply_resolutions: TokenBucket::new(REPLY_RESOLUTIONS_PER_S, REPLY_RESOLUTION_BURST),
            resolution_failures: VecDeque::new(),
            limit_jitter: secrets.random(KeyUse::IcmpLimit),
            idents: secrets.random(KeyUse::Identification),
            next_hop_key: secrets.key(KeyUse::NextHop),
            reassembly: Reassembly::new(config.reassembly_bytes, secrets),
            defended: BTreeMap::new(),
            address_generation: 0,
            actions: Vec::new(),
            config,
        };
        ip.check_mtu(IpVersion::V4)?;
        given.into_iter().try_for_each(|a| ip.add_address(a))?;
        routes.into_iter().try_for_each(|r| ip.add_route(r))?;
        Ok(ip)
    }

    /// Adds an address and its connected route. The first IPv6 address also adds the link-local
    /// address derived from the Ethernet address.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn add_address(&mut self, address: IfAddr) -> Result<(), ConfigError> {
        self.check_mtu(IpVersion::of(&address.addr))?;
        self.addresses.insert(address)?;
        if address.addr.is_ipv6() && !self.addresses.iter().any(|a| is_link_local(a.addr)) {
            let own = address::link_local(self.config.ether);
            self.addresses.insert(IfAddr { addr: IpAddr::V6(own), prefix_len: 64 })?;
        }
        self.address_generation = self.address_generation.wrapping_add(1);
        let links = [address.prefix(), address.addr.is_ipv6().then_some(LINK_LOCAL)];
        links.into_iter().flatten().try_for_each(|p| self.add_route(Route::on_link(p)))
    }

    /// Removes an address, and its connected route if no other address shares it. Returns whether
    /// the address existed.
    pub fn remove_address(&mut self, addr: IpAddr) -> bool {
        let Some(old) = self.addresses.remove(addr) else { return false };
        self.address_generation = self.address_generation.wrapping_add(1);
        let link = old.prefix();
        if let Some(link) = link
            && !self.addresses.iter().any(|a| a.prefix() == Some(link))
            && self.routes().any(|r| r == Route::on_link(link))
        {
            self.remove_route(link);
        }
        true
    }

    /// Returns the source address, next hop and MTU for packets to `dst`. `zone` is the interface
    /// of a link-local address; 0 means the only interface.
    ///
    /// # Errors
    /// [`NoRoute`]: no route, another zone, or no source address of this IP version.
    pub fn route(&self, dst: IpAddr, zone: Zone) -> Result<PathChoice, NoRoute> {
        self.route_from(None, dst, zone)
    }

    /// As [`Ip::route`], for packets with a given source address, which may have its own routing
    /// table ([`Ip::set_source_policy`]). With multipath routes, it returns one of the next hops.
    ///
    /// # Errors
    /// As [`Ip::route`].
    pub fn route_from(
        &self,
        src: Option<IpAddr>,
        dst: IpAddr,
        zone: Zone,
    ) -> Result<PathChoice, NoRoute> {
        let path = self.path_to(src, dst, zone, 0, Instant::ZERO).ok_or(NoRoute)?;
        let next_hop = match path.delivery {
            Delivery::Neighbour(hop) => hop,
            Delivery::Local | Delivery::Group(_) => dst,
        };
        let own = path.src.or_else(|| self.addresses.source_for(dst, next_hop));
        // A stack for every address may have none of its own.
        let src = own.or(src.filter(|_| self.config.any_ip)).ok_or(NoRoute)?;
        Ok(PathChoice {
            src,
            next_hop,
            mtu: path.limits.tcp.mtu,
            datagram_mtu: path.limits.datagrams.mtu,
            route_mtu: path.route_mtu,
            link_mtu: path.limits.link_mtu,
            generation: self.generation(),
            is_local: path.delivery == Delivery::Local,
            is_broadcast: path.is_broadcast,
        })
    }

    /// Generation of addresses, routes, neighbours and path MTUs: values derived from them are
    /// valid while it is unchanged.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.address_generation
            .wrapping_add(self.tables.generation())
            .wrapping_add(self.neighbours.generation())
            .wrapping_add(self.path_mtus.generation())
    }

    /// Lowers the path MTU to `dst` to `mtu` bytes, for all traffic. Call it for
    /// [`ErrorKind::TooBig`](crate::ip::ErrorKind::TooBig) once TCP has adopted the MTU (RFC 5927 section 7.2). Returns
    /// whether the path MTU changed.
    pub fn lower_path_mtu(&mut self, now: Instant, dst: IpAddr, mtu: usize) -> bool {
        self.lower_path(now, dst, mtu, Evidence::Segment)
    }

    /// As [`Ip::lower_path_mtu`], for traffic other than TCP: a quoted datagram does not prove that
    /// it was sent by this host.
    pub fn lower_datagram_mtu(&mut self, now: Instant, dst: IpAddr, mtu: usize) -> bool {
        self.lower_path(now, dst, mtu, Evidence::Datagram)
    }

    fn lower_path(&mut self, now: Instant, dst: IpAddr, mtu: usize, evidence: Evidence) -> bool {
        let path = self.path_to(None, dst, 0, 0, now);
        let Some(Path { delivery: Delivery::Neighbour(_), limits, .. }) = path else {
            return false;
        };
        let expires = now + self.config.path_mtu_lifetime;
        self.path_mtus.lower(dst, mtu, evidence, limits, expires)
    }

    /// Handles all timers due: neighbour probes and failures, reassembly time-outs, path MTU
    /// expiry.
    pub fn on_timer<S: FrameSink>(&mut self, cx: &mut Context<'_, S>) {
        self.path_mtus.on_timer(cx.now);
        self.expire_fragments(cx);
        let mut actions = core::mem::take(&mut self.actions);
        self.neighbours.on_timer(cx.now, &mut actions);
        for action in actions.drain(..) {
            match action {
                Action::Solicit { ip, unicast } => self.solicit(cx, ip, unicast),
                Action::Failed { ip } => self.fail_resolution(cx, ip),
            }
        }
        self.actions = actions;
    }

    /// The earliest deadline of [`Ip::on_timer`].
    pub fn next_deadline(&self) -> Option<Instant> {
        let deadlines = [
            self.neighbours.next_deadline(),
            self.path_mtus.next_deadline(),
            self.reassembly.next_deadline(),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// Takes the reports of packets dropped by failed neighbour resolution, oldest first. Call it
    /// after [`Ip::on_timer`].
    pub fn drain_resolution_failures(&mut self) -> impl Iterator<Item = QuotedError> + '_ {
        self.resolution_failures.drain(..)
    }

    /// Whether [`Ip::drain_resolution_failures`] has reports.
    #[inline]
    pub(crate) fn has_resolution_failures(&self) -> bool {
        !self.resolution_failures.is_empty()
    }

    pub(crate) fn report_resolution_failure(&mut self, error: QuotedError) {
        if self.resolution_failures.len() < MAX_FAILED {
            self.resolution_failures.push_back(error);
        }
    }

    /// Whether an address is assigned to this interface.
    #[inline]
    pub fn is_local(&self, ip: IpAddr) -> bool {
        self.addresses.is_own(ip)
    }

    /// Whether packets to `ip` are accepted: an address of the interface, or with
    /// [`Config::any_ip`] any unicast address.
    #[inline]
    pub fn accepts(&self, ip: IpAddr) -> bool {
        self.is_local(ip)
            || (self.config.any_ip && is_possible_source(ip) && !self.is_broadcast(ip))
    }

    /// Whether solicitations for `ip` are answered: not those for a known neighbour. An incomplete or failed entry does
    /// not count as known; otherwise a packet with a forged source would stop the answers.
    pub(crate) fn answers_for(&self, ip: IpAddr) -> bool {
        use NeighbourState::{Failed, Incomplete};
        let is_known = |n: &Neighbour| !matches!(n.state, Incomplete | Failed);
        self.is_local(ip) || (self.accepts(ip) && !self.neighbours.find(ip).is_some_and(is_known))
    }

    /// Whether an address is a broadcast address of this interface.
    pub fn is_broadcast(&self, ip: IpAddr) -> bool {
        self.addresses.is_broadcast(ip)
    }

    /// MTU of the link, bytes.
    pub fn mtu(&self) -> usize {
        self.config.mtu
    }

    /// The Ethernet address of the interface.
    pub fn ether(&self) -> EtherAddr {
        self.config.ether
    }

    /// All neighbours, ordered by address.
    pub fn neighbours(&self) -> impl Iterator<Item = &Neighbour> {
        self.neighbours.iter()
    }

    /// All addresses, in the order of their configuration.
    pub fn addresses(&self) -> impl Iterator<Item = &IfAddr> {
        self.addresses.iter()
    }

    /// Packets queued for neighbour resolution.
    pub fn queued_pkts(&self) -> usize {
        self.waiting.len()
    }

    /// Incomplete datagrams in reassembly.
    pub fn incomplete_datagrams(&self) -> usize {
        self.reassembly.len()
    }

    /// Storage of incomplete datagrams, bytes.
    pub fn incomplete_bytes(&self) -> usize {
        self.reassembly.truesize()
    }

    /// Frees all queued packets and fragments. Call it before the interface is dropped.
    pub fn release(&mut self, pool: &mut Pool) {
        self.reassembly.release(pool);
        self.waiting.release(pool);
    }

    /// Looks up the path to `dst`, for a source address and a flow hash.
    pub(crate) fn path_to(
        &self,
        src: Option<IpAddr>,
        dst: IpAddr,
        zone: Zone,
        flow: u64,
        now: Instant,
    ) -> Option<Path> {
        if address::is_link_scoped(dst) && zone != 0 && zone != self.config.zone {
            return None;
        }
        let path = |delivery, mtu| Path {
            delivery,
            src: None,
            limits: Limits::uniform(mtu),
            route_mtu: mtu,
            is_broadcast: false,
            is_multipath: false,
        };
        let group = Delivery::Group(address::group_ether(dst));
        match self.addresses.classify(dst) {
            DstClass::Own => {
                return Some(Path { src: Some(dst), ..path(Delivery::Local, LOOPBACK_MTU) });
            }
            DstClass::Broadcast => {
                return Some(Path { is_broadcast: true, ..path(group, self.config.mtu) });
            }
            DstClass::Group => return Some(path(group, self.config.mtu)),
            DstClass::Foreign if dst.is_multicast() => return Some(path(group, self.config.mtu)),
            DstClass::Foreign => {}
        }
        let Found { hop, is_multipath } = self.next_hop_to(dst, src, flow, now)?;
        let mtu = hop.mtu.map_or(self.config.mtu, |m| m.min(self.config.mtu));
        let mtu = mtu.max(smallest_mtu(IpVersion::of(&dst)));
        Some(Path {
            delivery: Delivery::Neighbour(hop.via.unwrap_or(dst)),
            src: hop.src,
            limits: self.path_mtus.limits(dst, mtu, self.config.mtu),
            route_mtu: mtu,
            is_broadcast: false,
            is_multipath,
        })
    }

    fn check_mtu(&self, version: IpVersion) -> Result<(), ConfigError> {
        let least = smallest_mtu(version);
        let fits = (least..=LOOPBACK_MTU).contains(&self.config.mtu);
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
