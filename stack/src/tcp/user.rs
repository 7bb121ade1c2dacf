//! User calls, made by `socket` under the shard lock.

use crate::base::{Duration, FlowKey, Instant, SeqNum};
use crate::mbuf::{Pool, RecvQueue, SendQueue};
use crate::tcp::contract::{ConnError, Env, State};
use crate::tcp::ecn::EcnPolicy;
use crate::tcp::tcb::{QUICK_ACKS, ResetDue};
use crate::tcp::timers::Timer;
use crate::tcp::{CongestionControl, Tcb};

impl Tcb {
    /// The send queue, to claim space and commit bytes. Call output after a commit.
    #[inline]
    pub fn send_queue(&mut self) -> &mut SendQueue {
        &mut self.send
    }

    /// The send queue, read-only.
    #[inline]
    pub fn send_queue_ref(&self) -> &SendQueue {
        &self.send
    }

    /// The receive queue, to take bytes from. Call [`Tcb::after_read`] afterwards.
    #[inline]
    pub fn recv_queue(&mut self) -> &mut RecvQueue {
        &mut self.recv
    }

    /// The receive queue, read-only.
    #[inline]
    pub fn recv_queue_ref(&self) -> &RecvQueue {
        &self.recv
    }

    /// The sequence number of the byte at `offset` of the received stream.
    #[inline]
    pub fn recv_seq(&self, offset: u64) -> SeqNum {
        self.peer_seq_of(offset.saturating_add(1))
    }

    /// Stream offset after the last segment with urgent data. Bytes before it may still be missing.
    #[inline]
    pub(crate) fn urgent_to(&self) -> u64 {
        self.recv_marks.urgent_to.saturating_sub(1)
    }

    /// Whether the last in-order byte ended a pushed segment (PSH).
    #[inline]
    pub fn is_pushed(&self) -> bool {
        let next = self.recv.next().saturating_add(1);
        next > 1 && (self.recv_marks.pushed_to == next || self.recv_marks.pushed_behind == next)
    }

    /// The addresses and ports.
    #[inline]
    pub fn key(&self) -> &FlowKey {
        &self.key
    }

    /// The connection state.
    #[inline]
    pub fn state(&self) -> State {
        self.state
    }

    /// CLOSED, and no reset is pending.
    #[inline]
    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed) && self.due.reset.is_none()
    }

    /// Whether a write is allowed now, space permitting.
    #[inline]
    pub fn can_send(&self) -> bool {
        let is_open = matches!(self.state, State::Established | State::CloseWait);
        (is_open || self.is_open_early()) && !self.fin.queued
    }

    /// Whether bytes are readable or may still arrive.
    pub(crate) fn can_recv(&self) -> bool {
        if self.user.recv_shutdown {
            return false;
        }
        let open = !self.fin.received && !matches!(self.state, State::Closed | State::TimeWait);
        open || self.recv.readable() > 0
    }

    /// Whether the peer's FIN was received, in order.
    #[inline]
    pub fn peer_closed(&self) -> bool {
        self.fin.received
    }

    /// End of file: receiving was shut down, or nothing is readable and the peer's FIN arrived or
    /// the connection closed without an error; not where unread bytes were discarded ([`Tcb::abort_unread`]).
    pub fn at_eof(&self) -> bool {
        if self.user.recv_shutdown {
            return true;
        }
        let ended = matches!(self.state, State::Closed) && self.errors.ended_by.is_none();
        self.recv.readable() == 0 && !self.errors.is_sticky && (self.fin.received || ended)
    }

    /// The error that a write would return now. `None` also while the connection is being opened.
    pub fn send_error(&self) -> Option<ConnError> {
        match self.state {
            State::Closed => Some(self.errors.ended_by.unwrap_or(ConnError::BrokenPipe)),
            _ if self.fin.queued || self.user.closed => Some(ConnError::BrokenPipe),
            _ => None,
        }
    }

    /// Takes the pending error (`SO_ERROR`). That of [`Tcb::abort_unread`] stays.
    pub fn take_error(&mut self) -> Option<ConnError> {
        if self.errors.is_sticky { self.errors.pending } else { self.errors.pending.take() }
    }

    /// What [`Tcb::take_error`] would return.
    #[inline]
    pub(crate) fn pending_error(&self) -> Option<ConnError> {
        self.errors.pending
    }

    /// Whether [`Tcb::take_error`] would return something.
    #[inline]
    pub fn has_error(&self) -> bool {
        self.errors.pending.is_some()
    }

    /// Whether everything accepted for sending is acknowledged, the FIN included if one is queued,
    /// or the connection is over.
    pub fn is_drained(&self) -> bool {
        if matches!(self.state, State::Closed | State::TimeWait) {
            return self.due.reset.is_none();
        }
        self.send.claimed_bytes() == 0 && (!self.fin.queued || self.fin.sent && self.flight() == 0)
    }

    /// Shuts down sending: a FIN follows the claimed bytes (RFC 9293 section 3.10.4).
    pub fn shutdown_write(&mut self, now: Instant) {
        if self.fin.queued {
            return;
        }
        self.fin.queued = true;
        match self.state {
            State::Established => self.state = State::FinWait1,
            State::CloseWait => self.state = State::LastAck,
            // SYN-SENT and SYN-RECEIVED send the FIN once established. In other states it was
            // already sent.
            _ => {}
        }
        self.rearm(now);
    }

    /// Shuts down receiving: unread and later bytes are acknowledged and discarded.
    pub fn shutdown_read(&mut self, env: &mut Env) {
        self.user.recv_shutdown = true;
        let unread = self.recv.take(usize::MAX, env.pool);
        env.pool.free(unread);
        self.update_charge(env.window);
    }

    /// Closes the connection, which becomes orphaned. Bytes accepted for sending are still
    /// delivered. With unread data it resets, so that the peer learns of the loss (RFC 9293 section
    /// 3.6.1, RFC 2525 section 2.17).
    pub fn close(&mut self, env: &mut Env) {
        self.user.closed = true;
        let unread = self.recv.readable() > 0 && !self.user.recv_shutdown;
        self.user.recv_shutdown = true;
        match self.state {
            // First data is in flight or waits for the handshake: it is still delivered.
            State::SynSent if self.send.claimed_bytes() > 0 => self.shutdown_write(env.now),
            State::SynSent => self.finish(None),
            State::Closed | State::TimeWait => {}
            _ if unread => self.abort(),
            _ => {
                self.shutdown_write(env.now);
                self.start_orphan_timer(env.now);
            }
        }
        self.recv.clear(env.pool);
        self.update_charge(env.window);
    }

    /// Aborts the connection (RFC 9293 section 3.10.5). The next output sends a reset if the
    /// connection is synchronized or its SYN,ACK was sent.
    pub fn abort(&mut self) {
        self.abort_with(ConnError::Aborted);
    }

    /// As [`Tcb::abort`], with `why` as the error for the user.
    pub(crate) fn abort_with(&mut self, why: ConnError) {
        // One whose SYN,ACK has not left yet, too: the peer would repeat its SYN and be accepted again.
        let is_known_to_peer =
            !matches!(self.state, State::SynSent | State::TimeWait | State::Closed);
        if is_known_to_peer {
            let seq = self.seq_of(self.acceptable_position());
            self.due.reset = Some(ResetDue { seq, with_ack: true });
        }
        if !matches!(self.state, State::Closed) {
            self.finish(Some(why));
        }
    }

    /// As [`Tcb::abort`], of a connection whose unread bytes are discarded because others need their memory. Every
    /// later read fails with [`ConnError::TimedOut`], also where the peer had ended the stream. TIME-WAIT goes on.
    pub fn abort_unread(&mut self, env: &mut Env) {
        if !matches!(self.state, State::TimeWait) {
            self.abort_with(ConnError::TimedOut);
            self.rcv.adv = self.rcv.nxt;
        }
        self.errors.pending = Some(ConnError::TimedOut);
        self.errors.is_sticky = true;
        self.recv.clear(env.pool);
        self.update_charge(env.window);
    }

    /// Discards the bytes behind gaps, for whose memory others wait: the peer sends them again. Returns their number.
    pub fn discard_out_of_order(&mut self, env: &mut Env) -> usize {
        let bytes = self.recv.out_of_order_bytes();
        self.recv.discard_out_of_order(env.pool);
        // By itself it would be a SACK of the discarded bytes.
        self.dsack_due.take_if(|(_, end)| *end > self.rcv.nxt);
        self.update_charge(env.window);
        bytes
    }

    /// Whether the peer accepts no data: its window is closed, or two time-outs or probes in a row have brought no
    /// acknowledgement of new data. Bytes committed now only wait in the send queue.
    pub fn is_stalled(&self) -> bool {
        let is_shut = self.snd.wnd == 0 && self.flight() == 0;
        self.persisting || is_shut || self.times.retries >= 2
    }

    /// When the peer last acknowledged new data, or data was sent with none in flight.
    pub(crate) fn last_progress(&self) -> Instant {
        self.times.last_progress
    }

    /// The user has asked for bytes that it leaves in the queue, or has given some back: they count as unread from now.
    pub(crate) fn note_read(&mut self, now: Instant) {
        self.times.unread_since = now;
    }

    /// When the user last read, or the first of the in-order bytes in the receive queue was there to be read.
    pub fn unread_since(&self) -> Instant {
        self.times.unread_since
    }

    /// Frees all buffers and the charge to the window budget. Call it once, as the last call before
    /// the Tcb is dropped.
    pub fn release(&mut self, env: &mut Env) {
        self.discard_send_buffer(env.pool);
        self.recv.clear(env.pool);
        self.state = State::Closed;
        self.due.reset = None;
        self.rcv.adv = self.rcv.nxt;
        self.update_charge(env.window);
    }

    /// Discards the send buffer of a closed connection. Owners of shared memory in it are notified
    /// of the error.
    pub(crate) fn discard_send_buffer(&mut self, pool: &mut Pool) {
        self.send.discard(self.errors.ended_by.map_or(0, ConnError::code), pool);
    }

    /// Sets the user time-out (TCP_USER_TIMEOUT): how long data may stay unacknowledged, a SYN
    /// unanswered or a window closed before the connection fails. It is not sent to the peer (the
    /// option of RFC 5482 is not used). `None` or zero: `Config::user_timeout`, under which a
    /// closed window is probed as long as the peer answers. It also replaces the count of keepalive
    /// probes ([`Tcb::set_keepalive`]). Call output afterwards: it restarts the retransmission
    /// timer.
    pub fn set_user_timeout(&mut self, timeout: Option<Duration>) {
        self.user.timeout = timeout.filter(|t| !t.is_zero());
        if !matches!(self.state, State::Closed | State::TimeWait) {
            self.timers.stop(Timer::Retransmit);
        }
    }

    /// TCP_USER_TIMEOUT as set.
    pub fn user_timeout(&self) -> Option<Duration> {
        self.user.timeout
    }

    /// TCP_CONGESTION: the congestion control of this connection, at any time. The window and the
    /// slow start threshold stay.
    pub fn set_congestion(&mut self, which: CongestionControl) {
        self.congestion.switch_to(which);
        self.delivery.switch_to(which);
        self.update_pacing();
    }

    /// The congestion control in effect.
    pub fn congestion(&self) -> CongestionControl {
        self.congestion.which()
    }

    /// TCP_NODELAY: disables Nagle's algorithm (true), and releases what is held back now, by a cork as well
    /// (tcp(7)). Call output afterwards.
    pub fn set_nodelay(&mut self, on: bool) {
        self.cfg.nodelay = on;
        self.user.cork_expired |= on && self.has_unsent();
    }

    /// Whether Nagle's algorithm is disabled.
    pub fn nodelay(&self) -> bool {
        self.cfg.nodelay
    }

    /// TCP_CORK: holds partial segments back (true) until uncorked, at most for
    /// `Config::cork_timeout`. Call output afterwards.
    pub fn set_cork(&mut self, on: bool) {
        self.user.cork = on;
        self.user.cork_expired = false;
    }

    /// TCP_CORK as set.
    pub fn cork(&self) -> bool {
        self.user.cork
    }

    /// Sets with each write whether it had MSG_MORE. If so, a partial segment is held back for the
    /// next write, at most for `Config::cork_timeout`. Call output afterwards.
    #[inline]
    pub(crate) fn set_msg_more(&mut self, more: bool) {
        if more && !self.user.msg_more {
            self.user.cork_expired = false;
        }
        self.user.msg_more = more;
    }

    /// Announces that more bytes are about to be committed. One segment is sent without delay.
    /// Unless Nagle's algorithm is disabled, the rest then waits until it fills a segment of the
    /// largest size. The caller must call `set_more_announced(false)` and then output soon afterwards.
    pub(crate) fn set_more_announced(&mut self, more: bool) {
        self.user.more_from = more.then_some(self.snd.nxt);
    }

    /// Sets the low-water mark of free send buffer space for
    /// [`Events::WRITABLE`](crate::tcp::Events::WRITABLE), bytes. `None`: a third of the buffer.
    pub fn set_send_low_water(&mut self, bytes: Option<usize>) {
        self.user.send_low_water = bytes;
    }

    /// The send low-water mark in effect, bytes: at most half of the buffer, which may have become smaller since the
    /// mark was set.
    #[inline]
    pub fn send_low_water(&self) -> Option<usize> {
        self.user.send_low_water.map(|bytes| bytes.min(self.send.limit() / 2).max(1))
    }

    /// TCP_NOTSENT_LOWAT: the connection accepts no bytes while `bytes` bytes are committed and not yet sent, so that a
    /// program can still change its next data. `None` or 0: the send buffer alone limits.
    pub fn set_notsent_low_water(&mut self, bytes: Option<u32>) {
        self.user.notsent_low_water = bytes.filter(|b| *b > 0);
    }

    /// TCP_NOTSENT_LOWAT as set.
    pub fn notsent_low_water(&self) -> Option<u32> {
        self.user.notsent_low_water
    }

    /// Free space of the send buffer for a write; 0 while TCP_NOTSENT_LOWAT or the number of records holds writers
    /// back.
    #[inline]
    pub fn write_space(&self) -> usize {
        if self.holds_writers_back() { 0 } else { self.send.space() }
    }

    /// Whether TCP_NOTSENT_LOWAT holds writers back.
    #[inline]
    pub(crate) fn is_unsent_limited(&self) -> bool {
        self.user.notsent_low_water.is_some_and(|limit| self.unsent_bytes() >= u64::from(limit))
    }

    #[inline]
    pub(crate) fn holds_writers_back(&self) -> bool {
        self.is_unsent_limited() || self.records.is_full()
    }

    /// MSG_EOR: a record ends with the last byte claimed or committed. No segment has bytes of both sides of its end.
    /// Call it after the commit, and output afterwards.
    pub fn end_record(&mut self) {
        self.records.push(self.send.claimed_end().saturating_add(1));
    }

    /// Committed bytes not yet sent.
    pub(crate) fn unsent_bytes(&self) -> u64 {
        self.send_end().saturating_sub(self.snd.nxt)
    }

    /// Whether the SYN asks for ECN, and whether that of the peer is agreed to. No effect once the handshake is over.
    pub fn set_ecn(&mut self, policy: EcnPolicy) {
        self.cfg.ecn = policy;
    }

    /// The policy of explicit congestion notification as set.
    pub fn ecn_policy(&self) -> EcnPolicy {
        self.cfg.ecn
    }

    /// TCP_MAXSEG: limits segments to `bytes` bytes, options of the TCP header included. It also limits the MSS option
    /// if that is yet to be sent. `None`: path and peer alone limit.
    pub fn set_max_segment(&mut self, bytes: Option<u16>) {
        self.user.max_segment = bytes;
        self.update_segment_sizes();
    }

    /// TCP_MAXSEG as set.
    pub fn max_segment(&self) -> Option<u16> {
        self.user.max_segment
    }

    /// TCP_QUICKACK: acknowledges the next segments at once, and what is received already (true), or delays ACKs
    /// again. As on Linux it is not permanent. Call output afterwards.
    pub fn set_quickack(&mut self, on: bool) {
        self.quick_acks = if on { QUICK_ACKS } else { 0 };
        if on && self.timers.is_running(Timer::DelayedAck) {
            self.due.ack = true;
        }
    }

    /// Sets SO_RCVLOWAT: with fewer bytes the socket is not readable and a read blocks. At least 1;
    /// capped at half of the receive buffer.
    pub fn set_recv_low_water(&mut self, bytes: usize) {
        self.user.recv_low_water = bytes;
    }

    /// SO_RCVLOWAT in effect.
    #[inline]
    pub fn recv_low_water(&self) -> usize {
        if self.user.recv_low_water <= 1 {
            return 1;
        }
        self.user.recv_low_water.min(self.space.limit() / 2)
    }

    /// Sets the send buffer, bytes, at most `Config::max_buffer_bytes`, and disables its
    /// autotuning. Returns the size set.
    pub fn set_send_buffer(&mut self, bytes: usize) -> usize {
        let bytes = bytes.clamp(MIN_BUFFER_BYTES, self.cfg.max_buffer_bytes.max(MIN_BUFFER_BYTES));
        self.send.set_limit(bytes);
        self.tuning.fixed = true;
        bytes
    }

    /// Sets the receive buffer, bytes, at most `Config::max_buffer_bytes`, and disables its
    /// autotuning. Returns the size set. A smaller buffer does not shrink the advertised window.
    pub fn set_recv_buffer(&mut self, bytes: usize) -> usize {
        let bytes = bytes.clamp(MIN_BUFFER_BYTES, self.cfg.max_buffer_bytes.max(MIN_BUFFER_BYTES));
        self.space.set_limit(bytes);
        self.recv_tuning.fixed = true;
        bytes
    }

    /// The send buffer as set, bytes. `None`: it is tuned.
    pub fn send_buffer_as_set(&self) -> Option<usize> {
        self.tuning.fixed.then(|| self.send.limit())
    }

    /// The receive buffer as set, bytes. `None`: it is tuned.
    pub fn recv_buffer_as_set(&self) -> Option<usize> {
        self.recv_tuning.fixed.then(|| self.space.limit())
    }

    /// The receive buffer, bytes.
    pub fn recv_buffer(&self) -> usize {
        self.space.limit()
    }
}

/// Smallest buffer, bytes: a few segments of the default MSS, as Linux.
const MIN_BUFFER_BYTES: usize = 2048;
