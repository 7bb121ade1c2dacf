//! Neighbours: who on the link owns which address, and whether it still answers.
//!
//! One state machine serves ARP and neighbour discovery (RFC 4861 section 7.3):
//!
//! ```text
//!            resolve                 advert              reachable time passes
//!   (none) ----------> INCOMPLETE ----------> REACHABLE ----------------------> STALE
//!                         |  3 asked             ^  ^                             | resolve
//!                         v                      |  | advert, confirm             v
//!   (none) <----------- FAILED <--------------  PROBE <----------------------- DELAY
//!           hold passes          3 asked              5 s, nobody confirmed
//! ```
//!
//! An address that is known is not given up for the asking (RFC 4861 section 11, RFC 5227 section 2.4).
//! Only an answer to a question of ours changes an entry at once. Anything else that names another
//! Ethernet address (a gratuitous ARP, an unsolicited advertisement, a question from elsewhere, a
//! second answer) is a claim: the known address is asked, packets go on to it meanwhile, and the claim
//! is taken up only if no answer comes within a second. A station that has really moved is followed by
//! then.
//!
//! Who can forge a source address can make the stack reply to neighbours that do not exist. So a
//! question that only replies wait for ([`Traffic::Reply`]) is second class: it takes no more than a
//! quarter of the table, and gives way to one of the host's own traffic. Where there are too many of a
//! kind the one asked first gives way: a neighbour that exists answers within a millisecond, and those
//! that do not are displaced.
//!
//! The table says what to ask; it sends nothing and keeps no packets. REACHABLE turns STALE only
//! when somebody looks, so that a quiet neighbour costs no timer. FAILED is kept for a moment, so
//! that a flood of packets to a dead address asks for it once per period and not once per packet.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::net::IpAddr;

use fulmar_base::{Duration, EtherAddr, Instant};

/// Questions to the known address before a claim of another one is taken up. With
/// [`CLAIM_RETRANSMIT`]: after one second, as long as Linux keeps an entry from changing (`locktime`).
const CLAIM_PROBES: u8 = 2;
/// Time between these questions. An answer takes well under a millisecond on a link.
const CLAIM_RETRANSMIT: Duration = Duration::from_millis(500);
/// How long an address that answered is not asked again because of claims: one question per second
/// is what a forger can cause.
const TRUST: Duration = Duration::from_secs(1);

/// Limits and times of the table.
#[derive(Clone, Copy, Debug)]
pub struct NeighbourConfig {
    /// Entries at most: what a /22 of active neighbours needs, about 100 KiB.
    pub max_entries: usize,
    /// How long a confirmation holds (RFC 4861 section 10: 30 s; the caller randomises it).
    pub reachable: Duration,
    /// How long to wait for the upper layers to confirm a stale entry (RFC 4861 section 10: 5 s).
    pub delay: Duration,
    /// Time between two questions (RFC 4861 section 10: 1 s).
    pub retransmit: Duration,
    /// Questions to everybody before giving up (RFC 4861 section 10: 3).
    pub multicast_probes: u8,
    /// Questions to the last known address before giving up (RFC 4861 section 10: 3).
    pub unicast_probes: u8,
    /// How long a failure is remembered. One retransmission time: long enough to stop a storm of
    /// questions, short enough that a neighbour that boots is found.
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

/// What is known about a neighbour (RFC 4861 section 7.3.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NeighbourState {
    /// Its address was asked for; no answer yet.
    Incomplete,
    /// It answered, or an upper layer made progress, within the reachable time.
    Reachable,
    /// Its address is known, whether it still answers is not.
    Stale,
    /// Packets were sent to a stale address; an upper layer may confirm it.
    Delay,
    /// It is being asked directly.
    Probe,
    /// It did not answer.
    Failed,
}

/// One neighbour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Neighbour {
    /// Its IP address.
    pub ip: IpAddr,
    /// Its Ethernet address; meaningless (zero) in INCOMPLETE and after it failed.
    pub ether: EtherAddr,
    /// What is known about it.
    pub state: NeighbourState,
    /// It said that it is a router (RFC 4861 section 4.4).
    pub is_router: bool,
    /// When this state ends, unless it is STALE.
    deadline: Instant,
    /// Questions asked in INCOMPLETE or PROBE.
    probes: u8,
    /// When somebody last wanted it: the least recently used one makes room.
    used: Instant,
    /// The host's own traffic was sent to it, or waits for it: it was not only heard of, or replied to.
    is_wanted: bool,
    /// Its Ethernet address was told ([`Resolution::Known`]) and may be remembered.
    is_told: bool,
    /// Another Ethernet address that was claimed for it. In PROBE: the known one is asked first.
    claim: Option<EtherAddr>,
    /// Claims before this are not looked into: the known address has just answered.
    trusted_until: Instant,
}

impl Neighbour {
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
            is_wanted: false,
            is_told: false,
            claim: None,
            trusted_until: Instant::ZERO,
        }
    }

    fn enter(&mut self, state: NeighbourState, deadline: Instant) {
        self.state = state;
        self.deadline = deadline;
    }

    /// Whether an upper layer may confirm it. What is acknowledged now may have been sent before the
    /// station moved, so a claim is looked into all the same.
    fn is_in_doubt(&self) -> bool {
        matches!(self.state, NeighbourState::Delay | NeighbourState::Probe) && self.claim.is_none()
    }

    /// Whether a question about it is unanswered.
    fn is_asked(&self) -> bool {
        matches!(self.state, NeighbourState::Incomplete | NeighbourState::Probe)
    }

    /// Whether the end of this state needs a timer: the other states end when somebody looks.
    fn is_timed(&self) -> bool {
        use NeighbourState::*;
        matches!(self.state, Incomplete | Delay | Probe)
    }

    /// Whether it gives way before any neighbour in use.
    fn is_idle(&self) -> bool {
        self.eviction_rank().is_some_and(|rank| rank <= 1)
    }

    /// What gives way first when the table is full. An entry that is being asked for does not: packets
    /// wait for it, and [`Neighbours::displace`] bounds it.
    fn eviction_rank(&self) -> Option<u8> {
        use NeighbourState::*;
        match self.state {
            Failed => Some(0),
            Incomplete => None,
            // Whoever can forge a source address can make as many of these as they like.
            _ if !self.is_wanted => Some(1),
            Stale => Some(2),
            Reachable => Some(3),
            Delay | Probe => Some(4),
        }
    }
}

/// Whose a packet is that is to be sent to a neighbour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Traffic {
    /// The stack replies by itself to a packet whose source may be forged: a reset, a SYN,ACK, ICMP.
    Reply,
    /// Of a program or a connection.
    Own,
}

/// The answer to [`Neighbours::resolve`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resolution {
    /// Send it there. The answer may be remembered until `fresh_until`, while the generation stays.
    Known {
        /// The neighbour's Ethernet address.
        ether: EtherAddr,
        /// When the state machine must see the next packet.
        fresh_until: Instant,
        /// Whether the neighbour still answers is not known: it waits for [`Neighbours::confirm`].
        in_doubt: bool,
    },
    /// Keep the packet: the address is being asked for.
    Queue {
        /// The question is to be sent now, to everybody.
        solicit: bool,
        /// This neighbour is no longer asked for: packets that wait for it are lost.
        displaced: Option<IpAddr>,
    },
    /// The neighbour did not answer, or the table has no room to ask.
    Failed,
}

/// What an ARP reply or a neighbour advertisement says (RFC 4861 section 4.4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Advert {
    /// The sender's Ethernet address, if it was given.
    pub ether: Option<EtherAddr>,
    /// It says that it answers a question of ours, which is believed while one is unanswered:
    /// two-way reachability is proven then.
    pub solicited: bool,
    /// It replaces an address known before.
    pub replaces: bool,
    /// The sender is a router.
    pub is_router: bool,
}

/// What became of what a neighbour said about itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Learned {
    /// Packets may go to the neighbour now.
    Usable,
    /// Nothing was learned: the neighbour is of no interest, or the table is full.
    Nothing,
    /// It contradicts an address that is in use, which is asked before the claim is taken up.
    Claim,
}

/// Something that the owner of the table must do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Ask for an address.
    Solicit {
        /// Whose.
        ip: IpAddr,
        /// Where the question goes; `None`: to everybody.
        unicast: Option<EtherAddr>,
    },
    /// Nobody answered: packets that wait for this neighbour are lost.
    Failed {
        /// The neighbour.
        ip: IpAddr,
    },
}

/// Who is in INCOMPLETE, in the order in which they were asked for.
#[derive(Clone, Debug, Default)]
struct Asked {
    /// Those that own traffic waits for: `is_wanted`.
    own: VecDeque<IpAddr>,
    /// Those that only replies wait for.
    replies: VecDeque<IpAddr>,
}

impl Asked {
    fn of(&mut self, is_wanted: bool) -> &mut VecDeque<IpAddr> {
        if is_wanted { &mut self.own } else { &mut self.replies }
    }

    fn forget(&mut self, ip: IpAddr, is_wanted: bool) {
        self.of(is_wanted).retain(|a| *a != ip);
    }

    fn len(&self) -> usize {
        self.own.len().saturating_add(self.replies.len())
    }
}

/// How many wait for a confirmation ([`Neighbour::is_in_doubt`]).
#[derive(Clone, Debug)]
struct InDoubt(usize);

impl InDoubt {
    /// A neighbour that was among them, or was not, is as it is now.
    fn note(&mut self, was: bool, neighbour: &Neighbour) {
        let is = neighbour.is_in_doubt();
        self.0 = self.0.saturating_add(is.into()).saturating_sub(was.into());
    }
}

/// There is no room for a question.
struct NoRoom;

/// The neighbours of one link.
#[derive(Clone, Debug)]
pub struct Neighbours {
    config: NeighbourConfig,
    /// Ordered, so that iteration is the same in every run.
    entries: BTreeMap<IpAddr, Neighbour>,
    /// Entries in INCOMPLETE.
    asked: Asked,
    in_doubt: InDoubt,
    /// Those that give way first ([`Neighbour::is_idle`]), in the order in which they came to be so; and
    /// some that no longer are, or are gone.
    idle: VecDeque<IpAddr>,
    /// Not later than the earliest deadline of a timed entry.
    next_deadline: Option<Instant>,
    generation: u64,
}

impl Neighbours {
    /// An empty table.
    pub fn new(config: NeighbourConfig) -> Neighbours {
        let entries = BTreeMap::new();
        let asked = Asked::default();
        let (idle, next_deadline) = (VecDeque::new(), None);
        Neighbours {
            config,
            entries,
            asked,
            in_doubt: InDoubt(0),
            idle,
            next_deadline,
            generation: 0,
        }
    }

    /// Where to send a packet for the on-link address `ip`. Using a stale entry starts its check.
    pub fn resolve(&mut self, ip: IpAddr, traffic: Traffic, now: Instant) -> Resolution {
        let Some(entry) = self.entries.get_mut(&ip) else {
            return self.start(ip, traffic, now);
        };
        entry.used = now;
        if traffic != Traffic::Reply && !entry.is_wanted {
            entry.is_wanted = true;
            if entry.state == NeighbourState::Incomplete {
                self.asked.forget(ip, false);
                self.asked.own.push_back(ip);
            }
        }
        match entry.state {
            NeighbourState::Incomplete => {
                return Resolution::Queue { solicit: false, displaced: None };
            }
            NeighbourState::Failed if now < entry.deadline => return Resolution::Failed,
            NeighbourState::Failed => return self.start(ip, traffic, now),
            NeighbourState::Reachable if now < entry.deadline => {}
            NeighbourState::Reachable | NeighbourState::Stale => {
                entry.enter(NeighbourState::Delay, now + self.config.delay);
                self.in_doubt.note(false, entry);
            }
            NeighbourState::Delay | NeighbourState::Probe => {}
        }
        entry.is_told = true;
        let (ether, fresh_until, timed) = (entry.ether, entry.deadline, entry.is_timed());
        let in_doubt = entry.is_in_doubt();
        if timed {
            self.wake_by(fresh_until);
        }
        Resolution::Known { ether, fresh_until, in_doubt }
    }

    /// An upper layer saw progress that needs the neighbour to be alive (RFC 4861 section 7.3.1): one in
    /// DELAY or PROBE is REACHABLE. Returns whether it was in doubt.
    pub fn confirm(&mut self, ip: IpAddr, now: Instant) -> bool {
        let Some(entry) = self.entries.get_mut(&ip).filter(|n| n.is_in_doubt()) else {
            return false;
        };
        entry.enter(NeighbourState::Reachable, now + self.config.reachable);
        self.in_doubt.note(true, entry);
        true
    }

    /// Whether a neighbour waits for [`Neighbours::confirm`].
    #[inline]
    pub fn has_doubts(&self) -> bool {
        self.in_doubt.0 > 0
    }

    /// The neighbour `ip` asked us something and said where it lives (RFC 4861 section 7.2.3; an
    /// ARP request for an address of ours).
    pub fn on_solicit(&mut self, ip: IpAddr, ether: EtherAddr, now: Instant) -> Learned {
        let known = self.entries.get(&ip).filter(|n| is_usable(n.state)).map(|n| n.ether);
        match known {
            Some(known) if known == ether => return Learned::Usable,
            Some(_) => return self.on_claim(ip, ether, now),
            None if !self.entries.contains_key(&ip) && !self.make_room() => {
                return Learned::Nothing;
            }
            None => {}
        }
        self.set(ip, ether, NeighbourState::Stale, now);
        Learned::Usable
    }

    /// The neighbour `ip` told its address (RFC 4861 section 7.2.5). Nothing is created: only who
    /// is being talked to may be told about.
    pub fn on_advert(&mut self, ip: IpAddr, advert: Advert, now: Instant) -> Learned {
        let Some(entry) = self.entries.get_mut(&ip) else { return Learned::Nothing };
        let solicited = advert.solicited && entry.is_asked();
        let (state, known) = (entry.state, entry.ether);
        if !is_usable(state) {
            let Some(ether) = advert.ether else { return Learned::Nothing };
            entry.is_router = advert.is_router;
            self.set(ip, ether, state_after(solicited), now);
            return Learned::Usable;
        }
        match advert.ether.filter(|ether| *ether != known) {
            Some(ether) if advert.replaces => return self.on_claim(ip, ether, now),
            Some(_) => {
                if state == NeighbourState::Reachable {
                    self.set(ip, known, NeighbourState::Stale, now);
                }
                return Learned::Usable;
            }
            None => {}
        }
        entry.is_router = advert.is_router;
        if solicited {
            if entry.claim.is_some() {
                entry.trusted_until = now + TRUST;
            }
            self.set(ip, known, NeighbourState::Reachable, now);
        }
        Learned::Usable
    }

    /// Another Ethernet address is claimed for a neighbour whose address is known: the known one is
    /// asked at once, and packets go on to it meanwhile.
    fn on_claim(&mut self, ip: IpAddr, ether: EtherAddr, now: Instant) -> Learned {
        let Some(entry) = self.entries.get_mut(&ip) else { return Learned::Nothing };
        if !entry.is_wanted {
            // Nothing is sent there: nothing is at stake, and no question is worth it.
            self.set(ip, ether, NeighbourState::Stale, now);
            return Learned::Usable;
        }
        if now < entry.trusted_until {
            return Learned::Claim;
        }
        if entry.claim.is_none() {
            let was_in_doubt = entry.is_in_doubt();
            entry.claim = Some(ether);
            if entry.state != NeighbourState::Probe {
                entry.probes = 0;
            }
            entry.enter(NeighbourState::Probe, now);
            self.in_doubt.note(was_in_doubt, entry);
            // Where it was remembered as fresh it no longer is.
            self.generation = self.generation.wrapping_add(1);
            self.wake_by(now);
        }
        Learned::Claim
    }

    /// Does what is due, and appends what the caller must do.
    pub fn on_timer(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.next_deadline.is_none_or(|d| now < d) {
            return;
        }
        let mut next: Option<Instant> = None;
        for entry in self.entries.values_mut().filter(|e| e.is_timed()) {
            if entry.deadline <= now {
                let (was, known, in_doubt) = (entry.state, entry.ether, entry.is_in_doubt());
                actions.push(expire(entry, &self.config, now));
                self.in_doubt.note(in_doubt, entry);
                if entry.state == NeighbourState::Failed {
                    self.idle.push_back(entry.ip);
                }
                if was == NeighbourState::Incomplete && entry.state != was {
                    self.asked.forget(entry.ip, entry.is_wanted);
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

    /// When [`Neighbours::on_timer`] has something to do; it may turn out to be nothing.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.next_deadline
    }

    /// Forgets a neighbour that no packet waits for.
    pub fn remove(&mut self, ip: IpAddr) -> Option<Neighbour> {
        self.entries.get(&ip).and_then(Neighbour::eviction_rank)?;
        let entry = self.entries.remove(&ip)?;
        self.note_change(entry.is_told);
        self.in_doubt.0 = self.in_doubt.0.saturating_sub(entry.is_in_doubt().into());
        Some(entry)
    }

    /// One neighbour.
    pub fn find(&self, ip: IpAddr) -> Option<&Neighbour> {
        self.entries.get(&ip)
    }

    /// Whether [`Neighbours::resolve`] would ask for it.
    pub fn is_unknown(&self, ip: IpAddr, now: Instant) -> bool {
        self.find(ip).is_none_or(|n| n.state == NeighbourState::Failed && now >= n.deadline)
    }

    /// Whether a neighbour did not answer, and is not to be asked again yet.
    pub fn has_failed(&self, ip: IpAddr, now: Instant) -> bool {
        let failed = |n: &Neighbour| n.state == NeighbourState::Failed && now < n.deadline;
        self.find(ip).is_some_and(failed)
    }

    /// Every neighbour, in the order of their addresses.
    pub fn iter(&self) -> impl Iterator<Item = &Neighbour> {
        self.entries.values()
    }

    /// How many neighbours there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Counts the changes after which a remembered Ethernet address would be wrong.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Starts to ask for `ip`.
    fn start(&mut self, ip: IpAddr, traffic: Traffic, now: Instant) -> Resolution {
        let is_wanted = traffic != Traffic::Reply;
        let Ok(displaced) = self.displace(is_wanted) else { return Resolution::Failed };
        if !self.entries.contains_key(&ip) && !self.make_room() {
            return Resolution::Failed;
        }
        let deadline = now + self.config.retransmit;
        let state = NeighbourState::Incomplete;
        let ether = EtherAddr::default();
        let entry =
            Neighbour { is_wanted, probes: 1, ..Neighbour::new(ip, ether, state, deadline, now) };
        self.entries.insert(ip, entry);
        self.asked.of(is_wanted).push_back(ip);
        self.wake_by(deadline);
        Resolution::Queue { solicit: true, displaced }
    }

    /// Makes sure that one more neighbour may be asked for, and returns which one is not any more.
    ///
    /// Half of the table at most is INCOMPLETE, so that a scan of the link's empty addresses cannot push
    /// out every neighbour that exists (RFC 6583 section 6); half of that at most for replies alone.
    fn displace(&mut self, is_wanted: bool) -> Result<Option<IpAddr>, NoRoom> {
        let most = self.config.max_entries.div_ceil(2);
        let is_full = self.asked.len() >= most;
        let too_many_replies = !is_wanted && self.asked.replies.len() >= most.div_ceil(2);
        let from = match (is_full, self.asked.replies.is_empty()) {
            (false, _) if !too_many_replies => return Ok(None),
            (_, false) => &mut self.asked.replies,
            (_, true) if is_wanted => &mut self.asked.own,
            (_, true) => return Err(NoRoom),
        };
        let displaced = from.pop_front();
        if let Some(ip) = displaced {
            self.entries.remove(&ip);
        }
        Ok(displaced)
    }

    /// Stores a learned address in STALE or REACHABLE.
    fn set(&mut self, ip: IpAddr, ether: EtherAddr, state: NeighbourState, now: Instant) {
        let deadline = now + self.config.reachable;
        let fresh = Neighbour::new(ip, ether, state, deadline, now);
        let entry = self.entries.entry(ip).or_insert(fresh);
        if entry.state == NeighbourState::Incomplete {
            self.asked.forget(ip, entry.is_wanted);
        }
        let was_fresh = entry.state == NeighbourState::Reachable;
        let is_other = entry.ether != ether || (was_fresh && state == NeighbourState::Stale);
        let (is_told, is_wanted) = (entry.is_told, entry.is_wanted);
        let was_in_doubt = entry.is_in_doubt();
        entry.ether = ether;
        entry.claim = None;
        entry.enter(state, deadline);
        self.in_doubt.note(was_in_doubt, entry);
        self.note_change(is_other && is_told);
        if !is_wanted {
            self.idle.push_back(ip);
            self.trim_idle();
        }
    }

    /// What was remembered may be wrong now.
    fn note_change(&mut self, is_wrong: bool) {
        self.generation = self.generation.wrapping_add(u64::from(is_wrong));
    }

    /// Makes the list of idle neighbours anew when most of it may be out of date.
    fn trim_idle(&mut self) {
        if self.idle.len() <= self.config.max_entries.saturating_mul(2) {
            return;
        }
        let idle = self.entries.values().filter(|n| n.is_idle());
        let mut by_age: Vec<_> = idle.map(|n| (n.used, n.ip)).collect();
        by_age.sort_unstable();
        self.idle = by_age.into_iter().map(|(_, ip)| ip).collect();
    }

    /// Makes sure that one more entry fits.
    fn make_room(&mut self) -> bool {
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

    fn wake_by(&mut self, deadline: Instant) {
        self.next_deadline = Some(self.next_deadline.map_or(deadline, |d| d.min(deadline)));
    }
}

/// Whether packets may go to the address of an entry in this state.
fn is_usable(state: NeighbourState) -> bool {
    !matches!(state, NeighbourState::Incomplete | NeighbourState::Failed)
}

fn state_after(solicited: bool) -> NeighbourState {
    if solicited { NeighbourState::Reachable } else { NeighbourState::Stale }
}

/// The deadline of a timed entry has passed: ask (again), take up a claim, or give up.
fn expire(entry: &mut Neighbour, config: &NeighbourConfig, now: Instant) -> Action {
    let (asked, limit) = match entry.state {
        NeighbourState::Incomplete => (entry.probes, config.multicast_probes),
        NeighbourState::Probe if entry.claim.is_some() => (entry.probes, CLAIM_PROBES),
        NeighbourState::Probe => (entry.probes, config.unicast_probes),
        _ => (0, config.unicast_probes),
    };
    let mut asked = asked;
    if asked >= limit {
        let Some(claimed) = entry.claim.take() else {
            entry.ether = EtherAddr::default();
            entry.enter(NeighbourState::Failed, now + config.failed_hold);
            return Action::Failed { ip: entry.ip };
        };
        // Nobody is at the known address any more. The new one has to answer as well.
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
