//! Posted receive in a shard: whose buffers have bytes to take, what the device is told about their flows,
//! and who learns that one is full.
//!
//! The steps themselves are `fulmar_socket::posted`. Connections with posted buffers that something
//! happened to wait in a list; after each burst their bytes are taken in, and when the device has run dry
//! it is decided which buffers are over. A buffer that is over goes into its [`RecvTicket`] under the lock;
//! whoever waits for it is told after the lock is released ([`Received`]).

mod placer;

use std::sync::Arc;

use fulmar_base::{Counter, Counters, Duration, FlowKey, Instant, Probe, SlotId};
use fulmar_ip::Ip;
use fulmar_mbuf::{Chain, RecvBuf, RecvQueue};
use fulmar_socket::posted::{Io, Posted, Rule, Stream, Taken};
use fulmar_socket::{SocketError, Step};
use fulmar_tcp::{State, Tcb};

use crate::net::Net;
use crate::shard::{CALLER_IS_BACK, Shard, TimerKey};
use crate::sockets::{Socket, TcpEntry};
use crate::sync::{AtomicUsize, Ordering};
use crate::ticket::{Post, RecvOutcome, RecvTicket};
use crate::wheel::TimerId;
use placer::{FlowPlacer, NoDevice};

/// When to look again at buffers whose memory somebody still refers to, or for which there was no memory
/// to move bytes away: nobody tells us. Well below what a person notices.
const RETRY: Duration = Duration::from_millis(5);

/// A ticket in the hands of its connection. If that goes without a word, so does whoever waits.
pub(crate) struct Token(Arc<RecvTicket>);

impl Drop for Token {
    fn drop(&mut self) {
        if self.0.is_over() {
            return;
        }
        let outcome = RecvOutcome { buf: None, error: Some(SocketError::NetworkDown) };
        self.0.put(outcome, &Arc::default());
        self.0.completion.finish();
    }
}

/// Tickets whose holders are to be told. Dropping it tells them, so it is dropped without the lock.
#[derive(Default)]
pub struct Received(smallvec::SmallVec<[Arc<RecvTicket>; 4]>);

impl Received {
    /// Those of another look as well.
    pub(crate) fn append(&mut self, mut other: Received) {
        self.0.append(&mut other.0);
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|t| t.completion.finish());
    }
}

/// The posted buffers of one connection and what the shard knows beside them.
#[derive(Default)]
pub struct RecvEntry {
    machine: Posted<Token>,
    timer: Option<TimerId>,
    /// It lies in the shard's list.
    is_listed: bool,
    /// Buffers that are over and not taken.
    untaken: Arc<AtomicUsize>,
    /// Whether the peer is an address of ours, and what `ip` said of its changes when that was looked up.
    is_local: Option<(u64, bool)>,
}

impl RecvEntry {
    /// Whether buffers wait: reads come behind them.
    pub(crate) fn is_waiting(&self) -> bool {
        self.machine.is_waiting()
    }

    /// Whether a buffer is there to be taken.
    pub(crate) fn has_untaken(&self) -> bool {
        self.untaken.load(Ordering::Relaxed) > 0
    }

    /// Whether the peer is an address of ours: the device has nothing of such a stream.
    #[inline]
    fn is_local(&mut self, ip: &Ip, flow: &FlowKey) -> bool {
        let changes = ip.generation();
        match self.is_local {
            Some((known, is_local)) if known == changes => is_local,
            _ => self.look_up_peer(ip, flow),
        }
    }

    #[cold]
    fn look_up_peer(&mut self, ip: &Ip, flow: &FlowKey) -> bool {
        self.is_local.insert((ip.generation(), ip.is_local(flow.remote_ip()))).1
    }

    /// Fills the tickets of what is over; how many.
    fn hand_out(&mut self, to: &mut Outbox) -> usize {
        let mut count = 0;
        while let Some(f) = self.machine.pop_finished() {
            let outcome = RecvOutcome { buf: Some(f.buf), error: f.error };
            if to.awaited == Some(address_of(&f.token.0)) {
                f.token.0.pass();
                to.outcome = Some(outcome);
                to.awaited = None;
            } else {
                f.token.0.put(outcome, &self.untaken);
                to.received.0.push(Arc::clone(&f.token.0));
            }
            count += 1;
        }
        count
    }
}

/// Which ticket it is, while somebody has it.
fn address_of(ticket: &RecvTicket) -> usize {
    std::ptr::from_ref(ticket).addr()
}

/// Where outcomes go.
#[derive(Default)]
struct Outbox {
    /// Tickets whose holders are to be told.
    received: Received,
    /// The one that the holder of the lock waits for, in this very step: it need not be told.
    awaited: Option<usize>,
    /// Its outcome.
    outcome: Option<RecvOutcome>,
}

/// What a shard keeps for all of them.
#[derive(Default)]
pub(crate) struct PostedTable {
    /// Connections to look at, each once.
    listed: Vec<SlotId>,
    /// Kept, so that a look allocates nothing.
    spare: Vec<SlotId>,
    /// Buffers of closed connections that somebody still refers to.
    orphans: Vec<RecvEntry>,
    /// When to look again at the latest.
    again_at: Option<Instant>,
    /// Buffers were posted of which the device has not been told.
    has_news: bool,
    /// A buffer became full since this was asked last.
    has_filled: bool,
    /// What came last for a posted buffer was put there by the device, most of it.
    is_placed: bool,
    out: Outbox,
}

impl PostedTable {
    /// When to look again at the latest.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.again_at
    }

    /// Whether holders of tickets are to be told.
    #[inline]
    pub(crate) fn has_received(&self) -> bool {
        !self.out.received.0.is_empty()
    }

    /// Something happened to a connection.
    #[inline]
    pub(crate) fn list(&mut self, id: SlotId, entry: &mut TcpEntry) {
        if let Some(posted) = &mut entry.posted
            && posted.machine.is_waiting()
            && !std::mem::replace(&mut posted.is_listed, true)
        {
            self.listed.push(id);
        }
    }

    /// Whether a buffer became full since this was asked last: its owner is about to come back with it.
    pub(crate) fn take_filled(&mut self) -> bool {
        std::mem::take(&mut self.has_filled)
    }

    fn look_by(&mut self, at: Instant) {
        self.again_at = Some(self.again_at.map_or(at, |a| a.min(at)));
    }
}

/// Whether the stream is over for a reader who has everything: `Ok` at its end, else why.
fn ended(entry: &TcpEntry) -> Option<Result<(), SocketError>> {
    if let Some(e) = entry.error {
        return Some(Err(e));
    }
    if let Some(e) = entry.tcb.pending_error() {
        return Some(Err(e.into()));
    }
    (entry.tcb.at_eof() || !entry.tcb.can_recv()).then_some(Ok(()))
}

fn is_receiving(tcb: &Tcb) -> bool {
    matches!(tcb.state(), State::Established | State::FinWait1 | State::FinWait2)
}

/// Runs a step of the machine of a connection.
fn with_machine<P: Probe, R>(
    net: &mut Net<P>,
    entry: &mut TcpEntry,
    f: impl FnOnce(&mut Posted<Token>, &mut Io<'_>) -> R,
) -> Option<R> {
    let flow = *entry.tcb.key();
    let first = entry.tcb.recv_seq(0);
    let posted = entry.posted.as_mut()?;
    let may_place = is_receiving(&entry.tcb) && !posted.is_local(&net.ip, &flow);
    let Net { pool, counters, link, .. } = net;
    let mut placer = FlowPlacer { device: link.device(), counters, flow, first };
    let recv = entry.tcb.recv_queue();
    let mut io = Io { recv, pool, placer: &mut placer, may_place };
    Some(f(&mut posted.machine, &mut io))
}

/// Hands out what is over of a connection; whether its watchers may want to know.
#[inline]
fn hand_out(entry: &mut TcpEntry, to: &mut Outbox, counters: &mut Counters) -> bool {
    let Some(posted) = &mut entry.posted else { return false };
    let count = posted.hand_out(to);
    counters.add(Counter::Receives, count as u64);
    // Readers wait behind the last of them, however that ended.
    count > 0 || !posted.machine.is_waiting()
}

impl<P: Probe> Shard<P> {
    /// Posts a buffer: what comes next and is not for those posted before goes into it.
    ///
    /// # Errors
    /// [`SocketError::WouldBlock`]: too many wait already; [`SocketError::BadHandle`],
    /// [`SocketError::NotSupported`], [`SocketError::NetworkDown`]. The buffer comes back.
    pub fn tcp_post(
        &mut self,
        now: Instant,
        id: SlotId,
        buf: RecvBuf,
        rule: Rule,
        ticket: &Arc<RecvTicket>,
    ) -> Result<(), (SocketError, RecvBuf)> {
        self.post_or_return(now, Post { id, buf, read: None, rule, ticket })
    }

    fn post_or_return(
        &mut self,
        now: Instant,
        Post { id, buf, read, rule, ticket }: Post<'_>,
    ) -> Result<(), (SocketError, RecvBuf)> {
        let entry = match self.sockets.get_mut(id) {
            Some(Socket::Tcp(entry)) if entry.error.is_none() => entry,
            _ => return Err((self.why_not(id), buf)),
        };
        let posted = entry.posted.get_or_insert_default();
        let token = Token(Arc::clone(ticket));
        let posting = match read {
            Some(done) => posted.machine.post_read(buf, done, rule, token),
            None => posted.machine.post(buf, rule, token),
        };
        if let Err((buf, token)) = posting {
            token.0.give_up();
            return Err((SocketError::WouldBlock, buf));
        }
        let may_wait = posted.machine.may_wait(entry.tcb.recv_queue_ref());
        self.posted.list(id, entry);
        if may_wait {
            self.posted.has_news = true;
        } else {
            self.run_posted_now(now, id);
        }
        Ok(())
    }

    /// Why nothing can be posted.
    #[cold]
    fn why_not(&mut self, id: SlotId) -> SocketError {
        let checked = self.check_down(id).and_then(|()| self.tcp_entry(id).map(drop));
        checked.err().unwrap_or(SocketError::BadHandle)
    }

    /// As [`Shard::tcp_post`]; what cannot be posted stays.
    pub(crate) fn post_if_possible(&mut self, now: Instant, post: &mut Option<Post<'_>>) {
        let Some(Post { id, buf, read, rule, ticket }) = post.take() else { return };
        if let Err((_, buf)) = self.post_or_return(now, Post { id, buf, read, rule, ticket }) {
            *post = Some(Post { id, buf, read, rule, ticket });
        }
    }

    /// One step of a read that waits, whose own buffer is `post`. What is there is detached
    /// ([`Shard::tcp_take_more`]); where the read has to wait, its buffer is posted, unless others are or the
    /// device is told nothing of this flow: then it stays in `post`.
    ///
    /// # Errors
    /// As [`Shard::tcp_take`].
    pub fn tcp_take_or_post(
        &mut self,
        now: Instant,
        post: &mut Option<Post<'_>>,
    ) -> Result<Option<Chain>, SocketError> {
        let Some(read) = post else { return Ok(None) };
        let (id, done) = (read.id, read.read.unwrap_or(0));
        let room = read.buf.capacity().saturating_sub(done);
        if !self.may_place_read(now, id) {
            return Ok(None);
        }
        if let Step::Done(chain) = self.tcp_take_more(id, room, done, done == 0)? {
            return Ok(Some(chain));
        }
        let least = self.tcp_entry(id)?.least(room, done == 0);
        read.rule.low_water_bytes = read.rule.low_water_bytes.max(least);
        self.post_if_possible(now, post);
        self.net.counters.add(Counter::PlacedReads, u64::from(post.is_none()));
        Ok(None)
    }

    /// Whether the device may be told of the buffer of a read.
    fn may_place_read(&mut self, now: Instant, id: SlotId) -> bool {
        let Some(Socket::Tcp(entry)) = self.sockets.get_mut(id) else { return false };
        let is_remote = !self.net.ip.is_local(entry.tcb.key().remote_ip());
        let may_place = |p: &mut Box<RecvEntry>| !p.is_waiting() && p.machine.may_place(now);
        is_remote && is_receiving(&entry.tcb) && entry.posted.as_mut().is_none_or(may_place)
    }

    /// Ends a posted buffer before its time: with what it has, or as cancelled. It is over once no device
    /// writes to it any more, which may take until the next polls.
    pub fn tcp_cancel_post(&mut self, now: Instant, id: SlotId, ticket: &Arc<RecvTicket>) {
        // Whoever waited with the lock in hand, and was thrown out by a device that panicked, does no more.
        (self.posted.out.awaited, self.posted.out.outcome) = (None, None);
        self.end_post(now, id, |machine, io| {
            machine.cancel(io, |t| Arc::ptr_eq(&t.0, ticket));
        });
    }

    /// Nobody waits any more for a posted buffer: what it has goes back into the stream. False: what
    /// follows has been received already, so the ticket stays good.
    pub fn tcp_abandon_post(&mut self, now: Instant, id: SlotId, ticket: &Arc<RecvTicket>) -> bool {
        self.take_in_posted(now, id);
        if ticket.is_over() {
            return false;
        }
        // Nobody is to be told that its token goes.
        ticket.give_up();
        let mut is_gone = true;
        self.end_post(now, id, |machine, io| {
            is_gone = machine.abandon(io, |t| Arc::ptr_eq(&t.0, ticket));
            if !is_gone {
                ticket.go_on();
            }
        });
        is_gone
    }

    /// As [`Shard::tcp_abandon_post`] for those of a connection that signal handlers let go of, the last
    /// first.
    pub(crate) fn tcp_abandon_unwanted(&mut self, now: Instant, id: SlotId) {
        let Some(Socket::Tcp(entry)) = self.sockets.get_mut(id) else { return };
        let Some(posted) = &entry.posted else { return };
        let is_unwanted = |t: &&Token| t.0.take_unwanted();
        let unwanted = posted.machine.tokens().filter(is_unwanted).map(|t| Arc::clone(&t.0));
        let unwanted: Vec<_> = unwanted.collect();
        for ticket in unwanted.iter().rev() {
            self.tcp_abandon_post(now, id, ticket);
        }
    }

    fn end_post(
        &mut self,
        now: Instant,
        id: SlotId,
        f: impl FnOnce(&mut Posted<Token>, &mut Io<'_>),
    ) {
        self.take_in_posted(now, id);
        if let Some(Socket::Tcp(entry)) = self.sockets.get_mut(id) {
            with_machine(&mut self.net, entry, f);
        }
        self.list_posted(id);
        self.run_posted_now(now, id);
        self.notify(id);
    }

    /// As [`Shard::step_for_reader`], for one who waits for this ticket and nothing else: how many frames
    /// came, and the outcome if it was over with them. Then nobody has to be told.
    pub fn step_for_ticket(
        &mut self,
        now: Instant,
        ticket: &RecvTicket,
    ) -> (usize, Option<RecvOutcome>) {
        self.step_for(ticket, |shard| match shard.posted.is_placed {
            true => shard.step_for_placed(now),
            false => shard.step_for_reader(now),
        })
    }

    /// The same for a read, whose buffer goes back to its caller with what one step brings: more than stays
    /// in a cache until the caller looks at it, or than the buffer has room for, would cost what was saved.
    pub(crate) fn step_for_read(
        &mut self,
        now: Instant,
        ticket: &RecvTicket,
    ) -> (usize, Option<RecvOutcome>) {
        self.step_for(ticket, |shard| shard.step_for_reader(now))
    }

    fn step_for(
        &mut self,
        ticket: &RecvTicket,
        step: impl FnOnce(&mut Self) -> usize,
    ) -> (usize, Option<RecvOutcome>) {
        self.posted.out.awaited = Some(address_of(ticket));
        let came = step(self);
        self.posted.out.awaited = None;
        (came, self.posted.out.outcome.take())
    }

    fn list_posted(&mut self, id: SlotId) {
        if let Some(Socket::Tcp(entry)) = self.sockets.get_mut(id) {
            self.posted.list(id, entry);
        }
    }

    /// For a call on one connection: what waits for it, and what it has to say then.
    pub(crate) fn run_posted_now(&mut self, now: Instant, id: SlotId) {
        self.take_in_posted(now, id);
        self.settle_posted(now, id, true);
        if self.expects_frames() {
            return;
        }
        if matches!(self.sockets.get(id), Some(Socket::Tcp(s)) if s.is_queued) {
            self.net.link.set_now(now);
            self.output_now(now, id);
            self.flush();
        }
    }

    /// Before the device is looked at: it is told of buffers that were posted meanwhile.
    #[inline]
    pub(crate) fn announce_posted(&mut self, now: Instant) {
        if std::mem::take(&mut self.posted.has_news) {
            self.announce_news(now);
        }
    }

    fn announce_news(&mut self, now: Instant) {
        for at in 0..self.posted.listed.len() {
            if let Some(id) = self.posted.listed.get(at)
                && let Some(Socket::Tcp(entry)) = self.sockets.get_mut(*id)
            {
                with_machine(&mut self.net, entry, |m, io| m.announce(now, io));
            }
        }
    }

    /// Takes in what the last burst brought.
    #[inline]
    pub(crate) fn take_in_all_posted(&mut self, now: Instant) {
        for at in 0..self.posted.listed.len() {
            if let Some(id) = self.posted.listed.get(at).copied() {
                self.take_in_posted(now, id);
            }
        }
    }

    fn take_in_posted(&mut self, now: Instant, id: SlotId) {
        let Some(Socket::Tcp(entry)) = self.sockets.get_mut(id) else { return };
        let Some(taken) = with_machine(&mut self.net, entry, |m, io| m.take_in(now, io)) else {
            return;
        };
        let is_told = hand_out(entry, &mut self.posted.out, &mut self.net.counters);
        if taken.bytes > 0
            && entry.tcb.after_read(&mut Self::env(&mut self.net, now))
            && !entry.is_queued
        {
            entry.is_queued = true;
            self.output_queue.push_back(id);
        }
        let is_watched = is_told && !entry.watch.is_empty();
        self.note_taken(now, &taken);
        if is_watched {
            self.notify(id);
        }
    }

    /// What the buffers of a connection got.
    #[inline]
    fn note_taken(&mut self, now: Instant, taken: &Taken) {
        let Taken { bytes, copied, is_unfinished, has_filled } = *taken;
        self.posted.has_filled |= has_filled;
        if is_unfinished {
            self.posted.look_by(if bytes > 0 { now } else { now + RETRY });
        }
        if bytes > 0 {
            self.posted.is_placed = copied <= bytes / 8;
            self.net.counters.add(Counter::ReceiveBytes, bytes as u64);
            self.net.counters.add(Counter::CopiedBytes, copied as u64);
        }
    }

    /// Whether it can wait until the next look what is over although it is not full: the only reader has a
    /// full buffer in hand, and finds out with that look, for which it is back at once.
    #[inline]
    pub(crate) fn posted_may_rest(&mut self, now: Instant) -> bool {
        let posted = &mut self.posted;
        let is_due = posted.again_at.is_some_and(|at| now >= at);
        let may_rest = posted.out.outcome.is_some() && posted.listed.len() == 1 && !is_due;
        if may_rest {
            posted.look_by(now + CALLER_IS_BACK);
        }
        may_rest
    }

    /// Decides which buffers are over, for every connection that something happened to.
    #[inline]
    pub(crate) fn settle_all_posted(&mut self, now: Instant, is_dry: bool) {
        if self.posted.again_at.is_some_and(|at| now >= at) {
            self.posted.again_at = None;
            self.drain_orphans();
        }
        if !self.posted.listed.is_empty() {
            self.settle_listed(now, is_dry);
        }
    }

    #[inline(never)]
    fn settle_listed(&mut self, now: Instant, is_dry: bool) {
        let spare = std::mem::take(&mut self.posted.spare);
        let mut listed = std::mem::replace(&mut self.posted.listed, spare);
        for id in listed.drain(..) {
            if let Some(Socket::Tcp(entry)) = self.sockets.get_mut(id)
                && let Some(posted) = &mut entry.posted
            {
                posted.is_listed = false;
                self.settle_posted(now, id, is_dry);
            }
        }
        self.posted.spare = listed;
    }

    fn settle_posted(&mut self, now: Instant, id: SlotId, is_dry: bool) {
        let Some(Socket::Tcp(entry)) = self.sockets.get_mut(id) else { return };
        let stream = Stream {
            now,
            is_pushed: is_dry && entry.tcb.is_pushed(),
            sent: entry.tcb.send_queue_ref().claimed_end(),
            ended: ended(entry),
        };
        let told = with_machine(&mut self.net, entry, |m, io| m.settle(&stream, io));
        if told == Some(true) && entry.error.is_none() {
            entry.tcb.take_error();
        }
        self.hand_out_posted(id);
        self.plan_posted(now, id, is_dry);
    }

    /// When and why to look again.
    fn plan_posted(&mut self, now: Instant, id: SlotId, is_dry: bool) {
        let Some(Socket::Tcp(entry)) = self.sockets.get_mut(id) else { return };
        let readable = entry.tcb.recv_queue_ref().readable() > 0;
        let Some(posted) = &mut entry.posted else { return };
        if !posted.machine.is_waiting() {
            return;
        }
        if let Some(at) = posted.machine.next_deadline() {
            posted.timer = Some(self.wheel.schedule(posted.timer, TimerKey::Posted(id), at));
        }
        let is_stuck = posted.machine.is_draining() || readable;
        if is_stuck || !is_dry {
            self.posted.look_by(if is_dry { now + RETRY } else { now });
            self.posted.list(id, entry);
        }
    }

    /// The timer of a connection with posted buffers.
    pub(crate) fn posted_timer(&mut self, id: SlotId) {
        if let Some(Socket::Tcp(entry)) = self.sockets.get_mut(id)
            && let Some(posted) = &mut entry.posted
        {
            posted.timer = None;
            self.posted.list(id, entry);
        }
    }

    fn hand_out_posted(&mut self, id: SlotId) {
        let Some(Socket::Tcp(entry)) = self.sockets.get_mut(id) else { return };
        if hand_out(entry, &mut self.posted.out, &mut self.net.counters) {
            self.notify(id);
        }
    }

    /// Urgent data came: once what belongs in front of it is there too, buffers are given back with what
    /// they have.
    pub(crate) fn flush_posted(&mut self, id: SlotId) {
        if let Some(Socket::Tcp(entry)) = self.sockets.get_mut(id)
            && let Some(posted) = &mut entry.posted
        {
            posted.machine.flush(entry.tcb.urgent_to());
        }
    }

    /// The user lets go of the connection. First half: its buffers are over.
    pub(crate) fn cancel_posted(&mut self, now: Instant, id: SlotId) {
        self.take_in_posted(now, id);
        if let Some(Socket::Tcp(entry)) = self.sockets.get_mut(id) {
            with_machine(&mut self.net, entry, |m, io| m.cancel_all(io));
        }
    }

    /// Second half, once the receive queue is empty: those that a device still refers to are looked after
    /// without the connection.
    pub(crate) fn orphan_posted(&mut self, now: Instant, id: SlotId) {
        let Some(Socket::Tcp(entry)) = self.sockets.get_mut(id) else { return };
        with_machine(&mut self.net, entry, |m, io| m.drain(io));
        let Some(mut posted) = entry.posted.take() else { return };
        if let Some(timer) = posted.timer.take() {
            self.wheel.cancel(timer);
        }
        posted.hand_out(&mut self.posted.out);
        if posted.machine.is_draining() {
            self.posted.orphans.push(*posted);
            self.posted.look_by(now + RETRY);
        }
    }

    fn drain_orphans(&mut self) {
        let PostedTable { orphans, out, .. } = &mut self.posted;
        let pool = &mut self.net.pool;
        pool.drain_remote();
        orphans.retain_mut(|posted| {
            let mut io =
                Io { recv: &mut RecvQueue::new(), pool, placer: &mut NoDevice, may_place: false };
            posted.machine.drain(&mut io);
            posted.hand_out(out);
            posted.machine.is_draining()
        });
        if !self.posted.orphans.is_empty() {
            self.posted.look_by(self.net.link.now() + RETRY);
        }
    }

    /// Whom to tell that a posted buffer is over, once the lock is released.
    pub fn take_received(&mut self) -> Received {
        std::mem::take(&mut self.posted.out.received)
    }
}
