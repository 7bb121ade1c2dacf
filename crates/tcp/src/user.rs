//! The user's side: called by the socket room under the shard lock.

use crate::Tcb;
use crate::contract::{ConnError, Env, State};
use crate::tcb::ResetDue;
use crate::timers::Timer;
use fulmar_base::{Duration, FlowKey, Instant, SeqNum};
use fulmar_mbuf::{Pool, RecvQueue, SendQueue};

impl Tcb {
    /// The send buffer, to claim from and commit to. Call output after a commit.
    #[inline]
    pub fn send_queue(&mut self) -> &mut SendQueue {
        &mut self.send
    }

    /// The send buffer, to look at.
    #[inline]
    pub fn send_queue_ref(&self) -> &SendQueue {
        &self.send
    }

    /// The receive buffer, to take from. Call [`Tcb::after_read`] afterwards.
    #[inline]
    pub fn recv_queue(&mut self) -> &mut RecvQueue {
        &mut self.recv
    }

    /// The receive buffer, to look at.
    #[inline]
    pub fn recv_queue_ref(&self) -> &RecvQueue {
        &self.recv
    }

    /// Sequence number, as on the wire, of a byte that comes: by its offset in the stream.
    #[inline]
    pub fn recv_seq(&self, offset: u64) -> SeqNum {
        self.peer_seq_of(offset.saturating_add(1))
    }

    /// Offset in the stream behind the last segment that brought urgent data, which may have come before
    /// others that belong in front of it.
    #[inline]
    pub fn urgent_to(&self) -> u64 {
        self.urgent_to.saturating_sub(1)
    }

    /// Whether the last byte received in order is one that the peer pushed, so that nothing need
    /// follow it.
    #[inline]
    pub fn is_pushed(&self) -> bool {
        let next = self.recv.next().saturating_add(1);
        next > 1 && (self.pushed_to == next || self.pushed_behind == next)
    }

    /// Who talks to whom.
    #[inline]
    pub fn key(&self) -> &FlowKey {
        &self.key
    }

    /// The state.
    #[inline]
    pub fn state(&self) -> State {
        self.state
    }

    /// The connection is over, and nothing is left to be sent for it.
    #[inline]
    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed) && self.due.reset.is_none()
    }

    /// Whether a write may be accepted now, space permitting.
    #[inline]
    pub fn can_send(&self) -> bool {
        matches!(self.state, State::Established | State::CloseWait) && !self.fin_queued
    }

    /// Whether bytes may still arrive or be read.
    pub fn can_recv(&self) -> bool {
        if self.user.recv_shut {
            return false;
        }
        let open = !self.fin_received && !matches!(self.state, State::Closed | State::TimeWait);
        open || self.recv.readable() > 0
    }

    /// The peer has sent its FIN.
    #[inline]
    pub fn peer_closed(&self) -> bool {
        self.fin_received
    }

    /// End of file: nothing is left to read, and the peer's FIN arrived, or the reader shut down,
    /// or the connection ended without an error.
    pub fn at_eof(&self) -> bool {
        if self.user.recv_shut {
            return true;
        }
        let ended = matches!(self.state, State::Closed) && self.fate.ended_by.is_none();
        self.recv.readable() == 0 && (self.fin_received || ended)
    }

    /// Why a write fails now; `None` if it would not, or the connection is still being opened.
    pub fn send_error(&self) -> Option<ConnError> {
        match self.state {
            State::Closed => Some(self.fate.ended_by.unwrap_or(ConnError::BrokenPipe)),
            _ if self.fin_queued || self.user.gone => Some(ConnError::BrokenPipe),
            _ => None,
        }
    }

    /// Takes the pending error (`SO_ERROR`), once.
    pub fn take_error(&mut self) -> Option<ConnError> {
        self.fate.error.take()
    }

    /// What [`Tcb::take_error`] would return.
    #[inline]
    pub fn pending_error(&self) -> Option<ConnError> {
        self.fate.error
    }

    /// Whether [`Tcb::take_error`] would return something.
    #[inline]
    pub fn has_error(&self) -> bool {
        self.fate.error.is_some()
    }

    /// Everything accepted for sending is acknowledged, a FIN that was asked for included, or
    /// nothing more will be.
    pub fn is_drained(&self) -> bool {
        if matches!(self.state, State::Closed | State::TimeWait) {
            return self.due.reset.is_none();
        }
        self.send.claimed_bytes() == 0 && (!self.fin_queued || self.fin_sent && self.flight() == 0)
    }

    /// Whether a sequence number that somebody quotes is in flight (RFC 5927 section 4).
    pub fn is_in_flight(&self, quoted: SeqNum) -> bool {
        let una = self.seq_of(self.snd_una);
        una.before_eq(quoted) && quoted.before(self.seq_of(self.snd_nxt))
    }

    /// Closes for sending: a FIN follows what was claimed (RFC 9293 section 3.10.4).
    pub fn shutdown_write(&mut self, now: Instant) {
        if self.fin_queued {
            return;
        }
        self.fin_queued = true;
        match self.state {
            State::Established => self.state = State::FinWait1,
            State::CloseWait => self.state = State::LastAck,
            // SYN-SENT, SYN-RECEIVED: once established. Others have closed already.
            _ => {}
        }
        self.rearm(now);
    }

    /// Closes for receiving: what is there and what comes is discarded (and acknowledged).
    pub fn shutdown_read(&mut self) {
        self.user.recv_shut = true;
    }

    /// Closes both ways; the user is gone. What was accepted for sending is delivered. Unread data
    /// makes it a reset, so that the peer learns that it was lost (RFC 9293 section 3.6.1, RFC 2525
    /// section 2.17).
    pub fn close(&mut self, env: &mut Env) {
        self.user.gone = true;
        let unread = self.recv.readable() > 0 && !self.user.recv_shut;
        self.user.recv_shut = true;
        match self.state {
            State::SynSent => self.finish(None),
            State::Closed | State::TimeWait => {}
            _ if unread => self.abort(),
            _ => {
                self.shutdown_write(env.now);
                self.limit_orphan(env.now);
            }
        }
        self.recv.clear(env.pool);
        self.recharge(env.window);
    }

    /// Ends the connection at once; the next output sends a reset if the peer knows of it
    /// (RFC 9293 section 3.10.5).
    pub fn abort(&mut self) {
        self.abort_because(ConnError::Aborted);
    }

    /// As [`Tcb::abort`]; the user is told why.
    pub fn abort_because(&mut self, why: ConnError) {
        let known = !matches!(self.state, State::SynSent | State::TimeWait | State::Closed);
        if known && self.snd_nxt > 0 {
            let seq = self.seq_of(self.snd_nxt);
            self.due.reset = Some(ResetDue { seq, with_ack: true });
        }
        if !matches!(self.state, State::Closed) {
            self.finish(Some(why));
        }
    }

    /// Whether the peer takes nothing: its window is closed, or it has left two retransmissions in a row
    /// unanswered. Bytes added to the send buffer now only wait there.
    pub fn is_stalled(&self) -> bool {
        let is_shut = self.snd_wnd == 0 && self.flight() == 0;
        self.persisting || is_shut || self.rtt.backoff() >= 2
    }

    /// When the peer last acknowledged something new, or data began to wait for it.
    pub fn progress_at(&self) -> Instant {
        self.marks.progress_at
    }

    /// As [`Tcb::abort`], where the bytes from `offset` of the stream on can never be sent: the reset
    /// stands where they would, which is where the peer expects the next byte if it has the others, so
    /// that it needs not ask back (RFC 5961 section 3.2).
    pub fn abort_at(&mut self, offset: u64) {
        let seq = self.seq_of(offset.saturating_add(1).clamp(self.snd_una, self.snd_nxt));
        self.abort();
        if let Some(reset) = &mut self.due.reset {
            reset.seq = seq;
        }
    }

    /// Gives back all buffers and the share of the window budget. Call it once, before the Tcb is
    /// dropped; nothing else may follow.
    pub fn release(&mut self, env: &mut Env) {
        self.void_send_buffer(env.pool);
        self.recv.clear(env.pool);
        self.state = State::Closed;
        self.due.reset = None;
        self.rcv_adv = self.rcv_nxt;
        self.recharge(env.window);
    }

    /// Once the connection is over: nobody will acknowledge what the send buffer still holds. Whose
    /// memory it refers to is told why.
    pub fn void_send_buffer(&mut self, pool: &mut Pool) {
        self.send.void(self.fate.ended_by.map_or(0, ConnError::code), pool);
    }

    /// Sets for how long data may stay unacknowledged, a SYN unanswered or a window closed before the
    /// connection fails (RFC 5482 section 3.1, TCP_USER_TIMEOUT); the peer is told nothing of it.
    /// `None`, or zero: `Config::user_timeout`, which waits for a closed window as long as the peer
    /// answers. It also decides when a peer that answers no keepalive probes is given up
    /// ([`Tcb::set_keepalive`]). Call output afterwards: the retransmission time-out begins anew.
    pub fn set_user_timeout(&mut self, timeout: Option<Duration>) {
        self.user.timeout = timeout.filter(|t| !t.is_zero());
        if !matches!(self.state, State::Closed | State::TimeWait) {
            self.timers.stop(Timer::Retransmit);
        }
    }

    /// What [`Tcb::set_user_timeout`] set.
    pub fn user_timeout(&self) -> Option<Duration> {
        self.user.timeout
    }

    /// Turns Nagle's algorithm off (true) or on. Call output afterwards.
    pub fn set_nodelay(&mut self, on: bool) {
        self.cfg.nodelay = on;
    }

    /// Whether Nagle's algorithm is off.
    pub fn nodelay(&self) -> bool {
        self.cfg.nodelay
    }

    /// Holds partial segments back (true) until uncorked or for `Config::cork_timeout`. Call output
    /// afterwards.
    pub fn set_cork(&mut self, on: bool) {
        self.user.cork = on;
        self.user.cork_expired = false;
    }

    /// Says with each write whether another one follows (MSG_MORE): then a partial segment waits for
    /// it, at most for `Config::cork_timeout`; full ones go. Call output afterwards.
    #[inline]
    pub fn set_message_more(&mut self, more: bool) {
        if more && !self.user.more {
            self.user.cork_expired = false;
        }
        self.user.more = more;
    }

    /// Says that more bytes are likely to follow at once. From then on something is
    /// sent; but what is left after that waits for them, unless Nagle's algorithm is off, until it
    /// fills a segment of the largest size. Holds until it is taken back; the caller sees to it
    /// that output runs soon after.
    pub fn set_more(&mut self, more: bool) {
        self.user.more_from = more.then_some(self.snd_nxt);
    }

    /// Bytes of free send buffer below which the writer is not woken; `None`: as usual.
    pub fn set_send_low_water(&mut self, bytes: Option<usize>) {
        self.user.send_low_water = bytes;
    }

    /// What [`Tcb::set_send_low_water`] set.
    #[inline]
    pub fn send_low_water(&self) -> Option<usize> {
        self.user.send_low_water
    }

    /// Bytes below which the socket is not readable, and a read waits (SO_RCVLOWAT), at least 1; at most
    /// half of the receive buffer counts.
    pub fn set_recv_low_water(&mut self, bytes: usize) {
        self.user.recv_low_water = bytes;
    }

    /// What [`Tcb::set_recv_low_water`] set, as far as it counts.
    #[inline]
    pub fn recv_low_water(&self) -> usize {
        if self.user.recv_low_water <= 1 {
            return 1;
        }
        self.user.recv_low_water.min(self.recv_limit / 2)
    }

    /// Sets the send buffer, bytes, at most `Config::max_buffer_bytes`; returns what was set. From
    /// then on it does not change by itself.
    pub fn set_send_buffer(&mut self, bytes: usize) -> usize {
        let bytes = bytes.clamp(MIN_BUFFER_BYTES, self.cfg.max_buffer_bytes.max(MIN_BUFFER_BYTES));
        self.send.set_limit(bytes);
        self.tuning.fixed = true;
        bytes
    }

    /// Sets the receive buffer, bytes, at most `Config::max_buffer_bytes`; returns what was set. A
    /// smaller one does not take back what was offered. From then on it does not change by itself.
    pub fn set_recv_buffer(&mut self, bytes: usize) -> usize {
        let bytes = bytes.clamp(MIN_BUFFER_BYTES, self.cfg.max_buffer_bytes.max(MIN_BUFFER_BYTES));
        self.recv_limit = bytes;
        self.recv_tuning.fixed = true;
        bytes
    }

    /// The receive buffer, bytes.
    pub fn recv_buffer(&self) -> usize {
        self.recv_limit
    }
}

/// The least buffer, bytes: a few segments of the default MSS, as Linux.
const MIN_BUFFER_BYTES: usize = 2048;
