//! The neighbour table: Ethernet addresses and reachability of on-link neighbours.
//!
//! One state machine serves ARP and neighbour discovery (RFC 4861 section 7.3):
//!
//! ```text
//!            resolve                 advert              reachable time passes
//!   (none) ----------> INCOMPLETE ----------> REACHABLE ----------------------> STALE
//!                         |  3 probes            ^  ^                             | resolve
//!                         v                      |  | advert, confirm             v
//!   (none) <----------- FAILED <--------------  PROBE <----------------------- DELAY
//!           hold time passes     3 probes             5 s, not confirmed
//! ```
//!
//! An unsolicited message does not replace a known address (RFC 4861 section 11, RFC 5227 section 2.4). Only a
//! solicited answer updates an entry immediately. Any other message with a different Ethernet address (gratuitous ARP,
//! unsolicited advertisement, solicitation from another station, a second answer) is a *claim*: the known address is
//! probed, packets are still sent to it, and the claim is adopted only if the known address does not answer within a
//! second. So a station that has really moved is followed after a second.
//!
//! Packets with spoofed sources make the stack reply to nonexistent neighbours. So resolution for replies only
//! ([`Traffic::Reply`]) has low priority: it may use at most a quarter of the table, is displaced by resolution for own
//! traffic, and its solicitation is not repeated: the packet that comes again from an existing neighbour asks again,
//! while the solicitations for nonexistent ones would fill the transmit queue at the same instants. At a limit the
//! oldest resolution is displaced: an existing neighbour answers within a millisecond, a nonexistent one never does.
//!
//! The table returns the solicitations to send; it sends nothing and queues no packets. REACHABLE becomes STALE lazily,
//! on the next use, so that an idle neighbour needs no timer. FAILED is kept for a hold time, so that a flood of
//! packets to a dead address causes one solicitation per period, not one per packet.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::net::IpAddr;

use crate::base::{Duration, EtherAddr, Instant};

/// Probes of the known address before a claim is adopted: with [`CLAIM_RETRANSMIT`] one second, Linux's `locktime`.
const CLAIM_PROBES: u8 = 2;
/// Interval between these probes. An answer takes well under a millisecond on a link.
const CLAIM_RETRANSMIT: Duration = Duration::from_millis(500);
/// After an answered probe, claims cause no further probe for this long. It limits the probes that
/// forged claims cause to one per second.
const CLAIM_HOLD_DOWN: Duration = Duration::from_secs(1);

/// Limits and timers of the table.
#[derive(Clone, Copy, Debug)]
pub struct NeighbourConfig {
    /// Maximum number of entries: a /22 of active neighbours, about 100 KiB.
    pub max_entries: usize,
    /// REACHABLE_TIME (RFC 4861 section 10: 30 s). The caller randomises it.
    pub reachable: Duration,
    /// DELAY_FIRST_PROBE_TIME: how long to wait for an upper-layer confirmation (RFC 4861 section
    /// 10: 5 s).
    pub delay: Duration,
    /// RETRANS_TIMER: interval between probes (RFC 4861 section 10: 1 s).
    pub retransmit: Duration,
    /// MAX_MULTICAST_SOLICIT: probes before resolution fails (RFC 4861 section 10: 3).
    pub multicast_probes: u8,
    /// MAX_UNICAST_SOLICIT: probes before a known neighbour fails (RFC 4861 section 10: 3).
    pub unicast_probes: u8,
    /// How long an entry stays FAILED. One retransmission interval: long enough to stop a storm of
    /// solicitations, short enough to find a neighbour that boots.
    pub failed_hold: Duration,
}

impl Default for NeighbourConfig {
    fn default() -> Self {
        NeighbourConfig {
            max_entries: 1024,
            reachable: Duration::from_secs(30),
            delay: Duration::from_secs(5),
            retransmit: Duration::from_secs(1),
            multicast_probes: 3,
            unicast_probes: 3,
            failed_hold: Duration::from_secs(1),
        }
    }
}

/// Reachability state (RFC 4861 section 7.3.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NeighbourState {
    /// Resolution in progress.
    Incomplete,
    /// Confirmed within the reachable time.
    Reachable,
    /// Address known, reachability unconfirmed.
    Stale,
    /// Packets were sent to a stale address; waiting for an upper-layer confirmation.
    Delay,
    /// Unicast probes are being sent.
    Probe,
    /// Resolution or probing failed.
    Failed,
}

/// A neighbour entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Neighbour {
    /// Its IP address.
    pub ip: IpAddr,
    /// Its Ethernet address; zero in INCOMPLETE and FAILED.
    pub ether: EtherAddr,
    /// Its reachability state.
    pub state: NeighbourState,
    /// The router flag of its advertisement (RFC 4861 section 4.4).
    pub is_router: bool,
    /// End of this state, unless it is STALE.
    deadline: Instant,
    /// Probes sent in INCOMPLETE or PROBE.
    probes: u8,
    /// Time of last use, for LRU eviction.
    used: Instant,
    /// Used by own traffic, not only learned or used by replies.
    used_by_own_traffic: bool,
    /// Its Ethernet address was returned ([`Resolution::Known`]) and may be cached.
    may_be_cached: bool,
    /// A pending claim of another Ethernet address. The state is PROBE: the known address is probed
    /// first.
    claim: Option<EtherAddr>,
    /// Claims before this time are ignored: the known address has just answered a probe.
    claims_ignored_until: Instant,
}

impl Neighbour {
    fn traffic(&self) -> Traffic {
        if self.used_by_own_traffic { Traffic::Own } else { Traffic::Reply }
    }

    fn new(
        ip: IpAddr,
        ether: EtherAddr,
        state: NeighbourState,
        deadline: Instant,
        now: Instant,
    ) -> Neighbour {
        Neighbour {
            ip,
            ether,
            state,
            is_router: false,
            deadline,
            probes: 0,
            used: now,
            used_by_own_traffic: false,
            may_be_cached: false,
            claim: None,
            claims_ignored_until: Instant::ZERO,
        }
    }

    fn enter(&mut self, state: NeighbourState, deadline: Instant) {
        self.state = state;
        self.deadline = deadline;
    }

    /// Whether an upper-layer confirmation applies. Not with a pending claim: what is acknowledged
    /// now may have been sent before the station moved.
    fn awaits_confirmation(&self) -> bool {
        matches!(self.state, NeighbourState::Delay | NeighbourState::Probe) && self.claim.is_none()
    }

    /// Whether a probe is unanswered.
    fn is_probed(&self) -> bool {
        matches!(self.state, NeighbourState::Incomplete | NeighbourState::Probe)
    }

    /// Whether the end of this state needs a timer. The other states end lazily, on the next use.
    fn is_timed(&self) -> bool {
        use NeighbourState::*;
        matches!(self.state, Incomplete | Delay | Probe)
    }

    /// Whether it is evicted before any neighbour in use.
    fn is_idle(&self) -> bool {
        self.eviction_rank().is_some_and(|rank| rank <= 1)
    }

    /// Eviction order of a full table, lowest first. `None`: not evictable. INCOMPLETE entries have
    /// queued packets and are bounded by [`Neighbours::displace_resolution`].
    fn eviction_rank(&self) -> Option<u8> {
        use NeighbourState::*;
        match self.state {
            Failed => Some(0),
            Incomplete => None,
            // Spoofed packets can create any number of these.
            _ if !self.used_by_own_traffic => Some(1),
            Stale => Some(2),
            Reachable => Some(3),
            Delay | Probe => Some(4),
        }
    }
}

/// The origin of a packet to be sent to a neighbour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Traffic {
    /// A reply of the stack to a packet whose source may be spoofed: a reset, a SYN,ACK, ICMP.
    Reply,
    /// Traffic of a program or an established connection.
    Own,
}

/// The result of [`Neighbours::resolve`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resolution {
    /// The address is known. It may be cached until `fresh_until` while the generation is
    /// unchanged.
    Known {
        /// The neighbour's Ethernet address.
        ether: EtherAddr,
        /// When the next packet must be passed to [`Neighbours::resolve`] again.
        fresh_until: Instant,
        /// Reachability is unconfirmed: call [`Neighbours::confirm`] on progress.
        awaits_confirmation: bool,
    },
    /// Queue the packet: resolution is in progress.
    Queue {
        /// Send a broadcast or multicast solicitation now.
        solicit: bool,
        /// The resolution of this neighbour was displaced: drop the packets queued for it.
        displaced: Option<IpAddr>,
    },
    /// Resolution failed, or the table is full.
    Failed,
}

/// An ARP reply or neighbour advertisement (RFC 4861 section 4.4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Advertisement {
    /// The sender's Ethernet address, if present.
    pub ether: Option<EtherAddr>,
    /// The solicited flag. It is honoured while a probe is unanswered, and then proves two-way
    /// reachability.
    pub solicited: bool,
    /// The override flag.
    pub replaces: bool,
    /// The router flag.
    pub is_router: bool,
}

/// The effect of a received message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Learned {
    /// The neighbour is resolved.
    Usable,
    /// Ignored: no entry exists, or the table is full.
    Nothing,
    /// It conflicts with an address in use, which is probed before the claim is adopted.
    Claim,
}

/// An action for the caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Send a solicitation.
    Solicit {
        /// The address to resolve.
        ip: IpAddr,
        /// Destination Ethernet address; `None`: broadcast or multicast.
        unicast: Option<EtherAddr>,
    },
    /// Resolution failed: drop the packets queued for this neighbour.
    Failed {
        /// The neighbour.
        ip: IpAddr,
    },
}

/// The entries in INCOMPLETE, in order of creation.
#[derive(Clone, Debug, Default)]
struct Resolving {
    /// Resolutions for own traffic: `used_by_own_traffic`.
    own: VecDeque<IpAddr>,
    /// Resolutions for replies only.
    replies: VecDeque<IpAddr>,
}

impl Resolving {
    fn queue(&mut self, traffic: Traffic) -> &mut VecDeque<IpAddr> {
        match traffic {
            Traffic::Own => &mut self.own,
            Traffic::Reply => &mut self.replies,
        }
    }

    fn remove(&mut self, neighbour: &Neighbour) {
        self.queue(neighbour.traffic()).retain(|a| *a != neighbour.ip);
    }

    fn len(&self) -> usize {
        self.own.len().saturating_add(self.replies.len())
    }
}

/// Number of entries that await a confirmation ([`Neighbour::awaits_confirmation`]).
#[derive(Clone, Debug)]
struct Unconfirmed(usize);

impl Unconfirmed {
    /// Updates the count after a change of `neighbour`, which was counted before if `was`.
    fn update(&mut self, was: bool, neighbour: &Neighbour) {
        let is = neighbour.awaits_confirmation();
        self.0 = self.0.saturating_add(is.into()).saturating_sub(was.into());
    }
}

/// The limit of concurrent resolutions is reached.
struct LimitReached;

/// The neighbours of one link.
#[derive(Clone, Debug)]
pub struct Neighbours {
    config: NeighbourConfig,
    /// Ordered, so that iteration is deterministic.
    entries: BTreeMap<IpAddr, Neighbour>,
    /// Entries in INCOMPLETE.
    resolving: Resolving,
    unconfirmed: Unconfirmed,
    /// Eviction candidates ([`Neighbour::is_idle`]), oldest first. May contain entries that are no
    /// longer idle, or were removed.
    idle: VecDeque<IpAddr>,
    /// Lower bound of the deadlines of timed entries.
    next_deadline: Option<Instant>,
    generation: u64,
}

impl Neighbours {
    /// An empty table.
    pub fn new(config: NeighbourConfig) -> Neighbours {
        Neighbours {
            config,
            entries: BTreeMap::new(),
            resolving: Resolving::default(),
            unconfirmed: Unconfirmed(0),
            idle: VecDeque::new(),
            next_deadline: None,
            generation: 0,
        }
    }

    /// Resolves the on-link address `ip` for a packet. Use of a STALE entry starts reachability
    /// detection (DELAY).
    pub fn resolve(&mut self, ip: IpAddr, traffic: Traffic, now: Instant) -> Resolution {
        let Some(entry) = self.entries.get_mut(&ip) else {
            return self.start_resolution(ip, traffic, now);
        };
        entry.used = now;
        if traffic != Traffic::Reply && !entry.used_by_own_traffic {
            entry.used_by_own_traffic = true;
            if entry.state == NeighbourState::Incomplete {
                self.resolving.replies.retain(|a| *a != ip);
                self.resolving.own.push_back(ip);
            }
        }
        match entry.state {
            NeighbourState::Incomplete => {
                return Resolution::Queue { solicit: false, displaced: None };
            }
            NeighbourState::Failed if now < entry.deadline => return Resolution::Failed,
            NeighbourState::Failed => return self.start_resolution(ip, traffic, now),
            NeighbourState::Reachable if now < entry.deadline => {}
            NeighbourState::Reachable | NeighbourState::Stale => {
                entry.enter(NeighbourState::Delay, now + self.config.delay);
                self.unconfirmed.update(false, entry);
            }
            NeighbourState::Delay | NeighbourState::Probe => {}
        }
        entry.may_be_cached = true;
        let (ether, fresh_until, timed) = (entry.ether, entry.deadline, entry.is_timed());
        let awaits_confirmation = entry.awaits_confirmation();
        if timed {
            self.set_deadline(fresh_until);
        }
        Resolution::Known { ether, fresh_until, awaits_confirmation }
    }

    /// Upper-layer reachability confirmation (RFC 4861 section 7.3.1): moves an entry from DELAY or
    /// PROBE to REACHABLE. Returns whether it did.
    pub fn confirm(&mut self, ip: IpAddr, now: Instant) -> bool {
        let Some(entry) = self.entries.get_mut(&ip).filter(|n| n.awaits_confirmation()) else {
            return false;
        };
        entry.enter(NeighbourState::Reachable, now + self.config.reachable);
        self.unconfirmed.update(true, entry);
        true
    }

    /// Whether a neighbour awaits [`Neighbours::confirm`].
    #[inline]
    pub fn awaits_confirmation(&self) -> bool {
        self.unconfirmed.0 > 0
    }

    /// Processes a solicitation from `ip` with its Ethernet address (RFC 4861 section 7.2.3), or an
    /// ARP request for an own address.
    pub(crate) fn on_solicit(&mut self, ip: IpAddr, ether: EtherAddr, now: Instant) -> Learned {
        let known = self.entries.get(&ip).filter(|n| is_usable(n.state)).map(|n| n.ether);
        match known {
            Some(known) if known == ether => return Learned::Usable,
            Some(_) => return self.on_claim(ip, ether, now),
            None if !self.entries.contains_key(&ip) && !self.make_space() => {
                return Learned::Nothing;
            }
            None => {}
        }
        self.store(ip, ether, NeighbourState::Stale, now);
        Learned::Usable
    }

    /// Processes an advertisement of `ip` (RFC 4861 section 7.2.5). It never creates an entry.
    pub(crate) fn on_advertisement(
        &mut self,
        ip: IpAddr,
        advert: Advertisement,
        now: Instant,
    ) -> Learned {
        let Some(entry) = self.entries.get_mut(&ip) else { return Learned::Nothing };
        let solicited = advert.solicited && entry.is_probed();
        let (state, known) = (entry.state, entry.ether);
        if !is_usable(state) {
            let Some(ether) = advert.ether else { return Learned::Nothing };
            entry.is_router = advert.is_router;
            let next = if solicited { NeighbourState::Reachable } else { NeighbourState::Stale };
            self.store(ip, ether, next, now);
            return Learned::Usable;
        }
        match advert.ether.filter(|ether| *ether != known) {
            Some(ether) if advert.replaces => return self.on_claim(ip, ether, now),
            Some(_) => {
                if state == NeighbourState::Reachable {
                    self.store(ip, known, NeighbourState::Stale, now);
                }
                return Learned::Usable;
            }
            None => {}
        }
        entry.is_router = advert.is_router;
        if solicited {
            if entry.claim.is_some() {
                entry.claims_ignored_until = now + CLAIM_HOLD_DOWN;
            }
            self.store(ip, known, NeighbourState::Reachable, now);
        }
        Learned::Usable
    }

    /// Processes a claim of another Ethernet address: the known address is probed immediately, and
    /// packets are still sent to it.
    fn on_claim(&mut self, ip: IpAddr, ether: EtherAddr, now: Instant) -> Learned {
        let Some(entry) = self.entries.get_mut(&ip) else { return Learned::Nothing };
        if !entry.used_by_own_traffic {
            // Not used by own traffic: adopt it without a probe.
            self.store(ip, ether, NeighbourState::Stale, now);
            return Learned::Usable;
        }
        if now < entry.claims_ignored_until {
            return Learned::Claim;
        }
        if entry.claim.is_none() {
            let was_unconfirmed = entry.awaits_confirmation();
            entry.claim = Some(ether);
            if entry.state != NeighbourState::Probe {
                entry.probes = 0;
            }
            entry.enter(NeighbourState::Probe, now);
            self.unconfirmed.update(was_unconfirmed, entry);
            // Invalidates caches of the entry.
            self.generation = self.generation.wrapping_add(1);
            self.set_deadline(now);
        }
        Learned::Claim
    }

    /// Handles all timers due. Appends the actions for the caller.
    pub fn on_timer(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.next_deadline.is_none_or(|d| now < d) {
            return;
        }
        let mut next: Option<Instant> = None;
        for entry in self.entries.values_mut().filter(|e| e.is_timed()) {
            if entry.deadline <= now {
                let (was, known, awaits_confirmation) =
                    (entry.state, entry.ether, entry.awaits_confirmation());
                actions.push(expire(entry, &self.config, now));
                self.unconfirmed.update(awaits_confirmation, entry);
                if entry.state == NeighbourState::Failed {
                    self.idle.push_back(entry.ip);
                }
                if was == NeighbourState::Incomplete && entry.state != was {
                    self.resolving.remove(entry);
                }
                if entry.ether != known {
                    self.generation = self.generation.wrapping_add(1);
                }
            }
            if entry.is_timed() {
                next = Some(next.map_or(entry.deadline, |n| n.min(entry.deadline)));
            }
        }
        self.next_deadline = next;
        self.trim_idle();
    }

    /// The next deadline of [`Neighbours::on_timer`]; may be early.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.next_deadline
    }

    /// Removes a neighbour, unless it is INCOMPLETE.
    pub fn remove(&mut self, ip: IpAddr) -> Option<Neighbour> {
        self.entries.get(&ip).and_then(Neighbour::eviction_rank)?;
        let entry = self.entries.remove(&ip)?;
        if entry.may_be_cached {
            self.invalidate_caches();
        }
        self.unconfirmed.0 = self.unconfirmed.0.saturating_sub(entry.awaits_confirmation().into());
        Some(entry)
    }

    /// Finds a neighbour.
    pub fn find(&self, ip: IpAddr) -> Option<&Neighbour> {
        self.entries.get(&ip)
    }

    /// Whether [`Neighbours::resolve`] would start a resolution.
    pub(crate) fn is_unknown(&self, ip: IpAddr, now: Instant) -> bool {
        self.find(ip).is_none_or(|n| n.state == NeighbourState::Failed && now >= n.deadline)
    }

    /// Whether a neighbour is FAILED and its hold time has not passed.
    pub fn has_failed(&self, ip: IpAddr, now: Instant) -> bool {
        let failed = |n: &Neighbour| n.state == NeighbourState::Failed && now < n.deadline;
        self.find(ip).is_some_and(failed)
    }

    /// All neighbours, ordered by address.
    pub fn iter(&self) -> impl Iterator<Item = &Neighbour> {
        self.entries.values()
    }

    /// Number of neighbours.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the table is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Generation of the table: a cached Ethernet address is valid while it is unchanged.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Starts the resolution of `ip`.
    fn start_resolution(&mut self, ip: IpAddr, traffic: Traffic, now: Instant) -> Resolution {
        let Ok(displaced) = self.displace_resolution(traffic) else {
            return Resolution::Failed;
        };
        if !self.entries.contains_key(&ip) && !self.make_space() {
            return Resolution::Failed;
        }
        let deadline = now + self.config.retransmit;
        let state = NeighbourState::Incomplete;
        let ether = EtherAddr::default();
        let entry = Neighbour {
            used_by_own_traffic: traffic == Traffic::Own,
            probes: 1,
            ..Neighbour::new(ip, ether, state, deadline, now)
        };
        self.entries.insert(ip, entry);
        self.resolving.queue(traffic).push_back(ip);
        self.set_deadline(deadline);
        Resolution::Queue { solicit: true, displaced }
    }

    /// Makes space for one more resolution. Returns the displaced neighbour, if any.
    ///
    /// At most half of the table is INCOMPLETE, so that a scan of the link's unused addresses
    /// cannot evict all existing neighbours (RFC 6583 section 6). At most half of that is for
    /// replies only.
    fn displace_resolution(&mut self, traffic: Traffic) -> Result<Option<IpAddr>, LimitReached> {
        let most = self.config.max_entries.div_ceil(2);
        let is_full = self.resolving.len() >= most;
        let too_many_replies =
            traffic == Traffic::Reply && self.resolving.replies.len() >= most.div_ceil(2);
        let from = match (is_full, self.resolving.replies.is_empty()) {
            (false, _) if !too_many_replies => return Ok(None),
            (_, false) => &mut self.resolving.replies,
            (_, true) if traffic == Traffic::Own => &mut self.resolving.own,
            (_, true) => return Err(LimitReached),
        };
        let displaced = from.pop_front();
        if let Some(ip) = displaced {
            self.entries.remove(&ip);
        }
        Ok(displaced)
    }

    /// Stores a learned address in STALE or REACHABLE.
    fn store(&mut self, ip: IpAddr, ether: EtherAddr, state: NeighbourState, now: Instant) {
        let deadline = now + self.config.reachable;
        let fresh = Neighbour::new(ip, ether, state, deadline, now);
        let entry = self.entries.entry(ip).or_insert(fresh);
        if entry.state == NeighbourState::Incomplete {
            self.resolving.remove(entry);
        }
        let was_fresh = entry.state == NeighbourState::Reachable;
        let is_other = entry.ether != ether || (was_fresh && state == NeighbourState::Stale);
        let (may_be_cached, used_by_own_traffic) = (entry.may_be_cached, entry.used_by_own_traffic);
        let was_unconfirmed = entry.awaits_confirmation();
        entry.ether = ether;
        entry.claim = None;
        entry.enter(state, deadline);
        self.unconfirmed.update(was_unconfirmed, entry);
        if is_other && may_be_cached {
            self.invalidate_caches();
        }
        if !used_by_own_traffic {
            self.idle.push_back(ip);
            self.trim_idle();
        }
    }

    /// Advances the generation: a cached address became invalid.
    fn invalidate_caches(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    /// Rebuilds the list of idle neighbours when most of it may be outdated.
    fn trim_idle(&mut self) {
        if self.idle.len() <= self.config.max_entries.saturating_mul(2) {
            return;
        }
        let idle = self.entries.values().filter(|n| n.is_idle());
        let mut by_age: Vec<_> = idle.map(|n| (n.used, n.ip)).collect();
        by_age.sort_unstable();
        self.idle = by_age.into_iter().map(|(_, ip)| ip).collect();
    }

    /// Makes space for one more entry.
    fn make_space(&mut self) -> bool {
        if self.entries.len() < self.config.max_entries {
            return true;
        }
        while let Some(ip) = self.idle.pop_front() {
            if self.entries.get(&ip).is_some_and(Neighbour::is_idle) {
                return self.remove(ip).is_some();
            }
        }
        let ranked = self.entries.values().filter_map(|e| Some((e.eviction_rank()?, e.used, e.ip)));
        let Some((_, _, ip)) = ranked.min() else { return false };
        self.remove(ip).is_some()
    }

    fn set_deadline(&mut self, deadline: Instant) {
        self.next_deadline = Some(self.next_deadline.map_or(deadline, |d| d.min(deadline)));
    }
}

/// Whether an entry in this state has a usable address.
fn is_usable(state: NeighbourState) -> bool {
    !matches!(state, NeighbourState::Incomplete | NeighbourState::Failed)
}

/// Handles the deadline of a timed entry: send a probe, adopt a claim, or fail.
fn expire(entry: &mut Neighbour, config: &NeighbourConfig, now: Instant) -> Action {
    let (asked, limit) = match entry.state {
        NeighbourState::Incomplete if !entry.used_by_own_traffic => (entry.probes, 1),
        NeighbourState::Incomplete => (entry.probes, config.multicast_probes),
        NeighbourState::Probe if entry.claim.is_some() => (entry.probes, CLAIM_PROBES),
        NeighbourState::Probe => (entry.probes, config.unicast_probes),
        _ => (0, config.unicast_probes),
    };
    let mut asked = asked;
    if asked >= limit {
        let Some(claimed) = entry.claim.take() else {
            entry.ether = EtherAddr::default();
            let is_own = entry.used_by_own_traffic;
            let hold = if is_own { config.failed_hold } else { Duration::ZERO };
            entry.enter(NeighbourState::Failed, now + hold);
            return Action::Failed { ip: entry.ip };
        };
        // The known address does not answer. Adopt the claim, which must be confirmed by a probe as
        // well.
        entry.ether = claimed;
        asked = 0;
    }
    entry.probes = asked.saturating_add(1);
    let is_known = entry.state != NeighbourState::Incomplete;
    let state = if is_known { NeighbourState::Probe } else { NeighbourState::Incomplete };
    let pause = if entry.claim.is_some() { CLAIM_RETRANSMIT } else { config.retransmit };
    entry.enter(state, now + pause);
    Action::Solicit { ip: entry.ip, unicast: is_known.then_some(entry.ether) }
}

#[cfg(test)]
mod tests;
