//! One end of a connection and its program. The program writes and reads as its plan says, and compares the received
//! bytes with the bytes that the other end's stack accepted.

use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;

use fulmar::internals::runtime::{PollSetCore, WatchedShard};
use fulmar_stack::base::{Duration, Instant, SlotId};
use fulmar_stack::mbuf::Chain;
use fulmar_stack::shard::Reserved;
use fulmar_stack::socket::sendfile::Rest;
use fulmar_stack::socket::{Attempt, Ready, Reservation, Shutdown, SocketError};

use super::gate::{SharedNetwork, lock};
use super::opening::Attempts;
use super::oracle::{self, Violation};
use super::pattern;
use super::posting::{Completed, Posting};
use super::scenario::{Draw, EndPlan, Leave};

/// How an end misbehaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Quirk {
    /// As the plan says.
    None,
    /// Resets once it has written this many bytes.
    Abort(u64),
    /// Closes with unread bytes.
    UnreadClose,
    /// Closes without reading.
    EarlyClose,
    /// Shuts reading down.
    Deaf,
    /// Never reads, writes or closes.
    Stuck,
}

/// Rounds of posting in one turn: enough for what is there, bounded whatever the draws.
const POSTS_PER_TURN: usize = 64;

/// How often an end checks whether everything is acknowledged: no readiness event reports it.
const POLL: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Not connected; a passive end waits to be accepted.
    Idle,
    Connecting,
    Open,
    Done,
}

/// The bytes that an end has sent and the other end must receive.
#[derive(Clone, Copy, Debug)]
pub struct SentStream {
    /// Bytes accepted.
    pub written: u64,
    /// It has finished writing: shut down or closed.
    pub finished: bool,
}

/// The state that an end needs for its turn.
pub struct Cx<'a> {
    /// Its station.
    pub shard: &'a mut WatchedShard,
    /// The time.
    pub now: Instant,
    /// The log.
    pub network: &'a SharedNetwork,
    /// The poll set of its station, if applications there act on its events.
    pub set: Option<&'a Arc<PollSetCore>>,
    /// The bytes that the other end has sent.
    pub other: SentStream,
}

/// See the module's header.
pub struct End {
    /// Flow, and 0 for the opener.
    pub name: (usize, usize),
    /// Whose socket it is.
    pub station: usize,
    /// Its socket, while it holds it.
    pub id: Option<SlotId>,
    /// An opener's local address, remote address and time of connecting.
    pub connects: Option<(SocketAddr, SocketAddr, Instant)>,
    /// A simultaneous open: the other end connects too.
    pub both_connect: bool,
    /// Questions for the other's Ethernet address may go unanswered.
    pub may_be_absent: bool,
    /// Closes only once everything is acknowledged: the orphaned sockets of others are given up early.
    pub lingers: bool,
    /// Errors have a cause.
    pub may_fail: bool,
    /// The error that it reported.
    pub error: Option<SocketError>,
    /// Bytes accepted from it.
    pub written: u64,
    /// Bytes that it got.
    pub read: u64,
    /// When it last gave the stack something to do.
    pub asked_at: Instant,
    /// When it first tried to connect.
    pub began_at: Option<Instant>,
    /// Its SYN carries data.
    pub(super) opens_early: bool,
    /// An attempt failed and was made again, from the same port.
    pub(super) has_reconnected: bool,
    pub(super) attempts: Attempts,
    /// The other's program did not want it.
    pub(super) is_refused: bool,
    /// Its station has reset it to reclaim its memory.
    pub(super) is_reclaimed: bool,
    pub(super) plan: EndPlan,
    pub(super) quirk: Quirk,
    pub(super) phase: Phase,
    shut: bool,
    eof: bool,
    attempt: Attempt,
    /// Bytes left of the write in hand, and whether a part of it was accepted.
    pub(super) write_left: usize,
    is_split: bool,
    pub(super) write_at: Option<Instant>,
    read_at: Option<Instant>,
    preempted: Duration,
    held_write: Option<(Instant, Reservation)>,
    held_read: Option<(Instant, Chain)>,
    poll_at: Option<Instant>,
    /// The readiness that its station's poll set has for it.
    pub(super) told: Option<Ready>,
    posting: Option<Posting>,
    /// The rest of the file that it sends.
    pub(super) file_rest: Option<Rest>,
    pub(super) draw: Draw,
}

impl End {
    /// An end that has not begun.
    pub fn new(
        name: (usize, usize),
        station: usize,
        plan: &EndPlan,
        quirk: Quirk,
        preempted: Duration,
        seed: u64,
    ) -> End {
        End {
            name,
            station,
            id: None,
            connects: None,
            both_connect: false,
            may_be_absent: false,
            lingers: false,
            may_fail: false,
            error: None,
            written: 0,
            read: 0,
            asked_at: Instant::ZERO,
            began_at: None,
            opens_early: false,
            has_reconnected: false,
            attempts: Attempts::default(),
            is_refused: false,
            is_reclaimed: false,
            plan: plan.clone(),
            quirk,
            phase: Phase::Idle,
            shut: false,
            eof: false,
            attempt: Attempt::First,
            write_left: 0,
            is_split: false,
            write_at: None,
            read_at: None,
            preempted,
            held_write: None,
            held_read: None,
            poll_at: None,
            told: None,
            posting: plan.posts.map(Posting::new),
            file_rest: None,
            draw: Draw::new(seed ^ (name.0 as u64) << 8 ^ (name.1 as u64) << 4),
        }
    }

    /// The bytes that it has sent so far.
    pub fn sent(&self) -> SentStream {
        SentStream { written: self.written, finished: self.shut || self.phase == Phase::Done }
    }

    /// Nothing is left to do.
    pub fn is_done(&self) -> bool {
        self.phase == Phase::Done && self.held_read.is_none() && self.held_write.is_none()
    }

    /// It has not called `connect` yet.
    pub fn is_idle(&self) -> bool {
        self.phase == Phase::Idle
    }

    /// No client has connected to it.
    pub fn is_unconnected(&self) -> bool {
        self.is_idle() && self.connects.is_none()
    }

    /// When it wants to act whatever the network does.
    #[inline]
    pub fn deadline(&self) -> Option<Instant> {
        // Asked of every end at every event, most of which wait for the network.
        let mut due = Instant::FAR_FUTURE;
        match self.phase {
            Phase::Idle => due = self.connects.map_or(due, |c| c.2),
            Phase::Open => {
                let pauses = [self.write_at, self.read_at, self.poll_at];
                pauses.into_iter().for_each(|at| due = due.min(at.unwrap_or(due)));
            }
            Phase::Connecting | Phase::Done => {}
        }
        due = self.held_write.as_ref().map_or(due, |held| due.min(held.0));
        due = self.held_read.as_ref().map_or(due, |held| due.min(held.0));
        (due < Instant::FAR_FUTURE).then_some(due)
    }

    /// In words, for the trace of a livelock.
    pub fn describe(&self) -> String {
        format!(
            "end {:?} {:?} wrote {} of {}, read {}, shut {}, eof {}",
            self.name, self.phase, self.written, self.plan.bytes, self.read, self.shut, self.eof
        )
    }

    pub(super) fn note(&self, cx: &Cx, what: impl FnOnce() -> String) {
        let name = self.name;
        lock(cx.network).log.line(cx.now, || format!("  end {}.{} {}", name.0, name.1, what()));
    }

    /// The end that it waited for is over: it connects now.
    pub fn start(&mut self, now: Instant) {
        if let Some((_, _, at)) = &mut self.connects
            && *at == Instant::FAR_FUTURE
        {
            *at = now;
        }
    }

    /// The connection was accepted.
    pub fn adopt(&mut self, cx: &mut Cx, id: SlotId) -> Result<(), Violation> {
        self.id = Some(id);
        self.note(cx, || "accepted".into());
        self.open(cx, id)
    }

    pub(super) fn open(&mut self, cx: &mut Cx, id: SlotId) -> Result<(), Violation> {
        self.phase = Phase::Open;
        self.read_at = (!self.plan.read_after.is_zero()).then_some(cx.now + self.plan.read_after);
        self.plan.set_options(cx, id)?;
        if self.quirk == Quirk::Deaf {
            self.eof = true;
            // It may have failed already; the next write tells.
            let _ = cx.shard.tcp_shutdown(cx.now, id, Shutdown::Read);
        }
        Ok(())
    }

    /// Does what it can now. True if it came further.
    pub fn drive(&mut self, cx: &mut Cx) -> Result<bool, Violation> {
        let before = (self.written, self.read, self.phase, self.shut, self.eof);
        self.end_pauses(cx.now);
        self.finish_held(cx, false);
        if self.phase == Phase::Idle {
            self.connect(cx)?;
        }
        if self.phase == Phase::Connecting {
            self.check_connected(cx)?;
        }
        if self.phase == Phase::Open {
            self.write(cx)?;
        }
        if self.phase == Phase::Open {
            self.read(cx)?;
        }
        if self.phase == Phase::Open {
            self.leave(cx)?;
        }
        self.tell_interest(cx)?;
        Ok(before != (self.written, self.read, self.phase, self.shut, self.eof))
    }

    /// The readiness that it waits for.
    fn interest(&self) -> Ready {
        let paused = self.held_read.is_some() || self.read_at.is_some();
        let reads = match self.quirk {
            Quirk::EarlyClose | Quirk::Stuck => false,
            Quirk::Deaf => true,
            _ => !self.eof && !paused,
        };
        let paused = self.held_write.is_some() || self.write_at.is_some();
        let writes = self.written < self.plan.bytes && !paused && self.quirk != Quirk::Stuck;
        match self.phase {
            Phase::Connecting => Ready::WRITABLE,
            Phase::Open => {
                let reads = if reads { Ready::READABLE } else { Ready::NONE };
                reads | if writes { Ready::WRITABLE } else { Ready::NONE }
            }
            Phase::Idle | Phase::Done => Ready::NONE,
        }
    }

    /// Keeps the poll set's interest equal to its own.
    fn tell_interest(&mut self, cx: &mut Cx) -> Result<(), Violation> {
        let (Some(set), Some(id)) = (cx.set, self.id) else { return Ok(()) };
        let interest = self.interest();
        if matches!(self.phase, Phase::Idle | Phase::Done) || self.told == Some(interest) {
            return Ok(());
        }
        self.told = Some(interest);
        let e = 2 * self.name.0 + self.name.1;
        cx.shard.join_set(id, set, e, interest).map_err(|e| Violation::Call("join_set", e))
    }

    fn end_pauses(&mut self, now: Instant) {
        self.write_at = self.write_at.filter(|at| *at > now);
        self.read_at = self.read_at.filter(|at| *at > now);
        self.poll_at = self.poll_at.filter(|at| *at > now);
    }

    /// The thread goes on that was put aside between two steps of a call.
    fn finish_held(&mut self, cx: &mut Cx, at_once: bool) {
        let Some(id) = self.id else { return };
        let now = cx.now;
        if let Some((_, r)) = self.held_write.take_if(|h| at_once || h.0 <= now) {
            self.commit(cx, id, r);
        }
        if let Some((_, chain)) = self.held_read.take_if(|h| at_once || h.0 <= now) {
            cx.shard.tcp_read_done(now, id, chain);
        }
    }

    pub(super) fn size(&mut self, most: usize) -> usize {
        let most = most.clamp(1, pattern::PIECE);
        if self.plan.ragged { 1 + self.draw.below(most as u64) as usize } else { most }
    }

    pub(super) fn stream(&self, of_other: bool) -> u64 {
        (self.name.0 * 2 + (self.name.1 ^ usize::from(of_other))) as u64
    }

    fn write(&mut self, cx: &mut Cx) -> Result<(), Violation> {
        let Some(id) = self.id.filter(|_| self.quirk != Quirk::Stuck) else { return Ok(()) };
        if let Some(file) = self.plan.options.file {
            return self.send_files(cx, id, file);
        }
        while self.written < self.plan.bytes && self.held_write.is_none() && self.write_at.is_none()
        {
            if self.write_left == 0 {
                let left = (self.plan.bytes - self.written) as usize;
                self.write_left = self.size(self.plan.write_bytes).min(left);
                self.is_split = false;
            }
            let bytes = pattern::piece(self.stream(false), self.written, self.write_left);
            let first = if self.is_split { &[] } else { bytes };
            match cx.shard.sosend(id).reserve(cx.now, first, bytes.len(), self.attempt) {
                Ok(Poll::Ready(Reserved::Sent(n))) => self.accepted(cx, n),
                Ok(Poll::Ready(Reserved::Space(r))) => self.fill(cx, id, r, bytes),
                Ok(Poll::Pending) => {
                    self.attempt = Attempt::Retry;
                    return Ok(());
                }
                Err(e) => return self.fail(cx, e),
            }
        }
        Ok(())
    }

    fn fill(&mut self, cx: &mut Cx, id: SlotId, mut r: Reservation, bytes: &[u8]) {
        let n = r.len();
        r.chain.copy_from(0, &bytes[..n]);
        if !self.preempted.is_zero() && self.draw.percent(20) {
            self.held_write = Some((cx.now + self.preempted, r));
            return;
        }
        self.commit(cx, id, r);
    }

    fn commit(&mut self, cx: &mut Cx, id: SlotId, r: Reservation) {
        if self.phase == Phase::Done && self.draw.percent(50) {
            return cx.shard.sosend(id).abandon(cx.now, r);
        }
        let n = r.len();
        cx.shard.sosend(id).commit(cx.now, r);
        self.accepted(cx, n);
    }

    pub(super) fn accepted(&mut self, cx: &Cx, n: usize) {
        self.asked_at = cx.now;
        self.attempt = Attempt::First;
        self.written += n as u64;
        self.write_left = self.write_left.saturating_sub(n);
        self.is_split = self.write_left > 0;
        self.note(cx, || format!("wrote {n}"));
        if self.write_left == 0 && !self.plan.write_pause.is_zero() {
            self.write_at = Some(cx.now + self.plan.write_pause);
        }
    }

    fn read(&mut self, cx: &mut Cx) -> Result<(), Violation> {
        let Some(id) = self.id else { return Ok(()) };
        if matches!(self.quirk, Quirk::UnreadClose | Quirk::EarlyClose | Quirk::Stuck) {
            return Ok(());
        }
        while !self.eof && self.held_read.is_none() && self.read_at.is_none() {
            if self.posting.is_some() && !self.receive_posted(cx, id)? {
                return Ok(());
            }
            if self.draw.below(16) == 0 {
                self.peek(cx, id)?;
                if self.phase != Phase::Open {
                    return Ok(());
                }
            }
            let most = self.size(self.plan.read_bytes);
            match cx.shard.tcp_take(id, most) {
                Ok(Poll::Ready(chain)) if chain.is_empty() => return self.on_eof(cx, id),
                Ok(Poll::Ready(chain)) => self.take(cx, id, chain)?,
                Ok(Poll::Pending) => return Ok(()),
                Err(e) => return self.fail(cx, e),
            }
        }
        Ok(())
    }

    /// Takes what posted buffers brought and posts others. True if it is the turn of a read.
    fn receive_posted(&mut self, cx: &mut Cx, id: SlotId) -> Result<bool, Violation> {
        let Some(mut posting) = self.posting.take() else { return Ok(true) };
        let done = self.receive_with(cx, id, &mut posting);
        if posting.is_reading() {
            posting.has_read(&mut self.draw);
            self.posting = Some(posting);
            return done.map(|()| !self.eof && self.phase == Phase::Open);
        }
        self.posting = Some(posting);
        done.map(|()| false)
    }

    fn receive_with(
        &mut self,
        cx: &mut Cx,
        id: SlotId,
        posting: &mut Posting,
    ) -> Result<(), Violation> {
        for _ in 0..POSTS_PER_TURN {
            while let Some(back) = posting.next_completed() {
                match back {
                    Completed::Bytes(buf) => {
                        self.count_read(cx, &buf)?;
                        posting.reuse(buf);
                    }
                    Completed::End => return self.on_eof(cx, id),
                    Completed::Failed(e) => return self.fail(cx, e),
                }
            }
            if posting.is_reading() {
                return Ok(());
            }
            if let Err(e) = posting.post(cx, id, &mut self.draw) {
                return self.fail(cx, e);
            }
        }
        Ok(())
    }

    /// Bytes came in a posted buffer.
    fn count_read(&mut self, cx: &Cx, bytes: &[u8]) -> Result<(), Violation> {
        self.compare(0, bytes)?;
        self.read += bytes.len() as u64;
        let (read, written) = (self.read, cx.other.written);
        if read > written {
            return Err(Violation::TooManyBytes { end: self.name, read, written });
        }
        self.note(cx, || format!("received {}", bytes.len()));
        lock(cx.network).log.mix(bytes.len() as u64 ^ cx.now.as_nanos());
        Ok(())
    }

    /// Looks at the next bytes; they must be those that are read afterwards.
    fn peek(&mut self, cx: &mut Cx, id: SlotId) -> Result<(), Violation> {
        let mut bytes = [0; 600];
        match cx.shard.tcp_peek_at(id, 0, bytes.len(), 1) {
            Ok(Poll::Ready(chain)) => {
                let n = chain.copy_to(0, &mut bytes);
                cx.shard.pool().free(chain);
                self.compare(0, &bytes[..n])
            }
            Ok(_) => Ok(()),
            // A pending error is reported once, here.
            Err(e) => self.fail(cx, e),
        }
    }

    fn compare(&self, skip: u64, bytes: &[u8]) -> Result<(), Violation> {
        let at = self.read + skip;
        match pattern::first_difference(self.stream(true), at, bytes) {
            None => Ok(()),
            Some(n) => Err(Violation::WrongByte { end: self.name, at: at + n as u64 }),
        }
    }

    fn take(&mut self, cx: &mut Cx, id: SlotId, chain: Chain) -> Result<(), Violation> {
        let mut at = 0;
        for piece in chain.slices() {
            self.compare(at, piece)?;
            at += piece.len() as u64;
        }
        self.read += at;
        let (read, written) = (self.read, cx.other.written);
        if read > written {
            return Err(Violation::TooManyBytes { end: self.name, read, written });
        }
        self.note(cx, || format!("read {at}"));
        lock(cx.network).log.mix(at ^ cx.now.as_nanos());
        if !self.plan.read_pause.is_zero() {
            self.read_at = Some(cx.now + self.plan.read_pause);
        }
        if !self.preempted.is_zero() && self.draw.percent(20) {
            self.held_read = Some((cx.now + self.preempted, chain));
        } else {
            cx.shard.tcp_read_done(cx.now, id, chain);
        }
        Ok(())
    }

    fn on_eof(&mut self, cx: &mut Cx, id: SlotId) -> Result<(), Violation> {
        self.eof = true;
        self.note(cx, || "end of stream".into());
        let (read, written) = (self.read, cx.other.written);
        if read != written || !cx.other.finished {
            return Err(Violation::EarlyEof { end: self.name, read, written });
        }
        match cx.shard.tcp_take(id, 1) {
            Ok(Poll::Ready(chain)) if chain.is_empty() => Ok(()),
            // A reset that came behind the FIN.
            Err(_) if self.may_fail => Ok(()),
            _ => Err(Violation::AfterEof { end: self.name }),
        }
    }

    fn leave(&mut self, cx: &mut Cx) -> Result<(), Violation> {
        let Some(id) = self.id else { return Ok(()) };
        let all_written = self.written == self.plan.bytes && self.held_write.is_none();
        match self.quirk {
            Quirk::Abort(after) if self.written >= after.min(self.plan.bytes) => {
                self.abort(cx);
                return Ok(());
            }
            Quirk::EarlyClose if all_written => {
                self.close(cx, id);
                return Ok(());
            }
            Quirk::UnreadClose if all_written => return self.close_unread(cx, id),
            Quirk::Stuck => return Ok(()),
            _ => {}
        }
        // A closed socket whose FIN waits for a window is given up: after the user time-out here, after
        // tcp_orphan_retries probes in Linux.
        let half_closes = self.plan.leave == Leave::HalfClose || self.lingers;
        if all_written && half_closes && !self.shut {
            self.asked_at = cx.now;
            self.shut = true;
            self.note(cx, || "shuts down writing".into());
            if let Err(e) = cx.shard.tcp_shutdown(cx.now, id, Shutdown::Write) {
                let told = cx.shard.take_error(id).ok().flatten();
                // Else a posted buffer has been told, and tells.
                let is_last = told.is_some() || self.posting.is_none();
                return if is_last { self.fail(cx, told.unwrap_or(e)) } else { Ok(()) };
            }
        }
        if all_written && self.lingers && !cx.shard.is_drained(Some(id)) {
            self.poll_at = Some(cx.now + POLL);
            return Ok(());
        }
        let heard = self.quirk != Quirk::Deaf || self.peer_is_through(cx, id)?;
        if all_written
            && self.eof
            && heard
            && (self.shut || !half_closes)
            && self.held_read.is_none()
        {
            self.close(cx, id);
        }
        Ok(())
    }

    /// An end that does not read sees the other's end of stream only in its state.
    fn peer_is_through(&mut self, cx: &mut Cx, id: SlotId) -> Result<bool, Violation> {
        let tcb = &mut cx.shard.tcp_entry(id).map_err(|e| Violation::Call("tcp_entry", e))?.tcb;
        if let Some(e) = tcb.take_error() {
            self.fail(cx, e.into())?;
            return Ok(false);
        }
        Ok(tcb.peer_closed())
    }

    fn close_unread(&mut self, cx: &mut Cx, id: SlotId) -> Result<(), Violation> {
        match cx.shard.tcp_peek_at(id, 0, 1, 1) {
            Ok(Poll::Ready(chain)) => {
                cx.shard.pool().free(chain);
                self.close(cx, id);
                Ok(())
            }
            Ok(_) if !self.shut => {
                self.shut = true;
                let _ = cx.shard.tcp_shutdown(cx.now, id, Shutdown::Write);
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(e) => self.fail(cx, e),
        }
    }

    fn close(&mut self, cx: &mut Cx, id: SlotId) {
        self.note(cx, || "closes".into());
        self.phase = Phase::Done;
        self.asked_at = cx.now;
        cx.shard.close(cx.now, id);
    }

    /// Resets the connection, or lets go of what is left of it.
    pub fn abort(&mut self, cx: &mut Cx) {
        let Some(id) = self.id else {
            self.phase = Phase::Done;
            return;
        };
        self.finish_held(cx, true);
        self.note(cx, || "aborts".into());
        if let Ok(entry) = cx.shard.tcp_entry(id) {
            entry.linger = Some(Duration::ZERO);
        }
        self.close(cx, id);
    }

    pub(super) fn fail(&mut self, cx: &mut Cx, error: SocketError) -> Result<(), Violation> {
        self.error = Some(error);
        self.note(cx, || format!("fails: {error}"));
        lock(cx.network).log.mix(error.errno() as u64 ^ cx.now.as_nanos());
        if !self.may_fail || !oracle::is_of_the_network(error) {
            return Err(Violation::Uncaused { end: self.name, error });
        }
        self.phase = Phase::Done;
        if let Some(id) = self.id {
            self.close(cx, id);
        }
        Ok(())
    }
}
