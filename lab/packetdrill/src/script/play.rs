//! Plays a script.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fulmar_stack::wire::tcp::Flags;

use super::call::{Call, Places};
use super::packet::{Addresses, Packet, Segment, emit_icmp};
use super::{Action, Assertion, Event, Script, TOLERANCE, When};
use crate::interface::{Interface, Wait};
use crate::settings::Settings;
use crate::sockets::Machine;
use crate::world::World;

/// The port of listeners, and that of peers: packetdrill's.
const OWN_PORT: u16 = 8080;
const PEER_PORT: u16 = 8080;
/// The port from which peers connect.
const PEER_CLIENT_PORT: u16 = 40_000;

/// The answer of [`Call::make`].
type Made = Result<Result<i64, i32>, String>;

/// A call that is blocked: when it has to return in microseconds, and its outcome with the time.
struct Blocked {
    end_us: u64,
    call: Call,
    thread: JoinHandle<(Made, u64)>,
}

struct Player {
    interface: Arc<Interface>,
    places: Places,
    /// The ends as the stack sees them, once they are known.
    ends: Option<Addresses>,
    /// The initial sequence number of the stack, once it has sent one. The peer's is the script's.
    own_isn: u32,
    /// What the stack's timestamps are ahead of the script's, once it has sent one.
    stamp_offset: Option<u32>,
    settings: String,
    start_us: u64,
    /// When the last event was, in microseconds of the clock.
    last_us: u64,
    tolerance: Duration,
    blocked: Option<Blocked>,
}

/// Plays a script.
///
/// # Errors
/// The line, and what was not as it says.
pub fn play(script: &Script) -> Result<(), String> {
    let (own, peer): (&str, &str) = if script.is_v6 {
        ("fd3d:fa7b:d17d::1", "2001:db8::1")
    } else {
        ("192.168.0.1", "192.0.2.1")
    };
    let place = |ip: &str, port| (ip.parse().expect("invariant: an address"), port);
    let interface = Arc::new(Interface::new(Machine::new(World::default())));
    let start_us = interface.clock_us();
    let mut player = Player {
        interface,
        places: Places { own: place(own, OWN_PORT), peer: place(peer, PEER_PORT) },
        ends: None,
        own_isn: 0,
        stamp_offset: None,
        settings: String::new(),
        start_us,
        last_us: start_us,
        tolerance: script.tolerance.unwrap_or(TOLERANCE),
        blocked: None,
    };
    for event in &script.events {
        player.play(event).map_err(|why| format!("line {}: {why}", event.line))?;
    }
    player.end_blocked()
}

fn us(time: Duration) -> u64 {
    time.as_micros() as u64
}

impl Player {
    /// The earliest and the latest time of an event.
    fn range(&self, when: When) -> (u64, u64) {
        match when {
            When::At(at) => (self.start_us + us(at), self.start_us + us(at)),
            When::After(time) => (self.last_us + us(time), self.last_us + us(time)),
            When::Within(from, to) => (self.last_us + us(from), self.last_us + us(to)),
            When::Any => (0, u64::MAX),
        }
    }

    /// Lets time pass to the time of an event.
    fn wait(&mut self, when: When) -> Result<(), String> {
        let (at, _) = self.range(when);
        let now = crate::world::micros(self.interface.now());
        if at > now {
            self.interface.sleep(Duration::from_micros(at - now));
        }
        self.last_us = self.last_us.max(at).max(now);
        Ok(())
    }

    fn play(&mut self, event: &Event) -> Result<(), String> {
        // The end of a blocking call counts from where its start does.
        let base_us = if let When::At(_) = event.when { self.start_us } else { self.last_us };
        match &event.action {
            Action::Expect(packet) => return self.expect(event.when, packet),
            _ => self.wait(event.when)?,
        }
        match &event.action {
            Action::Inject(packet) => self.inject(packet),
            Action::Call(call, None) => {
                self.end_blocked()?;
                self.call(call)
            }
            Action::Call(call, Some(end)) => self.call_blocking(call, base_us + us(*end)),
            Action::Sysctls(settings) => {
                for (name, value) in settings {
                    self.settings += &format!("{name}={value}\n");
                }
                let settings = Settings::parse(&self.settings);
                let set = |m: &mut Machine| {
                    m.world.set_settings(settings.clone());
                    Ok(())
                };
                self.interface.call(Wait::Never, set).map_err(|e| format!("errno {e}"))
            }
            Action::Assert(assertion) => self.assert(assertion),
            Action::Expect(_) => Ok(()),
        }
    }

    fn inject(&mut self, packet: &Packet) -> Result<(), String> {
        let connecting =
            Addresses { from: self.places.own, to: (self.places.peer.0, PEER_CLIENT_PORT) };
        let bytes = match packet {
            Packet::Tcp(segment) => {
                let is_syn = segment.flags.contains(Flags::SYN);
                if is_syn && !segment.flags.contains(Flags::ACK) && self.ends.is_none() {
                    self.ends = Some(connecting);
                }
                let ends = self.ends.unwrap_or(connecting);
                let mut segment = segment.clone();
                if let Some(stamps) = segment.options.as_mut().and_then(|o| o.timestamps.as_mut()) {
                    stamps.echo = stamps.echo.wrapping_add(self.stamp_offset.unwrap_or(0));
                }
                segment.emit(&ends.reversed(), (0, self.own_isn))
            }
            Packet::Icmp(kind, seq, bytes) => {
                let ends = self.ends.ok_or("an ICMP error before any segment")?;
                emit_icmp(*kind, &ends, seq.wrapping_add(self.own_isn), *bytes)
            }
        };
        self.interface.inject(&bytes);
        Ok(())
    }

    /// The packets that make up the expected one: a stack may send it as several segments.
    fn expect(&mut self, when: When, packet: &Packet) -> Result<(), String> {
        let Packet::Tcp(expected) = packet else { return Err("ICMP is not expected".to_owned()) };
        let (earliest, latest) = self.range(when);
        let (mut whole, mut sent_us) = (None::<Segment>, 0);
        loop {
            let (at, bytes) = self.interface.next_sent().ok_or("nothing was sent")?;
            sent_us = if whole.is_none() { at } else { sent_us };
            let segment = self.segment_of(&bytes)?;
            let joined = match whole {
                Some(first) => join(&first, &segment)?,
                None => segment,
            };
            let is_whole = joined.bytes >= expected.bytes;
            whole = Some(joined);
            if is_whole {
                break;
            }
        }
        let sent = whole.ok_or("nothing was sent")?;
        let stamp = |s: &Segment| s.options.and_then(|o| o.timestamps).map(|t| t.value);
        if let (None, Some(live), Some(own)) = (self.stamp_offset, stamp(&sent), stamp(expected)) {
            self.stamp_offset = Some(live.wrapping_sub(own));
        }
        if let Some(difference) = expected.difference(&sent) {
            return Err(difference);
        }
        let slack = us(self.tolerance);
        if sent_us + slack < earliest || sent_us > latest.saturating_add(slack) {
            let told = |us: u64| us.saturating_sub(self.start_us) as f64 / 1e6;
            return Err(format!(
                "sent at {:.6} and not between {:.6} and {:.6}",
                told(sent_us),
                told(earliest),
                told(latest.min(self.start_us + 1_000_000_000_000))
            ));
        }
        self.last_us = crate::world::micros(self.interface.now());
        Ok(())
    }

    /// A packet that was sent, relative to the initial sequence numbers; a first SYN tells the stack's.
    fn segment_of(&mut self, bytes: &[u8]) -> Result<Segment, String> {
        let (raw, ends) = Segment::of_wire(bytes, (0, 0)).ok_or("a packet that is not TCP")?;
        let is_connect = raw.flags.contains(Flags::SYN) && !raw.flags.contains(Flags::ACK);
        if self.ends.is_none() && is_connect {
            self.ends = Some(ends);
        }
        if raw.flags.contains(Flags::SYN) {
            self.own_isn = raw.seq;
        }
        let segment = Segment::of_wire(bytes, (self.own_isn, 0)).ok_or("not TCP")?;
        Ok(segment.0)
    }

    fn call(&mut self, call: &Call) -> Result<(), String> {
        let answer = call.make(&self.interface, &self.places)?;
        call.difference(answer)?.map_or(Ok(()), Err)
    }

    /// Makes a call in a thread, and waits until it has begun.
    fn call_blocking(&mut self, call: &Call, end_us: u64) -> Result<(), String> {
        self.end_blocked()?;
        let (interface, places, own) = (Arc::clone(&self.interface), self.places, call.clone());
        let thread = thread::spawn(move || {
            let answer = own.make(&interface, &places);
            (answer, interface.clock_us())
        });
        while !thread.is_finished() && !self.interface.has_parked() {
            thread::yield_now();
        }
        self.blocked = Some(Blocked { end_us, call: call.clone(), thread });
        Ok(())
    }

    /// The blocked call, if there is one, has returned in time, and as the script says.
    fn end_blocked(&mut self) -> Result<(), String> {
        let Some(blocked) = self.blocked.take() else { return Ok(()) };
        let at = blocked.end_us;
        let now = crate::world::micros(self.interface.now());
        if !blocked.thread.is_finished() && at > now {
            self.interface.sleep(Duration::from_micros(at - now));
        }
        if self.interface.has_parked() {
            return Err(format!("{} is still blocked", blocked.call.name));
        }
        let (answer, ended) = blocked.thread.join().map_err(|_| "a call panicked".to_owned())?;
        if let Some(difference) = blocked.call.difference(answer?)? {
            return Err(difference);
        }
        if ended.abs_diff(at) > us(self.tolerance) {
            let ended = (ended - self.start_us) as f64 / 1e6;
            return Err(format!("{} returned at {ended:.6}", blocked.call.name));
        }
        Ok(())
    }

    fn assert(&mut self, assertion: &Assertion) -> Result<(), String> {
        let info = self
            .interface
            .call(Wait::Never, |m| m.last_connection().ok_or(crate::sockets::Refusal::WouldBlock))
            .map_err(|_| "no connection to assert on".to_owned())?;
        let mss = u64::from(info.mss_bytes.max(1));
        let value = match assertion.field.as_str() {
            "tcpi_snd_cwnd" => info.cwnd_bytes / mss,
            "tcpi_snd_ssthresh" => info.ssthresh_bytes / mss,
            "tcpi_snd_mss" => mss,
            "tcpi_unacked" => info.in_flight_bytes.div_ceil(mss),
            "tcpi_sacked" => info.sacked_bytes.div_ceil(mss),
            "tcpi_backoff" => u64::from(info.backoff),
            "tcpi_total_retrans" => info.retransmits,
            field => return Err(format!("unknown field `{field}`")),
        };
        let n = assertion.number;
        let holds = match assertion.operator.as_str() {
            "==" => value == n,
            "!=" => value != n,
            "<" => value < n,
            "<=" => value <= n,
            ">" => value > n,
            ">=" => value >= n,
            operator => return Err(format!("unknown comparison `{operator}`")),
        };
        if holds { Ok(()) } else { Err(format!("{} is {value}", assertion.field)) }
    }
}

/// Two segments one behind the other as one.
fn join(first: &Segment, next: &Segment) -> Result<Segment, String> {
    if next.seq != first.seq.wrapping_add(first.bytes as u32) {
        return Err(format!("{next:?} does not follow {first:?}"));
    }
    Ok(Segment { seq: first.seq, bytes: first.bytes + next.bytes, ..next.clone() })
}
