//! A device in front of the simulated link: it writes the log of all frames, lets the link die,
//! plays a device that is full, and one that copies frames into the receiver's own memory.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fulmar::internals::drivers::link::SimLink;
use fulmar_stack::base::{Counters, DropReason, Duration, Instant, Offload};
use fulmar_stack::device::moderation::Profile;
use fulmar_stack::device::{
    Burst, Caps, Device, DeviceStats, DirectPlacement, Packet, Rng, WakeFd,
};
use fulmar_stack::mbuf::{Pool, Purpose};
use fulmar_testbed::tamper::copied;

use super::attack::{Injected, capture};
use super::clamp::clamp;
use super::describe;
use super::handshakes::Handshakes;
use super::idents::Idents;
use super::middlebox::{Middlebox, Verdict};
use super::moves::{Arrival, StationAddress};
use super::placing::Placing;
use super::urgency::Urgency;
use super::waiting::Attention;

/// Bytes of a frame that enter the digest and the log: all headers.
const HEAD_BYTES: usize = 128;
/// `ENODEV`, with which a device goes.
const ENODEV: i32 = 19;

/// The events so far, as a digest and, if requested, as lines.
pub struct Log {
    digest: u64,
    lines: VecDeque<String>,
    most_lines: usize,
}

impl Log {
    /// A log that keeps the last `most_lines` lines.
    pub fn new(most_lines: usize) -> Log {
        Log { digest: 0, lines: VecDeque::new(), most_lines }
    }

    /// Mixes a number into the digest.
    pub fn mix(&mut self, n: u64) {
        let x = (self.digest ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.digest = x ^ (x >> 29);
    }

    /// Adds a line, if lines are wanted.
    pub fn line(&mut self, now: Instant, text: impl FnOnce() -> String) {
        if self.most_lines == 0 {
            return;
        }
        if self.lines.len() >= self.most_lines {
            self.lines.pop_front();
        }
        let ns = now.as_nanos();
        self.lines.push_back(format!(
            "{:>6}.{:06} {}",
            ns / 1_000_000_000,
            ns / 1_000 % 1_000_000,
            text()
        ));
    }

    /// The digest of the events so far.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// The digest, and the lines.
    pub fn take(&mut self) -> (u64, Vec<String>) {
        (self.digest, std::mem::take(&mut self.lines).into())
    }

    fn frame(&mut self, now: Instant, station: usize, p: &Packet, note: &str) {
        let mut head = [0; HEAD_BYTES];
        let n = p.chain.copy_to(0, &mut head);
        self.mix(now.as_nanos() ^ (station as u64) << 63);
        self.mix(p.chain.len() as u64);
        for word in head.chunks_exact(8) {
            self.mix(word.iter().fold(0, |w, b| w << 8 | u64::from(*b)));
        }
        self.line(now, || {
            let to = if station == 0 { "0 -> 1" } else { "0 <- 1" };
            format!("{to}  {}{note}", describe::frame(&head[..n], p))
        });
    }
}

/// The state of the network: what the script and the two gates share.
pub struct NetworkState {
    /// The log of both.
    pub log: Log,
    /// Frames from this station vanish.
    pub dead: [bool; 2],
    /// This station's answers to questions for its Ethernet address vanish.
    pub mute: [bool; 2],
    /// The device is gone.
    pub gone: [bool; 2],
    /// Frames that the gates have passed on or received, to see progress.
    pub frames: u64,
    /// Frames dropped by death or muteness.
    pub swallowed: u64,
    /// When each station sees what has come.
    pub attention: [Attention; 2],
    /// Under which Ethernet address each station is to be found.
    pub station_addresses: [StationAddress; 2],
    /// Frames that arrive at each station whatever the wire does, in order.
    pub injected: [VecDeque<Injected>; 2],
    /// Handshakes of each station's listener.
    pub handshakes: [Handshakes; 2],
    /// Identifications of each station's fragments.
    pub idents: [Idents; 2],
    /// Frames that each station has sent, where a third one keeps them.
    pub captured: Option<[VecDeque<Vec<u8>>; 2]>,
}

/// The state of the network, behind a lock.
pub type SharedNetwork = Arc<Mutex<NetworkState>>;

/// Locks it.
pub fn lock(network: &SharedNetwork) -> MutexGuard<'_, NetworkState> {
    network.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device that is full for a while after some frames.
struct Fullness {
    takes_pkts: u32,
    left_pkts: u32,
    until: Instant,
    rng: Rng,
}

impl Fullness {
    /// How many frames it takes now.
    fn room(&mut self, now: Instant) -> usize {
        if now < self.until {
            return 0;
        }
        self.left_pkts as usize
    }

    fn took(&mut self, now: Instant, pkts: usize) {
        self.left_pkts -= (pkts as u32).min(self.left_pkts);
        if self.left_pkts == 0 {
            let us = self.rng.below(2_000) + 1;
            self.until = now + Duration::from_micros(us);
            self.left_pkts = 1 + self.rng.below(u64::from(self.takes_pkts)) as u32;
        }
    }
}

/// See the module's header.
pub struct Gate {
    inner: SimLink,
    caps: Caps,
    station: usize,
    network: SharedNetwork,
    fullness: Option<Fullness>,
    /// Frames stayed with the caller.
    refused: bool,
    copies: bool,
    placing: Option<Placing>,
    urgency: Urgency,
    clamp_mss: Option<u16>,
    middleboxes: Vec<Middlebox>,
    /// Frames may come that the wire did not bring.
    is_injected: bool,
    out: Burst,
    fresh: Burst,
}

impl Gate {
    /// A gate in front of one end of the link.
    pub fn new(
        inner: SimLink,
        station: usize,
        network: &SharedNetwork,
        s: &super::Scenario,
        seed: u64,
    ) -> Gate {
        let how = &s.stations[station];
        let fullness = how.takes_pkts.map(|takes_pkts| Fullness {
            takes_pkts,
            left_pkts: takes_pkts,
            until: Instant::ZERO,
            rng: Rng::new(seed),
        });
        let coalescing = how.waits.is_some_and(|w| w.registers);
        let caps = Caps { coalescing, ..*inner.caps() };
        Gate {
            inner,
            caps,
            station,
            network: Arc::clone(network),
            fullness,
            refused: false,
            copies: how.copies,
            placing: how.places.then(|| Placing::new(seed ^ 0x91ac)),
            urgency: Urgency::new(how.urgent_percent, seed ^ 0x04c9),
            clamp_mss: s.swarm.clamp_mss[station],
            middleboxes: s.swarm.middleboxes[station].clone(),
            is_injected: s.has_injected(),
            out: Burst::with_capacity(256),
            fresh: Burst::with_capacity(64),
        }
    }

    fn is_gone(&self) -> bool {
        lock(&self.network).gone[self.station]
    }

    /// Looks at the frames that the device takes; what vanishes is freed here.
    fn admit(
        &mut self,
        now: Instant,
        room: usize,
        burst: &mut Burst,
        pool: &mut Pool,
        counters: &mut Counters,
    ) {
        let network = &mut *lock(&self.network);
        for _ in 0..room.min(self.out.space()) {
            let Some(p) = burst.pop_front() else { break };
            let mute = network.mute[self.station] && describe::is_neighbour_answer(&p);
            let vanishes = mute || network.dead[self.station];
            network.frames += 1;
            network.handshakes[self.station].leaves(&p);
            network.idents[self.station].leaves(now, &p);
            network.log.frame(now, self.station, &p, if vanishes { "  (vanishes)" } else { "" });
            if vanishes {
                network.swallowed += 1;
                counters.drop_packet(DropReason::Injected);
                pool.free(p.chain);
                continue;
            }
            if let Some(captured) = &mut network.captured
                && !p.offload.needs_csum
            {
                capture(&mut captured[self.station], p.chain.to_vec());
            }
            let Some(p) = network.station_addresses[self.station].outward(p, pool) else {
                counters.drop_packet(DropReason::NoBuffer);
                continue;
            };
            if self.out.push(p).is_err() {
                unreachable!("invariant: no more frames than room");
            }
        }
    }

    /// A frame from the wire, as the station gets it; `None` if the station does not get it.
    fn arrived(
        &mut self,
        now: Instant,
        p: Packet,
        address: &StationAddress,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> Option<Packet> {
        let p = self.let_through(now, p, pool, counters)?;
        let p = match address.inward(p, pool) {
            Some(Arrival::Here(p)) => {
                let p = self.urgency.strike(p, pool);
                p.and_then(|p| match self.clamp_mss {
                    Some(most) => clamp(p, most, pool),
                    None => Some(p),
                })
            }
            Some(Arrival::Elsewhere(p)) => {
                counters.drop_packet(DropReason::NotForUs);
                pool.free(p.chain);
                return None;
            }
            None => None,
        };
        if p.is_none() {
            counters.drop_packet(DropReason::NoBuffer);
        }
        if self.copies { copied(p?, pool, counters) } else { p }
    }

    /// A frame after the middleboxes.
    fn let_through(
        &mut self,
        now: Instant,
        mut p: Packet,
        pool: &mut Pool,
        counters: &mut Counters,
    ) -> Option<Packet> {
        for middlebox in &self.middleboxes {
            p = match middlebox.pass(now, p, pool) {
                Verdict::Pass(p) => p,
                Verdict::Drop(p) => {
                    pool.free(p.chain);
                    counters.drop_packet(DropReason::Injected);
                    return None;
                }
                Verdict::NoBuffer => {
                    counters.drop_packet(DropReason::NoBuffer);
                    return None;
                }
            };
        }
        Some(p)
    }

    /// Frames from the wire, behind those that were injected.
    fn look(&mut self, now: Instant, pool: &mut Pool, budget: usize, counters: &mut Counters) {
        let mut left = budget.min(self.fresh.space());
        if self.is_injected {
            left -= self.take_injected(now, pool, left, counters);
        }
        self.inner.rx_burst(now, pool, &mut self.fresh, left, counters);
    }

    /// At most `most` of the frames that were injected; how many.
    fn take_injected(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        most: usize,
        counters: &mut Counters,
    ) -> usize {
        let mut left = most;
        while left > 0
            && let Some(injected) = lock(&self.network).injected[self.station].pop_front()
        {
            if injected.is_strict && injected.at != now {
                continue;
            }
            left -= 1;
            let frame = &injected.frame;
            let Ok(mut chain) = pool.alloc_chain(frame.len(), 0, Purpose::Control) else {
                counters.drop_packet(DropReason::NoBuffer);
                continue;
            };
            chain.copy_from(0, frame);
            if let Err(p) = self.fresh.push(Packet { chain, offload: Offload::default() }) {
                pool.free(p.chain);
            }
        }
        most - left
    }
}

impl Gate {
    /// The bytes that the hardware has placed and not handed up.
    fn hand_up(&mut self, now: Instant, out: &mut Burst) {
        let Some(placing) = &mut self.placing else { return };
        while out.space() > 0
            && let Some(p) = placing.hand_up(now)
        {
            if out.push(p).is_err() {
                unreachable!("invariant: there is room");
            }
        }
    }
}

impl Device for Gate {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn tx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        burst: &mut Burst,
        counters: &mut Counters,
    ) -> usize {
        if self.is_gone() {
            self.refused = false;
            return 0;
        }
        let before = burst.len();
        let room = self.fullness.as_mut().map_or(usize::MAX, |f| f.room(now));
        self.admit(now, room, burst, pool, counters);
        let taken = before - burst.len();
        if let Some(f) = &mut self.fullness {
            f.took(now, taken);
        }
        self.refused = !burst.is_empty();
        self.inner.tx_burst(now, pool, &mut self.out, counters);
        taken
    }

    fn rx_burst(
        &mut self,
        now: Instant,
        pool: &mut Pool,
        out: &mut Burst,
        budget: usize,
        counters: &mut Counters,
    ) -> usize {
        // Takes no frames while frames are held, so that one burst of the link bounds them.
        let is_held = self.placing.as_ref().is_some_and(|p| p.next_deadline().is_some());
        let budget = if is_held { 0 } else { budget.min(out.space()) };
        let oldest = if budget > 0 { self.inner.next_deadline() } else { None };
        let (gone, place) = {
            let network = &mut *lock(&self.network);
            let gone = network.gone[self.station];
            network.attention[self.station].looked(now, oldest.filter(|_| !gone));
            (gone, network.station_addresses[self.station])
        };
        self.look(now, pool, budget, counters);
        while gone && let Some(p) = self.placing.as_mut().and_then(Placing::lose) {
            counters.drop_packet(DropReason::DeviceGone);
            pool.free(p.chain);
        }
        if !self.fresh.is_empty() {
            lock(&self.network).frames += self.fresh.len() as u64;
        }
        let before = out.len();
        self.hand_up(now, out);
        while let Some(p) = self.fresh.pop_front() {
            if gone {
                counters.drop_packet(DropReason::DeviceGone);
                pool.free(p.chain);
                continue;
            }
            let Some(p) = self.arrived(now, p, &place, pool, counters) else { continue };
            lock(&self.network).handshakes[self.station].arrives(&p);
            if let Some(placing) = &mut self.placing {
                placing.take(p, pool);
            } else if out.push(p).is_err() {
                unreachable!("invariant: no more frames than room");
            }
        }
        self.hand_up(now, out);
        out.len() - before
    }

    fn wake_fd(&self) -> Option<WakeFd> {
        None
    }

    fn next_deadline(&self) -> Option<Instant> {
        let full = self.fullness.as_ref().filter(|_| self.refused).map(|f| f.until);
        let held = self.placing.as_ref().and_then(Placing::next_deadline);
        // The held frames come first.
        if held.is_some() {
            return [full, held].into_iter().flatten().min();
        }
        let network = lock(&self.network);
        let injected = network.injected[self.station].front().map(|n| n.at);
        let inner = [self.inner.next_deadline(), injected].into_iter().flatten().min();
        let inner = inner.map(|at| network.attention[self.station].seen_at(at));
        [full, inner].into_iter().flatten().min()
    }

    fn stats(&self) -> DeviceStats {
        self.inner.stats()
    }

    fn lost(&self) -> Option<i32> {
        self.is_gone().then_some(ENODEV)
    }

    fn coalesce(&mut self, to: Option<Profile>) {
        lock(&self.network).attention[self.station].coalesce(to);
    }

    fn placement(&mut self) -> Option<&mut dyn DirectPlacement> {
        let placing = self.placing.as_mut()?;
        Some(placing)
    }
}
